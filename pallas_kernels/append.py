"""A window's records behind the cursors of a ring, in place. Reference: `gdn.ops.append`.

Traffic: every record read once and written once. A block has a node, whose records arrive and
leave by TMA: no lane holds them. What is too short for that, a value a head, passes registers.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes

TILE = 64
UNIT = 16  # bytes that a copy is made of
BOX = 256  # elements of a copy along an axis, at most


def short(x) -> bool:
  """Whether a record is a value a head."""
  return x.ndim == 3 or x.shape[3] == 1


def line(ref, b, t):
  """A short record."""
  return ref.at[b, t] if len(ref.shape) == 3 else ref.at[b, t, :, 0]


def copy_short(source, to) -> None:
  """Past the last element, lanes repeat it."""
  (n,) = source.shape
  for first in range(0, n, TILE):
    at = lambda i, first=first: ((i + first).at_most(n - 1),)
    some = lanes.gather(source, (TILE,), lanes.ROWS, source.dtype, at)
    lanes.scatter(to, some, lanes.ROWS, at)


def kernel(*refs, count: int, ready, staged):
  pools, (row, at, nodes), records = refs[:count], refs[count : count + 3], refs[count + 3 :]
  b, t = lax.axis_index("slot"), lax.axis_index("node")

  @pl.when((row[b] >= 0) & (t < nodes[b]))
  def node():
    place = lambda pool: (row[b], lax.rem(at[b] + t, pool.shape[1]))
    every = list(zip(records, pools, strict=True))
    long = [x for x in every if not short(x[1])]
    for (record, _), buffer in zip(long, staged, strict=True):
      plgpu.copy_gmem_to_smem(record.at[b, t], buffer, ready)
    for record, pool in every:
      if short(pool):
        copy_short(line(record, b, t), line(pool, *place(pool)))
    plgpu.barrier_wait(ready)
    for (_, pool), buffer in zip(long, staged, strict=True):
      plgpu.copy_smem_to_gmem(buffer, pool.at[place(pool)])
    plgpu.wait_smem_to_gmem(0)


def append(pools, row, at, nodes, records):
  """Slots of one call are distinct, as everywhere."""
  leaves, form = jax.tree.flatten(pools)
  given = jax.tree.leaves(jax.tree.map(lambda pool, x: x.astype(pool.dtype), pools, records))
  long = [pool for pool in leaves if not short(pool)]
  for pool in long:
    if pool.ndim != 4 or max(pool.shape[2:]) > BOX or pool.shape[3] * pool.dtype.itemsize % UNIT:
      raise NotImplementedError(f"records of {pool.dtype}{list(pool.shape[2:])}")
  if not long:
    raise NotImplementedError("no record of heads and dims")
  (B, T), count = given[0].shape[:2], len(leaves)
  held = [jax.new_ref(pool) for pool in leaves]
  plgpu.kernel(
    lambda *refs, **shared: kernel(*refs, count=count, **shared),
    out_type=(),
    grid=(B, T),
    grid_names=("slot", "node"),
    scratch_types={
      "ready": plgpu.Barrier(num_arrivals=len(long)),
      "staged": [plgpu.SMEM(pool.shape[2:], pool.dtype) for pool in long],
    },
    compiler_params=lanes.COMPILER,
  )(*held, row, at, nodes, *given)
  return jax.tree.unflatten(form, [jax.freeze(x) for x in held])
