"""A whole model decoding, and what is left of it without recurrent layers, compiled to be timed.

Every cell is the library's own step: a window is drafted, verified, accepted from its front as far
as it is right, committed and appended. What is drafted is the text that plain decoding has written,
with a wrong token here and there: where, depends on slot and position alone, so that all schemes
accept and reject the same, each slot otherwise.

In bfloat16 two right ways to the same logits differ, and a text that is greedy leaves the other for
good at the first near tie. So the text's own token is taken where its logit lies within `tie` of
the best: the margin rule, applied to every token and not only to those before the first tie.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes import CommitScheme, together
from commit_schemes.decoding.accept import Verdict, agreed
from commit_schemes.decoding.loop import Batch, Decoding, step
from commit_schemes.kv_rows import kv_rows
from commit_schemes.model import Draft, ModelMemory
from gdn import hybrid
from gdn.attention import Attention
from gdn.config import Config
from gdn.hybrid import Params
from gdn.layer import GDNMemory
from gdn.ops import XLA
from gdn.streaming import empty, streaming
from gdn.window import chain


class Told(NamedTuple):
  """What a step says of every node: the logit of the token that follows it, and by how much another
  is larger. Only the first `emitted` of each row became text."""

  emitted: jax.Array  # [B]
  logit: jax.Array  # [B, T]
  lead: jax.Array  # [B, T]


# (params, state, text that is drafted from [N, L], tie) -> state, Told; takes over its state
Step = Callable[[Params, Decoding, jax.Array, jax.Array], tuple[Decoding, Told]]


def known(config: Config, positions: jax.Array, slots: jax.Array) -> jax.Array:
  """The token at each position of each slot: texts without end, all different."""
  mixed = positions * 7919 + positions // 13 * 104_729 + slots[:, None] * 1_000_003
  return mixed.astype(jnp.uint32).astype(jnp.int32) % config.vocab


def wrong(positions: jax.Array, slots: jax.Array, accepted: int) -> jax.Array:
  """Where a draft is wrong: one position in `accepted`, as if by chance (MurmurHash3's mixing)."""
  x = positions.astype(jnp.uint32) + slots.astype(jnp.uint32)[:, None] * jnp.uint32(1_000_003)
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
    x = (x ^ (x >> shift)) * jnp.uint32(factor)
  return x % accepted == 0


def decode_step(config: Config, memory: ModelMemory, window: int, accepted: int, until: int) -> Any:
  """A jitted `Step` of every slot that has fewer than `until` tokens."""

  def one(params, state, said, tie):
    N, L = said.shape
    slots = jnp.arange(N, dtype=jnp.int32)
    read = lambda text, at: jnp.take_along_axis(text, jnp.minimum(at, L - 1), axis=1)
    at = state.length[:, None] - 1 + jnp.arange(window, dtype=jnp.int32)[None]
    told: list[Told] = []

    def drafter(text, length, behind):
      tokens = read(said, at)
      tokens = jnp.where(wrong(at, slots, accepted), (tokens + 1) % config.vocab, tokens)
      tokens = tokens.at[:, 0].set(read(text, at)[:, 0])
      parents = jnp.broadcast_to(chain(window)[None], at.shape)
      return Draft(tokens, parents, jnp.full(N, window, jnp.int32))

    def accept(logits, draft) -> Verdict:
      best, right = jnp.argmax(logits, axis=-1).astype(jnp.int32), read(said, at + 1)
      of = lambda tokens: jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
      chosen = jnp.where(of(best) - of(right) <= tie, right, best)
      verdict = agreed(chosen, draft)
      told.append(Told(verdict.accepted.length, of(chosen), of(best) - of(chosen)))
      return verdict

    nodes = jnp.clip(until - state.length, 0, window)
    batch = Batch(jnp.where(nodes > 0, slots, -1), nodes)
    state, _ = step(params, config, memory, drafter, state, batch, accept)
    return state, told[0]

  return jax.jit(one, donate_argnums=1)


def nothing(through: Callable[..., Any]) -> CommitScheme:
  """A memory of nothing, whose output is one of its inputs."""
  keep = lambda carry, *_: ()
  return CommitScheme(keep, lambda carry, *x: (through(*x), ()), keep, keep, keep)


def without_states(config: Config) -> ModelMemory:
  """Attention as it is; of the recurrent layers the projections, no convolution and no state."""
  conv, state, rows = nothing(lambda x, *_: x), nothing(lambda w, _: w.raw.v), kv_rows()
  layer = lambda i: rows if config.is_attention(i) else GDNMemory(conv, state)
  return ModelMemory(conv, state, rows, together(tuple(map(layer, range(config.layers)))))


def without_mixers(params: Params) -> Params:
  """The weights without those of the recurrent layers' mixers."""
  keep = lambda block: isinstance(block.mixer, Attention)
  cut = lambda block: block if keep(block) else block._replace(mixer=None)
  return params._replace(layers=tuple(map(cut, params.layers)))


class Decoded(NamedTuple):
  """Each slot's text [N, L], and of what was decoded the logits and leads by slot; how many tokens
  each step [steps] gave each slot; microseconds of a step, by runs in which all slots went on."""

  text: np.ndarray
  logit: list[np.ndarray]
  lead: list[np.ndarray]
  emitted: np.ndarray  # [steps, N]
  times: list[float]


def decode(
  step: Step, params: Params, state: Decoding, said: jax.Array, tie: float, until: int, *,
  inner: int, runs: int | None = None,
) -> Decoded:  # fmt: skip
  """Until every slot has `until` tokens, or `runs` runs of `inner` steps, each waited for once."""
  times: list[float] = []
  told: list[Told] = []
  limit = jnp.float32(tie)
  while (np.asarray(state.length) < until).any() and len(told) != (runs or -1) * inner:
    began = time.perf_counter()
    for _ in range(inner):
      state, one = step(params, state, said, limit)
      told.append(one)
    jax.block_until_ready(state)
    took = time.perf_counter() - began
    if (np.asarray(state.length) < until).all():
      times.append(1e6 * took / inner)
  emitted, logit, lead = (np.stack(x) for x in zip(*jax.device_get(told), strict=True))
  here = np.arange(logit.shape[2]) < emitted[:, :, None]
  by_slot = lambda x: [x[:, b][here[:, b]] for b in range(x.shape[1])]
  return Decoded(np.asarray(state.text), by_slot(logit), by_slot(lead), emitted, times)


def one_pass(config: Config, prompt: int) -> Any:
  """Jitted (params, text [N, L]) -> logits [N, L - prompt] of the tokens behind the prompt, from
  one pass over all but the last of them."""

  def run(params, text):
    at = jnp.arange(text.shape[1] - 1, dtype=jnp.int32)[None]
    at = jnp.broadcast_to(at, text[:, 1:].shape)
    memories = empty(config, text.shape[0], params.embed.dtype)
    hidden, _ = hybrid.hidden_states(params, config, text[:, :-1], at, streaming(XLA), memories)

    def slot(pair):  # the logits of one text at a time are enough
      x, tokens = pair
      return jnp.take_along_axis(hybrid.logits(params, x[None])[0], tokens[:, None], axis=1)[:, 0]

    return jax.lax.map(slot, (hidden[-1][:, prompt - 1 :], text[:, prompt:]))

  return jax.jit(run)


class Timing(NamedTuple):
  """Microseconds of a step: median and quartiles over runs."""

  median: float
  low: float
  high: float


def timing(times: Iterable[float]) -> Timing:
  """The first run warms up. ValueError: fewer than three are left."""
  _, *kept = times
  if len(kept) < 3:
    raise ValueError(f"{len(kept)} runs of steps were timed, at least 3 are wanted")
  low, median, high = statistics.quantiles(kept, n=4)
  return Timing(median, low, high)


@functools.partial(jax.jit, static_argnums=2)
def _nudged(x, key, eps):
  return jnp.where(jax.random.bernoulli(key, shape=x.shape), x * jnp.asarray(1 + eps, x.dtype), x)


def nudged(params: Params) -> Params:
  """Every weight one rounding up, or as it was, at random."""
  leaves, structure = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  nudge = lambda x, key: _nudged(x, key, float(jnp.finfo(x.dtype).eps))
  return jax.tree.unflatten(structure, list(map(nudge, leaves, keys)))
