"""Which batch rows a launch has work for, and work on several short rows at once.

As in `lanes`, a warpgroup of 128 lanes under Lane semantics, and nothing here synchronises.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, memref, vector

from pallas_kernels import lanes
from pallas_kernels.index import Index, Places

QUADS = 8  # of lanes, in a warp
AT_ONCE = 16  # words of flags whose loads are under way together


def find(to, least) -> jax.Array:
  """The number of b that are live, with ref[b] >= n for every (ref, n) of `least`.

  `to` [B] int32 in shared memory takes those b in order from its start, and the others from its
  end. Every warp finds all of them, so none waits for another.
  """
  refs, bounds = zip(*least, strict=True)

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(),) * (1 + len(refs)),
    return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
  )
  def build(_, to, *refs):
    B, lane = to.type.shape[0], _int(Index.lane() % 32)
    count = _constant(0)
    for start in range(0, B, 32 * AT_ONCE):
      flags = []
      for first in range(start, min(B, start + 32 * AT_ONCE), 32):
        b = arith.addi(lane, _constant(first))
        flags.append((b, _live(b, B, refs, bounds)))
      for b, flag in flags:
        count = _list(to, b, flag, count)
    return fa.FragmentedArray.splat(count, (), is_signed=True)

  return build(to, *refs)


def _live(b, B: int, refs, bounds):
  """A lane's flag, false past the last row."""
  at = _index(arith.minsi(b, _constant(B - 1)))
  flag = arith.cmpi(arith.CmpIPredicate.slt, b, _constant(B))
  for ref, bound in zip(refs, bounds, strict=True):
    enough = arith.cmpi(arith.CmpIPredicate.sge, memref.load(ref, [at]), _constant(bound))
    flag = arith.andi(flag, enough)
  return flag


def _list(to, b, flag, count):
  """Puts 32 rows in their places behind `count` live ones; the count with those of them."""
  B, i32 = to.type.shape[0], ir.IntegerType.get_signless(32)
  vote, below = utils.inline_ptx(
    "{ .reg .pred p; setp.ne.s32 p, $2, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;"
    " mov.u32 $1, %lanemask_lt; }",
    arith.extui(i32, flag), result_types=(i32, i32), has_side_effects=True, convergent=True,
  )  # fmt: skip
  before = arith.addi(count, math.ctpop(arith.andi(vote, below)))
  others = arith.subi(b, before)
  place = arith.select(flag, before, arith.subi(_constant(B - 1), others))
  with utils.when(arith.cmpi(arith.CmpIPredicate.slt, b, _constant(B))):
    memref.store(b, to, [_index(place)])
  return arith.addi(count, math.ctpop(vote))


def words(ref, first: int) -> jax.Array:
  """ref[first + i] in lane i, int32 [128]; past the end the last one."""
  layout = lanes.PER_ROW

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(),),
    return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=layout),
  )
  def load(_, ref):
    word = memref.load(ref, [(Index.lane() + first).at_most(ref.type.shape[0] - 1).value])
    word = vector.broadcast(ir.VectorType.get((1,), word.type), word)
    return fa.FragmentedArray(
      _registers=np.array([word], dtype=object), _layout=layout.to_mgpu(), _is_signed=True
    )

  return load(ref)


def map_rows(f: Callable, ref, to) -> None:
  """to[i, :N] = f(ref[i, :N]) for all rows, at most eight, at once: one to a quad of lanes.

  f takes and gives an array over the columns of a tile, and does to each what it would do to a row
  that all quads have. ref [n, >= N] and `to` [>= n, >= N] float32 in shared memory, N = 128.
  """
  shape, layout, last = (128,), lanes.COLS, ref.shape[0] - 1

  def places():
    """Row and column of each register of a lane."""
    lane, steps = Index.lane(), Places(shape, layout).steps
    row, column = (lane // 4 % QUADS).at_most(last), lane % 4 * 2
    for (step,), _ in zip(steps, steps, strict=True):
      yield row.value, (column + step).value

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(),),
    return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=layout),
  )
  def load(_, ref):
    pair = ir.VectorType.get((2,), ref.type.element_type)
    loaded = [vector.load(pair, ref, [*at]) for at in places()]
    registers = np.empty(len(loaded), dtype=object)
    registers[:] = loaded
    tiled = layout.to_mgpu()
    return fa.FragmentedArray(
      _registers=registers.reshape(tiled.registers_shape(shape)), _layout=tiled, _is_signed=None
    )

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
  def store(_, ref, x):
    for register, at in zip(x.registers.flat, places(), strict=True):
      vector.store(register, ref, [*at])

  store(to, f(load(ref)))


def _constant(value: int):
  return arith.constant(ir.IntegerType.get_signless(32), value)


def _index(value):
  return arith.index_castui(ir.IndexType.get(), value)


def _int(index: Index):
  return arith.index_castui(ir.IntegerType.get_signless(32), index.value)
