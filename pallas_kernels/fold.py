"""Exact replay of accepted raw records into the state, in place. Reference: `gdn.ops.XLA.fold_raw`.

Traffic per value head: the state read once and written once, and K + V inputs and two gates per
accepted token. A slot with nothing pending is neither read nor written.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import recurrent
from pallas_kernels.recurrent import HALVES, TILE, Config


def kernel(S_gmem, k_gmem, v_gmem, beta_gmem, g_gmem, row_gmem, path_gmem, length_gmem, slots_gmem,
           *, in_smem, out_smem, ready):  # fmt: skip
  H, share, B = v_gmem.shape[2], v_gmem.shape[2] // k_gmem.shape[2], slots_gmem.shape[0]
  last = path_gmem.shape[1] - 1

  split = functools.partial(recurrent.split, H=H)

  def live(item):
    b = split(item)[0]
    return (slots_gmem[b] >= 0) & (row_gmem[b] >= 0) & (length_gmem[b] > 0)

  def tile(item):
    b, h, m = split(item)
    return S_gmem.at[slots_gmem[b], h, pl.ds(m * TILE, TILE)]

  def visit(item, S):
    b, h, m = split(item)
    row, length = row_gmem[b], length_gmem[b]

    def record(p):
      at = path_gmem[b, jnp.minimum(jnp.minimum(p, length - 1), last)]
      k = recurrent.key(k_gmem.at[row, at, lax.div(h, share)])
      v = recurrent.value(v_gmem.at[row, at, h], m)
      return k, v, beta_gmem[row, at, h], g_gmem[row, at, h, 0]

    def token(p, carry):
      S, now = carry
      ahead = record(p + 1)
      return recurrent.advance(S, *now), ahead

    S, _ = lax.fori_loop(0, length, token, (S, record(0)))
    recurrent.leave(S, out_smem, 0, tile(item), pending=0)

  recurrent.walk(tile, live, visit, lambda item: None, B * H * HALVES, in_smem=in_smem, ready=ready)


def fold_raw(S, records, pending, slots, *, config: Config = Config()):
  """Slots of one call are distinct, as everywhere."""
  recurrent.check(S, records.k, records.v, records.g)
  if records.beta.dtype != jnp.float32 or records.g.dtype != jnp.float32:
    raise ValueError("gates are float32 in every path")
  pool = jax.new_ref(S)
  items = slots.shape[0] * S.shape[1] * HALVES
  recurrent.launch(kernel, (), config, items, recurrent.scratch(S.dtype, 2, 1))(
    pool, *records, pending.row, pending.path, pending.length, slots
  )
  return jax.freeze(pool)
