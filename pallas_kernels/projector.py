"""The warpgroup that meets the state: W = S [k; q]', and its share of what follows.

The state arrives by TMA in chunks of 8 KiB; the next is requested as soon as one is in registers,
or one chunk later (`Plan.late`). Where pending writes are folded, each chunk receives them there
and leaves again from where it lay: a lane writes what it has read, so one barrier a chunk is
enough, and by the next one the copy has read it and its place is free. Neighbours may leave
together, and others come for them (`Plan.leaving`).
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import copies, history, lanes
from pallas_kernels.arith import bf16, exact_wgmma, f32
from pallas_kernels.finish import finish, values
from pallas_kernels.launch import K, Launch
from pallas_kernels.substitution import TILE

tile = plgpu.Layout.WGMMA


def project(run: Launch, team=0) -> None:
  S, x, pending, shared, plan = run.S, run.x, run.pending, run.shared, run.plan
  ROWS, pair, turns = plan.shape.rows, plan.pair, run.turns.count
  windows, halves, given = shared.kq.shape[0] // ROWS, plan.halves, plan.given
  places, _, width = shared.state.shape
  places, columns = places // plan.teams, K // width  # of chunks
  each = len(halves) * columns
  loops = plan.waits or plan.split_rows or shared.state.dtype == bf16
  late = plan.late and not loops and places > 2  # of two, one would come only when none is left
  own = team * TILE if plan.teams > 1 else 0

  def place(step):
    """Row of the pool (padding reads zeros from behind the last one) and number of nodes."""
    b, _, _ = run.turns.item(lax.div(step, pair))
    return jnp.where(x.slots[b] < 0, S.shape[0], x.slots[b]), x.nodes[b]

  def head_and_row(step):
    _, h, row = run.turns.item(lax.div(step, pair))
    return h + lax.rem(step, pair), row + own

  def these(column):
    """Columns of a chunk."""
    j = column * width
    return pl.ds(j if isinstance(j, int) else pl.multiple_of(j, width), width)

  def of_state(at, head, i):
    """Chunk i of a head: halves in the order of `Plan.halves`, columns in theirs."""
    (h, row), m = head, (len(halves) - 1 - i // columns) * TILE
    return S.at[at, h, pl.ds(row + m, TILE), these(i % columns)]

  def chunk_of(count):
    at = team * places + lax.rem(count, places)
    return shared.state.at[at], shared.chunk_ready.at[at]

  keeps = [m for m in halves if any((p, m) not in given for p in range(pair))]
  # Halves whose pending pseudo-values the projector needs: to fold them, or for its outputs.
  needs: tuple[int, ...] = halves if plan.fold else tuple(keeps) if plan.beside else ()
  steps, staged = pair * turns, shared.staged
  # Where chunks leave, the first ones free their places for the last.
  for i in range(places - plan.fold * plan.leaving):
    ask = lambda i: plgpu.copy_gmem_to_smem(
      of_state(place(i // each)[0], head_and_row(i // each), i % each), *chunk_of(i)
    )
    pl.when(i // each < steps)(functools.partial(ask, i))

  def places_of(turn):
    return staged.places.at[2 * team + lax.rem(turn, 2)]

  def ask_places(turn):
    pending.ask_places(run.turns.item(turn)[0], places_of(turn))

  def ask_values(step, m):
    turn, (h, row) = lax.div(step, pair), head_and_row(step)
    b = run.turns.item(turn)[0]
    pending.ask_values(b, h, row + m, places_of(turn), staged.values.at[team])

  def ask_next(step, m):
    """Behind the last use of what half m of a head needed."""
    lanes.sync()
    i = needs.index(m) + 1
    if i < len(needs):
      ask_values(step, needs[i])
    else:
      pl.when(step + 1 < steps)(lambda: ask_values(step + 1, needs[0]))
    copies.asked()

  if needs:
    ask_places(0)
    copies.asked()
    copies.brought()
    ask_values(0, needs[0])
    copies.asked()

  def head(step, at_places):
    p, turn = lax.rem(step, pair), lax.div(step, pair)
    buffer, (b, _, _), (h, row) = lax.rem(turn, windows), run.turns.item(turn), head_and_row(step)
    (at, nodes), handed_over = at_places[0], lax.rem(turn, 2)
    later = place(step + len(at_places))
    v = values(run, b, h, row + keeps[0]) if keeps else None
    if needs:
      pl.when((p == pair - 1) & (step + 1 < steps))(lambda: ask_places(turn + 1))
      copies.asked()

    @pl.when(p == 0)
    def await_window():
      plgpu.barrier_wait(shared.window_ready.at[buffer])
      if plan.fold:
        plgpu.barrier_wait(shared.prepared.at[handed_over])

    def request(i):
      """The chunk that takes the place of chunk i of this head."""
      ahead, which = (i + places) // each, (i + places) % each
      there = sum(jnp.where(ahead == n, at, 0) for n, (at, _) in enumerate(at_places))

      @pl.when(step + ahead < steps)
      def copy():
        source = of_state(there, head_and_row(step + ahead), which)
        plgpu.copy_gmem_to_smem(source, *chunk_of(step * each + i + places))

    if plan.fold:
      decays, keys = shared.decays.at[handed_over], shared.keys.at[handed_over]
      weighted, folds = shared.weighted.at[team], pending.length[b] > 0

    def read(i):
      chunk, ready = chunk_of(step * each + i)
      plgpu.barrier_wait(ready)
      # Moves between lanes, to spare the banks, would cost more than the banks do.
      return plgpu.load(chunk, layout=tile, optimized=False)

    def leave(i):
      """Chunk i is the last of those that go back together."""
      lanes.sync()

      @pl.when(folds)
      def back():
        for j in reversed(range(plan.leaving)):
          chunk, _ = chunk_of(step * each + i - j)
          plgpu.copy_smem_to_gmem(chunk, of_state(at, (h, row), i - j))

    def replace(i):
      """Chunk i is the first behind some that are gone, or alone and on its way itself."""
      pl.when(folds)(lambda: copies.left(later=int(plan.leaving == 1)))
      pl.when(~folds)(copies.left)
      for j in reversed(range(plan.leaving)):
        request(i - 1 - j)

    def fold(i, c, here):
      """Chunk i, the c-th of half a head, with pending writes, as the pool holds it."""
      left = [weighted.at[part] for part in range(3)]
      right = [keys.at[part, here].transpose((1, 0)) for part in range(keys.shape[0])]

      def received(acc):
        history.add(acc, left, right)
        plgpu.wgmma_wait(0)
        return acc[...]

      more = pl.run_scoped(received, plgpu.ACC((TILE, width), f32))
      s = read(i)
      s = (decays[pair + p, 0] * s.astype(f32) + more).astype(s.dtype)
      chunk, _ = chunk_of(step * each + i)
      lanes.put_back(chunk, s)
      n = lax.rem(c, plan.leaving)
      pl.when(n == plan.leaving - 1)(lambda: leave(i))
      pl.when(n == 0)(lambda: replace(i))
      return s

    def of_rows(acc, m):
      if plan.fold:
        behind = decays.at[p, pl.ds(0, history.CHUNK)]
        decay = plgpu.load(behind, layout=lanes.COLS, optimized=False)
        copies.brought()
        u = history.columns(staged.values.at[team], 0, 0)
        # Through shared memory: of parts that stay in registers over a loop ptxas 13.0 loses one.
        for part, x in enumerate(history.weighted(u, decay)):
          weighted.at[part][...] = x
        ask_next(step, m)

      def piece(c):
        i, here = halves.index(m) * columns + c, these(c)
        if plan.fold:
          s = fold(i, c, here)
        else:
          s, early = read(i), not late or i == each - 1
          (lanes.sync if early else lanes.meet)()
          if late and i:
            request(i - 1)
          if early:
            request(i)
        rows = shared.kq.at[pl.ds(buffer * ROWS, ROWS), here]
        exact_wgmma(acc, s, rows.transpose((1, 0)))

      if loops:

        def one(c, _):
          piece(c)
          plgpu.wgmma_wait(0)

        lax.fori_loop(0, columns, one, None)
      else:
        for c in range(columns):
          piece(c)
          plgpu.wgmma_wait(3)  # the parts of a chunk stay in registers one chunk longer
      return acc[...]

    def hand_over(w, m):
      ranks = [given.index((i, m)) if (i, m) in given else 0 for i in range(pair)]
      n = turn * len(given) + jnp.where(p == 0, ranks[0], ranks[-1])
      side = 2 * team + lax.rem(n, 2)
      pl.when(n > 1)(lambda: plgpu.barrier_wait(shared.w_free.at[side]))
      lanes.hand_over(shared.handed.at[side], w)
      plgpu.barrier_arrive(shared.w_full.at[side])

    for m in halves:
      w = pl.run_scoped(functools.partial(of_rows, m=m), plgpu.ACC((TILE, ROWS), f32))
      gives = [(i, m) in given for i in range(pair)]
      if all(gives):
        hand_over(w, m)
        continue
      if m == keeps[0] and not plan.fold:
        pl.when(p == 0)(lambda: plgpu.barrier_wait(shared.prepared.at[handed_over]))
      waiting = staged.values.at[0] if plan.beside else None
      if plan.beside:
        copies.brought()
      complete = functools.partial(finish, run, w, v, b, h, p, row + m, turn, nodes, waiting)
      v = values(run, b, h, row + keeps[1]) if m != keeps[-1] else None
      if any(gives):
        pl.when(p == 0)(functools.partial(hand_over, w, m))
        pl.when(p != 0)(complete)
      else:
        complete()
      if plan.beside:
        ask_next(step, m)
    if not plan.finisher:
      pl.when(p == pair - 1)(lambda: plgpu.barrier_arrive(shared.free.at[handed_over]))
    return *at_places[1:], later

  known = 2 + (places - 1) // each  # heads of which chunks are asked for
  lax.fori_loop(0, steps, head, tuple(map(place, range(known))))
  if plan.fold:
    plgpu.wait_smem_to_gmem(0)
