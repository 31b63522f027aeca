"""Outputs of every node of a window from the frozen state. Reference: `gdn.ops.XLA.verify`.

Traffic per value head: the state once (64 KiB at K = V = 128, fp32), v once, q and k once per key
head (its value heads run side by side and find them in L2), the outputs once; pseudo-values and
keys only if asked for. The state is never written.

A persistent grid of two warpgroups each walks over (slot, key head, value head). One projects: the
state arrives by TMA in chunks of 8 KiB, the next is requested as soon as one is in registers, and
W = S [k; q]' is made of them. The other prepares what a window is without the state, for one or two
value heads at once and a window ahead. Each then finishes half the value rows of a head: the
right-hand sides beta v - e^G S k against the window's two small matrices give [u; o]. All products
are on the tensor cores, in exact bf16 parts with float32 sums; no lane waits for a chain of nodes.

Chains and trees are one thing to it: a node meets its ancestors, given as one word of bits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn.ops import Gates
from gdn.typing import Rows
from pallas_kernels import lanes, prepare
from pallas_kernels.arith import bf16, exact_wgmma, f32, over_columns
from pallas_kernels.substitution import TILE, Shape

K = V = 128
WINDOWS = 4  # whose queries and keys are in shared memory or on their way
HANDED, OWN = TILE, 0  # first value row that the projecting warpgroup hands over, and finishes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """ctas_per_sm  resident blocks a multiprocessor: they hide each other's latency
  pair         value heads of one key head whose window is prepared at once: 1 or 2
  chunks       of the state that are on their way or in shared memory
  """

  ctas_per_sm: int = 2
  pair: int = 2
  chunks: int = 4
  sms: int = 132

  def __post_init__(self):
    if self.pair not in (1, 2):
      raise ValueError(f"{self.pair=} must be 1 or 2")
    if not 1 <= self.ctas_per_sm <= 4:
      raise ValueError(f"{self.ctas_per_sm=} must be in 1..4")
    if not 2 <= self.chunks <= 8:
      raise ValueError(f"{self.chunks=} must be in 2..8")
    if self.sms < 1:
      raise ValueError(f"{self.sms=} must be positive")


DEFAULT = Config()


def ancestor_words(parents: jax.Array) -> jax.Array:
  """Bit s of word t: s is a proper ancestor of t.

  Two or three small kernels of XLA's, the same for every layer of a step, so run once a step.
  """
  T = parents.shape[1]
  words: list[jax.Array] = []
  for t in range(T):
    p = parents[:, t]
    hit = [jnp.where(p == s, w | (1 << s), 0) for s, w in enumerate(words)]
    words.append(sum(hit[1:], hit[0]) if hit else jnp.zeros_like(p))
  return jnp.stack(words, axis=1)


def finish(w, v, factors, matrices, p, at: Shape, *, keep_writes: bool):
  """(o, u) [64, nodes] of 64 value rows from W = S [k; q]'; u is None unless asked for."""
  n = at.nodes
  factor = lambda i, kind: over_columns(
    plgpu.load(factors.at[i, pl.ds(p * at.rows + kind * n, n)], layout=lanes.COLS, optimized=False),
    (TILE, n),
  )
  right = factor(1, 0) * v.astype(f32) - factor(0, 0) * lanes.columns(w, 0, n)
  first, count = (0, at.rows) if keep_writes else (n, n)

  def product(acc):
    rows = lambda i: matrices.at[i, pl.ds(p * at.rows + first, count)].transpose((1, 0))
    prepare.product(acc, right, at, rows)
    plgpu.wgmma_wait(0)
    return acc[...]

  both = pl.run_scoped(product, plgpu.ACC((TILE, count), f32))
  o = factor(0, 1) * lanes.columns(w, n, n) + lanes.columns(both, n - first, n)
  return o, lanes.columns(both, 0, n) if keep_writes else None


def kernel(
  S_gmem, q_gmem, k_gmem, v_gmem, a_gmem, b_gmem, A_log_gmem, dt_gmem, max_gmem, words_gmem,
  nodes_gmem, slots_gmem, o_gmem, beta_gmem, g_gmem, *rows_gmem,
  s_smem, kq_smem, w_smem, matrices, factors, flat, lines, window_ready, chunk_ready, prepared,
  free, w_full, w_free, shape: Shape, pair: int, split_rows: bool,
):  # fmt: skip
  NODES, ROWS = shape.nodes, shape.rows
  B, T, H, _ = v_gmem.shape
  share, half = H // q_gmem.shape[2], len(rows_gmem) // 2
  halves = 2 if split_rows else 1  # blocks to a head
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
    return lanes.gather(
      v_gmem.at[b, :, h, pl.ds(row, TILE)], (TILE, NODES), plgpu.Layout.WGMMA, v_gmem.dtype, at
    )

  def finish_rows(w, v, b, h, p, row, turn, nodes):
    """Outputs, and pseudo-values if they are wanted, of 64 value rows from their W."""
    buffer = lax.rem(turn, 2)
    o, u = finish(
      w, v, factors.at[buffer], matrices.at[buffer], p, shape, keep_writes=bool(rows_gmem)
    )
    on = plgpu.broadcasted_iota(jnp.int32, (TILE, NODES), 1, layout=plgpu.Layout.WGMMA) < nodes
    put = lambda out, x: lanes.scatter(
      out.at[b, :, h, pl.ds(row, TILE)], x, plgpu.Layout.WGMMA, lambda r, t: (t, r), exists
    )
    put(o_gmem, jnp.where(on, o, 0.0).astype(o_gmem.dtype))
    if u is not None:
      for out, part in parts_like(jnp.where(on, u, 0.0), rows_gmem[half:]):
        put(out, part)

  @pl.when(lax.axis_index("wg") == 0)
  def projector():
    slots, _, width = s_smem.shape
    columns = range(0, K, width)
    pieces = [(m, j) for m in ((OWN,) if split_rows else (HANDED, OWN)) for j in columns]

    def load_chunk(count, at, head, i):
      (h, row), (m, j) = head, pieces[i]
      source = S_gmem.at[at, h, pl.ds(row + m, TILE), pl.ds(j, width)]
      slot = lax.rem(count, slots)
      plgpu.copy_gmem_to_smem(source, s_smem.at[slot], chunk_ready.at[slot])

    def place(step):
      """Row of the pool (padding reads some state and uses nothing of it) and number of nodes."""
      b, _, _ = item(lax.div(step, pair))
      return jnp.maximum(slots_gmem[b], 0), nodes_gmem[b]

    def head_and_row(step):
      _, h, row = item(lax.div(step, pair))
      return h + lax.rem(step, pair), row

    steps, now = pair * turns, place(0)
    for i in range(slots):
      load_chunk(i, now[0], head_and_row(0), i)

    def head(step, places):
      p, turn = lax.rem(step, pair), lax.div(step, pair)
      buffer, (b, _, _), (h, row) = lax.rem(turn, WINDOWS), item(turn), head_and_row(step)
      (at, nodes), (next_at, _) = places
      later, v = place(step + 2), values(b, h, row + OWN)

      @pl.when(p == 0)
      def await_window():
        plgpu.barrier_wait(window_ready.at[buffer])

      def request(i):
        """The chunk that takes the place of chunk i of this head."""
        count, i = step * len(pieces) + i + slots, i + slots
        if i < len(pieces):
          load_chunk(count, at, (h, row), i)
        else:
          load = lambda: load_chunk(count, next_at, head_and_row(step + 1), i - len(pieces))
          pl.when(step + 1 < steps)(load)

      def project(acc, m):
        for i, (_, j) in ((i, piece) for i, piece in enumerate(pieces) if piece[0] == m):
          slot = lax.rem(step * len(pieces) + i, slots)
          plgpu.barrier_wait(chunk_ready.at[slot])
          s = plgpu.load(s_smem.at[slot], layout=plgpu.Layout.WGMMA)
          lanes.sync()
          request(i)
          rows = kq_smem.at[pl.ds(buffer * ROWS, ROWS), pl.ds(j, width)]
          exact_wgmma(acc, s, rows.transpose((1, 0)))
          # The parts of a chunk stay in registers until its products are done: one chunk behind.
          plgpu.wgmma_wait(1 if s.dtype == bf16 else 3)
        return acc[...]

      w = lambda m: pl.run_scoped(functools.partial(project, m=m), plgpu.ACC((TILE, ROWS), f32))
      if not split_rows:
        handed, side = w(HANDED), lax.rem(step, 2)
        pl.when(step > 1)(lambda: plgpu.barrier_wait(w_free.at[side]))
        lanes.hand_over(w_smem.at[side], handed)
        plgpu.barrier_arrive(w_full.at[side])
      own = w(OWN)
      pl.when(p == 0)(lambda: plgpu.barrier_wait(prepared.at[lax.rem(turn, 2)]))
      finish_rows(own, v, b, h, p, row + OWN, turn, nodes)
      pl.when(p == pair - 1)(lambda: plgpu.barrier_arrive(free.at[lax.rem(turn, 2)]))
      return places[1], later

    lax.fori_loop(0, steps, head, (now, place(1)))

  @pl.when(lax.axis_index("wg") == 1)
  def preparer():
    beta_max, node = max_gmem[0], lambda r: (r % NODES).at_most(T - 1)
    head_of = lambda r: r // ROWS % pair  # rows past the last head repeat the first

    def load_window(turn):
      (b, h, _), whole = item(turn), pl.ds(lax.rem(turn, 1), NODES)
      buffer = lax.rem(turn, WINDOWS)
      for i, src in enumerate((k_gmem, q_gmem)):  # rows past T are out of bounds, so zeros
        plgpu.copy_gmem_to_smem(
          src.at[b, whole, lax.div(h, share)],
          kq_smem.at[pl.ds((2 * buffer + i) * NODES, NODES)],
          window_ready.at[buffer],
        )

    def fetch(turn):
      """What a window needs from global memory first, asked for ahead of time."""
      b, h, _ = item(turn)
      heads = pl.ds(h, pair)
      rows = lambda ref, at: lanes.gather(ref, (TILE,), lanes.ROWS, ref.dtype, at)
      both = lambda r: (node(r), head_of(r))
      return (
        nodes_gmem[b], rows(words_gmem.at[b], lambda r: (node(r),)),
        rows(a_gmem.at[b, :, heads, 0], both), rows(b_gmem.at[b, :, heads], both),
        rows(A_log_gmem.at[heads], lambda r: (head_of(r),)),
        rows(dt_gmem.at[heads, 0], lambda r: (head_of(r),)),
      )  # fmt: skip

    def write_keys(b, hk, nodes):
      def key(t, _):
        k = plgpu.load(k_gmem.at[b, t, hk], layout=lanes.PER_ROW, optimized=False)
        x = jnp.where(t < nodes, k.astype(f32) * lines[2, t], 0.0)
        for out, part in parts_like(x, rows_gmem[:half]):
          out.at[b, t, hk][...] = part

      lax.fori_loop(0, T, key, None)
      lanes.sync()  # the next preparation overwrites the norms

    def prepare_window(turn, fetched):
      nodes, words, a, b_in, A_log, dt_bias = fetched
      (b, h, row), source, buffer = item(turn), lax.rem(turn, WINDOWS), lax.rem(turn, 2)
      heads, near = pl.ds(h, pair), TILE // ROWS
      plgpu.barrier_wait(window_ready.at[source])
      beta, g = prepare.prepare(
        kq_smem.at[pl.ds(lax.div(source, near) * TILE, TILE)], lax.rem(source, near) * ROWS, shape,
        nodes, T - 1, words, a, b_in, (A_log, dt_bias, beta_max), pair,
        matrices.at[buffer], factors.at[buffer], flat=flat, lines=lines,
      )  # fmt: skip
      plgpu.barrier_arrive(prepared.at[buffer])

      @pl.when(row == 0)
      def put_gates():
        for out, x in ((beta_gmem.at[b, :, heads], beta), (g_gmem.at[b, :, heads, 0], g)):
          lanes.scatter(out, x, lanes.ROWS, lambda r: (node(r), head_of(r)))

      pl.when((half > 0) & (lax.rem(h, share) == 0) & (row == 0))(
        lambda: write_keys(b, lax.div(h, share), nodes)
      )

    for i in range(WINDOWS):
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
        side = lax.rem(step, 2)
        plgpu.barrier_wait(w_full.at[side])
        w = lanes.received(w_smem.at[side])
        plgpu.barrier_arrive(w_free.at[side])
        finish_rows(w, vs[p], b, h + p, p, HANDED, turn - 1, nodes)

      handed = () if split_rows else range(pair)
      for p in handed[:-1]:
        pl.when(turn > 0)(functools.partial(finish_handed, p))

      @pl.when(turn > 1)
      def reuse():
        plgpu.barrier_wait(free.at[lax.rem(turn, 2)])
        again = turn - 2 + WINDOWS
        pl.when(again < turns)(lambda: load_window(again))

      pl.when(turn < turns)(lambda: prepare_window(turn, fetched))
      later = fetched[0], first_values(turn), fetch(turn + 1)
      for p in handed[-1:]:
        pl.when(turn > 0)(functools.partial(finish_handed, p))
      return later

    lax.fori_loop(0, turns + 1, window, (nodes_gmem[item(0)[0]], first_values(0), fetch(0)))


def parts_like(x, outs):
  """Each array with its part of x [.] float32: x is the float32 sum of the parts."""
  for out in outs:
    part = x.astype(out.dtype)
    yield out, part
    x = x - part.astype(f32)


def check(S, window):
  """Raises NotImplementedError for what this kernel does not do."""
  raw = window.raw
  (_, T, Hk, K_), (_, _, H, V_) = raw.q.shape, raw.v.shape
  if (K_, V_) != (K, V):
    raise NotImplementedError(f"K, V = {K_}, {V_}: only {K}, {V}")
  if T > 16:
    raise NotImplementedError(f"{T=} nodes: at most 16")
  if raw.a.shape[3] != 1:
    raise NotImplementedError("per-channel decay")
  if H % Hk:
    raise ValueError(f"{H=} value heads over {Hk=} key heads")
  if S.dtype not in (f32, bf16) or {raw.q.dtype, raw.k.dtype, raw.v.dtype} != {jnp.dtype(bf16)}:
    raise NotImplementedError(f"state {S.dtype}, q {raw.q.dtype}: fp32 or bf16 state, bf16 inputs")


def verify(S, window, params, *, parts=(f32,), config: Config = DEFAULT, out_dtype=None):
  """`parts=()` leaves keys and pseudo-values unwritten."""
  check(S, window)
  q, k, v, a, b = window.raw
  (B, T, H, _), Hk, n = v.shape, q.shape[2], len(parts)
  shape, blocks = Shape(8 if T <= 8 else 16), config.ctas_per_sm * config.sms
  pair = config.pair if H // Hk % config.pair == 0 and B * H > blocks else 1
  split_rows = 2 * B * H <= config.sms  # two blocks to a head while multiprocessors are idle
  width = 128 // S.dtype.itemsize  # columns of a chunk: 8 KiB of 64 rows
  chunks = min(config.chunks, K // width * (1 if split_rows else 2))
  words = ancestor_words(window.parents)
  nodes = jnp.where(window.slots >= 0, window.nodes, 0)
  out = [
    jax.ShapeDtypeStruct((B, T, H, V), out_dtype or v.dtype),
    jax.ShapeDtypeStruct((B, T, H), f32),
    jax.ShapeDtypeStruct((B, T, H, 1), f32),
    *(jax.ShapeDtypeStruct((B, T, Hk, K), p) for p in parts),
    *(jax.ShapeDtypeStruct((B, T, H, V), p) for p in parts),
  ]
  o, beta, g, *rows = plgpu.kernel(
    functools.partial(kernel, shape=shape, pair=pair, split_rows=split_rows),
    out_type=out,
    grid=(min(B * H // pair * (2 if split_rows else 1), blocks),),
    grid_names=("cta",),
    num_threads=2,
    thread_name="wg",
    scratch_types={
      "s_smem": plgpu.SMEM(
        (chunks, TILE, width), S.dtype, transforms=lanes.swizzle(S.dtype, width)
      ),
      "kq_smem": plgpu.SMEM((WINDOWS * shape.rows, K), bf16, transforms=lanes.swizzle(bf16, width)),
      "window_ready": plgpu.Barrier(num_arrivals=2, num_barriers=WINDOWS),
      "chunk_ready": plgpu.Barrier(num_barriers=chunks),
      "prepared": plgpu.Barrier(num_barriers=2),
      "free": plgpu.Barrier(num_barriers=2),
      "w_full": plgpu.Barrier(num_barriers=2),
      "w_free": plgpu.Barrier(num_barriers=2),
      "w_smem": plgpu.SMEM((2, shape.rows // 8, 128, 4), f32),
    }
    | prepare.scratch(shape),
    compiler_params=lanes.COMPILER,
  )(
    S, q, k, v, a, b, params.A_log, params.dt_bias, params.beta_max.reshape(1),
    words, nodes, window.slots,
  )  # fmt: skip
  return o, Gates(beta, g), Rows(tuple(rows[:n]), tuple(rows[n:]), g)
