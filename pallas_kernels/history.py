"""Writes that are pending: rows of a pool that a window's state has not received yet.

With the rows i of a slot's path in order and after_i the log decay of everything behind i,

    S' = e^G S + sum_i u_i (e^after_i k_i)'      S' x = e^G S x + sum_i u_i C_ix
    C_ix = e^after_i (k_i . x)

so a window meets pending writes as one more small product, of pseudo-values that lie in registers
and of C, which is made beside the window's other matrices. after_i is a sum of the decays that
apply, never a difference, and rows past the path's length are selected away.

Sixteen rows at a time, because that is what a product of the tensor cores sums over. Parts are
those of a float32 (three, exact) or of the pool itself where it holds bf16.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes
from pallas_kernels.arith import f32, over_columns
from pallas_kernels.prepare import PITCH
from pallas_kernels.substitution import TILE, Shape

K = 128
CHUNK = 16
WIDE = (TILE, CHUNK)
tile = plgpu.Layout.WGMMA
i32 = jnp.int32


class Pending(NamedTuple):
  """Global memory: rows [N, R, ...] in parts, and a path through them for each batch row."""

  k: tuple[Any, ...]
  u: tuple[Any, ...]
  g: Any
  row: Any
  path: Any
  length: Any

  def count(self, b):
    return jnp.where(self.row[b] >= 0, self.length[b], 0)

  def chunk(self, b, c, shape=WIDE, layout=tile):
    """Positions of chunk c's rows and which of them exist: per column, or per line of sixteen."""
    column = lambda *at: at[-1] % CHUNK + c * CHUNK
    last = self.path.shape[1] - 1
    at = lanes.gather(self.path.at[b], shape, layout, i32, lambda *at: (column(*at).at_most(last),))
    iota = plgpu.broadcasted_iota(i32, shape, len(shape) - 1, layout=layout)
    on = lax.rem(iota, CHUNK) + c * CHUNK < self.count(b)
    return jnp.where(on, at, 0), on

  def _taken(self, refs, b, h, start, at, on):
    row = jnp.maximum(self.row[b], 0)
    take = lambda ref: lanes.lookup(
      ref.at[row, :, h, pl.ds(start, TILE)], at, tile, ref.dtype, lambda p, r, c: (p, r)
    )
    return [jnp.where(on, x, jnp.zeros((), x.dtype)) for x in map(take, refs)]

  def values(self, b, h, start, c):
    """Pseudo-values [64, 16] from a value row on, a column per pending row, parts as stored."""
    return self._taken(self.u, b, h, start, *self.chunk(b, c))

  def stage_keys(self, b, hk, c, smem) -> None:
    """Keys of chunk c to shared memory [parts, 128, 16]."""
    at, on = self.chunk(b, c)
    for half in (0, TILE):
      lanes.fence()
      for i, part in enumerate(parts(self._taken(self.k, b, hk, half, at, on))):
        smem.at[i, pl.ds(half, TILE)][...] = part

  def decays(self, b, h, heads: int, c, line, behind):
    """Log decays behind each row of chunk c, and behind the chunk before it; lines are (head, row).

    `behind` is what this returned for the chunk after c.
    """
    at, on = self.chunk(b, c, (TILE,), lanes.ROWS)
    row = jnp.maximum(self.row[b], 0)
    own = lambda r: r // CHUNK % heads
    g = lanes.lookup(
      self.g.at[row, :, pl.ds(h, heads), 0], at, lanes.ROWS, f32, lambda p, r: (p, own(r))
    )
    line[...] = jnp.where(on, g, 0.0)
    lanes.sync()
    every = lanes.gather(line, WIDE, tile, f32, lambda r, c: (r // CHUNK * CHUNK + c,))
    place = [plgpu.broadcasted_iota(i32, WIDE, d, layout=tile) for d in (0, 1)]
    later = place[1] > lax.rem(place[0], CHUNK)
    return (
      behind + jnp.sum(jnp.where(later, every, 0.0), axis=1),
      behind + jnp.sum(every, axis=1),
    )


NOTHING = Pending((), (), None, None, None, None)


def parts(stored: list[jax.Array]) -> list[jax.Array]:
  """Exact bf16 parts, largest first, of rows as they are stored: one float32, or bf16 ones."""
  return lanes.three_parts(stored[0]) if stored[0].dtype == f32 else stored


def count_parts(dtypes) -> int:
  """How many `parts` rows of these dtypes have."""
  return 3 if jnp.dtype(dtypes[0]) == f32 else len(dtypes)


def product(shape, left: list[jax.Array], right: list) -> jax.Array:
  """left right in float32 quality, both in parts: what is below 2^-24 of it is left out."""

  def add(acc):
    for order in reversed(range(3)):
      for i, x in enumerate(left):
        if 0 <= order - i < len(right):
          plgpu.wgmma(acc, x, right[order - i])
    plgpu.wgmma_wait(0)
    return acc[...]

  return pl.run_scoped(add, plgpu.ACC(shape, f32))


def coefficients(kq, base, width: int, keys_smem, after, at: Shape, heads: int, C, *, flat,
                 line) -> None:  # fmt: skip
  """C of one chunk, transposed and in three parts, to C [3, 64, 16].

  Rows are (head, key or query, node). kq as in `prepare`, in tiles of `width` columns; it goes
  through registers, for the tensor cores want both operands swizzled alike. after is per line
  (head, row).
  """

  def gram(acc):
    def add(i, _):
      j = pl.ds(pl.multiple_of(i * width, width), width)
      x = lanes.some_rows(kq, base, at.rows, j)
      for part in reversed(range(keys_smem.shape[0])):
        plgpu.wgmma(acc, x, keys_smem.at[part, j])
      plgpu.wgmma_wait(0)

    lax.fori_loop(0, K // width, add, None)
    return acc[...]

  met = pl.run_scoped(gram, plgpu.ACC(WIDE, f32))
  lanes.scatter(flat, met, tile, lambda r, c: (c * PITCH + r,))
  line[...] = jnp.exp(after)
  lanes.sync()
  own = flat.at[pl.ds(base, CHUNK * PITCH - PITCH + at.rows)]
  met = lanes.gather(own, WIDE, tile, f32, lambda r, c: (c * PITCH + r % at.rows,))
  decay = lanes.gather(line, WIDE, tile, f32, lambda r, c: (r // at.rows % heads * CHUNK + c,))
  for i, part in enumerate(lanes.three_parts(met * decay)):
    C.at[i][...] = part
  lanes.sync()


def weighted(values: list[jax.Array], decay) -> list[jax.Array]:
  """Parts of u_i e^after_i [64, 16] from stored pseudo-values and e^after [16]."""
  u = functools.reduce(jnp.add, (x.astype(f32) for x in values))
  return lanes.three_parts(u * over_columns(decay, WIDE))
