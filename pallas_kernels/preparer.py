"""The warpgroup that knows a window without the state, one ahead, and finishes its share."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import copies, history, lanes, prepare
from pallas_kernels.arith import f32
from pallas_kernels.finish import parts_like
from pallas_kernels.finisher import Handed
from pallas_kernels.launch import Launch
from pallas_kernels.substitution import TILE

EIGHT = 8  # keys of a window that are written at once


def ready(run: Launch) -> None:
  x, pending, written, shared, plan = run.x, run.pending, run.written, run.shared, run.plan
  NODES, ROWS, pair, turns = plan.shape.nodes, plan.shape.rows, plan.pair, run.turns.count
  _, T, H, _ = x.v.shape
  share, windows = H // x.q.shape[2], shared.kq.shape[0] // ROWS
  beta_max, node = x.beta_max[0], lambda r: (r % NODES).at_most(T - 1)
  head_of = lambda r: r // ROWS % pair  # rows past the last head repeat the first
  staged, handed = shared.staged, Handed(run, 4 * plan.teams, 4)
  each = 0 if plan.finisher else handed.each

  def load_window(turn):
    (b, h, _), whole = run.turns.item(turn), pl.ds(lax.rem(turn, 1), NODES)
    buffer = lax.rem(turn, windows)
    for i, src in enumerate((x.k, x.q)):  # rows past T are out of bounds, so zeros
      plgpu.copy_gmem_to_smem(
        src.at[b, whole, lax.div(h, share)],
        shared.kq.at[pl.ds((2 * buffer + i) * NODES, NODES)],
        shared.window_ready.at[buffer],
      )

  def fetch(turn):
    """What a window needs from global memory first, asked for ahead of time."""
    b, h, _ = run.turns.item(turn)
    heads = pl.ds(h, pair)
    rows = lambda ref, at: lanes.gather(ref, (TILE,), lanes.ROWS, ref.dtype, at)
    both = lambda r: (node(r), head_of(r))
    return (
      x.nodes[b], rows(x.words.at[b], lambda r: (node(r),)),
      rows(x.a.at[b, :, heads, 0], both), rows(x.b.at[b, :, heads], both),
      rows(x.A_log.at[heads], lambda r: (head_of(r),)),
      rows(x.dt_bias.at[heads, 0], lambda r: (head_of(r),)),
    )  # fmt: skip

  def write_keys(b, hk, nodes):
    where, *place = written.place(b, nodes)
    start, count = place or (0, T)

    for first in range(0, T, EIGHT):
      tokens = range(first, min(first + EIGHT, T))
      load = lambda t: plgpu.load(x.k.at[b, t, hk], layout=lanes.PER_ROW, optimized=False)

      def put(t, k):
        k = jnp.where(t < nodes, k.astype(f32) * shared.lines[2, t], 0.0)
        for out, part in parts_like(k, written.k):
          out.at[where, lax.rem(start + t, out.shape[1]), hk][...] = part

      for t, k in [(t, load(t)) for t in tokens]:  # all are on their way before one is needed
        pl.when(t < count)(functools.partial(put, t, k))
    lanes.sync()  # the next preparation overwrites the norms

  def write_decays(b, heads, nodes, g):
    where, *place = written.place(b, nodes)
    to = written.g.at[where, :, heads, 0]
    at = lambda r, start, count: ((node(r) + start) % to.shape[0], head_of(r))
    lanes.scatter(to, g, lanes.ROWS, at, lambda r, start, count: node(r).below(count), place)

  def ask_keys(turn):
    b, h, _ = run.turns.item(turn)
    pending.ask_keys(b, lax.div(h, share), h, handed.places(turn), staged.keys, staged.decays)

  def ready_pending(turn, kq):
    """What is folded, or met beside the state."""
    source = lax.rem(turn, 2)
    lanes.put_decays(staged.decays, shared.decays.at[source])
    if plan.fold:
      return history.put_keys(staged.keys, shared.keys.at[source])
    met = history.meet(staged.keys, kq, shared.state.shape[2])
    for i, part in enumerate(lanes.three_parts(met)):
      lanes.put_rows(shared.beside.at[source, i], part)
    lanes.sync()
    factors, totals = shared.factors.at[source], shared.decays.at[source, :, 0]
    total = lanes.gather(totals, (TILE,), lanes.ROWS, f32, lambda r: (head_of(r) + pair,))
    factor = lanes.gather(factors.at[0], (TILE,), lanes.ROWS, f32, lambda r: (r,))
    factors.at[2][...] = factor * total

  def prepare_window(turn, fetched):
    (b, h, row), source, buffer = run.turns.item(turn), lax.rem(turn, windows), lax.rem(turn, 2)
    heads, near, hk = pl.ds(h, pair), TILE // ROWS, lax.div(h, share)
    plgpu.barrier_wait(shared.window_ready.at[source])
    kq = shared.kq.at[pl.ds(lax.div(source, near) * TILE, TILE)]
    base = lax.rem(source, near) * ROWS
    if plan.waits:
      pl.when(turn + 1 < turns)(lambda: handed.ask_places(turn + 1))
      copies.asked()
    nodes, words, a, b_in, A_log, dt_bias = fetched
    beta, g = prepare.prepare(
      kq, base, plan.shape, nodes, T - 1, words, a, b_in, (A_log, dt_bias, beta_max), pair,
      shared.matrices.at[buffer], shared.factors.at[buffer], flat=shared.flat,
      lines=shared.lines,
    )  # fmt: skip
    if plan.waits:
      copies.brought()
      ready_pending(turn, kq.at[pl.ds(base, ROWS)])
      lanes.sync()
    if plan.awaited:
      plgpu.barrier_arrive(shared.prepared.at[buffer])
    if plan.waits:
      pl.when(turn + 1 < turns)(lambda: ask_keys(turn + 1))
      copies.asked()

    @pl.when(row == 0)
    def put_gates():
      for out, y in ((run.beta.at[b, :, heads], beta), (run.g.at[b, :, heads, 0], g)):
        lanes.scatter(out, y, lanes.ROWS, lambda r: (node(r), head_of(r)))
      if written.g is not None:
        write_decays(b, heads, nodes, g)

    if written.k:
      last = lax.rem(h, share) == share - pair  # what they replace has been read for every head
      pl.when(last & (row == 0))(lambda: write_keys(b, hk, nodes))

  for i in range(windows):
    pl.when(i < turns)(functools.partial(load_window, i))

  def window(turn, carried):
    """Its share of the window before is finished when this one is prepared: by then that is
    projected. Loads are asked for a phase ahead."""
    v, fetched = carried

    @pl.when(turn > 1)
    def reuse():
      plgpu.barrier_wait(shared.free.at[lax.rem(turn, 2)])
      again = turn - 2 + windows
      pl.when(again < turns)(lambda: load_window(again))

    pl.when(turn < turns)(lambda: prepare_window(turn, fetched))
    fetched, before = fetch(turn + 1), jnp.maximum(turn - 1, 0)
    if not each:
      return v, fetched
    nodes = x.nodes[run.turns.item(before)[0]]

    def half(n, v):
      ahead = handed.values(n + 1)
      handed.finish(n, v, nodes)
      if plan.beside:
        handed.ask_values(n + 1)
      return ahead

    return lax.fori_loop(before * each, turn * each, half, v), fetched

  first = handed.values(0) if each else None, fetch(0)
  if plan.waits:
    handed.ask_places(0)
    copies.asked()
    copies.brought()
    ask_keys(0)
    copies.asked()
    if plan.beside and each:
      handed.ask_values(0)
  lax.fori_loop(0, turns + 1, window, first)
