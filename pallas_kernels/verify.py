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
  exact_wgmma, gates, inverse_norm, over_columns, over_rows, bf16, f32,
)

K = V = 128
TILE = 64
CHUNKS = [(m, j) for m in range(V // TILE) for j in range(K // TILE)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """ctas_per_sm: resident warpgroups a multiprocessor; two hide each other's solve."""

  ctas_per_sm: int = 2
  sms: int = 132

  def __post_init__(self):
    if not 1 <= self.ctas_per_sm <= 4:
      raise ValueError(f"{self.ctas_per_sm=} must be in 1..4")
    if self.sms < 1:
      raise ValueError(f"{self.sms=} must be positive")


def padded(T: int) -> int:
  """Nodes as the tensor cores count them."""
  return 8 if T <= 8 else 16


def prepare(kq, coeff, M, nodes, a, b, gate_params, T: int):
  """Everything of a window that does not need the state, into shared memory.

  kq     the last 64 rows are unrelated: a product needs 64 rows, and only the first 2T count
  coeff  [4, 64]: factor of S [k; q] per row, G, inverse norms, beta
  M      [64, T]: row t < T is A_t., row T + t is B_t.; zero where masked
  """
  shape = (TILE, T)
  iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, layout=plgpu.Layout.WGMMA)

  def gram_product(acc):
    plgpu.wgmma(acc, kq, kq.at[pl.ds(0, 2 * T)].transpose((1, 0)))
    plgpu.wgmma_wait(0)
    return acc[...]

  gram = pl.run_scoped(gram_product, plgpu.ACC((TILE, 2 * T), f32))

  wide = (TILE, 2 * T)
  square = jnp.sum(jnp.where(iota(wide, 0) == iota(wide, 1), gram, 0.0), axis=1)

  beta, g = gates(a, b, *gate_params)
  row, col = iota(shape, 0), iota(shape, 1)
  t = lax.rem(row, T)
  is_key = row < T
  real = col < nodes
  # Masked by selection: whatever stands in a row that does not exist must not get out.
  G = jnp.sum(jnp.where((col <= t) & real, over_columns(g, shape), 0.0), axis=1)
  beta_row = jnp.sum(jnp.where((col == t) & real, over_columns(beta, shape), 0.0), axis=1)
  g_row = jnp.sum(jnp.where((col == t) & real, over_columns(g, shape), 0.0), axis=1)

  inverse = inverse_norm(square)
  coeff.at[1][...] = G
  coeff.at[2][...] = inverse
  coeff.at[3][...] = beta_row
  coeff.at[4][...] = g_row
  lanes.sync()
  G_col = plgpu.load(coeff.at[1, pl.ds(0, T)], layout=lanes.COLS, optimized=False)
  inverse_col = plgpu.load(coeff.at[2, pl.ds(0, T)], layout=lanes.COLS, optimized=False)

  scale = over_rows(inverse, shape) * jnp.where(is_key, over_rows(beta_row, shape), K**-0.5)
  below = jnp.where(is_key, col < t, col <= t) & real
  gap = jnp.where(below, over_rows(G, shape) - over_columns(G_col, shape), 0.0)
  gram = gram[:, :T] * jnp.exp(gap) * (scale * over_columns(inverse_col, shape))
  M[...] = jnp.where(below & (t < nodes), gram, 0.0)
  # beta e^G |k|^-1 and e^G |q|^-1 K^-1/2: the same value in every column, so take the first
  factor = jnp.where(col == 0, scale * jnp.exp(over_rows(G, shape)), 0.0)
  coeff.at[0][...] = jnp.sum(factor, axis=1)


def kernel(S_gmem, q_gmem, k_gmem, v_gmem, a_gmem, b_gmem, A_log_gmem, dt_gmem, max_gmem,
           nodes_gmem, slots_gmem, o_gmem, beta_gmem, g_gmem, *rows_gmem,
           s_smem, kq_smem, w_smem, M_smem, coeff, small_ready, chunk_ready):
  k_out, u_out = rows_gmem[: len(rows_gmem) // 2], rows_gmem[len(rows_gmem) // 2 :]
  (B, T, H, _), T8 = v_gmem.shape, M_smem.shape[1]
  share = H // q_gmem.shape[2]
  first, stride, heads = lax.axis_index("cta"), lax.axis_size("cta"), B * H
  split = lambda n: (lax.div(n, H), lax.rem(n, H))

  def load_small(n, slot):
    b, h = split(n)
    whole = pl.ds(lax.rem(n, 1), T8)  # rows past T are out of bounds and arrive as zeros
    for i, src in enumerate((k_gmem, q_gmem)):
      plgpu.copy_gmem_to_smem(
        src.at[b, whole, lax.div(h, share)],
        kq_smem.at[pl.ds((2 * slot + i) * T8, T8)],
        small_ready.at[slot],
      )

  def load_chunk(n, i):
    (b, h), (m, j) = split(n), CHUNKS[i]
    at = jnp.maximum(slots_gmem[b], 0)  # padding reads some state and uses nothing of it
    plgpu.copy_gmem_to_smem(
      S_gmem.at[at, h, pl.ds(m * TILE, TILE), pl.ds(j * TILE, TILE)], s_smem.at[i], chunk_ready.at[i]
    )

  load_small(first, 0)
  for i in range(len(CHUNKS)):
    load_chunk(first, i)

  def head(step, _):
    n, slot = first + step * stride, lax.rem(step, 2)
    b, h = split(n)
    more = n + stride < heads

    a_in = lanes.columns(a_gmem.at[b, :, h, 0], T8, a_gmem.dtype)
    b_in = lanes.columns(b_gmem.at[b, :, h], T8, b_gmem.dtype)
    vs = [plgpu.load(v_gmem.at[b, t, h], layout=lanes.PER_ROW, optimized=False) for t in range(T)]
    nodes = jnp.where(slots_gmem[b] >= 0, nodes_gmem[b], 0)
    gate_params = (A_log_gmem[h], dt_gmem[h, 0], max_gmem[0])

    @pl.when(more)
    def _():
      load_small(n + stride, 1 - slot)

    plgpu.barrier_wait(small_ready.at[slot])
    kq = kq_smem.at[pl.ds(slot * 2 * T8, TILE)]
    prepare(kq, coeff, M_smem, nodes, a_in, b_in, gate_params, T8)

    for m in range(V // TILE):

      def project(acc, m=m):
        for j in range(K // TILE):
          i = CHUNKS.index((m, j))
          plgpu.barrier_wait(chunk_ready.at[i])
          rhs = kq.at[pl.ds(0, 2 * T8), pl.ds(j * TILE, TILE)].transpose((1, 0))
          s = plgpu.load(s_smem.at[i], layout=plgpu.Layout.WGMMA)
          lanes.sync()

          @pl.when(more)
          def _(i=i):
            load_chunk(n + stride, i)

          exact_wgmma(acc, s, rhs)
          plgpu.wgmma_wait(0)
        return acc[...]

      w = pl.run_scoped(project, plgpu.ACC((TILE, 2 * T8), f32))
      lanes.put_transposed(w_smem.at[:, pl.ds(m * TILE, TILE)], w)
    lanes.sync()

    Sx = lambda t: plgpu.load(w_smem.at[t, pl.ds(0, V)], layout=lanes.PER_ROW, optimized=False)
    factors = lanes.scalars(coeff.at[0], T), lanes.scalars(coeff.at[0, pl.ds(T8, T8)], T)
    betas = lanes.scalars(coeff.at[3], T)
    us = []
    for t in range(T):
      u = betas[t] * vs[t].astype(f32) - factors[0][t] * Sx(t)
      for A, x in zip(lanes.scalars(M_smem.at[t], t), us, strict=True):
        u = u - A * x
      us.append(jnp.where(t < nodes, u, 0.0))
      o = factors[1][t] * Sx(T8 + t)
      for B_, x in zip(lanes.scalars(M_smem.at[T8 + t], t + 1), us, strict=True):
        o = o + B_ * x
      o_gmem.at[b, t, h][...] = jnp.where(t < nodes, o, 0.0).astype(o_gmem.dtype)

    if rows_gmem:
      for t, u in enumerate(us):
        for out in u_out:
          part = u.astype(out.dtype)
          out.at[b, t, h][...] = part
          u = u - part.astype(f32)

      @pl.when(lax.rem(h, share) == 0)
      def _():
        hk = lax.div(h, share)
        for t, scale in enumerate(lanes.scalars(coeff.at[2], T)):
          x = plgpu.load(k_gmem.at[b, t, hk], layout=lanes.PER_ROW, optimized=False)
          x = jnp.where(t < nodes, x.astype(f32) * scale, 0.0)
          for out in k_out:
            part = x.astype(out.dtype)
            out.at[b, t, hk][...] = part
            x = x - part.astype(f32)

    lanes.put_columns(
      beta_gmem.at[b, :, h], plgpu.load(coeff.at[3, pl.ds(0, T8)], layout=lanes.COLS, optimized=False)
    )
    lanes.put_columns(
      g_gmem.at[b, :, h, 0], plgpu.load(coeff.at[4, pl.ds(0, T8)], layout=lanes.COLS, optimized=False)
    )
    lanes.sync()  # the next head overwrites what this one has read

  lax.fori_loop(0, lax.div(heads - first + stride - 1, stride), head, None)


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
  swizzle = lanes.SWIZZLE_32BIT if S.dtype == f32 else lanes.SWIZZLE_16BIT
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
    grid=(min(B * H, config.ctas_per_sm * config.sms),),
    grid_names=("cta",),
    scratch_types=dict(
      s_smem=plgpu.SMEM((len(CHUNKS), TILE, TILE), S.dtype, transforms=swizzle),
      kq_smem=plgpu.SMEM((2 * T8 + TILE, K), bf16, transforms=lanes.SWIZZLE_16BIT),
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
