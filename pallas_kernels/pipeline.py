"""The two warpgroups that verify a window: one meets the state, one knows the rest.

A persistent grid walks over (slot, key head, value head). The projector reads the state by TMA in
chunks of 8 KiB, the next requested as soon as one is in registers, and makes W = S [k; q]' of them.
The preparer works out what a window is without the state, for one or two value heads at once and a
window ahead. Each then finishes half the value rows of a head: the right-hand sides
beta v - e^G S k against the window's two small matrices give [u; o]. All products are on the tensor
cores, in exact bf16 parts with float32 sums; no lane waits for a chain of nodes.

Chains and trees are one thing to it: a node meets its ancestors, given as one word of bits.

Writes that are pending reach a window in one of two ways. `fold`: each chunk of the state receives
them on its way through registers, and leaves again. Otherwise they are met beside the state
(`history`), and the state is not written.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import history, lanes, prepare
from pallas_kernels.arith import bf16, exact_wgmma, f32, over_columns
from pallas_kernels.substitution import TILE, Shape

K = V = 128
HANDED, OWN = TILE, 0  # first value row that the projecting warpgroup hands over, and finishes
tile = plgpu.Layout.WGMMA


class Plan(NamedTuple):
  """What a launch does, known when it is compiled.

  pair        value heads of one key head whose window is prepared at once: 1 or 2
  split_rows  two blocks to a head, half its value rows each
  chunks      sixteens of pending rows that are met beside the state
  fold        at most sixteen pending rows are folded into the state
  """

  shape: Shape
  pair: int = 1
  split_rows: bool = False
  chunks: int = 0
  fold: bool = False


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

  state: Any  # [chunks, 64, width]
  kq: Any  # [windows * rows, K], keys and queries of a window
  handed: Any  # [2, rows / 8, 128, 4], W of value rows that the projector does not finish
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
  keys: Any = None  # [1 or 2, parts, K, 16] of pending rows
  decays: Any = None  # [2, 2, 64], e^after of pending rows and e^G, a line per (head, row)
  leaving: Any = None  # [2, 64, width] of a folded state


def parts_like(x, outs):
  """Each array with its part of x [.] float32: x is the float32 sum of the parts."""
  for out in outs:
    part = x.astype(out.dtype)
    yield out, part
    x = x - part.astype(f32)


def finish(w, v, pending, shared: Shared, buffer, p, plan: Plan, *, keep_writes: bool):
  """(o, u) [64, nodes] of 64 value rows from W = S [k; q]'; u is None unless asked for.

  pending  the rows' pseudo-values, a list of parts for each chunk
  """
  at, n = plan.shape, plan.shape.nodes
  matrices, factors = shared.matrices.at[buffer], shared.factors.at[buffer]

  def factor(i, first, count):
    here = factors.at[i, pl.ds(p * at.rows + first, count)]
    return over_columns(plgpu.load(here, layout=lanes.COLS, optimized=False), (TILE, count))

  def rows(i, first, count):
    return matrices.at[i, pl.ds(p * at.rows + first, count)].transpose((1, 0))

  met = factor(2 if plan.chunks else 0, 0, at.rows) * w
  for c, stored in enumerate(pending):
    C = [rows(prepare.MATRICES + 3 * c + i, 0, at.rows) for i in range(3)]
    met += factor(0, 0, at.rows) * history.product(w.shape, history.parts(stored), C)
  right = factor(1, 0, n) * v.astype(f32) - lanes.columns(met, 0, n)
  first, count = (0, at.rows) if keep_writes else (n, n)

  def product(acc):
    prepare.product(acc, right, at, lambda i: rows(i, first, count))
    plgpu.wgmma_wait(0)
    return acc[...]

  both = pl.run_scoped(product, plgpu.ACC((TILE, count), f32))
  o = lanes.columns(met, n, n) + lanes.columns(both, n - first, n)
  return o, lanes.columns(both, 0, n) if keep_writes else None


def run(S, x: Window, pending: history.Pending, o_gmem, beta_gmem, g_gmem,
        written: Written, shared: Shared, plan: Plan) -> None:  # fmt: skip
  """The kernel. S, and what starts as `pending`, may be written in place."""
  NODES, ROWS, pair = plan.shape.nodes, plan.shape.rows, plan.pair
  B, T, H, _ = x.v.shape
  share, windows = H // x.q.shape[2], shared.kq.shape[0] // ROWS
  halves = 2 if plan.split_rows else 1  # blocks to a head
  first, stride = lax.axis_index("cta"), lax.axis_size("cta")
  items = B * H // pair * halves
  turns = lax.div(items - first + stride - 1, stride)
  exists = None if T == NODES else lambda r, t: t.below(T)

  def item(turn):
    """Of a turn, or of the last one: decode slot, first value head, first value row of its own."""
    n = jnp.minimum(first + turn * stride, items - 1)
    head = lax.div(n, halves) * pair
    return lax.div(head, H), lax.rem(head, H), lax.rem(n, halves) * TILE

  def values(b, h, row):
    at = lambda r, t: (t if T == NODES else t.at_most(T - 1), r)
    source = x.v.at[b, :, h, pl.ds(row, TILE)]
    return lanes.gather(source, (TILE, NODES), tile, x.v.dtype, at)

  def met_beside(b, h, row):
    """Pseudo-values of all pending rows that are met beside the state."""
    return [pending.values(b, h, row, c) for c in range(plan.chunks)]

  def finish_rows(w, v, met, b, h, p, row, turn, nodes):
    """Outputs, and pseudo-values if they are wanted, of 64 value rows from their W."""
    buffer = lax.rem(turn, 2)
    o, u = finish(w, v, met, shared, buffer, p, plan, keep_writes=bool(written.u))
    on = plgpu.broadcasted_iota(jnp.int32, (TILE, NODES), 1, layout=tile) < nodes
    to = o_gmem.at[b, :, h, pl.ds(row, TILE)]
    o = jnp.where(on, o, 0.0).astype(to.dtype)
    lanes.scatter(to, o, tile, lambda r, t: (t, r), exists)
    if u is not None:
      where, *place = written.place(b, nodes)
      for out, part in parts_like(jnp.where(on, u, 0.0), written.u):
        put_values(out.at[where, :, h, pl.ds(row, TILE)], part, place)

  def put_values(to, u, place):
    if not place:
      return lanes.scatter(to, u, tile, lambda r, t: (t, r), exists)
    at = lambda r, t, start, count: ((t + start) % to.shape[0], r)
    lanes.scatter(to, u, tile, at, lambda r, t, start, count: t.below(count), place)

  @pl.when(lax.axis_index("wg") == 0)
  def projector():
    chunk_slots, _, width = shared.state.shape
    columns = range(0, K, width)
    pieces = [(m, j) for m in ((OWN,) if plan.split_rows else (HANDED, OWN)) for j in columns]

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
      b, _, _ = item(lax.div(step, pair))
      return jnp.maximum(x.slots[b], 0), x.nodes[b]

    def head_and_row(step):
      _, h, row = item(lax.div(step, pair))
      return h + lax.rem(step, pair), row

    steps, now = pair * turns, place(0)
    for i in range(chunk_slots):
      load_chunk(i, now[0], head_and_row(0), i)

    def head(step, places):
      p, turn = lax.rem(step, pair), lax.div(step, pair)
      buffer, (b, _, _), (h, row) = lax.rem(turn, windows), item(turn), head_and_row(step)
      (at, nodes), (next_at, _) = places
      later, v = place(step + 2), values(b, h, row + OWN)
      handed_over = lax.rem(turn, 2)

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

      def leave(new, i):
        """A folded chunk, as the pool holds it, goes back behind the next one's work."""
        out = shared.leaving.at[i % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        lanes.sync()
        out[...] = new
        lanes.sync()

        @pl.when(pending.count(b) > 0)
        def copy():
          plgpu.copy_smem_to_gmem(out, of_state(at, (h, row), i))

      def project(acc, m):
        if plan.fold:
          of_head = pl.ds(p * history.CHUNK, history.CHUNK)
          decay = plgpu.load(decays.at[0, of_head], layout=lanes.COLS, optimized=False)
          total = decays[1, p * history.CHUNK]
          weighted = history.weighted(pending.values(b, h, row + m, 0), decay)
        for i, (_, j) in ((i, piece) for i, piece in enumerate(pieces) if piece[0] == m):
          here, slot = pl.ds(j, width), lax.rem(step * len(pieces) + i, chunk_slots)
          if plan.fold:
            parts = [keys.at[part, here].transpose((1, 0)) for part in range(keys.shape[0])]
            received = history.product((TILE, width), weighted, parts)
          plgpu.barrier_wait(shared.chunk_ready.at[slot])
          s = plgpu.load(shared.state.at[slot], layout=tile)
          lanes.sync()
          request(i)
          if plan.fold:
            s = (total * s.astype(f32) + received).astype(s.dtype)
            leave(s, i)
          rows = shared.kq.at[pl.ds(buffer * ROWS, ROWS), here]
          exact_wgmma(acc, s, rows.transpose((1, 0)))
          # The parts of a chunk stay in registers until its products are done: one chunk behind.
          plgpu.wgmma_wait(1 if s.dtype == bf16 else 3)
        return acc[...]

      w = lambda m: pl.run_scoped(functools.partial(project, m=m), plgpu.ACC((TILE, ROWS), f32))
      if not plan.split_rows:
        handed, side = w(HANDED), lax.rem(step, 2)
        pl.when(step > 1)(lambda: plgpu.barrier_wait(shared.w_free.at[side]))
        lanes.hand_over(shared.handed.at[side], handed)
        plgpu.barrier_arrive(shared.w_full.at[side])
      met = met_beside(b, h, row + OWN)
      own = w(OWN)
      if not plan.fold:
        pl.when(p == 0)(lambda: plgpu.barrier_wait(shared.prepared.at[handed_over]))
      finish_rows(own, v, met, b, h, p, row + OWN, turn, nodes)
      pl.when(p == pair - 1)(lambda: plgpu.barrier_arrive(shared.free.at[handed_over]))
      return places[1], later

    lax.fori_loop(0, steps, head, (now, place(1)))
    if plan.fold:
      plgpu.wait_smem_to_gmem(0)

  @pl.when(lax.axis_index("wg") == 1)
  def preparer():
    beta_max, node = x.beta_max[0], lambda r: (r % NODES).at_most(T - 1)
    head_of = lambda r: r // ROWS % pair  # rows past the last head repeat the first

    def load_window(turn):
      (b, h, _), whole = item(turn), pl.ds(lax.rem(turn, 1), NODES)
      buffer = lax.rem(turn, windows)
      for i, src in enumerate((x.k, x.q)):  # rows past T are out of bounds, so zeros
        plgpu.copy_gmem_to_smem(
          src.at[b, whole, lax.div(h, share)],
          shared.kq.at[pl.ds((2 * buffer + i) * NODES, NODES)],
          shared.window_ready.at[buffer],
        )

    def fetch(turn):
      """What a window needs from global memory first, asked for ahead of time."""
      b, h, _ = item(turn)
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

    def bring_pending(turn, kq, base):
      """Readies what the projector folds, or what both meet beside the state: then returns e^G."""
      (b, h, _), source = item(turn), lax.rem(turn, 2)
      behind = plgpu.layout_cast(jnp.zeros((TILE,), f32), lanes.ROWS)
      for c in reversed(range(max(plan.chunks, 1))):
        keys = shared.keys.at[source if plan.fold else 0]
        pending.stage_keys(b, lax.div(h, share), c, keys)
        after, behind = pending.decays(b, h, pair, c, shared.lines.at[0], behind)
        if plan.fold:
          for i, line in enumerate((after, behind)):
            shared.decays.at[source, i][...] = jnp.exp(line)
          lanes.sync()
          return None
        C = shared.matrices.at[source, pl.ds(prepare.MATRICES + 3 * c, 3)]
        lanes.sync()
        history.coefficients(
          kq, base, shared.state.shape[2], keys, after, plan.shape, pair, C, flat=shared.flat,
          line=shared.lines.at[1],
        )  # fmt: skip
      shared.lines.at[0][...] = jnp.exp(behind)
      lanes.sync()
      carried = lanes.gather(
        shared.lines.at[0], (TILE,), lanes.ROWS, f32, lambda r: (head_of(r) * history.CHUNK,)
      )
      lanes.sync()
      return carried

    def prepare_window(turn, fetched):
      nodes, words, a, b_in, A_log, dt_bias = fetched
      (b, h, row), source, buffer = item(turn), lax.rem(turn, windows), lax.rem(turn, 2)
      heads, near = pl.ds(h, pair), TILE // ROWS
      plgpu.barrier_wait(shared.window_ready.at[source])
      kq = shared.kq.at[pl.ds(lax.div(source, near) * TILE, TILE)]
      base = lax.rem(source, near) * ROWS
      carried = bring_pending(turn, kq, base) if plan.fold or plan.chunks else None
      beta, g = prepare.prepare(
        kq, base, plan.shape, nodes, T - 1, words, a, b_in, (A_log, dt_bias, beta_max), pair,
        shared.matrices.at[buffer], shared.factors.at[buffer], flat=shared.flat,
        lines=shared.lines, carried=carried,
      )  # fmt: skip
      plgpu.barrier_arrive(shared.prepared.at[buffer])

      @pl.when(row == 0)
      def put_gates():
        for out, y in ((beta_gmem.at[b, :, heads], beta), (g_gmem.at[b, :, heads, 0], g)):
          lanes.scatter(out, y, lanes.ROWS, lambda r: (node(r), head_of(r)))
        if written.g is not None:
          write_decays(b, heads, nodes, g)

      if written.k:
        pl.when((lax.rem(h, share) == 0) & (row == 0))(
          lambda: write_keys(b, lax.div(h, share), nodes)
        )

    for i in range(windows):
      pl.when(i < turns)(functools.partial(load_window, i))

    def first_values(turn):
      b, h, _ = item(turn)
      return values(b, h, HANDED)

    def window(turn, carried):
      """The last head of the window before is finished when this one is prepared: by then the other
      warpgroup has projected it. Loads are asked for a phase ahead."""
      nodes, first_v, fetched = carried
      b, h, _ = item(jnp.maximum(turn - 1, 0))
      vs = [first_v, *(values(b, h + p, HANDED) for p in range(1, pair))]

      def finish_handed(p):
        step = (turn - 1) * pair + p
        side, met = lax.rem(step, 2), met_beside(b, h + p, HANDED)
        plgpu.barrier_wait(shared.w_full.at[side])
        w = lanes.received(shared.handed.at[side])
        plgpu.barrier_arrive(shared.w_free.at[side])
        finish_rows(w, vs[p], met, b, h + p, p, HANDED, turn - 1, nodes)

      handed = () if plan.split_rows else range(pair)
      for p in handed[:-1]:
        pl.when(turn > 0)(functools.partial(finish_handed, p))

      @pl.when(turn > 1)
      def reuse():
        plgpu.barrier_wait(shared.free.at[lax.rem(turn, 2)])
        again = turn - 2 + windows
        pl.when(again < turns)(lambda: load_window(again))

      pl.when(turn < turns)(lambda: prepare_window(turn, fetched))
      later = fetched[0], first_values(turn), fetch(turn + 1)
      for p in handed[-1:]:
        pl.when(turn > 0)(functools.partial(finish_handed, p))
      return later

    lax.fori_loop(0, turns + 1, window, (x.nodes[item(0)[0]], first_values(0), fetch(0)))
