"""Bytes, flops and launches of one speculative step of one recurrent layer, for every scheme.

Compulsory traffic: what a step reads is read once, what it leaves is written once, nothing else
moves. Flops count a multiply and an add as two. Launches are those of a layer; what is done for all
layers at once is left out. Where the state is written, and what else a fold needs, is the scheme's.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from commit_schemes.footprint import LayerShape


class Cost(NamedTuple):
  """Of one decode slot and one layer; `launches` do not grow with the batch."""

  bytes: float = 0.0
  flops: float = 0.0
  launches: float = 0.0

  def plus(self, *others: "Cost") -> "Cost":
    return Cost(*map(sum, zip(self, *others, strict=True)))

  def times(self, factor: float) -> "Cost":
    """Done in this share of the steps."""
    return Cost(*(factor * x for x in self))


class Point(NamedTuple):
  """One step: T nodes verified, `accepted` of them kept, on average.

  ring     R, slots of a ring; it flushes when the next window would not fit behind its rows
  state    bytes of one element of the checkpoint
  row      bytes of one element of stored keys and pseudo-values
  """

  window: int
  accepted: float
  ring: int = 16
  state: int = 4
  row: int = 2

  @property
  def flushes(self) -> float:
    """Share of steps that flush: one in floor((R - T) / accepted) + 1."""
    return 1 / (max(self.ring - self.window, 0) // self.accepted + 1)

  @property
  def history(self) -> float:
    """Mean number of committed rows that a verify finds in the ring."""
    return self.accepted * (1 / self.flushes - 1) / 2


def state(s: LayerShape, p: Point) -> float:
  return s.value_heads * s.value_dim * s.key_dim * p.state


def rows(s: LayerShape, p: Point, n: float) -> float:
  """Bytes of n records of k, u and g."""
  width = s.key_heads * s.key_dim + s.value_heads * s.value_dim
  return n * (width * p.row + 4 * s.value_heads * s.channels)


def raw(s: LayerShape, n: float) -> float:
  """Bytes of n raw records: bf16 k and v, fp32 beta and g."""
  width = s.key_heads * s.key_dim + s.value_heads * s.value_dim
  return n * (2 * width + 4 * s.value_heads * (1 + s.channels))


def inputs(s: LayerShape, n: float) -> float:
  """Bytes of a window's q, k, v in, gates in and outputs out, all bf16."""
  qkv = 2 * s.key_heads * s.key_dim + s.value_heads * s.value_dim
  return 2 * n * (qkv + s.value_heads * (1 + s.channels) + s.value_heads * s.value_dim)


def token_steps(s: LayerShape, n: float) -> float:
  """Flops of n one-token steps: S k, S q, the write, the decay and beta (v - S k)."""
  return s.value_heads * n * s.value_dim * (7 * s.key_dim + 3)


def fold_flops(s: LayerShape, n: float) -> float:
  """Flops of e^G S + sum of n rank-one writes."""
  return s.value_heads * s.value_dim * s.key_dim * (2 * n + 1)


def window_flops(s: LayerShape, T: float, history: float = 0.0) -> float:
  """S [k; q]', two Gram matrices, the solve and the outputs; `history` rows stand beside S."""
  K, V = s.key_dim, s.value_dim
  head = 4 * T * V * K + 4 * T * T * K + T * T * V + 2 * T * T * V
  return s.value_heads * (head + 4 * T * history * (K + V))


def verify(s: LayerShape, p: Point, out: float, history: float = 0.0) -> Cost:
  """An output-only verify that leaves `out` bytes for its commit."""
  moved = state(s, p) + rows(s, p, history) + inputs(s, p.window) + out
  return Cost(moved, window_flops(s, p.window, history), 1)


def fold(s: LayerShape, p: Point, records: float, flops: float) -> Cost:
  """A kernel of its own: state read and written, records read."""
  return Cost(2 * state(s, p) + records, flops, 1)


def snapshots(s: LayerShape, p: Point, keep: int) -> Cost:
  """Token by token; the state after each of the first `keep` nodes."""
  moved = (1 + min(keep, p.window)) * state(s, p) + inputs(s, p.window)
  return Cost(moved, token_steps(s, p.window), 1)


def partial_cache(keep: int) -> Callable[[LayerShape, Point], Cost]:
  """The tail past the kept states is replayed from its raw records."""

  def step(s: LayerShape, p: Point) -> Cost:
    tail = max(p.accepted - keep, 0.0)
    replayed = Cost(raw(s, p.window))
    return snapshots(s, p, keep).plus(
      replayed, fold(s, p, raw(s, tail), token_steps(s, tail) if tail else 0.0)
    )

  return step


def ring_rank(s: LayerShape, p: Point) -> Cost:
  """The verify that flushes has read the state and the rows anyway: it writes, once more."""
  flush = Cost(state(s, p), fold_flops(s, p.history * 2))
  return verify(s, p, rows(s, p, p.window), p.history).plus(flush.times(p.flushes))


def ring_exact(s: LayerShape, p: Point) -> Cost:
  """Raw inputs are kept beside the rows, which have their g; a flush replays them on its own."""
  n = p.accepted / p.flushes
  flush = fold(s, p, raw(s, n), token_steps(s, n))
  kept = rows(s, p, p.window) + raw(s, p.window) - 4 * p.window * s.value_heads * s.channels
  return verify(s, p, kept, p.history).plus(flush.times(p.flushes))


def fused(s: LayerShape, p: Point) -> Cost:
  """The next verify folds the accepted path as it reads the state, and writes it."""
  moved = state(s, p) + rows(s, p, p.accepted)
  return verify(s, p, rows(s, p, p.window)).plus(Cost(moved, fold_flops(s, p.accepted)))


STEPS: Mapping[str, Callable[[LayerShape, Point], Cost]] = MappingProxyType(
  {
    "snapshot": lambda s, p: snapshots(s, p, p.window).plus(fold(s, p, 0.0, 0.0)),
    "replay_0": lambda s, p: verify(s, p, raw(s, p.window)).plus(
      fold(s, p, raw(s, p.accepted), token_steps(s, p.accepted))
    ),
    "replay_1": partial_cache(1),
    "replay_4": partial_cache(4),
    "replay_8": partial_cache(8),
    "replay_4_compact": partial_cache(4),
    "delta_cache": lambda s, p: verify(s, p, rows(s, p, p.window)).plus(
      fold(s, p, rows(s, p, p.accepted), fold_flops(s, p.accepted))
    ),
    "ring_open_loop": ring_rank,
    "ring_exact": ring_exact,
    "ring_compensated": lambda s, p: ring_rank(s, p._replace(row=4)),
    "tree_wy": fused,
  }
)
"""What one step of each scheme costs one slot of one layer."""


def plain(s: LayerShape, p: Point) -> Cost:
  """A token of decoding without speculation: state read and written."""
  return Cost(2 * state(s, p) + inputs(s, 1), token_steps(s, 1), 1)
