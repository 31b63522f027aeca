"""Register-level moves that Pallas has no words for: gathers, transposed stores, broadcast rows.

Everything here is one warpgroup of 128 lanes under Lane semantics. None of it synchronises; the
kernels place their own barriers, because the automatic ones (two around every store) cost as much
as the arithmetic between them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector
from jaxlib.mlir.dialects import math as mlir_math

from pallas_kernels.index import Index, Places, start

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
  """All lanes have read and written shared memory; later copies and matrix products see it.

  Also before a copy that overwrites what was only read: behind a barrier without the fence, reads
  may still be on their way, and copies were seen to overtake them.
  """
  plgpu.commit_smem()


def meet() -> None:
  """All lanes are here. What they read last may still be on its way, what they used is not."""

  @plgpu.inline_mgpu()
  def barrier(_):
    utils.warpgroup_barrier()

  barrier()


def fence() -> None:
  """No load moves across: without it the compiler asks for everything at once and takes registers
  that a second resident block needs."""

  @plgpu.inline_mgpu()
  def barrier(_):
    utils.warp_barrier()

  barrier()


def zero() -> jax.Array:
  """A zero that no compiler knows: addresses made with it are worked out where they are used. It
  would work out those of buffers that stay in place before a loop, and keep them in registers."""

  @plgpu.inline_mgpu(
    return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(()))
  )
  def opaque(_):
    i32 = ir.IntegerType.get_signless(32)
    same = arith.index_castui(i32, Index.anew(arith.constant(i32, 0)).value)
    return fa.FragmentedArray.splat(same, (), is_signed=True)

  return opaque()


def gather(ref, shape: tuple[int, ...], layout, dtype, index, scalars=()) -> jax.Array:
  """An array whose element at `at` is ref[index(*at, *scalars)]; `index` maps `Index` values to a
  tuple."""
  splat = [plgpu.Layout.WG_SPLAT(())] * len(scalars)

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(), *splat),
    return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=layout),
  )
  def build(_, ref, *scalars):
    places, more = Places(shape, layout), [Index.anew(y.registers.item()) for y in scalars]
    load = lambda *at: memref.load(ref, [i.value for i in index(*places(at), *more)])
    return fa.FragmentedArray.build(shape, layout.to_mgpu(), load, is_signed=signed(dtype))

  return build(ref, *scalars)


def flags(shape: tuple[int, ...], layout, test, scalars=()) -> jax.Array:
  """test(*at, *scalars) of `Index` values, for every element. Numbers of rows and columns would be
  made before a loop, and kept in registers."""
  splat = [plgpu.Layout.WG_SPLAT(())] * len(scalars)

  @plgpu.inline_mgpu(
    arg_types=tuple(splat),
    return_type=plgpu.ShapeDtypeStruct(shape, jnp.bool_, layout=layout),
  )
  def build(_, *scalars):
    places, more = Places(shape, layout), [Index.anew(y.registers.item()) for y in scalars]
    one = lambda *at: test(*places(at), *more).value
    return fa.FragmentedArray.build(shape, layout.to_mgpu(), one, is_signed=False)

  return build(*scalars)


def signed(dtype) -> bool | None:
  return True if jnp.issubdtype(dtype, jnp.integer) else None


def put_decays(ref, to) -> None:
  """Of log decays, ref [heads, n]: to[p, i] = e^(the sum behind i), to[heads + p, 0] = e^(all).

  n is at most 64 and `to` [2 heads, 64]; past n it may hold anything. A warp has a head, a lane two
  of its elements; sums are of neighbours, then of neighbours' sums, and nothing is subtracted.
  """
  heads, n = ref.shape

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2)
  def scan(_, ref, to):
    zero = arith.constant(ir.F32Type.get(), 0.0)
    head, lane = Index.lane() // 32 % heads, Index.lane() % 32

    def element(first):
      at = lane + first
      there = at.below(n).value
      return arith.select(there, memref.load(ref, [head.value, at.at_most(n - 1).value]), zero)

    def down(x, distance):
      return utils.inline_ptx(
        "{ .reg .pred p; .reg .f32 t; shfl.sync.down.b32 t|p, $1, "
        f"{distance}, 0x1f, 0xffffffff; selp.f32 $0, t, 0f00000000, p; }}",
        x, result_types=x.type, has_side_effects=True, convergent=True,
      )  # fmt: skip

    def behind(x):
      """Sums behind each lane, and in the first lane of all."""
      for distance in (1, 2, 4, 8, 16):
        x = arith.addf(x, down(x, distance))
      return down(x, 1), x

    def first(x):
      text = "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;"
      return utils.inline_ptx(text, x, result_types=x.type, has_side_effects=True, convergent=True)

    def put(row, column, x):
      memref.store(mlir_math.exp(x), to, [row.value, column.value])

    low, total = behind(element(0))
    total = first(total)
    if n > 32:
      high, more = behind(element(32))
      more = first(more)
      put(head, lane + 32, high)
      low, total = arith.addf(low, more), arith.addf(total, more)
    put(head, lane, low)
    put(head + heads, Index.constant(0), total)

  scan(ref, to)


def put_rows(ref, x: jax.Array) -> None:
  """The first rows, whole sixteens, of a bf16 WGMMA tile to ref [rows, N] of `swizzle(bf16, 16)`.

  Such a tile's rows are 32 bytes, and its halves change places in every other four rows.
  """
  shape, tile = x.shape, plgpu.Layout.WGMMA

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzle(bf16, 16)), tile))
  def store(_, ref, x):
    (row, column), steps = start(shape, tile), Places(shape, tile).steps
    half, row_of, tile_of = row // 4 % 2, row % 8, row // 8
    with utils.when((tile_of * 8).below(8 * ref.type.shape[0]).value):
      for register in x.registers.flat:
        (down, right), _ = next(steps), next(steps)
        other = half if right // 8 % 2 == 0 else 1 - half
        place = tile_of + down // 8, Index.constant(right // 16), row_of, other * 8 + column
        vector.store(register, ref, [i.value for i in place])

  store(ref, x)


def scatter(ref, x: jax.Array, layout, index, keep=None, scalars=()) -> None:
  """The inverse of `gather`. Lanes that hold the same element write the same value; `keep(*at)`
  says which elements are written. Both get `scalars`, int32, behind the place."""
  splat = [plgpu.Layout.WG_SPLAT(())] * len(scalars)

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *splat))
  def store(_, ref, x, *scalars):
    places = Places(x.shape, layout)
    more = [Index.anew(y.registers.item()) for y in scalars]

    def one(value, at):
      at = (*places(at), *more)
      put = lambda: memref.store(value, ref, [i.value for i in index(*at)])
      if keep is None:
        put()
      else:
        with utils.when(keep(*at).value):
          put()

    x.foreach(one)

  store(ref, x, *scalars)


def put_back(ref, x: jax.Array) -> None:
  """A WGMMA tile with rows of 128 bytes to where `plgpu.load(ref, optimized=False)` has it from, so
  every lane writes what it has read."""
  rows = swizzle(x.dtype, x.shape[1])

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(rows), plgpu.Layout.WGMMA))
  def store(_, ref, x):
    x.store_tiled(ref, swizzle=128, optimized=False)

  store(ref, x)


def bits(words: jax.Array, n: int) -> jax.Array:
  """[64, n] bool: which of the lowest n bits of a word per row are set.

  A lane shifts its words by its first column once, and tests against constants.
  """
  shape, tile = (words.shape[0], n), plgpu.Layout.WGMMA

  @plgpu.inline_mgpu(
    arg_types=(ROWS,), return_type=plgpu.ShapeDtypeStruct(shape, jnp.bool_, layout=tile)
  )
  def test(_, words):
    i32, steps = ir.IntegerType.get_signless(32), Places(shape, tile).steps
    first = arith.index_castui(i32, start(shape, tile)[1].value)
    rows: list[ir.Value] = []
    words.foreach(lambda word, _: rows.append(arith.shrui(word, first)))

    def one(*_):
      row, column = next(steps)
      bit = arith.andi(rows[row // 8], arith.constant(i32, 1 << column))
      return arith.cmpi(arith.CmpIPredicate.ne, bit, arith.constant(i32, 0))

    return fa.FragmentedArray.build(shape, tile.to_mgpu(), one, is_signed=False)

  return test(words)


def beside(x: jax.Array, y: jax.Array) -> jax.Array:
  """[x y]: the columns of two WGMMA tiles."""
  tile, n = plgpu.Layout.WGMMA, x.shape[1] + y.shape[1]

  @plgpu.inline_mgpu(
    arg_types=(tile, tile),
    return_type=plgpu.ShapeDtypeStruct((x.shape[0], n), x.dtype, layout=tile),
  )
  def join(_, x, y):
    both = np.concatenate([x.registers, y.registers], axis=1)
    return fa.FragmentedArray(_registers=both, _layout=x.layout, _is_signed=None)

  return join(x, y)


def three_parts(x: jax.Array) -> list[jax.Array]:
  """A WGMMA tile of float32 as the sum of three bf16 ones: 8 + 8 + 8 bits, nothing lost.

  Each part is cut off, not rounded: conversions have a quarter of the throughput of a mask.
  """
  tile = plgpu.Layout.WGMMA

  @plgpu.inline_mgpu(
    arg_types=(tile,),
    return_type=tuple(plgpu.ShapeDtypeStruct(x.shape, bf16, layout=tile) for _ in range(3)),
  )
  def split(_, x):
    kind = lambda t: ir.VectorType.get((2,), t)
    i16, i32 = (ir.IntegerType.get_signless(n) for n in (16, 32))
    every = lambda n: vector.broadcast(kind(i32), arith.constant(i32, n))
    high, sixteen = every(-65536), every(16)
    parts = [x.registers.copy() for _ in range(3)]
    for at, value in np.ndenumerate(x.registers):
      for part in parts:
        bits = vector.bitcast(kind(i32), value)
        upper = arith.trunci(kind(i16), arith.shrui(bits, sixteen))
        part[at] = vector.bitcast(kind(ir.BF16Type.get()), upper)
        cut = vector.bitcast(kind(ir.F32Type.get()), arith.andi(bits, high))
        value = arith.subf(value, cut)
    return tuple(
      fa.FragmentedArray(_registers=part, _layout=x.layout, _is_signed=None) for part in parts
    )

  return list(split(x))


def columns(x: jax.Array, start: int, n: int) -> jax.Array:
  """Columns of a WGMMA tile, a multiple of eight."""
  tile = plgpu.Layout.WGMMA

  @plgpu.inline_mgpu(
    arg_types=(tile,), return_type=plgpu.ShapeDtypeStruct((x.shape[0], n), x.dtype, layout=tile)
  )
  def cut(_, x):
    return x[:, start : start + n]

  return cut(x)


def hand_over(ref, x: jax.Array) -> None:
  """A WGMMA tile [64, N] float32 to ref [N / 8, 128, 4]: four values of a lane side by side."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
  def store(_, ref, x):
    lane, first = Index.lane().value, Index.constant(0).value
    element = lambda pair, e: vector.extract(pair, [], ir.DenseI64ArrayAttr.get([e]))
    for i, pairs in enumerate(x.registers.reshape(-1, 2)):
      four = [element(pair, e) for pair in pairs for e in range(2)]
      values = vector.from_elements(ir.VectorType.get((4,), ir.F32Type.get()), four)
      vector.store(values, ref, [Index.constant(i).value, lane, first])

  store(ref, x)


def received(ref) -> jax.Array:
  """What `hand_over` left, for the same lanes of another warpgroup."""
  shape, tile = (64, 8 * ref.shape[0]), plgpu.Layout.WGMMA

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, f32, layout=tile)
  )
  def load(_, ref):
    lane, first = Index.lane().value, Index.constant(0).value
    kind = lambda n: ir.VectorType.get((n,), ir.F32Type.get())
    pairs = []
    for i in range(ref.type.shape[0]):
      four = vector.load(kind(4), ref, [Index.constant(i).value, lane, first])
      for at in (0, 2):
        pairs.append(vector.extract_strided_slice(kind(2), four, [at], [2], [1]))
    registers = np.empty(len(pairs), dtype=object)
    registers[:] = pairs
    layout = tile.to_mgpu()
    return fa.FragmentedArray(
      _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=None
    )

  return load(ref)


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
