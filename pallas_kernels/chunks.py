"""Pending rows into states, a few at a time: what both folds have in common."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import copies, lanes
from pallas_kernels.recurrent import Path
from pallas_kernels.tiles import LANES, Ahead, Items, Turn, leave, walk


class Chunks(NamedTuple):
  """How pending rows get into a state, a few at a time.

  bring(item, row, places)  asks for rows of a record at places, -1 for none, as `copies.bring_rows`
  dress()                   makes what has arrived what `apply` reads, and is done with it
  apply(S, item, n)         the state with the first n of them
  size                      rows of a chunk
  """

  bring: Callable
  dress: Callable
  apply: Callable
  size: int


def fold(
  items: Items, path: Path, chunks: Chunks, *, in_smem, out_smem, ready, places_smem
) -> None:
  """Every live item with what is pending, in place.

  One chunk of rows is on its way at any time: while one gets into the state the next one of the
  path is, or the first one of the next item's. places_smem [2, whole 128s].
  """
  size = chunks.size

  def fetch(item):
    return path.places(items.split(item)[0])

  def stage(places, number):
    for i, x in enumerate(places):
      places_smem.at[lax.rem(number, 2), pl.ds(i * LANES, LANES)][...] = x

  def ask(item, number, c):
    at = pl.ds(pl.multiple_of(c * size, size), size)
    row = jnp.maximum(path.row[items.split(item)[0]], 0)
    chunks.bring(item, row, places_smem.at[lax.rem(number, 2), at])
    copies.asked()

  def visit(item, S, turn: Turn):
    length = jnp.minimum(path.length[items.split(item)[0]], path.path.shape[1])
    count = lax.div(length + size - 1, size)

    def chunk(c, S):
      copies.brought()  # and all lanes are done with the chunk before
      chunks.dress()
      lanes.sync()
      last = c + 1 == count

      @pl.when(jnp.logical_not(last) | turn.more)
      def next_chunk():
        pick = lambda x, y: jnp.where(last, x, y)
        ask(pick(turn.following, item), pick(turn.number + 1, turn.number), pick(0, c + 1))

      return chunks.apply(S, item, jnp.minimum(length - c * size, size))

    S = lax.fori_loop(0, count, chunk, S)
    leave(S, out_smem, 0, items.tile(item), pending=0)

  begin = lambda item, following: ask(item, jnp.int32(0), jnp.int32(0))
  walk(items, visit, in_smem=in_smem, ready=ready, ahead=Ahead(begin, fetch, stage))


def places_smem(P: int):
  """Shared memory of `fold` for paths of P tokens."""
  return plgpu.SMEM((2, pl.cdiv(P, LANES) * LANES), jnp.int32)


def chunk_size(P: int, most: int) -> int:
  """Rows of a chunk, at most so many: the last one of a path ends no later than its places do."""
  end = places_smem(P).shape[1]
  return next(n for n in range(most, 0, -1) if pl.cdiv(P, n) * n <= end)
