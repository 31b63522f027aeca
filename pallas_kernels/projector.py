"""The warpgroup that meets the state: W = S [k; q]', and its share of what follows.

The state arrives by TMA in chunks of 8 KiB; the next is requested as soon as one is in registers,
or one chunk later (`Plan.late`). Where pending writes are folded, each chunk receives them there
and leaves again.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import copies, history, lanes
from pallas_kernels.arith import bf16, exact_wgmma, f32
from pallas_kernels.finish import finish, values
from pallas_kernels.launch import FIRST_ROWS, K, Launch
from pallas_kernels.substitution import TILE

tile = plgpu.Layout.WGMMA


def project(run: Launch) -> None:
  S, x, pending, shared, plan = run.S, run.x, run.pending, run.shared, run.plan
  ROWS, pair, turns = plan.shape.rows, plan.pair, run.turns.count
  windows = shared.kq.shape[0] // ROWS
  chunk_slots, _, width = shared.state.shape
  late = plan.late and chunk_slots > 2  # of two, one would be on its way only when none is left
  columns = range(0, K, width)
  halves = (0,) if plan.split_rows else FIRST_ROWS
  pieces, given = [(m, j) for m in halves for j in columns], plan.given

  def of_state(at, head, i):
    (h, row), (m, j) = head, pieces[i]
    return S.at[at, h, pl.ds(row + m, TILE), pl.ds(j, width)]

  def load_chunk(count, at, head, i):
    slot = lax.rem(count, chunk_slots)
    plgpu.copy_gmem_to_smem(
      of_state(at, head, i), shared.state.at[slot], shared.chunk_ready.at[slot]
    )

  def place(step):
    """Row of the pool (padding reads some state and uses nothing of it) and number of nodes."""
    b, _, _ = run.turns.item(lax.div(step, pair))
    return jnp.maximum(x.slots[b], 0), x.nodes[b]

  def head_and_row(step):
    _, h, row = run.turns.item(lax.div(step, pair))
    return h + lax.rem(step, pair), row

  keeps = [m for m in halves if any((p, m) not in given for p in range(pair))]
  # Halves whose pending pseudo-values the projector needs: to fold them, or for its outputs.
  needs: tuple[int, ...] = halves if plan.fold else tuple(keeps) if plan.beside else ()
  steps, now, staged = pair * turns, place(0), shared.staged
  for i in range(chunk_slots):
    load_chunk(i, now[0], head_and_row(0), i)

  def ask_places(turn):
    pending.ask_places(run.turns.item(turn)[0], staged.places.at[lax.rem(turn, 2)])

  def ask_values(step, m):
    turn, (h, row) = lax.div(step, pair), head_and_row(step)
    b, places = run.turns.item(turn)[0], staged.places.at[lax.rem(turn, 2)]
    pending.ask_values(b, h, row + m, places, staged.values.at[0])

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

  def head(step, places):
    p, turn = lax.rem(step, pair), lax.div(step, pair)
    buffer, (b, _, _), (h, row) = lax.rem(turn, windows), run.turns.item(turn), head_and_row(step)
    (at, nodes), (next_at, _) = places
    later, handed_over = place(step + 2), lax.rem(turn, 2)
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
      count, i = step * len(pieces) + i + chunk_slots, i + chunk_slots
      if i < len(pieces):
        load_chunk(count, at, (h, row), i)
      else:
        load = lambda: load_chunk(count, next_at, head_and_row(step + 1), i - len(pieces))
        pl.when(step + 1 < steps)(load)

    if plan.fold:
      decays, keys = shared.decays.at[handed_over], shared.keys.at[handed_over]
      folds = pending.length[b] > 0

    def leave(new, i):
      """A folded chunk, as the pool holds it, goes back behind the next one's work."""

      @pl.when(folds)
      def copy():
        buffers = shared.leaving.shape[0]  # a head's chunks are a multiple of them
        out = shared.leaving.at[i % buffers]
        plgpu.wait_smem_to_gmem(buffers - 1, wait_read_only=True)
        lanes.sync()
        out[...] = new
        lanes.sync()
        plgpu.copy_smem_to_gmem(out, of_state(at, (h, row), i))

    def of_rows(acc, m):
      if plan.fold:
        behind = decays.at[p, pl.ds(0, history.CHUNK)]
        decay = plgpu.load(behind, layout=lanes.COLS, optimized=False)
        total = decays[pair + p, 0]
        copies.brought()
        weighted = history.weighted(history.columns(staged.values.at[0], 0, 0), decay)
        ask_next(step, m)
      for i, (_, j) in ((i, piece) for i, piece in enumerate(pieces) if piece[0] == m):
        here, slot = pl.ds(j, width), lax.rem(step * len(pieces) + i, chunk_slots)
        if plan.fold:
          parts = [keys.at[part, here].transpose((1, 0)) for part in range(keys.shape[0])]
          received = history.products((TILE, width), 1, lambda _, parts=parts: (weighted, parts))
        plgpu.barrier_wait(shared.chunk_ready.at[slot])
        # Moves between lanes, to spare the banks, would cost more than the banks do.
        s = plgpu.load(shared.state.at[slot], layout=tile, optimized=False)
        early = not late or i == len(pieces) - 1
        (lanes.sync if early else lanes.meet)()
        if late and i:
          request(i - 1)
        if early:
          request(i)
        if plan.fold:
          s = (total * s.astype(f32) + received).astype(s.dtype)
          leave(s, i)
        rows = shared.kq.at[pl.ds(buffer * ROWS, ROWS), here]
        exact_wgmma(acc, s, rows.transpose((1, 0)))
        # The parts of a chunk stay in registers until its products are done: one chunk behind.
        plgpu.wgmma_wait(0 if plan.fold else 1 if s.dtype == bf16 else 3)
      return acc[...]

    def hand_over(w, m):
      ranks = [given.index((i, m)) if (i, m) in given else 0 for i in range(pair)]
      number = turn * len(given) + jnp.where(p == 0, ranks[0], ranks[-1])
      side = lax.rem(number, 2)
      pl.when(number > 1)(lambda: plgpu.barrier_wait(shared.w_free.at[side]))
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
    return places[1], later

  lax.fori_loop(0, steps, head, (now, place(1)))
  if plan.fold:
    plgpu.wait_smem_to_gmem(0)
