"""Decode steps of a whole model, and of what is left of it, compiled to be timed and compared.

Every step verifies a window of known tokens in each slot, picks the most likely token after every
node, and commits the first `accepted` nodes. All schemes see the same tokens.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes import CommitScheme
from commit_schemes.model import Draft, ModelMemory, verify
from gdn import hybrid
from gdn.config import Config
from gdn.hybrid import Mixers, Params
from gdn.typing import Accepted
from gdn.window import chain

WARM_UP = 3
# (params, carry, committed tokens) -> carry, tokens [B, T], logits behind the last accepted node
Step = Callable[[Params, Any, jax.Array], tuple[Any, jax.Array, jax.Array]]


class Windows(NamedTuple):
  """Chains of T nodes in B slots, and the acceptance of each."""

  path: jax.Array  # [B, T]
  parents: jax.Array  # [B, T]
  nodes: jax.Array  # [B]
  slots: jax.Array  # [B]
  accepted: Accepted

  @property
  def last(self) -> jax.Array:
    """The last accepted node of each slot."""
    return self.accepted.length - 1


def windows(B: int, T: int, accepted: int) -> Windows:
  across = lambda x: jnp.broadcast_to(x[None], (B, T))
  full = lambda n: jnp.full(B, n, jnp.int32)
  path = across(jnp.arange(T, dtype=jnp.int32))
  slots = jnp.arange(B, dtype=jnp.int32)
  return Windows(path, across(chain(T)), full(T), slots, Accepted(path, full(accepted)))


def known(config: Config, positions: jax.Array, slots: jax.Array) -> jax.Array:
  """The token at each position of each slot: texts without end, all different."""
  mixed = positions * 7919 + positions // 13 * 104_729 + slots[:, None] * 1_000_003
  return mixed.astype(jnp.uint32).astype(jnp.int32) % config.vocab


def behind_last(logits: jax.Array, w: Windows) -> jax.Array:
  return jnp.take_along_axis(logits, w.last[:, None, None], axis=1)[:, 0]


def scheme_step(config: Config, memory: ModelMemory, w: Windows) -> Any:
  """The whole model under a commit scheme: a jitted `Step` that takes over its carry."""

  def step(params, carry, at):
    draft = Draft(known(config, at + w.path, w.slots), w.parents, w.nodes)
    logits, flight = verify(params, config, memory, carry, draft, at + w.path, w.slots)
    carry = memory.whole.commit(flight, w.accepted)
    return carry, jnp.argmax(logits, axis=-1), behind_last(logits, w)

  return jax.jit(step, donate_argnums=1)


def rest_step(config: Config, rows: CommitScheme, w: Windows, *, projected: bool) -> Any:
  """The same without recurrent layers, or with their projections and neither conv nor state."""
  attend = lambda m, q, k, v: rows.verify(m, q, k, v, w.parents, w.nodes, w.slots)
  mixers = Mixers(lambda m, x, taps: (x, m), lambda m, raw, gates: (raw.v, m), attend)

  def layer(i, weights, x, at, memory):
    if config.is_attention(i) or projected:
      x, memory = hybrid.block(weights, config, x, at + w.path, mixers, memory)
    else:
      x = hybrid.behind(weights, config, x)
    return x, rows.commit(memory, w.accepted) if config.is_attention(i) else memory

  def step(params, carry, at):
    x, new = params.embed[known(config, at + w.path, w.slots)], []
    for i, (weights, memory) in enumerate(zip(params.layers, carry, strict=True)):
      x, memory = layer(i, weights, x, at, memory)
      new.append(memory)
    logits = hybrid.logits(params, x)
    return tuple(new), jnp.argmax(logits, axis=-1), behind_last(logits, w)

  return jax.jit(step, donate_argnums=1)


def run(
  step: Step, params: Params, carry: Any, numbers: Iterable[int], accepted: int
) -> tuple[Any, jax.Array]:
  """Carry and last logits after the steps of these numbers; returns when they are done."""
  logits = None
  for i in numbers:
    carry, _, logits = step(params, carry, jnp.int32(i * accepted))
  return carry, jax.block_until_ready(logits)


class Timing(NamedTuple):
  """Microseconds of a step: median and quartiles over runs."""

  median: float
  low: float
  high: float


def timed(step: Step, params: Params, carry: Any, accepted: int, inner: int, runs: int) -> Timing:
  """`runs` runs of `inner` steps, waited for once each; the first steps compile and warm up."""
  carry, _ = run(step, params, carry, range(WARM_UP), accepted)
  times, at = [], WARM_UP
  for _ in range(runs):
    began = time.perf_counter()
    carry, _ = run(step, params, carry, range(at, at + inner), accepted)
    times.append(1e6 * (time.perf_counter() - began) / inner)
    at += inner
  low, median, high = statistics.quantiles(times, n=4)
  return Timing(median, low, high)


def nudged(params: Params) -> Params:
  """Every weight one rounding up, or as it was, at random."""
  leaves, structure = jax.tree.flatten(params)

  @jax.jit
  def nudge(x, key):
    up = jax.random.bernoulli(key, shape=x.shape)
    return jnp.where(up, x * jnp.asarray(1 + float(jnp.finfo(x.dtype).eps), x.dtype), x)

  keys = jax.random.split(jax.random.key(1), len(leaves))
  return jax.tree.unflatten(structure, [nudge(*pair) for pair in zip(leaves, keys, strict=True)])


def difference(x: jax.Array, y: jax.Array) -> float:
  """RMS of the difference over that of y."""
  a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
  return float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2)))
