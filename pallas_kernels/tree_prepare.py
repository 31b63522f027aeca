"""Everything of a tree that does not need the state, in halves of 32 nodes: see `tree_verify`.

Rows of a [64, .] tile are (key or query, node) of one half. For one value head it leaves

  matrices  [4, 64 per tile, 32] bf16: in three parts, and `MARK` where column s is on the path of
            the row's node. A tile per half: X and Y of `substitution`. Of two halves one more: what
            nodes of the second take from writes of the first, -A_10 and B_10
  factors   [2, 64 per half]: what S x is multiplied by, and the write strength
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes, substitution
from pallas_kernels.arith import (
  bf16,
  decay_parts,
  f32,
  inverse_norm,
  over_columns,
  over_rows,
)
from pallas_kernels.prepare import MARK
from pallas_kernels.substitution import TILE, Shape

K = 128
HALF = 32  # nodes: as many as a word of ancestors has bits
SHAPE = (TILE, HALF)
_LOG2_E = 1.4426950408889634
_COARSE = 10  # bits after the point: sums of 64 decays of at most 2^-200 are exact


def scratch(halves: int) -> dict[str, object]:
  """Shared memory for one window."""
  tiles = 2 * halves - 1
  return {
    "matrices": plgpu.SMEM((4, tiles * TILE, HALF), bf16, transforms=lanes.swizzle(bf16, HALF)),
    "factors": plgpu.SMEM((2, 2, halves * TILE), f32),
    "flat": plgpu.SMEM((Shape(HALF, tiles=halves).size,), f32),
    "lines": plgpu.SMEM((3, TILE), f32),
    "norms": plgpu.SMEM((halves * TILE,), f32),
    "words": plgpu.SMEM((halves, TILE), jnp.int32),
  }


def tiles(halves: int) -> list[tuple[int, int]]:
  """Halves of rows and of columns of the tiles of `matrices`."""
  return [(i, i) for i in range(halves)] + [(i, j) for i in range(halves) for j in range(i)]


def _iota(axis: int) -> jax.Array:
  return plgpu.broadcasted_iota(jnp.int32, SHAPE, axis, layout=plgpu.Layout.WGMMA)


def _line() -> jax.Array:
  return plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=lanes.ROWS)


def _own(i: int):
  """Rows of a half."""
  return pl.ds(i * TILE, TILE)


def _bit(s) -> jax.Array:
  return lax.shift_left(jnp.ones_like(s), s)


def _by_row(line, half: int, dtype) -> jax.Array:
  """Per row of a tile what a line holds of its node."""
  index = lambda r: (r % HALF + half * HALF,)
  return lanes.gather(line, (TILE,), lanes.ROWS, dtype, index)


def _path(words, i: int, j: int) -> jax.Array:
  """Where the column, a node of half j, is on the path to the row's node, of half i."""
  return lanes.bits(_by_row(words.at[j], i, jnp.int32), HALF)


def _by_key(line, half: int, pitch: int) -> jax.Array:
  index = lambda s: (s + half * pitch,)
  return over_columns(lanes.gather(line, (HALF,), lanes.COLS, f32, index), SHAPE)


def grams(kq, halves: int) -> tuple[list[jax.Array], list[list[jax.Array]]]:
  """Squared norm of every row of kq [64 per half, K], and its products with the keys of its own
  half and of those before: [i][j] is [64, 32]."""
  is_key = _iota(0) < HALF
  squares, products = [], []
  for i in range(halves):

    def multiply(*accs, i=i):
      for j, acc in enumerate(accs):
        columns = pl.ds(j * TILE, acc.shape[1])
        plgpu.wgmma(acc, kq.at[_own(i)], kq.at[columns].transpose((1, 0)))
      plgpu.wgmma_wait(0)
      return tuple(acc[...] for acc in accs)

    before = [plgpu.ACC(SHAPE, f32) for _ in range(i)]
    *before, both = pl.run_scoped(multiply, *before, plgpu.ACC((TILE, TILE), f32))
    with_keys, with_queries = (lanes.columns(both, j * HALF, HALF) for j in (0, 1))
    # The diagonal holds the squared norms.
    diagonal = lanes.bits(_bit(lax.rem(_line(), HALF)), HALF)
    square = jnp.where(diagonal, jnp.where(is_key, with_keys, with_queries), 0.0)
    squares.append(jnp.sum(square, axis=1))
    products.append([*before, with_keys])
  return squares, products


def path_words(parents, nodes, words) -> None:
  """Bit s of words[j, t]: node s of half j is t or an ancestor of t. Rows past `nodes` are zero."""
  halves, last = words.shape[0], parents.shape[0] - 1
  for j in range(halves):
    words.at[j][...] = plgpu.layout_cast(jnp.zeros((TILE,), jnp.int32), lanes.ROWS)
  lanes.sync()

  def node(t, parent):
    ahead = parents[jnp.minimum(t + 1, last)]
    for j in range(halves):
      # Every lane writes these words and reads its own.
      above = jnp.where(parent < 0, 0, words[j, jnp.clip(parent, 0, t)])
      own = jnp.where(lax.div(t, HALF) == j, lax.shift_left(1, lax.rem(t, HALF)), 0)
      words[j, t] = above | own
    lanes.fence()  # otherwise the compiler stores two nodes at once, behind the second one's loads
    return ahead

  lax.fori_loop(0, nodes, node, parents[0])


def path_sums(words, g: jax.Array, lines) -> None:
  """The decay on the way to each node as a power of two, coarse and fine: lines[0] and lines[1]."""
  for kind, part in enumerate(decay_parts(g * _LOG2_E, _COARSE)):
    lines.at[kind][...] = part
  lanes.sync()
  of_nodes = lambda j: lanes.gather(words.at[j], (TILE,), lanes.ROWS, jnp.int32, lambda t: (t,))
  paths = [lanes.bits(of_nodes(j), HALF) for j in range(words.shape[0])]

  def total(kind):
    on = (jnp.where(path, _by_key(lines.at[kind], j, HALF), 0.0) for j, path in enumerate(paths))
    return functools.reduce(jnp.add, (jnp.sum(x, axis=1) for x in on))

  sums = total(0), total(1)
  lanes.sync()
  for kind in (0, 1):
    lines.at[kind][...] = sums[kind]


def prepare(squares, products, words, beta, g, factors, *, flat, lines, norms) -> list[jax.Array]:
  """The tiles of `matrices` in float32. Leaves the inverse norms of the rows in `norms`.

  words    what `path_words` left
  beta, g  a value per node; zero of those that do not exist
  """
  halves, at = len(squares), Shape(HALF, tiles=len(squares))
  path_sums(words, g, lines)
  lines.at[2][...] = beta
  inverse = [inverse_norm(x) for x in squares]
  for i in range(halves):
    norms.at[_own(i)][...] = inverse[i]
  lanes.sync()

  is_key = _line() < HALF
  coarse, fine, betas = (
    [_by_row(lines.at[kind], i, f32) for i in range(halves)] for kind in (0, 1, 2)
  )
  scale = [x * jnp.where(is_key, b, K**-0.5) for x, b in zip(inverse, betas, strict=True)]
  for i in range(halves):
    factors.at[0, _own(i)][...] = scale[i] * jnp.exp2(coarse[i] + fine[i])
    factors.at[1, _own(i)][...] = betas[i]

  def decayed(i, j):
    """beta_t e^(G_ts) (k_t . k_s) in rows of keys, e^(G_ts) (q_t . k_s) in those of queries.
    Substitution takes A below its diagonal."""
    seen = _path(words, i, j)
    gap = over_rows(coarse[i], SHAPE) - _by_key(lines.at[0], j, HALF)
    gap = gap + (over_rows(fine[i], SHAPE) - _by_key(lines.at[1], j, HALF))
    norm = over_rows(scale[i], SHAPE) * _by_key(norms, j, TILE)
    x = products[i][j] * jnp.exp2(jnp.where(seen, gap, 0.0)) * norm
    # A node whose own inputs are not finite is marked by its right-hand side, not by its matrices.
    return jnp.where(seen & (jnp.abs(x) < jnp.inf), x, 0.0)

  taken = []
  for i, j in tiles(halves):
    x = decayed(i, j)
    if i == j:
      substitution.put(flat.at[pl.ds(i * at.block, at.block)], x, at)
    else:
      taken.append(jnp.where(over_rows(is_key, SHAPE), -x, x))
  lanes.sync()
  substitution.solve(flat, halves, at)
  lanes.sync()
  return [substitution.take(flat, at, i) for i in range(halves)] + taken


def put(solved: list[jax.Array], words, matrices) -> None:
  """Hands the tiles over."""
  zero = lanes.zero()
  for tile, (i, j) in enumerate(tiles(words.shape[0])):
    mark = jnp.where(_path(words, i, j), MARK, 0.0).astype(bf16)
    for part, x in enumerate((*lanes.three_parts(solved[tile]), mark)):
      matrices.at[part, pl.ds(zero + tile * TILE, TILE)][...] = x
  lanes.sync()
