"""What a projector hands over, and the warpgroup that finishes all of it where there is one."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import copies, lanes
from pallas_kernels.finish import finish, values
from pallas_kernels.launch import Launch
from pallas_kernels.substitution import TILE


class Handed(NamedTuple):
  """The halves of heads that a projector hands over; half n is the n % each-th of its turn.

  places  of a turn in shared memory, from one on and so many
  team    whose projector it is
  """

  run: Launch
  first_places: int
  buffers: int
  team: Any = 0

  @property
  def each(self) -> int:
    return len(self.run.plan.given)

  def places(self, turn):
    return self.run.shared.staged.places.at[self.first_places + lax.rem(turn, self.buffers)]

  def where(self, n):
    """Turn, decode slot, head, which head of the turn, first value row."""
    turn, i = lax.div(n, self.each), lax.rem(n, self.each)
    of = lambda k: sum(jnp.where(i == j, x[k], 0) for j, x in enumerate(self.run.plan.given))
    (b, h, row), p = self.run.turns.item(turn), of(0)
    return turn, b, h + p, p, row + of(1) + self.team * TILE

  def values(self, n):
    _, b, h, _, row = self.where(n)
    return values(self.run, b, h, row)

  def ask_places(self, turn) -> None:
    self.run.pending.ask_places(self.run.turns.item(turn)[0], self.places(turn))

  def ask_values(self, n) -> None:
    """Pending pseudo-values, for `finish`: two groups of copies, the second one empty."""
    turn, b, h, _, row = self.where(n)
    ask = lambda: self.run.pending.ask_values(b, h, row, self.places(turn), self.staged)
    pl.when(turn < self.run.turns.count)(ask)
    for _ in range(2):
      copies.asked()

  @property
  def staged(self):
    values = self.run.shared.staged.values
    return values.at[values.shape[0] - self.run.plan.teams + self.team]

  def finish(self, n, v, nodes) -> None:
    """Of copies that were asked for, the last group may still be on its way."""
    shared, plan = self.run.shared, self.run.plan
    turn, b, h, p, row = self.where(n)
    side = 2 * self.team + lax.rem(n, 2)
    plgpu.barrier_wait(shared.w_full.at[side])
    w = lanes.received(shared.handed.at[side])
    plgpu.barrier_arrive(shared.w_free.at[side])
    if plan.beside:
      copies.brought(later=1)
    finish(self.run, w, v, b, h, p, row, turn, nodes, self.staged if plan.beside else None)
    if plan.beside:
      lanes.sync()


def complete(run: Launch, team=0) -> None:
  shared, plan, turns = run.shared, run.plan, run.turns.count
  handed = Handed(run, 2 * plan.teams + 2 * team, 2, team)
  each = handed.each
  nodes_of = lambda turn: run.x.nodes[run.turns.item(turn)[0]]

  def half(n, carried):
    nodes, v = carried
    turn, i = lax.div(n, each), lax.rem(n, each)

    @pl.when(i == 0)
    def begin():
      if plan.beside:
        pl.when(turn + 1 < turns)(lambda: handed.ask_places(turn + 1))
      plgpu.barrier_wait(shared.prepared.at[lax.rem(turn, 2)])

    if plan.beside:
      copies.asked()
    later = nodes_of(lax.div(n + 1, each)), handed.values(n + 1)
    handed.finish(n, v, nodes)
    if plan.beside:
      handed.ask_values(n + 1)
    pl.when(i == each - 1)(lambda: plgpu.barrier_arrive(shared.free.at[lax.rem(turn, 2)]))
    return later

  if plan.beside:
    handed.ask_places(0)
    copies.asked()
    copies.brought()
    handed.ask_values(0)
  lax.fori_loop(0, turns * each, half, (nodes_of(0), handed.values(0)))
