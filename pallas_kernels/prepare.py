"""Everything of a window that does not need the state: gates, norms, Gram matrices, their inverse.

For one or two value heads of a key head. Rows of a [64, .] tile are (head, key or query, node).
What it leaves in shared memory:

  matrices  [4, 64, 16] bf16: X and Y of `substitution` in three parts, and `MARK` where column s is
            on the path of the row's node; `product` says how windows of 8 nodes lie in it
  factors   [3, 64]: what S x is multiplied by, the write strength, and room for the former with
            e^G of pending writes
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes, substitution
from pallas_kernels.arith import bf16, decay_parts, f32, gates, inverse_norm, over_rows
from pallas_kernels.substitution import TILE, Shape

K = 128
MARK = 2.0**100  # MARK x MARK is an infinity, MARK x 0 is nothing
PITCH = TILE + 4  # of a transposed tile: its columns start on different banks


def scratch(at: Shape) -> dict[str, object]:
  """Shared memory: what is handed over is there twice, to be prepared a window ahead."""
  return {
    "matrices": plgpu.SMEM((2, 4, TILE, 16), bf16, transforms=lanes.swizzle(bf16, 16)),
    "factors": plgpu.SMEM((2, 3, TILE), f32),
    "flat": plgpu.SMEM((max(at.size, at.rows * PITCH),), f32),
    "lines": plgpu.SMEM((3, TILE), f32),
  }


def product(acc, right, at: Shape, rows) -> None:
  """acc += right [X; Y]' in float32 quality, for right-hand sides [64, nodes] in registers.

  One that is not finite is left out and marks, as an infinity, the nodes behind it and no others.
  `rows(i)` is matrix i, transposed. Its three parts h, m, l meet those of the right-hand sides in
  six products. Of 8 nodes, two of them are one: the matrices are then [h h], [m m] and [l h].
  """
  finite = jnp.abs(right) < jnp.inf
  mark = jnp.where(finite, 0.0, MARK).astype(bf16)
  h, m, l = lanes.three_parts(jnp.where(finite, right, 0.0))
  if at.nodes > 8:
    operands = [(mark, 3), (l, 0), (m, 1), (h, 2), (m, 0), (h, 1), (h, 0)]
  else:
    hm = lanes.beside(h, m)
    operands = [(lanes.beside(mark, mark), 3), (lanes.beside(h, l), 2), (hm, 1), (hm, 0)]
  for x, i in operands:
    plgpu.wgmma(acc, x, rows(i))


def _put_matrices(matrices, solved, path, at: Shape) -> None:
  h, m, l = lanes.three_parts(solved)
  mark = jnp.where(path, MARK, 0.0).astype(bf16)
  if at.nodes == 8:
    h, m, l = lanes.beside(h, h), lanes.beside(m, m), lanes.beside(l, h)
    mark = lanes.beside(mark, mark)
  for i, x in enumerate((h, m, l, mark)):
    matrices.at[i][...] = x


def prepare(kq, base, at: Shape, nodes, last: int, words, a, b, gate_params, heads: int,
            matrices, factors, *, flat, lines):  # fmt: skip
  """Returns write strength and log decay, each a value per row; leaves inverse norms in lines[2].

  kq     [64, K] raw rows of some windows; this one has keys at `base`, queries behind them
  words  per row: bits of the proper ancestors of its node
  a, b   per row: raw gate inputs
  last   nodes past it do not exist in any window
  """
  N, ROWS = at.nodes, at.rows
  tile, shape = plgpu.Layout.WGMMA, (TILE, N)
  of_rows = functools.partial(lanes.flags, (TILE,), lanes.ROWS)
  of_tile = functools.partial(lanes.flags, shape, tile)

  def gram(acc):
    plgpu.wgmma(acc, kq, kq.at[pl.ds(base, ROWS)].transpose((1, 0)))
    plgpu.wgmma_wait(0)
    return acc[...]

  raw = pl.run_scoped(gram, plgpu.ACC((TILE, ROWS), f32))
  lanes.scatter(flat, raw, tile, lambda r, c: (c * PITCH + r,))

  beta, g = gates(a, b, *gate_params)
  # Selected, never multiplied by zero: what stands in a row that does not exist must not get out.
  real = of_rows(lambda r, n: (r % N).at_most(last).below(n), [nodes])
  beta, g = jnp.where(real, beta, 0.0), jnp.where(real, g, 0.0)
  coarse, fine = decay_parts(g)
  lines.at[0][...] = coarse
  lines.at[1][...] = fine
  lanes.sync()

  # The diagonal of the product holds the squared norms.
  own = flat.at[pl.ds(base, ROWS * PITCH - ROWS)]
  square = lanes.gather(own, (TILE,), lanes.ROWS, f32, lambda r: (r % ROWS * (PITCH + 1),))
  products = lanes.gather(own, shape, tile, f32, lambda r, c: (c * PITCH + r % ROWS,))
  per_node = lambda i: lanes.gather(lines.at[i], shape, tile, f32, lambda r, c: (r // N * N + c,))
  inverse = inverse_norm(square)
  above = lanes.bits(words, N)
  path = above | of_tile(lambda r, c: c.equals(r % N))
  sums = [jnp.sum(jnp.where(path, per_node(i), 0.0), axis=1) for i in (0, 1)]
  lanes.sync()
  for i, x in enumerate((*sums, inverse)):
    lines.at[i][...] = x
  lanes.sync()
  is_key = lambda r, *_: (r % ROWS).below(N)
  scale = inverse * jnp.where(of_rows(is_key), beta, K**-0.5)
  gap = (over_rows(sums[0], shape) - per_node(0)) + (over_rows(sums[1], shape) - per_node(1))
  inverse_key = lanes.gather(lines.at[2], shape, tile, f32, lambda r, c: (r // ROWS * ROWS + c,))
  seen = jnp.where(of_tile(is_key), above, path)
  seen = seen & of_tile(lambda r, _, n: (r % N).below(n), [nodes])
  decayed = products * jnp.exp(jnp.where(seen, gap, 0.0)) * (over_rows(scale, shape) * inverse_key)
  # A node whose own inputs are not finite is marked by its right-hand side, not by its matrices.
  seen = seen & (jnp.abs(decayed) < jnp.inf)
  substitution.put(flat, jnp.where(seen, decayed, 0.0), at)
  factors.at[0][...] = scale * jnp.exp(sums[0] + sums[1])
  factors.at[1][...] = beta
  lanes.sync()
  substitution.solve(flat, heads, at)
  lanes.sync()
  _put_matrices(matrices, substitution.take(flat, at), path, at)
  lanes.sync()
  return beta, g
