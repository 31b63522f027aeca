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
from pallas_kernels.arith import f32, over_columns, over_rows
from pallas_kernels.substitution import TILE

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

  def chunks(self, b):
    """Sixteens of rows that a path has, the last one perhaps not full."""
    return lax.div(self.count(b) + CHUNK - 1, CHUNK)

  def _pool(self, b):
    return jnp.maximum(self.row[b], 0)

  def _by_line(self, b):
    """Positions of the first 64 rows and which of them exist, a line each."""
    last = self.path.shape[1] - 1
    at = lanes.gather(self.path.at[b], (TILE,), lanes.ROWS, i32, lambda r: (r.at_most(last),))
    on = lanes.flags((TILE,), lanes.ROWS, lambda r, n: r.below(n), [self.count(b)])
    return jnp.where(on, at, 0), on

  def positions(self, b, c):
    """Of the rows of chunk c, and which of them exist, a column each."""
    last = self.path.shape[1] - 1
    column = lambda j, first: ((j + first).at_most(last),)
    at = lanes.gather(self.path.at[b], (CHUNK,), lanes.COLS, i32, column, [c * CHUNK])
    exists = lambda j, first, n: (j + first).below(n)
    on = lanes.flags((CHUNK,), lanes.COLS, exists, [c * CHUNK, self.count(b)])
    return jnp.where(on, at, 0), on

  def _by_column(self, refs, b, h, start, positions):
    """Elements [64, 16] of some rows from `start` on, a column for each row."""
    at, on = positions

    def take(ref):
      x = lanes.columns_at(ref.at[self._pool(b), :, h, pl.ds(start, TILE)], at, ref.dtype)
      return jnp.where(over_columns(on, WIDE), x, jnp.zeros((), x.dtype))

    return [take(ref) for ref in refs]

  def values(self, b, h, start, positions):
    """Pseudo-values [64, 16] from a value row on, a column per pending row, parts as stored."""
    return self._by_column(self.u, b, h, start, positions)

  def keys(self, b, hk, columns):
    """Some columns of the keys [64, .], a line per pending row, parts as stored."""
    at, on = self._by_line(b)

    def take(ref):
      x = lanes.rows_at(ref.at[self._pool(b), :, hk, columns], at, ref.dtype)
      return jnp.where(over_rows(on, x.shape), x, jnp.zeros((), x.dtype))

    return [take(ref) for ref in self.k]

  def ask(self, refs, b, h) -> None:
    """Has a head's rows in k or u brought to L2; past the path's length, any of the pool."""
    rows = self.path.shape[1]
    for ref in refs:
      line = 128 // ref.dtype.itemsize  # elements
      lines, R = K // line, ref.shape[1]
      for first in range(0, rows * lines, 128):
        place = lambda i, first=first, lines=lines: ((i + first) // lines).at_most(rows - 1)
        index = lambda p, i, lines=lines, line=line, R=R: (p.at_most(R - 1), i % lines * line)
        lanes.prefetch(ref.at[self._pool(b), :, h], self.path.at[b], place, index)

  def stage_keys(self, b, hk, smem) -> None:
    """Keys of the first sixteen rows to shared memory [parts, 128, 16]."""
    positions = self.positions(b, 0)
    for half in (0, TILE):
      lanes.fence()
      for i, part in enumerate(parts(self._by_column(self.k, b, hk, half, positions))):
        smem.at[i, pl.ds(half, TILE)][...] = part

  def decays(self, b, h, heads: int, lines):
    """Of each head the log decays behind every row, and behind them all, a line per row."""
    at, on = self._by_line(b)
    for p in range(heads):
      g = lanes.lookup(
        self.g.at[self._pool(b), :, h + p, 0], at, lanes.ROWS, f32, lambda at, _: (at,)
      )
      lines.at[p][...] = jnp.where(on, g, 0.0)
    lanes.sync()

    def sums(line):
      def chunk(c, carry):
        (behind, total), first = carry, c * CHUNK
        own = line.at[pl.ds(first, CHUNK)]
        every = lanes.gather(own, WIDE, tile, f32, lambda _, j: (j,))
        later = lanes.flags(WIDE, tile, lambda r, j, first: r.below(j + first), [first])
        return behind + jnp.where(later, every, 0.0), total + every

      zero = plgpu.layout_cast(jnp.zeros(WIDE, f32), tile)
      return [jnp.sum(x, axis=1) for x in lax.fori_loop(0, self.chunks(b), chunk, (zero, zero))]

    after, total = zip(*(sums(lines.at[p]) for p in range(heads)), strict=True)
    lanes.sync()
    return after, total


NOTHING = Pending((), (), None, None, None, None)


def parts(stored: list[jax.Array]) -> list[jax.Array]:
  """Exact bf16 parts, largest first, of rows as they are stored: one float32, or bf16 ones."""
  return lanes.three_parts(stored[0]) if stored[0].dtype == f32 else stored


def count_parts(dtypes) -> int:
  """How many `parts` rows of these dtypes have."""
  return 3 if jnp.dtype(dtypes[0]) == f32 else len(dtypes)


def products(shape, count, pair) -> jax.Array:
  """The sum over c < count of left right for (left, right) = pair(c), in float32 quality, both in
  parts: what is below 2^-24 of a product is left out."""

  def add(acc):
    def one(c, _):
      left, right = pair(c)
      for order in reversed(range(3)):
        for i, x in enumerate(left):
          if 0 <= order - i < len(right):
            plgpu.wgmma(acc, x, right[order - i])
      plgpu.wgmma_wait(0)

    lax.fori_loop(0, count, one, None)
    return acc[...]

  return pl.run_scoped(add, plgpu.ACC(shape, f32))


def meet(pending: Pending, b, hk, kq, width: int):
  """Products [64, rows] of up to 64 pending keys and the rows of kq [rows, K].

  They meet the window as the state does, `width` columns at a time.
  """

  def gram(acc):
    for j in range(0, K, width):
      columns = pl.ds(j, width)
      lanes.fence()
      for part in reversed(parts(pending.keys(b, hk, columns))):
        plgpu.wgmma(acc, part, kq.at[:, columns].transpose((1, 0)))
      plgpu.wgmma_wait(0)
    return acc[...]

  return pl.run_scoped(gram, plgpu.ACC((TILE, kq.shape[0]), f32))


def put_coefficients(met, afters, C) -> None:
  """C of each head in three parts, C [heads, 3, 64, rows], from what `meet` gave."""
  for p, after in enumerate(afters):
    for i, part in enumerate(lanes.three_parts(met * over_rows(jnp.exp(after), met.shape))):
      C.at[p, i][...] = part


def weighted(values: list[jax.Array], decay) -> list[jax.Array]:
  """Parts of u_i e^after_i [64, 16] from stored pseudo-values and e^after [16]."""
  u = functools.reduce(jnp.add, (x.astype(f32) for x in values))
  return lanes.three_parts(u * over_columns(decay, WIDE))
