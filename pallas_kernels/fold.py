"""Exact replay of accepted raw records into the state, in place. Reference: `gdn.ops.XLA.fold_raw`.

Traffic per value head: the state read once and written once, and K + V inputs and the gates of each
accepted token. A slot with nothing pending is neither read nor written.

Records come a few at a time, while the ones before are replayed. Before a few are replayed their
keys get their norms, all at once and each as `recurrent.advance` would give it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import chunks, copies, lanes, recurrent, rows, tiles
from pallas_kernels.arith import f32
from pallas_kernels.recurrent import Path
from pallas_kernels.tiles import HALVES, LANES, TILE, Config, Items, K
from pallas_kernels.tuning import chosen

# Of a chunk's keys each goes to one of the eight quads of a warp's lanes. One more record, and a
# multiprocessor would lack the shared memory for a third warpgroup, a second one with channels.
SIZE, SIZE_PER_CHANNEL = 6, 5
RAW_BETA, RAW_G, BETA, DECAY = range(0, 32, 8)
PITCH = K + 8  # of rows that are read at once, so that they start on different banks


def kernel(S_gmem, k_gmem, v_gmem, beta_gmem, g_gmem, *refs, in_smem, out_smem, ready, places_smem,
           k_smem, v_smem, unit_smem, value_smem, g_smem=None, decay_smem=None):  # fmt: skip
  *path_gmem, slots_gmem = refs
  share = v_gmem.shape[2] // k_gmem.shape[2]
  path, size = Path(*path_gmem), k_smem.shape[0]
  items = Items(S_gmem, slots_gmem, path.length, path.row)
  gates = unit_smem.at[size]  # behind the keys: as they came, and as `apply` takes them

  def bring(item, row, places):
    _, h, m = items.split(item)
    copies.bring_rows(k_gmem.at[row, :, lax.div(h, share)], k_smem, places)
    values = v_gmem.at[row, :, h, pl.ds(m * TILE, TILE)]
    copies.bring_rows(values, v_smem.at[pl.ds(0, size)], places)
    line = lambda first: unit_smem.at[pl.ds(size, 1), pl.ds(first, size)]
    copies.bring_words(beta_gmem.at[row, :, pl.ds(h, 1)], line(RAW_BETA), places)
    if g_smem is None:
      copies.bring_words(g_gmem.at[row, :, h], line(RAW_G), places)
    else:
      copies.bring_rows(g_gmem.at[row, :, h], g_smem, places)

  def dress():
    rows.map_rows(recurrent.unit, k_smem, unit_smem)
    layout = plgpu.Layout.WG_STRIDED(v_smem.shape, vec_size=v_smem.shape[0] * TILE // LANES)
    value_smem[...] = plgpu.load(v_smem, layout=layout, optimized=False)
    eight = lambda first: gates.at[pl.ds(first, 8)]
    eight(BETA)[...] = recurrent.key(eight(RAW_BETA))
    if g_smem is None:
      eight(DECAY)[...] = jnp.exp(recurrent.key(eight(RAW_G)))
    else:
      for p in range(size):
        decay_smem.at[p][...] = jnp.exp(recurrent.channels(g_smem.at[p]))

  def apply(S, item, n):
    del item

    def token(p, S):
      k = recurrent.key(unit_smem.at[p, pl.ds(0, K)])
      v = plgpu.load(value_smem.at[p], layout=lanes.ROWS, optimized=False)
      decay = gates[DECAY + p] if decay_smem is None else recurrent.columns(decay_smem.at[p])
      return recurrent.write(S, k, v, gates[BETA + p], decay)[0]

    return lax.fori_loop(0, n, token, S)

  chunks.fold(
    items, path, chunks.Chunks(bring, dress, apply, size), in_smem=in_smem, out_smem=out_smem,
    ready=ready, places_smem=places_smem,
  )  # fmt: skip


# A decay per channel takes the registers of a third warpgroup.
DEFAULT = Config(ctas_per_sm=3)
PER_CHANNEL = Config(ctas_per_sm=2)


def fold_raw(S, records, pending, slots, *, config: Config | None = None):
  """Slots of one call are distinct, as everywhere."""
  recurrent.check(S, records.k, records.v, records.g)
  if records.beta.dtype != f32 or records.g.dtype != f32:
    raise ValueError("gates are float32 in every path")
  pool = jax.new_ref(S)
  heads, channels, P = slots.shape[0] * S.shape[1], records.g.shape[3], pending.path.shape[1]
  default = DEFAULT if channels == 1 else PER_CHANNEL
  config = config or chosen(
    "fold", default, state=S.dtype, channels=channels, tokens=P, heads=heads
  )
  size = chunks.chunk_size(P, SIZE if channels == 1 else SIZE_PER_CHANNEL)
  values, per_channel = plgpu.SMEM((8, TILE), records.v.dtype), plgpu.SMEM((size, K), f32)
  scratch = tiles.scratch(S.dtype, config.arriving, 1) | {
    "places_smem": chunks.places_smem(P),
    "k_smem": plgpu.SMEM((size, PITCH), records.k.dtype),
    "v_smem": values,
    "unit_smem": plgpu.SMEM((size + 1, PITCH), f32),
    "value_smem": values,
    **({"g_smem": per_channel, "decay_smem": per_channel} if channels > 1 else {}),
  }
  tiles.launch(kernel, (), config, heads * HALVES, scratch)(pool, *records, *pending, slots)
  return jax.freeze(pool)
