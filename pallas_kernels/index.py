"""Where a lane's elements stand, and arithmetic on it that stays where it is written."""

import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith


def start(shape: tuple[int, ...], layout) -> list["Index"]:
  """Where this lane's first element of a tiled array stands."""
  return [Index.anew(i) for i in next(iter(layout.to_mgpu().thread_idxs(shape)))]


class Places:
  """Where a lane's elements of a tiled array stand, in the order of its registers: the first, and
  constant steps from it. So the addresses of a lane's elements are one address and constants.
  """

  def __init__(self, shape: tuple[int, ...], layout):
    tiled = layout.to_mgpu()
    strides = tiled.tiling.tile_strides(tuple(utils.get_contiguous_strides(shape)))
    self.steps = iter(
      [
        (*at[:-1], at[-1] + i)
        for register in np.ndindex(tiled.registers_shape(shape))
        for at in [[int(x) for x in np.unravel_index(np.dot(register, strides), shape)]]
        for i in range(tiled.vector_length)
      ]
    )
    self.first: list[Index] | None = None

  def __call__(self, at) -> list["Index"]:
    if self.first is None:
      self.first = [Index.anew(i) for i in at]
    return [i + step if step else i for i, step in zip(self.first, next(self.steps), strict=True)]


class Index:
  """An index of a lane's element and arithmetic on it; // and % are those of non-negative ones."""

  def __init__(self, value):
    self.value = value

  @classmethod
  def lane(cls) -> "Index":
    """This lane's number in its warpgroup."""
    return cls.anew(utils.thread_idx()) % 128

  @classmethod
  def anew(cls, value) -> "Index":
    """An index whose consequences stay where they are written. They are cheap, but the compiler
    would compute all of them before the loop over windows and keep them in registers."""
    i32 = ir.IntegerType.get_signless(32)
    if value.type != i32:
      value = arith.index_castui(i32, value)
    same = utils.inline_ptx("mov.u32 $0, $1;", value, result_types=i32, has_side_effects=True)
    return cls(arith.index_castui(ir.IndexType.get(), same))

  @classmethod
  def constant(cls, value: int) -> "Index":
    return cls(arith.constant(ir.IndexType.get(), value))

  def _binary(self, op, other) -> "Index":
    if isinstance(other, int):
      other = Index.constant(other)
    return Index(op(self.value, other.value))

  def __add__(self, other):
    return self._binary(arith.addi, other)

  def __rsub__(self, other: int):
    return Index(arith.subi(Index.constant(other).value, self.value))

  def __mul__(self, other):
    return self._binary(arith.muli, other)

  def __floordiv__(self, other):
    return self._binary(arith.divui, other)

  def __mod__(self, other):
    return self._binary(arith.remui, other)

  def at_most(self, last: int) -> "Index":
    return self._binary(arith.minui, last)

  def below(self, end: "int | Index") -> "Index":
    """A flag."""
    return self._binary(lambda x, y: arith.cmpi(arith.CmpIPredicate.ult, x, y), end)

  def equals(self, other: "int | Index") -> "Index":
    """A flag."""
    return self._binary(lambda x, y: arith.cmpi(arith.CmpIPredicate.eq, x, y), other)

  def choose(self, yes: "Index", no: "Index") -> "Index":
    """`yes` where this flag is set."""
    return Index(arith.select(self.value, yes.value, no.value))
