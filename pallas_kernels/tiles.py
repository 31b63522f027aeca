"""Half a head of a state is a tile: who visits which, how it comes, how it leaves.

A persistent grid walks over (slot, value head, half) of the slots that have something to do. A
warpgroup holds [64, K] in registers for a visit; the next two tiles arrive by TMA meanwhile, and
finished ones leave by TMA.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes, rows
from pallas_kernels.arith import f32

K = V = 128
TILE = 64
HALVES = V // TILE
LANES = 128
SHAPE = (TILE, K)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """ctas_per_sm resident warpgroups a multiprocessor."""

  ctas_per_sm: int = 2
  sms: int = 132

  def __post_init__(self):
    if not 1 <= self.ctas_per_sm <= 4:
      raise ValueError(f"{self.ctas_per_sm=} must be in 1..4")
    if self.sms < 1:
      raise ValueError(f"{self.sms=} must be positive")

  @property
  def arriving(self) -> int:
    """Tiles that a fold has on the way in: a third warpgroup hides more than a second tile."""
    return 1 if self.ctas_per_sm > 2 else 2


DEFAULT = Config()


def shared(dtype, *count: int):
  """Shared memory for so many tiles."""
  swizzle = lanes.swizzle(dtype, 128 // jnp.dtype(dtype).itemsize)
  return plgpu.SMEM((*count, *SHAPE), dtype, transforms=swizzle)


def scratch(dtype, arriving: int, leaving: int = 0) -> dict[str, object]:
  """Shared memory of `walk`: tiles on the way in and, where states are written, out."""
  return {
    "in_smem": shared(dtype, arriving),
    **({"out_smem": shared(dtype, leaving)} if leaving else {}),
    "ready": plgpu.Barrier(num_barriers=arriving),
  }


class Items(NamedTuple):
  """What a launch walks over: the halves of every value head of every batch row.

  S, slots  global memory of the pool and of each row's place in it
  tokens    of each batch row; a row without any, and one of padding, is not live
  rows      of records, where there are some: one of a batch row that is live is not negative
  """

  S: Any
  slots: Any
  tokens: Any
  rows: Any = None

  @property
  def per_row(self) -> int:
    return self.S.shape[1] * HALVES

  @property
  def total(self) -> int:
    return self.slots.shape[0] * self.per_row

  @property
  def needs(self) -> list[tuple[Any, int]]:
    """What makes a batch row live, as `rows.find` takes it."""
    records = [] if self.rows is None else [(self.rows, 0)]
    return [(self.slots, 0), (self.tokens, 1), *records]

  def split(self, item):
    """Batch row, value head and half."""
    head, H = lax.div(item, HALVES), self.S.shape[1]
    return lax.div(head, H), lax.rem(head, H), lax.rem(item, HALVES)

  def tile(self, item):
    """[64, K] of the pool; of a live item."""
    return self.tile_of(item, self.slots[self.split(item)[0]])

  def tile_of(self, item, slot):
    """The same where the slot is known."""
    _, h, m = self.split(item)
    return self.S.at[slot, h, pl.ds(m * TILE, TILE)]


class Turn(NamedTuple):
  """Of a warpgroup's visits the how manieth this is, how many there are, and the next two items."""

  number: Any
  count: Any
  following: Any
  later: Any

  @property
  def more(self):
    return self.number + 1 < self.count


class Ahead(NamedTuple):
  """What is done for an item before its visit: fetch(item) and stage(answer, number) early in the
  visit two before, and behind it; meet(item, turn) right before, while no register holds a state;
  begin(item, following) for the first item, what is staged for it in place."""

  begin: Callable
  fetch: Callable = lambda item: None
  stage: Callable = lambda answer, number: None
  meet: Callable = lambda item, turn: None


class Team(NamedTuple):
  """Warpgroups that share the items of a launch.

  first, stride  of this warpgroup's lots of `together` neighbours, of which a batch row has whole
                 ones
  order          [B] int32 in shared memory, its own
  barriers       where its own start
  spare_banks    whether a tile moves between lanes on its way to registers, which takes some
  """

  first: Any
  stride: Any
  order: Any
  together: int = 1
  barriers: Any = 0
  spare_banks: bool = True

  def barrier(self, ready, at):
    return ready.at[self.barriers + at]


def walk(
  items: Items, visit: Callable, miss: Callable | None = None, *, in_smem, ready,
  ahead: Ahead | None = None, team: Team | None = None,
) -> None:  # fmt: skip
  """visit(item, S, turn) for every live item of this warpgroup, S [64, K] float32 in registers.

  Items that are not live are not read, and go to miss(item) while the first tiles arrive. All lanes
  have left a visit before anything of the next one is written.
  """
  body = functools.partial(_walk, items, visit, miss, in_smem, ready, ahead)
  if team is None:
    first, stride = lax.axis_index("cta"), lax.axis_size("cta")
    scoped = lambda order: body(Team(first, stride, order))
    return pl.run_scoped(scoped, plgpu.SMEM(items.slots.shape, jnp.int32))
  return body(team)


def _walk(items: Items, visit, miss, in_smem, ready, ahead: Ahead | None, team: Team) -> None:
  first, stride, order, together = team.first, team.stride, team.order, team.together
  depth, per_row = in_smem.shape[0], items.per_row
  count = rows.find(order, items.needs) * per_row
  lanes.sync()
  turns = lax.div(lax.div(count, together) - first + stride - 1, stride) * together

  def in_order(at):
    """Number `at` of the live items and, behind them, the others."""
    n = lax.div(at, per_row)
    return at + (order[n] - n) * per_row

  def item(i):
    """The item of a turn; past the last turn the last live one, or any."""
    lot = (first + lax.div(i, together) * stride) * together
    return in_order(jnp.maximum(jnp.minimum(lot + lax.rem(i, together), count - 1), 0))

  def slot(item):
    return items.slots[items.split(item)[0]]

  def ask(i, item, slot):
    @pl.when(i < turns)
    def copy():
      at = lax.rem(i, depth)
      plgpu.copy_gmem_to_smem(items.tile_of(item, slot), in_smem.at[at], team.barrier(ready, at))

  for i in range(depth):
    ask(jnp.int32(i), item(i), slot(item(i)))
  if ahead:
    for i in range(2):
      ahead.stage(ahead.fetch(item(i)), i)
    lanes.sync()
    pl.when(turns > 0)(lambda: ahead.begin(item(0), item(1)))
  if miss:
    other = lambda i, _: miss(in_order(count + first + i * stride))
    lax.fori_loop(0, lax.div(items.total - count - first + stride - 1, stride), other, None)

  def turn(i, _):
    later = item(i + depth)
    slot_later = slot(later)
    fetched = ahead.fetch(item(i + 2)) if ahead else None
    now = Turn(i, turns, item(i + 1), item(i + 2))
    if ahead:
      ahead.meet(item(i), now)
    at = lax.rem(i, depth)
    plgpu.barrier_wait(team.barrier(ready, at))
    S = plgpu.load(in_smem.at[at], layout=plgpu.Layout.WGMMA, optimized=team.spare_banks)
    S = S.astype(f32)
    lanes.sync()
    ask(i + depth, later, slot_later)
    visit(item(i), S, now)
    if ahead:
      lanes.sync()
      ahead.stage(fetched, i + 2)

  lax.fori_loop(0, turns, turn, None)
  plgpu.wait_smem_to_gmem(0)


def leave(S, out_smem, slot, target, *, pending: int) -> None:
  """Writes a tile to global memory behind the next one's work, with `pending` others under way."""
  plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
  lanes.sync()
  out_smem.at[slot][...] = S.astype(out_smem.dtype)
  lanes.sync()
  plgpu.copy_smem_to_gmem(out_smem.at[slot], target)


def launch(kernel, out_type, config: Config, items: int, scratch_types, team: int = 1):
  """A block is a team of so many warpgroups, each with items of its own."""
  blocks = min(pl.cdiv(items, team), config.ctas_per_sm // team * config.sms)
  return plgpu.kernel(
    kernel,
    out_type=out_type,
    grid=(blocks,),
    grid_names=("cta",),
    **({"num_threads": team, "thread_name": "wg"} if team > 1 else {}),
    scratch_types=scratch_types,
    compiler_params=lanes.COMPILER,
  )
