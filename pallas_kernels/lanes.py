"""Register-level moves that Pallas has no words for: gathers, transposed stores, broadcast rows.

Everything here is one warpgroup of 128 lanes under Lane semantics. None of it synchronises; the
kernels place their own barriers, because the automatic ones (two around every store) cost as much
as the arithmetic between them.
"""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

f32 = jnp.float32
bf16 = jnp.bfloat16

ROWS = plgpu.Layout.WGMMA.reduce(1)  # a value per row of a [64, N] tile
COLS = plgpu.Layout.WGMMA.reduce(0)  # a value per column

# One lane per value row (V = 128).
PER_ROW = plgpu.Layout.WG_STRIDED((128,), vec_size=1)


def swizzle(dtype, columns: int) -> tuple:
  """Tiles of 8 rows and `columns` columns, whose rows are interleaved so that no banks conflict."""
  return (
    plgpu.TilingTransform((8, columns)),
    plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize),
  )


COMPILER = plgpu.CompilerParams(
  lowering_semantics=plgpu.LoweringSemantics.Lane,
  unsafe_no_auto_barriers=True,
  reduction_scratch_bytes=0,
)


def sync() -> None:
  """All lanes have read and written shared memory; later copies and matrix products see it."""
  plgpu.commit_smem()


def fence() -> None:
  """No load moves across: without it the compiler asks for everything at once and takes registers
  that a second resident block needs."""

  @plgpu.inline_mgpu()
  def barrier(_):
    utils.warp_barrier()

  barrier()


def gather(ref, shape: tuple[int, ...], layout, dtype, index) -> jax.Array:
  """An array whose element at `at` is ref[index(*at)]; `index` maps `Index` values to a tuple."""

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)
  )
  def build(_, ref):
    load = lambda *at: memref.load(ref, [i.value for i in index(*map(Index, at))])
    signed = True if jnp.issubdtype(dtype, jnp.integer) else None
    return fa.FragmentedArray.build(shape, layout.to_mgpu(), load, is_signed=signed)

  return build(ref)


def scatter(ref, x: jax.Array, layout, index) -> None:
  """The inverse of `gather`. Lanes that hold the same element write the same value."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
  def store(_, ref, x):
    x.foreach(lambda value, at: memref.store(value, ref, [i.value for i in index(*map(Index, at))]))

  store(ref, x)


class Index:
  """An index of a lane's element: +, *, //, % and `at_most`, with non-negative integers."""

  def __init__(self, value):
    self.value = value

  def _binary(self, op, other) -> "Index":
    if isinstance(other, int):
      other = Index(arith.constant(ir.IndexType.get(), other))
    return Index(op(self.value, other.value))

  def __add__(self, other):
    return self._binary(arith.addi, other)

  def __mul__(self, other):
    return self._binary(arith.muli, other)

  def __floordiv__(self, other):
    return self._binary(arith.divui, other)

  def __mod__(self, other):
    return self._binary(arith.remui, other)

  def at_most(self, last: int) -> "Index":
    return self._binary(arith.minui, last)


def put_transposed(ref, x: jax.Array) -> None:
  """ref[j, i] = x[i, j] for a WGMMA tile; no bank conflicts if the pitch is 4 mod 32."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
  def scatter(_, ref, x):
    x.foreach(lambda value, at: memref.store(value, ref, [at[1], at[0]]))

  scatter(ref, x)


def scalars(ref, n: int) -> list[jax.Array]:
  """The first n elements of a float32 row as scalars that every lane holds, four per load."""
  splat = plgpu.Layout.WG_SPLAT(())
  total = ref.shape[0]

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(),),
    return_type=tuple(plgpu.ShapeDtypeStruct((), f32, layout=splat) for _ in range(n)),
  )
  def broadcast(_, ref):
    index, out = ir.IndexType.get(), []
    for first in range(0, n, 4):
      width = min(4, total - first)
      vec = ir.VectorType.get((width,), ir.F32Type.get())
      four = vector.load(vec, ref, [arith.constant(index, first)])
      for i in range(min(width, n - first)):
        value = vector.extract(four, [], ir.DenseI64ArrayAttr.get([i]))
        out.append(fa.FragmentedArray.splat(value, (), is_signed=None))
    return tuple(out)

  return list(broadcast(ref)) if n else []
