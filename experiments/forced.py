"""Teacher-forced speculative decoding: a known text, its drafts, one scheme over streams."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes import CommitScheme
from commit_schemes.decoding.drafts import prompt_lookup
from experiments.streams import Streams
from gdn.typing import Accepted, Window
from gdn.window import chain


class Schedule(NamedTuple):
  """The windows of a text: first token, nodes, accepted length. None straddles a probe."""

  start: np.ndarray
  nodes: np.ndarray
  accepted: np.ndarray
  last: np.ndarray  # number of windows up to and including the one that ends at each probe


def schedule(text: np.ndarray, window: int, probes: Sequence[int]) -> Schedule:
  """Prompt-lookup drafts of `text`, int [T], each accepted as far as it equals the text."""
  drafter, L = prompt_lookup(window), len(text)

  @jax.jit
  def accepted(text, known):
    draft = drafter(text[None], known[None])
    follows = text[jnp.minimum(known + jnp.arange(window - 1), L - 1)]
    same = (draft.tokens[0, 1:] == follows) & (jnp.arange(1, window) < draft.nodes[0])
    return draft.nodes[0], 1 + jnp.sum(jnp.cumprod(same), dtype=jnp.int32)

  ids, stops = jnp.asarray(text, jnp.int32), sorted(probes)
  rows, last, at = [], [], 0
  for stop in stops:
    while at < stop:
      nodes, n = map(int, accepted(ids, jnp.int32(at + 1)))
      rows.append((at, nodes, min(n, stop - at)))
      at += rows[-1][2]
    last.append(len(rows))
  start, drafted, kept = np.asarray(rows, np.int32).T
  return Schedule(start, drafted, kept, np.asarray(last))


class Probe(NamedTuple):
  """After the window that ends at `token`: the committed state and that token's output, float32."""

  token: int
  state: np.ndarray  # [H, V, K]
  output: np.ndarray  # [H, V]


def run(
  scheme: CommitScheme,
  streams: Streams,
  plan: Schedule,
  window: int,
  progress: Callable[[float], None] = lambda fraction: None,
) -> Iterator[Probe]:
  """A scheme over the streams, window by window as planned, from a zero state."""
  raw = jax.tree.map(
    lambda x: jnp.concatenate([x, jnp.zeros((window, *x.shape[1:]), x.dtype)]), streams.raw
  )
  _, H, V = raw.v.shape
  slots, path = jnp.zeros(1, jnp.int32), jnp.arange(window, dtype=jnp.int32)[None]

  def one(i, carried):
    carry, _, (raw, gates, start, nodes, accepted) = carried
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start[i], window)[None]
    step = Window(jax.tree.map(cut, raw), chain(window)[None], nodes[i][None], slots)
    o, flight = scheme.verify(carry, step, gates)
    carry = scheme.commit(flight, Accepted(path, accepted[i][None]))
    return carry, o[0, accepted[i] - 1].astype(jnp.float32), carried[2]

  @jax.jit
  def advance(carry: Any, lo, hi, data):
    o = jnp.zeros((H, V), jnp.float32)
    carry, o, _ = jax.lax.fori_loop(lo, hi, one, (carry, o, data))
    return carry, o, scheme.materialize(carry)[0].astype(jnp.float32)

  data = (raw, streams.gates, *map(jnp.asarray, plan[:3]))
  carry = scheme.init(jnp.zeros((1, H, V, raw.k.shape[-1]), jnp.float32))
  lo = 0
  for hi in map(int, plan.last):
    carry, o, S = advance(carry, jnp.int32(lo), jnp.int32(hi), data)
    token = int(plan.start[hi - 1] + plan.accepted[hi - 1])
    yield Probe(token, np.asarray(S), np.asarray(o))
    progress(hi / len(plan.start))
    lo = hi
