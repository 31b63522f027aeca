"""Outputs of every node of a chain window from the frozen state. Reference: `gdn.ops.XLA.verify`.

Traffic per value head: the state once (64 KiB at K = V = 128, fp32), v once, q and k once per key
head (its value heads run side by side and find them in L2), the outputs once; pseudo-values and
keys only if asked for. The state is never written.

A persistent grid of warpgroups walks over (slot, value head). The state arrives by TMA in chunks of
[64, 64]; a chunk is requested for the next head as soon as it is in registers, so that memory never
waits for the solve. fp32 meets bf16 keys on the tensor cores in three exact parts. Before the state
is there, gates, norms and the two Gram matrices of the window are formed from one [64, 2T] product
of the raw rows [k; q]: its diagonal holds the squared norms. Then one lane per value row does
forward substitution in fp32, with coefficients that arrive four at a time as broadcasts.
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
from pallas_kernels import lanes
from pallas_kernels.arith import (
  bf16,
  decay_parts,
  exact_wgmma,
  f32,
  gates,
  inverse_norm,
  over_columns,
  over_rows,
)

K = V = 128
TILE = 64
CHUNKS = [(m, j) for m in range(V // TILE) for j in range(K // TILE)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """ctas_per_sm  resident warpgroups a multiprocessor: they hide each other's solve
  pair         value heads of one key head whose window is prepared at once: 1 or 2
  """

  ctas_per_sm: int = 2
  pair: int = 2
  sms: int = 132

  def __post_init__(self):
    if self.pair not in (1, 2):
      raise ValueError(f"{self.pair=} must be 1 or 2")
    if not 1 <= self.ctas_per_sm <= 4:
      raise ValueError(f"{self.ctas_per_sm=} must be in 1..4")
    if self.sms < 1:
      raise ValueError(f"{self.sms=} must be positive")


def padded(T: int) -> int:
  """Nodes as the tensor cores count them."""
  return 8 if T <= 8 else 16


def prepare(kq, base, w, coeff, M, nodes, a, b, gate_params, T: int, last: int):
  """Everything of a window that does not need the state, for one or two heads of one key head.

  Rows of a [64, T] tile are (head, k or q, node). A product takes 64 rows, of which the window's
  own 2T are looked at; they go through shared memory so that both heads' rows find them.

  kq     [64, K] raw rows of two windows; this one has k at `base` and q at `base + T`
  coeff  [5, 64] per row: factor of S x, inverse norm, cumulated g in two parts, beta
  M      [64, T] row t of k is A_t., row t of q is B_t.; zero where masked
  """
  shape, wide = (TILE, T), (TILE, 2 * T)
  iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, layout=plgpu.Layout.WGMMA)

  def gram_product(acc):
    plgpu.wgmma(acc, kq, kq.at[pl.ds(base, 2 * T)].transpose((1, 0)))
    plgpu.wgmma_wait(0)
    return acc[...]

  lanes.put_transposed(w.at[:, pl.ds(0, TILE)], pl.run_scoped(gram_product, plgpu.ACC(wide, f32)))

  line = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=lanes.ROWS)
  t, is_key = lax.rem(line, T), lax.rem(line, 2 * T) < T
  beta, g = gates(a, b, *gate_params)
  # Selected, never multiplied by zero: what stands in a row that does not exist must not get out.
  real = jnp.minimum(t, last) < nodes
  beta, g = jnp.where(real, beta, 0.0), jnp.where(real, g, 0.0)
  coarse, fine = decay_parts(g)
  coeff.at[4][...] = beta
  coeff.at[2][...] = coarse
  coeff.at[3][...] = fine
  lanes.sync()

  own = w.at[:, pl.ds(base, 2 * T)]
  square = lanes.gather(own, (TILE,), lanes.ROWS, f32, lambda r: (r % (2 * T), r % (2 * T)))
  inverse = inverse_norm(square)
  gram = lanes.gather(own, shape, plgpu.Layout.WGMMA, f32, lambda r, c: (c, r % (2 * T)))
  head_row = lambda r, c: (r // T * T + c,)
  per_node = lambda i: lanes.gather(coeff.at[i], shape, plgpu.Layout.WGMMA, f32, head_row)
  row, col = iota(shape, 0), iota(shape, 1)
  t_row = lax.rem(row, T)
  sums = [jnp.sum(jnp.where(col <= t_row, per_node(i), 0.0), axis=1) for i in (2, 3)]
  lanes.sync()
  coeff.at[1][...] = inverse
  for i, x in zip((2, 3), sums, strict=True):
    coeff.at[i][...] = x
  scale = inverse * jnp.where(is_key, beta, K**-0.5)
  coeff.at[0][...] = scale * jnp.exp(sums[0] + sums[1])
  lanes.sync()
  gap = (over_rows(sums[0], shape) - per_node(2)) + (over_rows(sums[1], shape) - per_node(3))
  inverse_key = lanes.gather(
    coeff.at[1], shape, plgpu.Layout.WGMMA, f32, lambda r, c: (r // (2 * T) * (2 * T) + c,)
  )
  below = jnp.where(lax.rem(row, 2 * T) < T, col < t_row, col <= t_row) & (t_row < nodes)
  decayed = gram * jnp.exp(jnp.where(below, gap, 0.0)) * (over_rows(scale, shape) * inverse_key)
  M[...] = jnp.where(below, decayed, 0.0)
  return beta, g, inverse


def kernel(
  S_gmem, q_gmem, k_gmem, v_gmem, a_gmem, b_gmem, A_log_gmem, dt_gmem, max_gmem, nodes_gmem,
  slots_gmem, o_gmem, beta_gmem, g_gmem, *rows_gmem,
  s_smem, kq_smem, w_smem, M_smem, coeff, small_ready, chunk_ready, pair: int,
):  # fmt: skip
  k_out, u_out = rows_gmem[: len(rows_gmem) // 2], rows_gmem[len(rows_gmem) // 2 :]
  (B, T, H, _), T8 = v_gmem.shape, M_smem.shape[1]
  share = H // q_gmem.shape[2]
  first, stride, items = lax.axis_index("cta"), lax.axis_size("cta"), B * H // pair
  beta_max = max_gmem[0]

  def split(item):
    n = item * pair
    return lax.div(n, H), lax.rem(n, H)

  def load_small(item, slot):
    b, h = split(item)
    whole = pl.ds(lax.rem(item, 1), T8)  # rows past T are out of bounds and arrive as zeros
    for i, src in enumerate((k_gmem, q_gmem)):
      plgpu.copy_gmem_to_smem(
        src.at[b, whole, lax.div(h, share)],
        kq_smem.at[pl.ds((2 * slot + i) * T8, T8)],
        small_ready.at[slot],
      )

  def load_chunk(at, h, i):
    m, j = CHUNKS[i]
    plgpu.copy_gmem_to_smem(
      S_gmem.at[at, h, pl.ds(m * TILE, TILE), pl.ds(j * TILE, TILE)], s_smem.at[i], chunk_ready.at[i]
    )

  node = lambda r: (r % T8).at_most(T - 1)
  head_of = lambda r: r // (2 * T8) % pair  # rows past the last head repeat the first

  def fetch(item):
    """What an item needs from global memory first, asked for ahead of time."""
    b, h = split(item)
    row = slots_gmem[b]
    nodes = jnp.where(row >= 0, nodes_gmem[b], 0)
    heads = pl.ds(h, pair)
    per_row = lambda ref: lanes.gather(
      ref, (TILE,), lanes.ROWS, ref.dtype, lambda r: (node(r), head_of(r))
    )
    per_head = lambda ref: lanes.gather(
      ref, (TILE,), lanes.ROWS, ref.dtype, lambda r: (head_of(r),)
    )
    # padding reads some state and uses nothing of it
    return (
      jnp.maximum(row, 0), nodes, per_row(a_gmem.at[b, :, heads, 0]), per_row(b_gmem.at[b, :, heads]),
      per_head(A_log_gmem.at[heads]), per_head(dt_gmem.at[heads, 0]),
    )  # fmt: skip

  load_small(first, 0)
  ahead = fetch(first)
  for i in range(len(CHUNKS)):
    load_chunk(ahead[0], split(first)[1], i)

  def head(step, carry):
    """One value head. `carry` holds the item's own inputs, and the next item's once asked for."""
    p, turn = lax.rem(step, pair), lax.div(step, pair)
    item, slot = first + turn * stride, lax.rem(turn, 2)
    base = slot * 2 * T8
    b, h0 = split(item)
    h = h0 + p
    more = item + stride < items
    now, ahead = carry, fetch(jnp.where(p == pair - 1, jnp.minimum(item + stride, items - 1), item))
    nodes = now[1]
    vs = [plgpu.load(v_gmem.at[b, t, h], layout=lanes.PER_ROW, optimized=False) for t in range(T)]

    @pl.when((p == 0) & more)
    def _():
      load_small(item + stride, 1 - slot)

    @pl.when(p == 0)
    def _():
      plgpu.barrier_wait(small_ready.at[slot])
      _, _, a, b_in, A_log, dt_bias = now
      beta, g, inverse = prepare(
        kq_smem, base, w_smem, coeff, M_smem, nodes, a, b_in, (A_log, dt_bias, beta_max), T8, T - 1
      )
      heads = pl.ds(h0, pair)
      for out, x in ((beta_gmem.at[b, :, heads], beta), (g_gmem.at[b, :, heads, 0], g)):
        lanes.scatter(out, x, lanes.ROWS, lambda r: (node(r), head_of(r)))
      lanes.sync()

    wanted = (p < pair - 1) | more
    next_h = jnp.where(p == pair - 1, split(item + stride)[1], h + 1)
    for m in range(V // TILE):

      def project(acc, m=m):
        for j in range(K // TILE):
          i = CHUNKS.index((m, j))
          plgpu.barrier_wait(chunk_ready.at[i])
          rhs = kq_smem.at[pl.ds(base, 2 * T8), pl.ds(j * TILE, TILE)].transpose((1, 0))
          s = plgpu.load(s_smem.at[i], layout=plgpu.Layout.WGMMA)
          lanes.sync()

          @pl.when(wanted)
          def _(i=i):
            load_chunk(ahead[0], next_h, i)

          exact_wgmma(acc, s, rhs)
          plgpu.wgmma_wait(0)
        return acc[...]

      w = pl.run_scoped(project, plgpu.ACC((TILE, 2 * T8), f32))
      lanes.put_transposed(w_smem.at[:, pl.ds(m * TILE, TILE)], w)
    lanes.sync()

    mine = p * 2 * T8
    of_row = lambda i, start: lanes.scalars(coeff.at[i, pl.ds(start, T8)], T)

    def finish(masked: bool):
      exists = lambda t, x: jnp.where(t < nodes, x, 0.0) if masked else x
      us = solve(w_smem, M_smem, mine, vs, of_row, exists, T, T8, o_gmem.at[b, :, h])
      if rows_gmem:
        write_parts([out.at[b, :, h] for out in u_out], us)

    pl.when(nodes == T)(lambda: finish(masked=False))
    pl.when(nodes < T)(lambda: finish(masked=True))

    if rows_gmem:

      @pl.when(lax.rem(h, share) == 0)
      def _():
        hk = lax.div(h, share)
        load = lambda t: plgpu.load(k_gmem.at[b, t, hk], layout=lanes.PER_ROW, optimized=False)
        ks = [
          jnp.where(t < nodes, load(t).astype(f32) * scale, 0.0)
          for t, scale in enumerate(of_row(1, mine))
        ]
        write_parts([out.at[b, :, hk] for out in k_out], ks)

    lanes.sync()  # the next head overwrites what this one has read
    return ahead

  lax.fori_loop(0, pair * lax.div(items - first + stride - 1, stride), head, ahead)


def solve(w, M, mine, vs, of_row, exists, T: int, T8: int, o):
  """Forward substitution and outputs, one lane per value row; the pseudo-values are returned."""
  Sx = lambda t: plgpu.load(w.at[t, pl.ds(0, V)], layout=lanes.PER_ROW, optimized=False)
  of_k, of_q = of_row(0, mine), of_row(0, mine + T8)
  betas = of_row(4, mine)
  us = []
  for t in range(T):
    u = betas[t] * vs[t].astype(f32) - of_k[t] * Sx(t)
    for A, x in zip(lanes.scalars(M.at[mine + t], t), us, strict=True):
      u = u - A * x
    us.append(exists(t, u))
    out = of_q[t] * Sx(T8 + t)
    for B, x in zip(lanes.scalars(M.at[mine + T8 + t], t + 1), us, strict=True):
      out = out + B * x
    o.at[t][...] = exists(t, out).astype(o.dtype)
  return us


def write_parts(outs, rows) -> None:
  """Rows in float32 to arrays whose float32 sum they are."""
  for t, x in enumerate(rows):
    for out in outs:
      part = x.astype(out.dtype)
      out.at[t][...] = part
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


def verify(S, window, params, *, parts=(f32,), config: Config = Config(), out_dtype=None):
  """A window of a chain: `window.parents` is not read."""
  check(S, window)
  q, k, v, a, b = window.raw
  (B, T, H, _), Hk, n, T8 = v.shape, q.shape[2], len(parts), padded(v.shape[1])
  pair = config.pair if H // Hk % config.pair == 0 and B * H > 2 * config.sms else 1
  swizzle = lanes.SWIZZLE_32BIT if S.dtype == f32 else lanes.SWIZZLE_16BIT
  out = [
    jax.ShapeDtypeStruct((B, T, H, V), out_dtype or v.dtype),
    jax.ShapeDtypeStruct((B, T, H), f32),
    jax.ShapeDtypeStruct((B, T, H, 1), f32),
    *(jax.ShapeDtypeStruct((B, T, Hk, K), p) for p in parts),
    *(jax.ShapeDtypeStruct((B, T, H, V), p) for p in parts),
  ]
  o, beta, g, *rows = plgpu.kernel(
    functools.partial(kernel, pair=pair),
    out_type=out,
    grid=(min(B * H // pair, config.ctas_per_sm * config.sms),),
    grid_names=("cta",),
    scratch_types=dict(
      s_smem=plgpu.SMEM((len(CHUNKS), TILE, TILE), S.dtype, transforms=swizzle),
      kq_smem=plgpu.SMEM((TILE, K), bf16, transforms=lanes.SWIZZLE_16BIT),
      w_smem=plgpu.SMEM((2 * T8, V + 4), f32),
      M_smem=plgpu.SMEM((TILE, T8), f32),
      coeff=plgpu.SMEM((5, TILE), f32),
      small_ready=plgpu.Barrier(num_arrivals=2, num_barriers=2),
      chunk_ready=plgpu.Barrier(num_barriers=len(CHUNKS)),
    ),
    compiler_params=lanes.COMPILER,
  )(
    S, q, k, v, a, b, params.A_log, params.dt_bias, params.beta_max.reshape(1),
    window.nodes, window.slots,
  )
  return o, Gates(beta, g), Rows(tuple(rows[:n]), tuple(rows[n:]), g)
