"""Token by token, the state kept after each node. Reference: `gdn.ops.XLA.snapshot`.

Traffic per value head: the state read once, one state written per kept node, the raw inputs and
outputs of a verify. Writing dominates: seventeen states cross memory for a window of sixteen.

A node whose parent is not its predecessor reads the parent's state back from where it was kept (or
the root from the pool): trees need `keep = T`. Rows past `nodes` and states past them are not
written; outputs of those rows are zero.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn.ops import Gates
from pallas_kernels import arith, recurrent
from pallas_kernels.recurrent import DEFAULT, HALVES, TILE, Config


def kernel(S_gmem, q_gmem, k_gmem, v_gmem, a_gmem, b_gmem, A_log_gmem, dt_gmem, max_gmem,
           parents_gmem, nodes_gmem, slots_gmem, o_gmem, beta_gmem, g_gmem, states_gmem,
           *, in_smem, out_smem, ready, back):  # fmt: skip
  (B, T, H, _), keep = v_gmem.shape, states_gmem.shape[1]
  share, buffers = H // k_gmem.shape[2], out_smem.shape[0]
  split = functools.partial(recurrent.split, H=H)
  rows = lambda m: pl.ds(m * TILE, TILE)

  def live(item):
    b = split(item)[0]
    return (slots_gmem[b] >= 0) & (nodes_gmem[b] > 0)

  def tile(item):
    b, h, m = split(item)
    return S_gmem.at[slots_gmem[b], h, rows(m)]

  def visit(item, S, turn):
    del turn
    b, h, m = split(item)
    nodes, hk = nodes_gmem[b], lax.div(h, share)
    head = (A_log_gmem[h], dt_gmem[h, 0], max_gmem[0])

    def inputs(t):
      t = jnp.minimum(t, nodes - 1)
      q, k = (recurrent.key(x.at[b, t, hk]) for x in (q_gmem, k_gmem))
      v = recurrent.value(v_gmem.at[b, t, h], m)
      return q, k, v, a_gmem[b, t, h, 0], b_gmem[b, t, h], parents_gmem[b, t]

    def reload(parent):
      plgpu.wait_smem_to_gmem(0)

      @pl.when(parent < 0)
      def _():
        plgpu.copy_gmem_to_smem(tile(item), out_smem.at[0], back)

      @pl.when(parent >= 0)
      def _():
        kept = states_gmem.at[b, jnp.maximum(parent, 0), h, rows(m)]
        plgpu.copy_gmem_to_smem(kept, out_smem.at[0], back)

      plgpu.barrier_wait(back)
      return plgpu.load(out_smem.at[0], layout=plgpu.Layout.WGMMA).astype(jnp.float32)

    def node(t, carry):
      S, (q, k, v, a, b_in, parent) = carry
      ahead = inputs(t + 1)
      S = lax.cond(parent == t - 1, lambda S: S, lambda _: reload(parent), S)
      beta, g = arith.gates(a, b_in, *head)
      S = recurrent.advance(S, k, v, beta, g)

      @pl.when(t < keep)
      def _():
        target = states_gmem.at[b, jnp.minimum(t, keep - 1), h, rows(m)]
        recurrent.leave(S, out_smem, lax.rem(t, buffers), target, pending=buffers - 1)

      recurrent.put_row(o_gmem.at[b, t, h], m, recurrent.read(S, q))

      @pl.when(m == 0)
      def _():
        beta_gmem[b, t, h] = beta
        g_gmem[b, t, h, 0] = g

      return S, ahead

    # The last item may have left from either buffer, whatever the parity of its window.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    lax.fori_loop(0, nodes, node, (S, inputs(0)))
    empty(item, nodes)

  def empty(item, start):
    b, h, m = split(item)
    blank = lambda t, _: recurrent.put_row(o_gmem.at[b, t, h], m, recurrent.nothing())
    lax.fori_loop(start, T, blank, None)

  miss = functools.partial(empty, start=0)
  recurrent.walk(tile, live, visit, miss, B * H * HALVES, in_smem=in_smem, ready=ready)


def snapshot(S, window, params, *, keep: int, config: Config = DEFAULT, out_dtype=None):
  q, k, v, a, b = window.raw
  recurrent.check(S, k, v, a)
  (B, T, H, V), K = v.shape, k.shape[3]
  if not 1 <= keep <= T:
    raise NotImplementedError(f"{keep=} of {T=} states")
  o, beta, g, states = recurrent.launch(
    kernel,
    (
      jax.ShapeDtypeStruct(v.shape, out_dtype or v.dtype),
      jax.ShapeDtypeStruct((B, T, H), jnp.float32),
      jax.ShapeDtypeStruct((B, T, H, 1), jnp.float32),
      jax.ShapeDtypeStruct((B, keep, H, V, K), S.dtype),
    ),
    config,
    B * H * HALVES,
    recurrent.scratch(S.dtype, 1, 2) | {"back": plgpu.Barrier()},
  )(
    S, q, k, v, a, b, params.A_log, params.dt_bias, params.beta_max.reshape(1),
    window.parents, window.nodes, window.slots,
  )  # fmt: skip
  return o, Gates(beta, g), states
