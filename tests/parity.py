"""Goldens of other implementations, and how far this one is from them.

A golden says of which model it is (config and names as transformers wrote them); its weights come
from tests/goldens/cases.py, so the folder that is loaded here is the one that was run there.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.decoding.block import block_drafter
from commit_schemes.decoding.loop import every, prefilled, step
from commit_schemes.decoding.trees import chain
from commit_schemes.model import Pair, model_memory
from gdn import drafter, hybrid
from gdn.config import Config
from gdn.drafter import DrafterConfig
from gdn.huggingface import load, load_drafter
from gdn.hybrid import Params
from gdn.layer import GDNMemory
from gdn.ops import XLA
from gdn.streaming import empty, streaming
from tests.goldens import cases

GOLDENS = Path(__file__).parent / "goldens"
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


class Golden(NamedTuple):
  """Arrays of a golden, as float32 where they are floating, and what it says of itself."""

  arrays: dict[str, np.ndarray]
  about: dict[str, Any]


def read(name: str, folder: Path = GOLDENS) -> Golden:
  with safe_open(folder / f"{name}.safetensors", framework="np") as file:
    about = json.loads(file.metadata()["about"])
    arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, a handle
  whole = lambda x: x if x.dtype == np.int32 else x.astype(np.float32)
  return Golden({key: whole(x) for key, x in arrays.items()}, about)


def of_vocabulary(golden: Golden, vocab: int) -> Golden:
  """The model with another number of tokens; nothing of what was run there holds of it."""
  shapes = {
    name: [vocab, *rest] if name.endswith(("embed_tokens.weight", "lm_head.weight")) else [n, *rest]
    for name, (n, *rest) in golden.about["shapes"].items()
  }
  config = golden.about["config"] | {"vocab_size": vocab}
  return Golden({}, golden.about | {"config": config, "shapes": shapes})


def weights(golden: Golden, dtype: Any = np.float32) -> dict[str, np.ndarray]:
  """The tensors of the model's folder by their names."""
  shapes, seed = golden.about["shapes"], golden.about["seed"]
  return {name: cases.weight(name, tuple(s), seed).astype(dtype) for name, s in shapes.items()}


def write(golden: Golden, folder: Path, dtype: Any = np.float32) -> Path:
  """The model's folder."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(golden.about["config"]))
  save_file(weights(golden, dtype), folder / "model.safetensors")
  return folder


# Compiled without optimisation, in half the time.
@partial(
  jax.jit,
  static_argnames="config",
  compiler_options={"xla_backend_optimization_level": 0}
  if jax.default_backend() == "cpu"
  else None,
)
def piece(params: Params, config: Config, ids, start, memories):
  positions = start + jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
  return hybrid.forward(params, config, ids, positions, streaming(XLA), memories)


def states(config: Config, memories, prefix: str) -> dict[str, np.ndarray]:
  """States and convolution tails under a golden's names and in its layout."""
  found = {}
  for i, memory in enumerate(memories):
    if isinstance(memory, GDNMemory):
      found[f"{prefix}.state.{i}"] = np.swapaxes(memory.recurrent, 2, 3)
      found[f"{prefix}.conv.{i}"] = np.swapaxes(memory.conv.astype(jnp.float32), 1, 2)
  return found


def run(params: Params, config: Config, ids: np.ndarray) -> dict[str, np.ndarray]:
  """The prompt in one piece and then token by token: what a golden holds of one dtype."""
  memories, n = empty(config, len(ids), params.embed.dtype), cases.PROMPT
  out, memories = piece(params, config, ids[:, :n], jnp.int32(0), memories)
  logits, found = [out], states(config, memories, "prompt")
  for t in range(n, ids.shape[1]):
    out, memories = piece(params, config, ids[:, t : t + 1], jnp.int32(t), memories)
    logits.append(out)
  found |= states(config, memories, "decoded")
  return {"logits": np.concatenate(logits, axis=1), **found}


def largest(x: np.ndarray, want: np.ndarray) -> float:
  """The largest difference, over the largest number."""
  return float(np.max(np.abs(x - want)) / np.max(np.abs(want)))


def reference(golden: Golden, dtype: str, key: str, like: np.ndarray) -> np.ndarray:
  """The golden's array. It keeps one input of the convolution that no step reads: the oldest."""
  x = golden.arrays[f"{dtype}.{key}"]
  x = x[..., -like.shape[-1] :] if ".conv." in key else x
  assert x.shape == like.shape, f"{key}: ours is {like.shape}, the golden {x.shape}"
  return x


def target_of(golden: Golden) -> Golden:
  """The target that the golden's drafter was run with; it has no arrays of its own."""
  return Golden({}, golden.about["target"] | {"seed": golden.about["seed"]})


def drafter_pair(golden: Golden, folder: Path) -> Callable[[Any], tuple[Pair, DrafterConfig]]:
  """Target and drafter from folders that are written here, in any dtype."""
  target, own = write(target_of(golden), folder / "target"), write(golden, folder / "drafter")

  def loaded(dtype: Any) -> tuple[Pair, DrafterConfig]:
    params, config = load(target, dtype=dtype)
    mine, sizes = load_drafter(own, params, config, dtype=dtype)
    return Pair(params, mine), sizes

  return loaded


def drafter_hidden(pair: Pair, config: DrafterConfig, seed: int) -> np.ndarray:
  """[blocks, D - 1, width], what the head reads of each block of cases.py, in the dtype of `pair`.

  The head is a unit matrix, beside which the embedding has as many rows.
  """
  width, embed = config.target.width, pair.target.embed
  features = jnp.concatenate([cases.residual(tap + 1, seed) for tap in config.taps], axis=-1)
  at = jnp.arange(features.shape[1], dtype=jnp.int32)[None]
  anchors, contexts = (jnp.asarray(x, jnp.int32)[None] for x in (cases.ANCHORS, cases.CONTEXTS))

  @jax.jit
  def run(params, embed, features):
    rows = drafter.context_rows(params, config, features, at)
    embed = jnp.pad(embed, ((0, width - len(embed)), (0, 0)))
    back = contexts[..., None] - at[:, None]
    head = jnp.eye(width, dtype=embed.dtype)
    return drafter.marginals(params, config, embed, anchors, contexts, rows, back, head)

  return np.asarray(run(pair.drafter, embed, features.astype(embed.dtype))[0])


def drafted(pair: Pair, config: DrafterConfig, golden: Golden) -> dict[str, np.ndarray]:
  """Decodes on from the golden's first new token; text and blocks under the golden's names."""
  text, target = golden.arrays["text"], config.target
  spec = Spec(target.key_heads, config.block, dtypes=Dtypes(raw=jnp.float32))
  memory = model_memory(target, SCHEMES["replay_0"].make(spec), drafter=config)
  draft, drafts = block_drafter(config, chain(config.block)), []

  def watched(*args):
    drafts.append(draft(*args))
    return drafts[-1]

  @partial(jax.jit, donate_argnums=1)
  def one(pair, state):
    batch = every(jnp.ones(1, bool), config.block)
    state, report = step(pair, target, memory, watched, state, batch)
    return state, drafts.pop().tokens[0], report.emitted[0]

  prompt, capacity = text[: cases.DFLASH_PROMPT + 1].tolist(), len(text) + config.block
  state, found = prefilled(pair, target, memory, [prompt], capacity=capacity), []
  for _ in golden.arrays["blocks"]:
    state, *block = one(pair, state)
    found.append(block)
  blocks, kept = (np.stack(x) for x in zip(*found, strict=True))
  n = int(state.length[0])
  return {"text": np.asarray(state.text[0, :n]), "blocks": blocks, "kept": kept}
