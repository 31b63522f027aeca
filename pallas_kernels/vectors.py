"""Products of a tile of registers, or of short rows, with vectors that every lane reads.

As in `lanes`, a warpgroup of 128 lanes under Lane semantics, and nothing here synchronises. Vectors
are rows of 128 float32 in shared memory in `turned` order: of a WGMMA tile a lane has columns 2j,
2j + 1, 8 + 2j and 9 + 2j of every sixteen, j its place in a quad, and these stand side by side, so
that one load brings four of them and no banks conflict.
"""

import contextlib
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf, vector
from jaxlib.mlir.dialects import math as mlir_math

from pallas_kernels.index import Index, Places

K = 128
SIXTEEN, QUADS, WARPS = 16, 8, 4
GROUPS = K // SIXTEEN
DOWN = 0, 8  # rows of a lane, from its first one

f32 = jnp.float32


def turned(ref, to) -> None:
  """The first columns of rows ref [n, >= 128], n at most eight, to `to` [n, 128] float32."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2)
  def turn(_, ref, to):
    row, j, warp = _quad(to.type.shape[0])
    for i in range(GROUPS // WARPS):
      g = warp * (GROUPS // WARPS) + i
      four = [x for pair in _pairs(ref, row, j, g * SIXTEEN) for x in pair]
      vector.store(_vector(four), to, [row.value, (g * SIXTEEN + j * 4).value])

  turn(ref, to)


def dots(refs, x, to) -> None:
  """to[i, r] = x[r] . (the sum of ref[i, :128] over refs), for all rows of `to` [n, >= m].

  Parts refs, each [>= n, >= 128]; x [m, 128] turned. Eight rows and one vector at a time a warp.
  """

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (2 + len(refs)))
  def meet(_, x, to, *refs):
    n, m = to.type.shape[0], x.type.shape[0]
    row, j, warp = _quad(QUADS)
    with _loop(-(-n // QUADS) * m, WARPS) as first:
      at = first + warp
      here, r = (at // m * QUADS + row).at_most(n - 1), at % m
      total = [_zero()] * 4
      for g in range(GROUPS):
        own, four = _row(refs, here, j, g * SIXTEEN), _four(x, r, j, g)
        total = [mlir_math.fma(*ab, t) for *ab, t in zip(own, four, total, strict=True)]
      both = arith.addf(*(arith.addf(*total[i : i + 2]) for i in (0, 2)))
      vector.store(_vector([_over_quad(both)]), to, [here.value, r.value])

  meet(x, to, *refs)


def products(tile: jax.Array, ref, to) -> None:
  """to[i] = tile ref[i]: of a WGMMA tile [64, 128] float32 with each row of ref [n, 128], which are
  turned; to [n, 64] float32. A warp writes its own rows. Of more than two vectors a lane would have
  more in registers than a tile leaves room for."""

  @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.RefType()))
  def multiply(_, tile, ref, to):
    elements, n = dict(_elements(tile)), range(ref.type.shape[0])
    row, j = Index.lane() // 32 * 16 + Index.lane() % 32 // 4, Index.lane() % 4
    total = {chain: _zero() for chain in itertools.product(n, DOWN, (0, 1))}
    for g in range(GROUPS):
      for r in n:
        for e, y in enumerate(_four(ref, Index.constant(r), j, g)):
          column = SIXTEEN * g + 8 * (e // 2) + e % 2
          for down in DOWN:
            chain = r, down, g % 2
            total[chain] = mlir_math.fma(elements[down, column], y, total[chain])
    for r, down in itertools.product(n, DOWN):
      x = _over_quad(arith.addf(total[r, down, 0], total[r, down, 1]))
      vector.store(_vector([x]), to, [Index.constant(r).value, (row + down).value])

  multiply(tile, ref, to)


@contextlib.contextmanager
def _loop(end: int, step: int = 1) -> Iterator[Index]:
  """A loop that stays one, so that few vectors are in registers at once."""
  first, *more = (Index.constant(n).value for n in (0, end, step))
  loop = scf.ForOp(first, *more, [])
  with ir.InsertionPoint(loop.body):
    yield Index(loop.induction_variable)
    scf.yield_([])


def _elements(tile) -> Iterator[tuple[tuple[int, ...], ir.Value]]:
  """A lane's elements by rows and columns from its first one."""
  steps = Places(tile.shape, plgpu.Layout.WGMMA).steps
  for register in tile.registers.flat:
    for e in range(2):
      yield next(steps), vector.extract(register, [], ir.DenseI64ArrayAttr.get([e]))


def _quad(rows: int) -> tuple[Index, Index, Index]:
  """The row of a lane's quad, past the last one the last one; its place in it; its warp."""
  lane = Index.lane()
  return (lane // 4 % QUADS).at_most(rows - 1), lane % 4, lane // 32


def _pairs(ref, row: Index, j: Index, first) -> list[list[ir.Value]]:
  """This lane's four columns of sixteen from `first` on, as float32."""
  element = ref.type.element_type
  pair, wide = ir.VectorType.get((2,), element), ir.F32Type.get()
  loaded = []
  for b in (0, 8):
    both = vector.load(pair, ref, [row.value, (j * 2 + first + b).value])
    two = [vector.extract(both, [], ir.DenseI64ArrayAttr.get([e])) for e in range(2)]
    loaded.append([x if element == wide else arith.extf(wide, x) for x in two])
  return loaded


def _row(refs, row: Index, j: Index, first: int) -> list[ir.Value]:
  """The sum of parts; order as `_four`."""
  total: list[ir.Value] = []
  for ref in refs:
    four = [x for pair in _pairs(ref, row, j, first) for x in pair]
    total = [arith.addf(a, b) for a, b in zip(total, four, strict=True)] if total else four
  return total


def _four(ref, row: Index, j: Index, g: int) -> list[ir.Value]:
  """This lane's four of a turned vector's sixteen."""
  kind = ir.VectorType.get((4,), ir.F32Type.get())
  four = vector.load(kind, ref, [row.value, (j * 4 + SIXTEEN * g).value])
  return [vector.extract(four, [], ir.DenseI64ArrayAttr.get([e])) for e in range(4)]


def _over_quad(x: ir.Value) -> ir.Value:
  for distance in (1, 2):
    x = arith.addf(x, utils.shfl_bfly(x, distance))
  return x


def _vector(values: list[ir.Value]) -> ir.Value:
  return vector.from_elements(ir.VectorType.get((len(values),), ir.F32Type.get()), values)


def _zero() -> ir.Value:
  return arith.constant(ir.F32Type.get(), 0.0)
