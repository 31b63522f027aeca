"""Writes that are pending: rows of a pool that a window's state has not received yet.

With the rows i of a slot's path in order and after_i the log decay of everything behind i,

    S' = e^G S + sum_i e^after_i u_i k_i'      S' x = e^G S x + sum_i (e^after_i u_i) (k_i . x)

so a window meets pending writes as one more small product, of pseudo-values and of k_i . x, which
is worked out once for all heads of a key head, beside the window's other matrices. after_i is a sum
of the decays that apply, never a difference. What does not exist is never read: rows are brought to
shared memory while the window before is worked on, zeros in place of those past the path's length.

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

from pallas_kernels import copies, lanes
from pallas_kernels.arith import f32, over_columns
from pallas_kernels.substitution import TILE

K = 128
CHUNK = 16
WIDE = (TILE, CHUNK)
tile = plgpu.Layout.WGMMA
i32 = jnp.int32


def whole(n: int, unit: int) -> int:
  """n, filled up to whole units."""
  return -(-n // unit) * unit


class Pending(NamedTuple):
  """Global memory: rows [N, R, ...] in parts, and for each batch row its places in them, whole
  sixteens, -1 where there is none, and the number of those that exist."""

  k: tuple[Any, ...]
  u: tuple[Any, ...]
  g: Any
  row: Any
  places: Any
  length: Any

  def chunks(self, b):
    """Sixteens of rows that a path has, the last one perhaps not full."""
    return lax.div(self.length[b] + CHUNK - 1, CHUNK)

  def ask_places(self, b, places) -> None:
    copies.bring_words(self.places.at[b], places)

  def ask_keys(self, b, hk, h, places, keys, decays) -> None:
    """Keys of a key head, and decays of its value heads from h on."""
    at = jnp.maximum(self.row[b], 0)
    for i, ref in enumerate(self.k):
      copies.bring_rows(ref.at[at, :, hk], keys.at[i], places)
    copies.bring_words(self.g.at[at, :, pl.ds(h, decays.shape[0]), 0], decays, places)

  def ask_values(self, b, h, start, places, values) -> None:
    """Pseudo-values of 64 value rows of a head."""
    at = jnp.maximum(self.row[b], 0)
    for i, ref in enumerate(self.u):
      copies.bring_rows(ref.at[at, :, h, pl.ds(start, TILE)], values.at[i], places)


NOTHING = Pending((), (), None, None, None, None)


class Staged(NamedTuple):
  """Shared memory of rows that were asked for, as they are stored; zeros where there are none."""

  places: Any  # [., sixteens]: two of each projector, two of each finisher, four of the preparer
  keys: Any  # [parts, rows, K + 16 bytes and more]
  values: Any  # [readers, parts, rows, 64 + 16 bytes], the projectors', then who else finishes
  decays: Any  # [pair, sixteens]

  @classmethod
  def scratch(cls, dtypes, rows: int, pair: int, readers: int, teams: int) -> "Staged":
    """For so many rows of these dtypes. Rows that a warp reads at once start on different banks."""
    sixteens, rows = whole(rows, CHUNK), whole(rows, 8)
    dtype, count = jnp.dtype(dtypes[0]), len(dtypes)
    pitch = lambda n, more: n + more // dtype.itemsize
    return cls(
      plgpu.SMEM((4 * teams + 4, sixteens), i32),
      plgpu.SMEM((count, rows, pitch(K, 32 if dtype == f32 else 16)), dtype),
      plgpu.SMEM((readers, count, rows, pitch(TILE, 16)), dtype),
      plgpu.SMEM((pair, sixteens), f32),
    )


def _read(rows, shape, first, index, exists=None):
  """Parts of a tile [64, .] of staged rows [parts, rows, .]."""

  def one(i):
    x = lanes.gather(rows.at[i], shape, tile, rows.dtype, index, first)
    return x if exists is None else jnp.where(exists, x, jnp.zeros((), x.dtype))

  return [one(i) for i in range(rows.shape[0])]


def keys(rows, first: int, width: int):
  """Keys [64, width] from a column on, a line per row, of staged ones [parts, rows, .]; lines past
  the last row repeat it."""
  last = rows.shape[1] - 1
  return _read(rows, (TILE, width), (), lambda r, c: (r.at_most(last), c + first))


def columns(rows, start: int, first):
  """Elements [64, 16] from one on of sixteen staged rows [parts, rows, .], a column per row."""
  n = rows.shape[1]
  exists = None
  if n % CHUNK:
    exists = lanes.flags(WIDE, tile, lambda _, j, first: (j + first).below(n), [first])
  return _read(
    rows, WIDE, [first], lambda e, j, first: ((j + first).at_most(n - 1), e + start), exists
  )


def put_keys(rows, smem) -> None:
  """Sixteen staged keys to shared memory [parts, 128, 16], in bf16 parts."""
  for half in (0, TILE):
    lanes.fence()
    for i, part in enumerate(parts(columns(rows, half, 0))):
      smem.at[i, pl.ds(half, TILE)][...] = part


def parts(stored: list[jax.Array]) -> list[jax.Array]:
  """Exact bf16 parts, largest first, of rows as they are stored: one float32, or bf16 ones."""
  return lanes.three_parts(stored[0]) if stored[0].dtype == f32 else stored


def count_parts(dtypes) -> int:
  """How many `parts` rows of these dtypes have."""
  return 3 if jnp.dtype(dtypes[0]) == f32 else len(dtypes)


def add(acc, left, right) -> None:
  """acc += left right, both in parts, in float32 quality: what is below 2^-24 of a product is left
  out."""
  for order in reversed(range(3)):
    for i, x in enumerate(left):
      if 0 <= order - i < len(right):
        plgpu.wgmma(acc, x, right[order - i])


def products(shape, count, pair) -> jax.Array:
  """The sum over c < count of left right for (left, right) = pair(c), as in `add`."""

  def sum_up(acc):
    def one(c, _):
      add(acc, *pair(c))
      plgpu.wgmma_wait(0)

    lax.fori_loop(0, count, one, None)
    return acc[...]

  return pl.run_scoped(sum_up, plgpu.ACC(shape, f32))


def meet(rows, kq, width: int):
  """Products [64, rows] of up to 64 staged keys and the rows of kq [rows, K].

  They meet the window as the state does, `width` columns at a time.
  """

  def gram(acc):
    for j in range(0, K, width):
      lanes.fence()
      for part in reversed(parts(keys(rows, j, width))):
        plgpu.wgmma(acc, part, kq.at[:, pl.ds(j, width)].transpose((1, 0)))
      plgpu.wgmma_wait(0)
    return acc[...]

  return pl.run_scoped(gram, plgpu.ACC((TILE, kq.shape[0]), f32))


def weighted(values: list[jax.Array], decay) -> list[jax.Array]:
  """Parts of u_i e^after_i [64, 16] from stored pseudo-values and e^after [16]."""
  u = functools.reduce(jnp.add, (x.astype(f32) for x in values))
  return lanes.three_parts(u * over_columns(decay, WIDE))
