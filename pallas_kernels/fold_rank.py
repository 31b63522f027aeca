"""Committed writes into the state, in place, without a replay. Reference: `gdn.ops.XLA.fold_rank`.

    S <- e^G S + sum_s u_s (e^(G - G_s) k_s)'

Traffic per value head: the state read once and written once, and K + V values and the decay of each
pending write. A slot with nothing pending is neither read nor written.

A few writes at a time: while some are added, the rows of the next few, or of the next tile, are on
their way to shared memory. Once there, a key takes up the decay of the writes after it among those
few, summed from the last one backwards: a sum of the decays that apply and never the difference of
two sums, so a decay to nothing costs no digits of what follows it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import chunks, copies, lanes, recurrent, tiles
from pallas_kernels.arith import bf16, f32, over_columns, over_rows
from pallas_kernels.recurrent import Path
from pallas_kernels.tiles import HALVES, LANES, SHAPE, TILE, Config, Items, K
from pallas_kernels.tuning import chosen


def kernel(S_gmem, *refs, parts: int, in_smem, out_smem, ready, places_smem, k_smem, u_smem,
           key_smem, value_smem, g_smem=None):  # fmt: skip
  k_gmem, u_gmem = refs[:parts], refs[parts : 2 * parts]
  g_gmem, *path_gmem, slots_gmem = refs[2 * parts :]
  share = u_gmem[0].shape[2] // k_gmem[0].shape[2]
  path, size = Path(*path_gmem), k_smem.shape[1]
  if g_smem is None:
    g_line = key_smem.at[pl.ds(size, 1), pl.ds(0, size)]
    decay_smem = key_smem.at[size, pl.ds(TILE, 1)]
  else:
    decay_smem = key_smem.at[size]
  items = Items(S_gmem, slots_gmem, path.length, path.row)

  def bring(item, row, places):
    _, h, m = items.split(item)
    for i in range(parts):
      copies.bring_rows(k_gmem[i].at[row, :, lax.div(h, share)], k_smem.at[i], places)
      u = u_gmem[i].at[row, :, h, pl.ds(m * TILE, TILE)]
      copies.bring_rows(u, u_smem.at[i, pl.ds(0, size)], places)
    if g_smem is None:
      copies.bring_words(g_gmem.at[row, :, h], g_line, places)
    else:
      copies.bring_rows(g_gmem.at[row, :, h], g_smem, places)

  def dress():
    g_of = lambda p: g_line[0, p] if g_smem is None else recurrent.channels(g_smem.at[p])
    k_of = lambda p: [recurrent.channels(k_smem.at[i, p]).astype(f32) for i in range(parts)]
    # All loads first: the compiler does not know that a store before a load is elsewhere.
    came = [(g_of(p), k_of(p)) for p in range(size)]
    after = jnp.zeros_like(came[0][0])
    for p, (g, k) in reversed(list(enumerate(came))):
      key_smem.at[p][...] = sum(k[1:], k[0]) * jnp.exp(after)
      after += g
    recurrent.put_channels(decay_smem, jnp.exp(after))
    layout = plgpu.Layout.WG_STRIDED(value_smem.shape, vec_size=value_smem.shape[0] * TILE // LANES)
    load = lambda i: plgpu.load(u_smem.at[i], layout=layout, optimized=False).astype(f32)
    value_smem[...] = sum((load(i) for i in range(1, parts)), load(0))

  def apply(S, item, n):
    del item

    def write(p, S):
      u = plgpu.load(value_smem.at[p], layout=lanes.ROWS, optimized=False)
      return S + over_rows(u, SHAPE) * over_columns(recurrent.key(key_smem.at[p]), SHAPE)

    S = recurrent.decayed(S, recurrent.columns(decay_smem))
    return lax.fori_loop(0, n, write, S)

  chunks.fold(
    items, path, chunks.Chunks(bring, dress, apply, size), in_smem=in_smem, out_smem=out_smem,
    ready=ready, places_smem=places_smem,
  )  # fmt: skip


# As for fold_raw; pairs of rows take the registers of a third warpgroup.
DEFAULT = Config(ctas_per_sm=3)
PAIRS = Config(ctas_per_sm=2)


def fold_rank(S, rows, pending, slots, *, config: Config | None = None):
  """Slots of one call are distinct, as everywhere. Paths of any length."""
  parts, P = len(rows.k), pending.path.shape[1]
  recurrent.check(S, rows.k[0], rows.u[0], rows.g)
  if rows.g.dtype != f32:
    raise ValueError("gates are float32 in every path")
  if not {x.dtype for x in (*rows.k, *rows.u)} <= {jnp.dtype(f32), jnp.dtype(bf16)}:
    raise NotImplementedError(f"rows of {rows.k[0].dtype}: only fp32 and bf16")
  heads, channels = slots.shape[0] * S.shape[1], rows.g.shape[3]
  name, default = ("fold_rank", DEFAULT) if parts == 1 else ("fold_rank_pairs", PAIRS)
  config = config or chosen(name, default, state=S.dtype, channels=channels, tokens=P, heads=heads)
  # What leaves shared memory for a third warpgroup, beside pairs for a second one.
  if rows.k[0].dtype == f32:
    most = 4 if channels == 1 else 3
  else:
    most = 4 if channels > 1 else 5 if parts == 1 else 7
  size = chunks.chunk_size(P, most)
  whole = pl.cdiv(size, 4) * 4
  pool = jax.new_ref(S)
  scratch = tiles.scratch(S.dtype, config.arriving, 1) | {
    "places_smem": chunks.places_smem(P),
    "k_smem": plgpu.SMEM((parts, size, K), rows.k[0].dtype),
    "u_smem": plgpu.SMEM((parts, whole, TILE), rows.u[0].dtype),
    "key_smem": plgpu.SMEM((size + 1, K), f32),  # the last one's place is for decays
    "value_smem": plgpu.SMEM((whole, TILE), f32),
    **({"g_smem": plgpu.SMEM((size, K), f32)} if channels > 1 else {}),
  }
  body = functools.partial(kernel, parts=parts)
  tiles.launch(body, (), config, heads * HALVES, scratch)(
    pool, *rows.k, *rows.u, rows.g, *pending, slots
  )
  return jax.freeze(pool)
