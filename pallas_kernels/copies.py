"""Rows of global memory through a path of them to shared memory, behind other work (cp.async).

As in `lanes`, a warpgroup of 128 lanes under Lane semantics. What is asked for between two calls of
`asked` is a group, and `brought` counts groups: every branch must close as many as any other.
"""

import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref

from pallas_kernels import lanes
from pallas_kernels.index import Index


def bring_rows(ref, to, at=None) -> None:
  """to[i, :W] = ref[at[i]], zeros where at[i] is negative; without `at`, to[i, :W] = ref[i]. It is
  on its way when this returns, and no register waits for it: see `brought`.

  ref [R, W] in global memory, rows of whole 16 bytes; `to` [n, >= W] and `at` [n] int32 in shared.
  """

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (2 if at is None else 3))
  def ask(_, ref, to, *at):
    W, n = ref.type.shape[1], to.type.shape[0]
    each = 128 // utils.bitwidth(ref.type.element_type)
    pieces = W // each
    row, column = Index.lane() // pieces, Index.lane() % pieces * each
    for first in range(0, n, 128 // pieces):
      here = row + first if first + 128 // pieces <= n else (row + first).at_most(n - 1)
      if at:
        _bring(ref, to, 16, memref.load(at[0], [here.value]), (column,), (here, column))
      else:
        _bring(ref, to, 16, None, (here, column), (here, column))

  ask(ref, to, *(() if at is None else (at,)))


def bring_words(ref, to, at=None) -> None:
  """to[p, i] = ref[at[i], p], zeros where at[i] is negative; without `at`, to[i] = ref[i].

  Elements of four bytes; otherwise as `bring_rows`.
  """

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (2 if at is None else 3))
  def ask(_, ref, to, *at):
    shape = to.type.shape
    assert np.prod(shape) <= 128
    lane = Index.lane()
    if not at:
      return _bring(ref, to, 4, None, (lane % shape[0],), (lane % shape[0],))
    p, i = lane // shape[1] % shape[0], lane % shape[1]
    _bring(ref, to, 4, memref.load(at[0], [i.value]), (p,), (p, i))

  ask(ref, to, *(() if at is None else (at,)))


def _bring(ref, to, size: int, row, place, target) -> None:
  """One piece of a lane; zeros where its row is negative."""
  i32 = ir.IntegerType.get_signless(32)
  constant = lambda n: arith.constant(i32, n)
  count = constant(size)
  if row is not None:
    count = arith.select(arith.cmpi(arith.CmpIPredicate.sge, row, constant(0)), count, constant(0))
    place = Index(arith.index_castui(ir.IndexType.get(), arith.maxsi(row, constant(0)))), *place
  source = utils.memref_slice(ref, tuple(i.value for i in place))
  slot = utils.memref_slice(to, tuple(i.value for i in target))
  kind = "cg" if size == 16 else "ca"
  utils.inline_ptx(
    f"cp.async.{kind}.shared.global [$0], [$1], {size}, $2;",
    utils.memref_ptr(slot), utils.memref_ptr(source), count, has_side_effects=True,
  )  # fmt: skip


def asked() -> None:
  """What was brought since the last call is one group, for `brought`."""

  @plgpu.inline_mgpu()
  def commit(_):
    utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)

  commit()


def brought(later: int = 0) -> None:
  """All groups but the last `later` ones have arrived, for all lanes."""

  @plgpu.inline_mgpu()
  def wait(_):
    utils.inline_ptx(f"cp.async.wait_group {later};", has_side_effects=True)

  wait()
  lanes.sync()


def left(later: int = 0) -> None:
  """All TMA copies to global memory but the last `later` ones have read shared memory.

  Only the lane that asks for copies knows.
  """

  @plgpu.inline_mgpu()
  def wait(_):
    utils.inline_ptx(f"cp.async.bulk.wait_group.read {later};", has_side_effects=True)

  wait()
