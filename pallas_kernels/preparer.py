"""The warpgroup that knows a window without the state, one ahead, and finishes its share."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import history, lanes, prepare
from pallas_kernels.arith import f32
from pallas_kernels.finish import finish, parts_like, values
from pallas_kernels.launch import Launch
from pallas_kernels.substitution import TILE


def ready(run: Launch) -> None:
  x, pending, written, shared, plan = run.x, run.pending, run.written, run.shared, run.plan
  NODES, ROWS, pair, turns = plan.shape.nodes, plan.shape.rows, plan.pair, run.turns.count
  _, T, H, _ = x.v.shape
  share, windows = H // x.q.shape[2], shared.kq.shape[0] // ROWS
  beta_max, node = x.beta_max[0], lambda r: (r % NODES).at_most(T - 1)
  head_of = lambda r: r // ROWS % pair  # rows past the last head repeat the first

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

    def key(t, _):
      k = plgpu.load(x.k.at[b, t, hk], layout=lanes.PER_ROW, optimized=False)
      k = jnp.where(t < nodes, k.astype(f32) * shared.lines[2, t], 0.0)
      for out, part in parts_like(k, written.k):
        out.at[where, lax.rem(start + t, out.shape[1]), hk][...] = part

    lax.fori_loop(0, count, key, None)
    lanes.sync()  # the next preparation overwrites the norms

  def write_decays(b, heads, nodes, g):
    where, *place = written.place(b, nodes)
    to = written.g.at[where, :, heads, 0]
    at = lambda r, start, count: ((node(r) + start) % to.shape[0], head_of(r))
    lanes.scatter(to, g, lanes.ROWS, at, lambda r, start, count: node(r).below(count), place)

  def stage_pending(turn):
    """Readies what the projector folds."""
    (b, h, _), source = run.turns.item(turn), lax.rem(turn, 2)
    pending.stage_keys(b, lax.div(h, share), shared.keys.at[source])
    after, total = pending.decays(b, h, pair, shared.lines)
    for i, line in enumerate((*after, *total)):
      shared.decays.at[source, i][...] = jnp.exp(line)
    lanes.sync()

  def put_pending(turn, met):
    """Readies what both meet beside the state; returns its e^G for every row."""
    (b, h, _), source = run.turns.item(turn), lax.rem(turn, 2)
    after, total = pending.decays(b, h, pair, shared.lines)
    history.put_coefficients(met, after, shared.beside.at[source])
    line = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=lanes.ROWS)
    of_first = lax.rem(lax.div(line, ROWS), pair) == 0
    return jnp.exp(jnp.where(of_first, total[0], total[-1]))

  def prepare_window(turn, fetched):
    (b, h, row), source, buffer = run.turns.item(turn), lax.rem(turn, windows), lax.rem(turn, 2)
    heads, near, hk, carried = pl.ds(h, pair), TILE // ROWS, lax.div(h, share), None
    plgpu.barrier_wait(shared.window_ready.at[source])
    kq = shared.kq.at[pl.ds(lax.div(source, near) * TILE, TILE)]
    base = lax.rem(source, near) * ROWS
    if plan.fold:
      stage_pending(turn)
    if plan.beside:
      met = history.meet(pending, b, hk, kq.at[pl.ds(base, ROWS)], shared.state.shape[2])
      fetched = fetch(turn)
      carried = put_pending(turn, met)
    nodes, words, a, b_in, A_log, dt_bias = fetched
    beta, g = prepare.prepare(
      kq, base, plan.shape, nodes, T - 1, words, a, b_in, (A_log, dt_bias, beta_max), pair,
      shared.matrices.at[buffer], shared.factors.at[buffer], flat=shared.flat,
      lines=shared.lines, carried=carried,
    )  # fmt: skip
    plgpu.barrier_arrive(shared.prepared.at[buffer])

    @pl.when(row == 0)
    def put_gates():
      for out, y in ((run.beta.at[b, :, heads], beta), (run.g.at[b, :, heads, 0], g)):
        lanes.scatter(out, y, lanes.ROWS, lambda r: (node(r), head_of(r)))
      if written.g is not None:
        write_decays(b, heads, nodes, g)

    if written.k:
      pl.when((lax.rem(h, share) == 0) & (row == 0))(lambda: write_keys(b, hk, nodes))

  for i in range(windows):
    pl.when(i < turns)(functools.partial(load_window, i))

  # Beside pending keys there are no registers for it.
  fetch_ahead = fetch if not plan.beside else lambda turn: None
  nodes_of = lambda turn: x.nodes[run.turns.item(turn)[0]]

  given = plan.given

  def handed_values(turn, i):
    b, h, _ = run.turns.item(turn)
    return values(run, b, h + given[i][0], given[i][1]) if i < len(given) else None

  def window(turn, carried):
    """The last half of the window before is finished when this one is prepared: by then the other
    warpgroup has projected it. Loads are asked for a phase ahead."""
    nodes, v, fetched = carried
    before = jnp.maximum(turn - 1, 0)
    b, h, _ = run.turns.item(before)

    def finish_handed(i, v):
      side, (p, row) = lax.rem((turn - 1) * len(given) + i, 2), given[i]
      plgpu.barrier_wait(shared.w_full.at[side])
      w = lanes.received(shared.handed.at[side])
      plgpu.barrier_arrive(shared.w_free.at[side])
      finish(run, w, v, b, h + p, p, row, turn - 1, nodes)

    for i in range(len(given) - 1):
      ahead = handed_values(before, i + 1)
      pl.when(turn > 0)(functools.partial(finish_handed, i, v))
      v = ahead

    @pl.when(turn > 1)
    def reuse():
      plgpu.barrier_wait(shared.free.at[lax.rem(turn, 2)])
      again = turn - 2 + windows
      pl.when(again < turns)(lambda: load_window(again))

    pl.when(turn < turns)(lambda: prepare_window(turn, fetched))
    if plan.beside:
      next_b, next_h, _ = run.turns.item(turn + 1)
      pending.ask(pending.k, next_b, lax.div(next_h, share))
    later = nodes_of(turn), handed_values(turn, 0), fetch_ahead(turn + 1)
    if given:
      pl.when(turn > 0)(functools.partial(finish_handed, len(given) - 1, v))
    return later

  lax.fori_loop(0, turns + 1, window, (nodes_of(0), handed_values(0, 0), fetch_ahead(0)))
