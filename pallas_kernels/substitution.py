"""The inverse of a window's unit triangle and its product with B, by forward substitution.

With A the decayed Gram of the keys and B that of queries and keys, a window of raw right-hand sides
r gives pseudo-values u = (I + A)^-1 r and outputs B u on top of what the state gives. So two small
matrices say everything about a window: X = (I + A)^-1, one column a lane, and Y = B (I + A)^-1, one
row a lane. Both are forward substitutions in float32: reversed in both indices, the second is
y_i = b_i - sum_(j < i) A'_ij y_j with A'_ij = A_(n-1-j, n-1-i). No powers of A are formed.
"""

import dataclasses
import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math, memref, vector

from pallas_kernels import lanes
from pallas_kernels.index import Index

TILE = 64


@dataclasses.dataclass(frozen=True)
class Shape:
  """How windows lie in [64, .] tiles, rows (head, key or query, node), and in a flat scratch.

  The scratch has a block per head, of A, A' and the right-hand sides b_i of Y, and then X and Y.
  Four floats between the matrices keep the two halves of a warp on different banks.
  """

  nodes: int
  tiles: int = 1

  @property
  def rows(self) -> int:
    """Rows of one head: its keys, then its queries."""
    return 2 * self.nodes

  @property
  def second(self) -> int:
    return self.nodes**2 + 4

  @property
  def right(self) -> int:
    return 2 * self.second

  @property
  def block(self) -> int:
    return self.right + self.nodes**2

  @property
  def out(self) -> int:
    return self.tiles * TILE // self.rows * self.block

  @property
  def pitch(self) -> int:
    return self.nodes + 4

  @property
  def size(self) -> int:
    return self.out + self.tiles * TILE * self.pitch


def put(flat, grams: jax.Array, at: Shape) -> None:
  """`grams` [64, nodes]: rows (head, A or B, node), zero where masked."""
  n, last = at.nodes, at.nodes - 1

  def linear(r, s, of_keys, of_queries):
    """Start, and strides of the node and of the column."""
    is_key = (r // n % 2).below(1)
    start, by_node, by_column = (
      is_key.choose(Index.constant(x), Index.constant(y))
      for x, y in zip(of_keys, of_queries, strict=True)
    )
    return (r // at.rows * at.block + start + r % n * by_node + s * by_column,)

  right = (at.right + last * n, 1, -n)
  for of_keys in ((0, n, 1), (at.second + last * n + last, -1, -n)):
    index = functools.partial(linear, of_keys=of_keys, of_queries=right)
    lanes.scatter(flat, grams, plgpu.Layout.WGMMA, index)


def solve(flat, heads: int, at: Shape) -> None:
  """From what `put` left, X and Y of each head to where `take` finds them."""

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
  def run(_, flat):
    f32, n = ir.F32Type.get(), at.nodes
    four = ir.VectorType.get((4,), f32)
    number = lambda x: arith.constant(f32, float(x))
    lane = Index.lane()
    # Whole warps, or the barriers below would wait for lanes that never come.
    with utils.when(lane.below(max(32, at.rows * heads)).value):
      head, kind, j = lane // at.rows, lane // n % 2, lane % n
      is_key, base = kind.below(1), head * at.block
      row = head * at.rows + kind * n
      place = is_key.choose(row * at.pitch + j, (row + j) * at.pitch + (n - 1)) + at.out
      step = is_key.choose(Index.constant(at.pitch), Index.constant(-1))

      def row_of(i):
        """Right-hand side and coefficients of a row, asked for a row ahead of their use."""
        first = base + kind * at.second + n * i
        fours = [vector.load(four, flat, [(first + s).value]) for s in range(0, i, 4)]
        return memref.load(flat, [(base + j + (at.right + n * i)).value]), fours

      xs: list[ir.Value] = []
      chains = max(1, n // 16)  # that a sum is split into: one would be a latency per term
      ahead = row_of(0)
      for i in range(n):
        utils.warp_barrier()  # otherwise the compiler loads all rows at once
        (given, fours), ahead = ahead, row_of(i + 1) if i + 1 < n else ahead
        unit = arith.select(j.equals(i).value, number(1), number(0))
        sums = [arith.select(is_key.value, unit, given), *[number(0)] * (chains - 1)]
        for s in range(i):
          a = vector.extract(fours[s // 4], [], ir.DenseI64ArrayAttr.get([s % 4]))
          sums[s % chains] = math.fma(arith.negf(a), xs[s], sums[s % chains])
        xs.append(functools.reduce(arith.addf, sums))
        memref.store(xs[i], flat, [place.value])
        place = place + step

  run(flat)


def take(flat, at: Shape, tile: int = 0) -> jax.Array:
  """[64, nodes]: rows (head, X or Y, node), float32."""
  out = flat.at[pl.ds(at.out + tile * TILE * at.pitch, TILE * at.pitch)]
  index = lambda r, c: (r * at.pitch + c,)
  return lanes.gather(out, (TILE, at.nodes), plgpu.Layout.WGMMA, lanes.f32, index)
