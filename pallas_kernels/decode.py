"""One token per slot, the state read and written in place. Reference: `gdn.ops.XLA.decode`.

Traffic per value head: the state read once and written once, the raw inputs of one token, one
output row.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import arith, recurrent
from pallas_kernels.recurrent import DEFAULT, HALVES, TILE, Config


def kernel(S_gmem, q_gmem, k_gmem, v_gmem, a_gmem, b_gmem, A_log_gmem, dt_gmem, max_gmem,
           nodes_gmem, slots_gmem, o_gmem, *, in_smem, out_smem, ready):  # fmt: skip
  H, share, B = v_gmem.shape[2], v_gmem.shape[2] // k_gmem.shape[2], slots_gmem.shape[0]

  split = functools.partial(recurrent.split, H=H)

  def live(item):
    b = split(item)[0]
    return (slots_gmem[b] >= 0) & (nodes_gmem[b] > 0)

  def tile(item):
    b, h, m = split(item)
    return S_gmem.at[slots_gmem[b], h, pl.ds(m * TILE, TILE)]

  def visit(item, S, turn):
    del turn
    b, h, m = split(item)
    gates = arith.gates(
      a_gmem[b, 0, h, 0], b_gmem[b, 0, h], A_log_gmem[h], dt_gmem[h, 0], max_gmem[0]
    )
    q, k = (recurrent.key(x.at[b, 0, lax.div(h, share)]) for x in (q_gmem, k_gmem))
    S = recurrent.advance(S, k, recurrent.value(v_gmem.at[b, 0, h], m), *gates)
    recurrent.leave(S, out_smem, 0, tile(item), pending=0)
    recurrent.put_row(o_gmem.at[b, 0, h], m, recurrent.read(S, q))

  def miss(item):
    b, h, m = split(item)
    recurrent.put_row(o_gmem.at[b, 0, h], m, recurrent.nothing())

  recurrent.walk(tile, live, visit, miss, B * H * HALVES, in_smem=in_smem, ready=ready)


def decode(S, window, params, *, config: Config = DEFAULT, out_dtype=None):
  q, k, v, a, b = window.raw
  recurrent.check(S, k, v, a)
  pool = jax.new_ref(S)
  out = jax.ShapeDtypeStruct(v.shape, out_dtype or v.dtype)
  items = v.shape[0] * v.shape[2] * HALVES
  o = recurrent.launch(kernel, out, config, items, recurrent.scratch(S.dtype, 2, 1))(
    pool, q, k, v, a, b, params.A_log, params.dt_bias, params.beta_max.reshape(1),
    window.nodes, window.slots,
  )  # fmt: skip
  return o, jax.freeze(pool)
