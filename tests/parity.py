"""Goldens of other implementations, and how far this one is from them.

A golden says of which model it is (config and names as transformers wrote them); its weights come
from tests/goldens/cases.py, so the folder that is loaded here is the one that was run there.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from gdn import hybrid
from gdn.config import Config
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
