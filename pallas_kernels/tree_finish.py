"""From W = S [k; q]' of 64 value rows to their outputs and pseudo-values, half a tree at a time.

With r_i the right-hand sides beta v - e^G S k of half i, [X; Y]_i the two small matrices of
`substitution`, A and B the decayed Gram matrices,

    [u; y]_0 = [X; Y]_0 r_0          o_0 = e^G S q + y_0        [d; z] = [-A; B]_10 u_0
    [u; y]_1 = [X; Y]_1 (r_1 + d)    o_1 = e^G S q + z + y_1

In the kernel all of this is transposed: its nodes are columns.
"""

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes, prepare
from pallas_kernels.arith import f32, over_columns
from pallas_kernels.substitution import TILE, Shape
from pallas_kernels.tree_prepare import HALF, SHAPE


def finish(w, v, values, factors, matrices, *, keep_writes: bool):
  """(o, u) [64, 32] of each half; u is None where it is neither asked for nor needed.

  v        of the first half; of later ones `values(i)`, asked for a half ahead
  factors, matrices  of `tree_prepare`
  """
  at, taken = Shape(HALF), None
  column = lambda x, kind: lanes.columns(x, kind * HALF, HALF)

  def product(right, tile, first, count):
    here = pl.ds(lanes.zero() + tile * TILE + first, count)

    def multiply(acc):
      rows = lambda i: matrices.at[i, here].transpose((1, 0))
      prepare.product(acc, right, at, rows)
      plgpu.wgmma_wait(0)
      return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((TILE, count), f32))

  halves = w.shape[1] // TILE
  for i in range(halves):
    last = i == halves - 1
    ahead = None if last else values(i + 1)

    def factor(kind, of, i=i):
      own = factors.at[kind, pl.ds(i * TILE + of * HALF, HALF)]
      return over_columns(plgpu.load(own, layout=lanes.COLS, optimized=False), SHAPE)

    own = lanes.columns(w, i * TILE, TILE)
    right = factor(1, 0) * v.astype(f32) - factor(0, 0) * column(own, 0)
    o = factor(0, 1) * column(own, 1)
    if taken is not None:
      right, o = right + column(taken, 0), o + column(taken, 1)
    if last and not keep_writes:
      u, y = None, product(right, i, HALF, HALF)
    else:
      both = product(right, i, 0, TILE)
      u, y = column(both, 0), column(both, 1)
    if not last:
      taken = product(u, halves, 0, TILE)
    v = ahead
    yield o + y, u
