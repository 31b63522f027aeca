"""The inverse of a window's unit triangle and its product with B, by forward substitution.

With A the decayed Gram of the keys and B that of queries and keys, a window of raw right-hand sides
r gives pseudo-values u = (I + A)^-1 r and outputs B u on top of what the state gives. So two small
matrices say everything about a window: X = (I + A)^-1, one column a lane, and Y = B (I + A)^-1, one
row a lane. Both are forward substitutions in float32: reversed in both indices, the second is
y_i = b_i - sum_(j < i) A'_ij y_j with A'_ij = A_(n-1-j, n-1-i). No powers of A are formed.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, memref, vector

from pallas_kernels import lanes
from pallas_kernels.lanes import Index

NODES = 16
ROWS = 2 * NODES  # of one head: keys, then queries
TILE = 64  # two heads

# In one flat scratch, a block per head: A, A', and right-hand sides b_i of Y. Four floats between
# the matrices keep the two halves of a warp on different banks.
_SECOND = NODES * NODES + 4
_RIGHT = 2 * _SECOND
_BLOCK = _RIGHT + NODES * NODES
_OUT = 2 * _BLOCK
_PITCH = NODES + 4
FLAT = _OUT + TILE * _PITCH


def put(flat, grams: jax.Array) -> None:
  """`grams` [64, 16]: rows (head, A or B, node), zero where masked."""

  n = NODES - 1

  def linear(r, s, of_keys, of_queries):
    """Start, and strides of the node and of the column."""
    is_key = (r // NODES % 2).below(1)
    start, by_node, by_column = (
      is_key.choose(Index.constant(x), Index.constant(y))
      for x, y in zip(of_keys, of_queries, strict=True)
    )
    return (r // ROWS * _BLOCK + start + r % NODES * by_node + s * by_column,)

  right = (_RIGHT + n * NODES, 1, -NODES)
  for of_keys in ((0, NODES, 1), (_SECOND + n * NODES + n, -1, -NODES)):
    index = functools.partial(linear, of_keys=of_keys, of_queries=right)
    lanes.scatter(flat, grams, plgpu.Layout.WGMMA, index)


def solve(flat, heads: int) -> None:
  """From what `put` left, X and Y of each head to where `take` finds them."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def run(_, flat):
    f32 = ir.F32Type.get()
    four = ir.VectorType.get((4,), f32)
    number = lambda x: arith.constant(f32, float(x))
    lane = Index.lane()
    with utils.when(lane.below(ROWS * heads).value):
      head, kind, j = lane // ROWS, lane // NODES % 2, lane % NODES
      is_key, base = kind.below(1), head * _BLOCK
      row = head * ROWS + kind * NODES
      at = is_key.choose(row * _PITCH + j, (row + j) * _PITCH + (NODES - 1)) + _OUT
      step = is_key.choose(Index.constant(_PITCH), Index.constant(-1))

      def row_of(i):
        """Right-hand side and coefficients of a row, asked for a row ahead of their use."""
        at = base + kind * _SECOND + NODES * i
        fours = [vector.load(four, flat, [(at + s).value]) for s in range(0, i, 4)]
        return memref.load(flat, [(base + j + (_RIGHT + NODES * i)).value]), fours

      xs: list[ir.Value] = []
      ahead = row_of(0)
      for i in range(NODES):
        utils.warp_barrier()  # otherwise the compiler loads all rows at once
        (given, fours), ahead = ahead, row_of(i + 1) if i + 1 < NODES else ahead
        unit = arith.select(j.equals(i).value, number(1), number(0))
        x = arith.select(is_key.value, unit, given)
        for s in range(i):
          a = vector.extract(fours[s // 4], [], ir.DenseI64ArrayAttr.get([s % 4]))
          x = math.fma(arith.negf(a), xs[s], x)
        xs.append(x)
        memref.store(x, flat, [at.value])
        at = at + step

  run(flat)


def take(flat) -> jax.Array:
  """[64, 16]: rows (head, X or Y, node), float32."""
  out = flat.at[pl.ds(_OUT, TILE * _PITCH)]
  index = lambda r, c: (r * _PITCH + c,)
  return lanes.gather(out, (TILE, NODES), plgpu.Layout.WGMMA, lanes.f32, index)
