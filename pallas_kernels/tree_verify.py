"""Outputs of every node of a tree of up to 64 nodes. Reference: `gdn.ops.XLA.verify`.

Traffic per value head: the state once (64 KiB at K = V = 128, fp32), v once, q and k once per key
head (its value heads follow each other and find them in L2), the outputs once; pseudo-values and
keys only if asked for. The state is never written.

The tree is one or two halves of 32 nodes. Parents come first, so the second half waits for the
first and never the other way round: forward substitution by blocks (`tree_finish`). All products
are on the tensor cores, in exact bf16 parts with float32 sums.

A persistent grid of three warpgroups walks over (slot, value head). Two have half the value rows
each: the state arrives by TMA in chunks of 8 KiB, the next is requested as soon as one is in
registers, W = S [k; q]' is made of them, and outputs of it. The third prepares a head ahead.
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
from pallas_kernels import lanes, recurrent, tree_finish, tree_prepare
from pallas_kernels.arith import bf16, exact_wgmma, f32, gates
from pallas_kernels.finish import parts_like
from pallas_kernels.substitution import TILE
from pallas_kernels.tiles import K, V
from pallas_kernels.tree_prepare import HALF, SHAPE

MAX_NODES = 64
FINISHERS = V // TILE
AT_ONCE = 8  # keys written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """chunks  of half a state that are on their way or in shared memory
  sms     multiprocessors; each has one block
  """

  chunks: int = 4
  sms: int = 132

  def __post_init__(self):
    if not 2 <= self.chunks <= 4:
      raise ValueError(f"{self.chunks=} must be in 2..4")
    if self.sms < 1:
      raise ValueError(f"{self.sms=} must be positive")


DEFAULT = Config()


def kernel(
  S_gmem, q_gmem, k_gmem, v_gmem, a_gmem, b_gmem, A_log_gmem, dt_gmem, max_gmem, parents_gmem,
  nodes_gmem, slots_gmem, o_gmem, beta_gmem, g_gmem, *rows_gmem,
  s_smem, kq_smem, matrices, factors, flat, lines, norms, words, window_ready, chunk_ready,
  projected, prepared, free,
):  # fmt: skip
  B, T, H, _ = v_gmem.shape
  share, parts, halves = H // q_gmem.shape[2], len(rows_gmem) // 2, words.shape[0]
  cta, ctas = lax.axis_index("cta"), lax.axis_size("cta")
  first = lax.div(cta * B * H, ctas)
  turns = lax.div((cta + 1) * B * H, ctas) - first
  wg = lax.axis_index("wg")
  window = lambda turn: kq_smem.at[lax.rem(turn, 2)]

  def item(turn):
    """Decode slot and value head of a turn, or of the last one."""
    n = jnp.minimum(first + turn, B * H - 1)
    return lax.div(n, H), lax.rem(n, H)

  @pl.when(wg < FINISHERS)
  def finisher():
    row = pl.ds(wg * TILE, TILE)
    _, slots, _, width = s_smem.shape
    columns = range(0, K, width)

    def load_chunk(count, at, h, i):
      source, slot = S_gmem.at[at, h, row, pl.ds(columns[i], width)], lax.rem(count, slots)
      plgpu.copy_gmem_to_smem(source, s_smem.at[wg, slot], chunk_ready.at[wg * slots + slot])

    def place(turn):
      """Row of the pool (padding reads some state and uses nothing of it) and number of nodes."""
      b, _ = item(turn)
      return jnp.maximum(slots_gmem[b], 0), nodes_gmem[b]

    def values(b, h, i):
      at = lambda r, t: ((t + i * HALF).at_most(T - 1), r)
      return lanes.gather(v_gmem.at[b, :, h, row], SHAPE, plgpu.Layout.WGMMA, v_gmem.dtype, at)

    def put(out, b, h, i, x):
      exists = None if T >= (i + 1) * HALF else lambda r, t: (t + i * HALF).below(T)
      at = lambda r, t: (t + i * HALF, r)
      lanes.scatter(out.at[b, :, h, row], x, plgpu.Layout.WGMMA, at, exists)

    now = place(0)
    for i in range(slots):
      load_chunk(i, now[0], item(0)[1], i)

    def head(turn, places):
      (b, h), ((at, nodes), (next_at, _)) = item(turn), places
      later, v = place(turn + 2), values(b, h, 0)
      plgpu.barrier_wait(window_ready.at[lax.rem(turn, 2)])

      def request(i):
        """The chunk that takes the place of chunk i of this head."""
        count, i = turn * len(columns) + i + slots, i + slots
        if i < len(columns):
          load_chunk(count, at, h, i)
        else:
          load = lambda: load_chunk(count, next_at, item(turn + 1)[1], i - len(columns))
          pl.when(turn + 1 < turns)(load)

      def project(acc):
        for i, j in enumerate(columns):
          slot = lax.rem(turn * len(columns) + i, slots)
          plgpu.barrier_wait(chunk_ready.at[wg * slots + slot])
          s = plgpu.load(s_smem.at[wg, slot], layout=plgpu.Layout.WGMMA)
          lanes.sync()
          request(i)
          exact_wgmma(acc, s, window(turn).at[:, pl.ds(j, width)].transpose((1, 0)))
          # The parts of a chunk stay in registers until its products are done: one chunk behind.
          plgpu.wgmma_wait(1 if s.dtype == bf16 else 3)
        plgpu.wgmma_wait(0)
        return acc[...]

      w = pl.run_scoped(project, plgpu.ACC((TILE, kq_smem.shape[1]), f32))
      plgpu.barrier_arrive(projected.at[lax.rem(turn, 2)])
      plgpu.barrier_wait(prepared)
      column = plgpu.broadcasted_iota(jnp.int32, SHAPE, 1, layout=plgpu.Layout.WGMMA)
      finished = tree_finish.finish(
        w, v, functools.partial(values, b, h), factors.at[lax.rem(turn, 2)], matrices,
        keep_writes=bool(parts),
      )  # fmt: skip
      for i, (o, u) in enumerate(finished):
        on = column + i * HALF < nodes
        o = jnp.where(jnp.abs(o) < jnp.inf, o, jnp.nan)
        put(o_gmem, b, h, i, jnp.where(on, o, 0.0).astype(o_gmem.dtype))
        if parts:
          u = jnp.where(jnp.abs(u) < jnp.inf, u, jnp.nan)
          for out, part in parts_like(jnp.where(on, u, 0.0), rows_gmem[parts:]):
            put(out, b, h, i, part)
      plgpu.barrier_arrive(free)
      return places[1], later

    lax.fori_loop(0, turns, head, (now, place(1)))

  @pl.when(wg == FINISHERS)
  def preparer():
    line = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=lanes.ROWS)
    by_row = lambda ref, at: lanes.gather(ref, (TILE,), lanes.ROWS, ref.dtype, at)
    node = lambda r: (r.at_most(T - 1),)

    def load_window(turn):
      (b, h), buffer = item(turn), lax.rem(turn, 2)
      for i in range(halves):  # rows past T are out of bounds, so zeros
        rows = pl.ds(lax.rem(turn, 1) + i * HALF, HALF)
        for j, src in enumerate((k_gmem, q_gmem)):
          plgpu.copy_gmem_to_smem(
            src.at[b, rows, lax.div(h, share)],
            kq_smem.at[buffer, pl.ds((2 * i + j) * HALF, HALF)],
            window_ready.at[buffer],
          )

    def fetch(turn):
      """What a window needs from global memory, asked for ahead of time."""
      b, h = item(turn)
      a, b_in = (by_row(ref, node) for ref in (a_gmem.at[b, :, h, 0], b_gmem.at[b, :, h]))
      return nodes_gmem[b], a, b_in, A_log_gmem[h], dt_gmem[h, 0]

    def write_keys(b, hk, nodes):
      def some(i, _):
        at = [jnp.minimum(i * AT_ONCE + j, T - 1) for j in range(AT_ONCE)]
        load = lambda t: plgpu.load(k_gmem.at[b, t, hk], layout=lanes.PER_ROW, optimized=False)
        for t, k in [(t, load(t)) for t in at]:
          norm = norms[lax.div(t, HALF) * TILE + lax.rem(t, HALF)]
          x = jnp.where(t < nodes, k.astype(f32) * norm, 0.0)
          for out, part in parts_like(x, rows_gmem[:parts]):
            out.at[b, t, hk][...] = part

      lax.fori_loop(0, pl.cdiv(T, AT_ONCE), some, None)
      lanes.sync()  # the next preparation overwrites the norms

    for i in range(2):
      pl.when(i < turns)(functools.partial(load_window, i))

    def prepare_window(turn, fetched):
      (b, h), (nodes, a, b_in, A_log, dt_bias) = item(turn), fetched
      pl.when((turn == 0) | (h == 0))(
        lambda: tree_prepare.path_words(parents_gmem.at[b], nodes, words)
      )
      plgpu.barrier_wait(window_ready.at[lax.rem(turn, 2)])
      squares, products = tree_prepare.grams(window(turn), halves)

      @pl.when(turn > 0)
      def reuse():
        plgpu.barrier_wait(projected.at[lax.rem(turn + 1, 2)])
        pl.when(turn + 1 < turns)(lambda: load_window(turn + 1))

      # Selected, never multiplied by zero: what is in a row that does not exist must not get out.
      real = jnp.minimum(line, T - 1) < nodes
      both = gates(a, b_in, A_log, dt_bias, max_gmem[0])
      beta, g = (jnp.where(real, x, 0.0) for x in both)
      for out, x in ((beta_gmem.at[b, :, h], beta), (g_gmem.at[b, :, h, 0], g)):
        lanes.scatter(out, x, lanes.ROWS, node)
      solved = tree_prepare.prepare(
        squares, products, words, beta, g, factors.at[lax.rem(turn, 2)],
        flat=flat, lines=lines, norms=norms,
      )  # fmt: skip
      later = fetch(turn + 1)
      pl.when(turn > 0)(lambda: plgpu.barrier_wait(free))
      tree_prepare.put(solved, words, matrices)
      plgpu.barrier_arrive(prepared)
      pl.when((parts > 0) & (lax.rem(h, share) == 0))(
        lambda: write_keys(b, lax.div(h, share), nodes)
      )
      return later

    lax.fori_loop(0, turns, prepare_window, fetch(0))


def check(S, window):
  """Raises NotImplementedError for what this kernel does not do."""
  q, k, v, a, _ = window.raw
  recurrent.check(S, k, v, a)
  if v.shape[1] > MAX_NODES:
    raise NotImplementedError(f"T={v.shape[1]} nodes: at most {MAX_NODES}")
  if a.shape[3] != 1:
    raise NotImplementedError("per-channel decay")
  if {q.dtype, k.dtype, v.dtype} != {jnp.dtype(bf16)}:
    raise NotImplementedError(f"inputs of {q.dtype}: only bf16")


def verify(S, window, params, *, parts=(f32,), config: Config = DEFAULT, out_dtype=None):
  """`parts=()` leaves keys and pseudo-values unwritten. Of nodes that do not exist everything is
  zero."""
  check(S, window)
  q, k, v, a, b = window.raw
  (B, T, H, _), Hk, n, halves = v.shape, q.shape[2], len(parts), pl.cdiv(v.shape[1], HALF)
  width = 128 // S.dtype.itemsize  # columns of a chunk: 8 KiB of 64 rows
  chunks = min(config.chunks, K // width)
  if T > 8 and T % 8:  # rows are copied in tiles of eight
    q, k = (jnp.pad(x, ((0, 0), (0, -T % 8), (0, 0), (0, 0))) for x in (q, k))
  nodes = jnp.where(window.slots >= 0, window.nodes, 0)
  out = [
    jax.ShapeDtypeStruct((B, T, H, V), out_dtype or v.dtype),
    jax.ShapeDtypeStruct((B, T, H), f32),
    jax.ShapeDtypeStruct((B, T, H, 1), f32),
    *(jax.ShapeDtypeStruct((B, T, Hk, K), p) for p in parts),
    *(jax.ShapeDtypeStruct((B, T, H, V), p) for p in parts),
  ]
  o, beta, g, *rows = plgpu.kernel(
    kernel,
    out_type=out,
    grid=(min(B * H, config.sms),),
    grid_names=("cta",),
    num_threads=FINISHERS + 1,
    thread_name="wg",
    scratch_types={
      "s_smem": plgpu.SMEM(
        (FINISHERS, chunks, TILE, width), S.dtype, transforms=lanes.swizzle(S.dtype, width)
      ),
      "kq_smem": plgpu.SMEM((2, halves * TILE, K), bf16, transforms=lanes.swizzle(bf16, width)),
      "window_ready": plgpu.Barrier(num_arrivals=2 * halves, num_barriers=2),
      "chunk_ready": plgpu.Barrier(num_barriers=FINISHERS * chunks),
      "projected": plgpu.Barrier(num_arrivals=FINISHERS, num_barriers=2),
      "prepared": plgpu.Barrier(),
      "free": plgpu.Barrier(num_arrivals=FINISHERS),
    }
    | tree_prepare.scratch(halves),
    compiler_params=lanes.COMPILER,
  )(
    S, q, k, v, a, b, params.A_log, params.dt_bias, params.beta_max.reshape(1),
    window.parents, nodes, window.slots,
  )  # fmt: skip
  return o, Gates(beta, g), Rows(tuple(rows[:n]), tuple(rows[n:]), g)
