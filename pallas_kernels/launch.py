"""What one launch of the window pipeline is given, and in which order a block goes through it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import history
from pallas_kernels.substitution import TILE, Shape

K = V = 128


class Plan(NamedTuple):
  """What a launch does, known when it is compiled.

  pair        value heads of one key head whose window is prepared at once: 1 or 2
  split_rows  two blocks to a head, half its value rows each
  handed      of the halves of a turn's heads, how many a projector does not finish
  finisher    a warpgroup of its own finishes those, else the preparer
  teams       of a projector and a finisher: where there are two, each has half the value rows
  beside      up to 64 pending rows are met beside the state
  fold        at most sixteen pending rows are folded into the state
  leaving     chunks that were folded and leave together
  together    turns that one block goes through one after the other: all of a key head
  """

  shape: Shape
  pair: int = 1
  split_rows: bool = False
  handed: int = 0
  finisher: bool = False
  teams: int = 1
  beside: bool = False
  fold: bool = False
  leaving: int = 1
  together: int = 1

  @property
  def waits(self) -> bool:
    """Whether there are pending rows."""
    return self.beside or self.fold

  @property
  def late(self) -> bool:
    """Whether a chunk of the state makes room for another only when the next one is in registers.

    By then its products were asked for, so nobody still reads it and no fence is waited for. Worth
    it where a chunk's products take longer than the copy that comes later.
    """
    return self.shape.nodes > 8 and not self.waits

  @property
  def halves(self) -> tuple[int, ...]:
    """First of a projector's value rows of a head, in the order in which they are projected."""
    return (0,) if self.split_rows or self.teams > 1 else (TILE, 0)

  @property
  def given(self) -> tuple[tuple[int, int], ...]:
    """Head of the turn and first value row of what a projector hands over, as it comes."""
    every = [(p, m) for m in self.halves for p in range(self.pair)][: self.handed]
    return tuple(sorted(every, key=lambda x: x[0]))

  @property
  def awaited(self) -> bool:
    """Whether another warpgroup needs what the preparer made of a window."""
    return self.fold or self.finisher or self.split_rows or self.handed < 2 * self.pair


class Window(NamedTuple):
  """Global memory of what goes in: raw tokens and gates, ancestors as words of bits."""

  q: Any
  k: Any
  v: Any
  a: Any
  b: Any
  A_log: Any
  dt_bias: Any
  beta_max: Any
  words: Any
  nodes: Any
  slots: Any


class Written(NamedTuple):
  """Global memory of what a window leaves as rows; nothing in it where they are not wanted.

  Node t of batch row b goes to position (at + t) mod R of a row of each array [N, R, ...]. Without
  `row` and `at` that is position t of row b, and nodes that do not exist are written as zeros;
  g is then no row but a result.
  """

  k: tuple[Any, ...] = ()
  u: tuple[Any, ...] = ()
  g: Any = None
  row: Any = None
  at: Any = None

  def place(self, b, nodes):
    """(row, first position, how many nodes are written), or (row,) where every node is."""
    if self.row is None:
      return (b,)
    return jnp.maximum(self.row[b], 0), self.at[b], jnp.where(self.row[b] < 0, 0, nodes)


class Shared(NamedTuple):
  """Shared memory and barriers. What one warpgroup leaves for the other is there twice."""

  state: Any  # [teams * chunks, 64, width]
  kq: Any  # [windows * rows, K], keys and queries of a window
  matrices: Any
  factors: Any
  flat: Any
  lines: Any
  window_ready: Any
  chunk_ready: Any
  prepared: Any
  free: Any
  w_full: Any
  w_free: Any
  handed: Any = None  # [2 teams, rows / 8, 128, 4], W of value rows that are handed over
  staged: Any = None  # history.Staged, pending rows
  decays: Any = None  # [2, 2 pair, 64], their e^after of each head, and e^G of each
  beside: Any = None  # [2, 3, ., rows], their products with [k; q]
  keys: Any = None  # [2, parts, K, 16] of those that are folded
  weighted: Any = None  # [teams, 3, 64, 16], their pseudo-values times e^after, of half a head


class Turns(NamedTuple):
  """The items of a persistent block, one after the other: `pair` value heads of a slot, or half the
  value rows of one head. It takes `together` neighbours before it moves on."""

  first: Any
  stride: Any
  items: int
  heads: int
  pair: int
  halves: int
  together: int

  @classmethod
  def of(cls, plan: Plan, B: int, H: int) -> "Turns":
    halves = 2 if plan.split_rows else 1
    block, blocks = lax.axis_index("cta"), lax.axis_size("cta")
    items = B * H // plan.pair * halves
    return cls(block, blocks, items, H, plan.pair, halves, plan.together)

  @property
  def count(self):
    groups = self.items // self.together
    return lax.div(groups - self.first + self.stride - 1, self.stride) * self.together

  def item(self, turn):
    """Of a turn, or of the last one: decode slot, first value head, first value row of its own."""
    group, i = lax.div(turn, self.together), lax.rem(turn, self.together)
    n = jnp.minimum((self.first + group * self.stride) * self.together + i, self.items - 1)
    head = lax.div(n, self.halves) * self.pair
    return lax.div(head, self.heads), lax.rem(head, self.heads), lax.rem(n, self.halves) * TILE


class Launch(NamedTuple):
  """Global memory, shared memory, the plan and a block's turns.

  S, and what `pending` reads, may be written in place.
  """

  S: Any
  x: Window
  pending: history.Pending
  o: Any
  beta: Any
  g: Any
  written: Written
  shared: Shared
  plan: Plan
  turns: Turns
