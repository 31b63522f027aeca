"""What every scheme is soaked in: a small model, prompts, and the text that follows each."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.decoding.drafts import Drafter, anchors, nothing
from commit_schemes.decoding.engine import Engine, Text
from commit_schemes.decoding.schedule import Limits
from commit_schemes.decoding.slots import compiled
from commit_schemes.model import Draft, model_memory
from experiments.record import BadInput
from experiments.target import target
from gdn import hybrid
from gdn.config import Config as ModelConfig
from gdn.hybrid import Params
from gdn.ops import XLA, Ops
from pallas_kernels import MOSAIC_GPU

TINY = ModelConfig(
  width=32, inner=32, layers=2, attention_every=2, key_heads=2, value_heads=4, key_dim=8,
  value_dim=8, query_heads=4, kv_heads=2, head_dim=8, rotary=4, window=24,
)  # fmt: skip
HEADS = ModelConfig(width=128, inner=128, layers=2, attention_every=2, window=64)

MODELS: Mapping[str, tuple[ModelConfig, str, Ops]] = MappingProxyType(
  {
    "tiny float32": (TINY, "float32", XLA),
    "128-wide heads, bfloat16, Mosaic kernels": (HEADS, "bfloat16", MOSAIC_GPU),
  }
)


def rigged(truth: np.ndarray, window: int, vocab: int = 256) -> Drafter:
  """Drafts the known continuation with errors, in windows that are chains and (by turns) trees.

  truth  int [texts, L]; a text is known by its first token
  """
  L = truth.shape[1]
  table, t = jnp.asarray(truth), jnp.arange(window, dtype=jnp.int32)
  # Node 1 is a decoy: its sibling, node 2, carries the chain on.
  tree = jnp.where(t == 0, -1, jnp.where(t <= 2, 0, t - 1))
  depth = jnp.where(t < 2, t, t - 1)

  def slot(text, length):
    branching = length % 3 == 1
    at = length - 1 + jnp.where(branching, depth, t)
    right = table[text[0] % truth.shape[0], jnp.minimum(at, L - 1)]
    spoil = ((length * 31 + at * 17 + text[0]) % 7 == 0) | (branching & (t == 1))
    return jnp.where(spoil, (right + 1) % vocab, right), jnp.where(branching, tree, t - 1)

  def draft(text, length, behind=None) -> Draft:
    del behind
    tokens, parents = jax.vmap(slot)(text, length)
    tokens = jnp.where(t[None] == 0, anchors(text, length)[:, None], tokens)
    return Draft(tokens, parents, jnp.where(length > 0, window, 0).astype(jnp.int32))

  return draft


def one_rounding_away(x: jax.Array) -> jax.Array:
  """The next representable number of every element, away from zero."""
  return jnp.nextafter(x, jnp.where(x < 0, -jnp.inf, jnp.inf).astype(x.dtype))


def first_difference(text: Text, plain: Text) -> tuple[int | None, float]:
  """The first token of a text that is not plain decoding's, None if there is none, and the largest
  error of a top-2 pair of logits over the tokens before it."""
  n, skip = len(text.tokens), text.prompt - plain.prompt
  differs = np.flatnonzero(np.asarray(text.tokens) != np.asarray(plain.tokens[skip : skip + n]))
  end = int(differs[0]) if len(differs) else n
  pairs = zip(text.top[:end], plain.top[skip : skip + end], strict=True)
  error = max((float(np.abs(a - b).sum()) for a, b in pairs), default=0.0)
  return (end if len(differs) else None), error


def model_of(c: Any) -> tuple[Params, ModelConfig, Ops]:
  """Random weights of a named model, or a checkpoint. BadInput: it cannot be, or is too small."""
  if c.model in MODELS:
    config, dtype, ops = MODELS[c.model]
    return hybrid.init(config, jax.random.key(c.seed), jnp.dtype(dtype)), config, ops
  params, config, *_ = target(Path(c.model), context=c.capacity)
  if config.vocab < c.prompts:
    raise BadInput(f"prompts = {c.prompts}, allowed: at most the vocabulary of {config.vocab}")
  return params, config, MOSAIC_GPU if jax.default_backend() == "gpu" else XLA


class World:
  """The model, prompts, and plain decoding's text after each; `c` is a soak's Config.

  `noise` is what weights one rounding away do to a top-2 pair of logits: the dtype leaves it open.
  """

  def __init__(self, c: Any):
    self.c = c
    self.params, self.config, self.ops = model_of(c)
    self.dtype = self.params.embed.dtype
    rng = np.random.default_rng(c.seed)
    lengths = rng.integers(2, c.capacity // 4, c.prompts)
    self.prompts = [
      (i, *map(int, rng.integers(0, min(256, self.config.vocab), n))) for i, n in enumerate(lengths)
    ]
    self.plain = self._plainly(self.params)
    nudged = self._plainly(jax.tree.map(one_rounding_away, self.params))
    self.noise = max(first_difference(nudged[p], self.plain[p])[1] for p in self.prompts)
    self.truth = np.stack([self.plain[p].known for p in self.prompts]).astype(np.int32)

  def spec(self, window: int) -> Spec:
    dtypes = Dtypes(raw=self.dtype)
    return Spec(self.config.key_heads, window, self.ops, self.config.decay_channels, dtypes)

  def limits(self, window: int) -> Limits:
    return Limits(self.c.capacity, self.config.vocab, window)

  def _plainly(self, params: Params) -> dict[tuple[int, ...], Text]:
    memory = model_memory(self.config, SCHEMES["snapshot"].make(self.spec(1)), self.ops)
    programs = compiled(params, self.config, memory, nothing, ops=self.ops)
    engine = Engine(programs, self.limits(1), slots=self.c.prompts, block=self.c.block)
    for p in self.prompts:
      engine.submit(p, p, tokens=self.c.capacity - len(p), draft=0)
    engine.run()
    return {p: engine.texts[p] for p in self.prompts}
