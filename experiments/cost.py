"""Bytes, flops and launches of one speculative step of one recurrent layer, for every scheme.

Compulsory traffic: what a step reads is read once, what it leaves is written once, nothing else
moves. Flops count a multiply and an add as two. Launches are those of a layer; what is done for all
layers at once is left out. Where the state is written, and what else a fold needs, is the scheme's.
"""

from collections.abc import Callable, Mapping
from functools import partial
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


def replay_flops(s: LayerShape, n: float) -> float:
  """The same without outputs: no S q."""
  return s.value_heads * n * s.value_dim * (5 * s.key_dim + 3)


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


class Part(NamedTuple):
  """One kernel of a scheme's step.

  kernel  what it does; experiments/counted.py has its program, experiments/kernel_time.py its time
  share   of the slots that it does it for, on average
  n       committed rows that it reads, records that it replays or states that it keeps
  """

  kernel: str
  cost: Cost
  share: float = 1.0
  n: float = 0.0


Parts = tuple[Part, ...]


def replayed(s: LayerShape, p: Point, n: float, share: float = 1.0) -> Part:
  """Raw records one token at a time; of none the state is copied."""
  return Part("fold_raw", fold(s, p, raw(s, n), replay_flops(s, n)), share, n)


def partial_cache(keep: int) -> Callable[[LayerShape, Point], Parts]:
  """The tail past the kept states is replayed from its raw records."""

  def step(s: LayerShape, p: Point) -> Parts:
    kept = snapshots(s, p, keep).plus(Cost(raw(s, p.window)))
    return Part("partial", kept, n=min(keep, p.window)), replayed(s, p, max(p.accepted - keep, 0.0))

  return step


def folding(s: LayerShape, p: Point, n: float) -> Cost:
  """A verify that folds n rows into the state that it reads, and writes it: once more."""
  folded = Cost(state(s, p) + rows(s, p, n), fold_flops(s, n))
  return verify(s, p, rows(s, p, p.window)).plus(folded)


def ring_rank(s: LayerShape, p: Point) -> Parts:
  """Slots whose ring is full fold what is in it; the others have half of that on average."""
  n, f = p.accepted / p.flushes, p.flushes
  live = verify(s, p, rows(s, p, p.window), n / 2)
  return Part("step_ring", live, 1 - f, n / 2), Part("step_ring_flush", folding(s, p, n), f, n)


def ring_exact(s: LayerShape, p: Point) -> Parts:
  """Raw inputs are kept beside the rows, which have their g; a flush replays them on its own.

  A kernel of its own may keep them; a verify could, so it is no launch here.
  """
  kept = Cost(raw(s, p.window) - 4 * p.window * s.value_heads * s.channels)
  live = verify(s, p, rows(s, p, p.window), p.history)
  return (
    replayed(s, p, p.accepted / p.flushes, p.flushes),
    Part("step_ring", live, n=p.history),
    Part("append", kept),
  )


PARTS: Mapping[str, Callable[[LayerShape, Point], Parts]] = MappingProxyType(
  {
    "snapshot": lambda s, p: (
      Part("snapshot", snapshots(s, p, p.window), n=p.window),
      Part("snapshot_commit", fold(s, p, 0.0, 0.0)),
    ),
    "replay_0": lambda s, p: (
      Part("verify_raw", verify(s, p, raw(s, p.window))),
      replayed(s, p, p.accepted),
    ),
    "replay_1": partial_cache(1),
    "replay_4": partial_cache(4),
    "replay_8": partial_cache(8),
    "replay_4_compact": partial_cache(4),
    "delta_cache": lambda s, p: (
      Part("verify_rows", verify(s, p, rows(s, p, p.window))),
      Part(
        "fold_rank",
        fold(s, p, rows(s, p, p.accepted), fold_flops(s, p.accepted)),
        n=p.accepted,
      ),
    ),
    "ring_open_loop": ring_rank,
    "ring_exact": ring_exact,
    "ring_compensated": lambda s, p: ring_rank(s, p._replace(row=4)),
    "tree_wy": lambda s, p: (Part("step", folding(s, p, p.accepted), n=p.accepted),),
  }
)
"""The kernels of a step of each scheme, in order."""


def whole(parts: Parts) -> Cost:
  """Of one slot and one layer."""
  return Cost().plus(*(x.cost.times(x.share) for x in parts))


def step(scheme: str, s: LayerShape, p: Point) -> Cost:
  return whole(PARTS[scheme](s, p))


STEPS: Mapping[str, Callable[[LayerShape, Point], Cost]] = MappingProxyType(
  {name: partial(step, name) for name in PARTS}
)
"""What one step of each scheme costs one slot of one layer."""


def plain(s: LayerShape, p: Point) -> Cost:
  """A token of decoding without speculation: state read and written."""
  return Cost(2 * state(s, p) + inputs(s, 1), token_steps(s, 1), 1)
