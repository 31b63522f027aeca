"""Verify with writes that are pending, in one launch. Reference: `gdn.ops.XLA.step`.

Traffic per value head beyond `verify`: K + V values and a decay of each pending row, the keys once
per key head, and as much for each row that the window leaves; where pending rows are folded, the
state is written too.

    fold everything    TreeWY: at most 16 rows, folded on the state's one way through registers
    fold nothing       a ring between flushes: rows are met beside the state, which is only read
    fold some slots    a flush of the ring: `fold_rank` for those, then as between flushes

A window's rows may replace rows that are pending only where those are folded. Then the block that
reads a key head's pending keys has to be the one that writes its new ones, so it owns all value
heads of that key head, and writes the keys with the last of them.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn.ops import Gates, dtypes_of
from gdn.typing import Rows
from pallas_kernels import fold_rank, history, lanes, pipeline, verify
from pallas_kernels.arith import bf16, f32
from pallas_kernels.history import CHUNK
from pallas_kernels.launch import K, Shared, V, Window, Written
from pallas_kernels.substitution import TILE
from pallas_kernels.tuning import chosen
from pallas_kernels.verify import Config

MOST = 4 * CHUNK  # pending rows beside the state


def default(fold: bool, T: int, rows: int, state) -> Config:
  """For windows of T nodes and so many pending rows of float32. Two blocks share a multiprocessor
  where their shared memory does; else one has five warpgroups, or three and more chunks."""
  if fold and state == bf16:
    return Config(handed=0) if T > 8 else Config(handed=4)
  if fold or (T > 8 and rows <= 3 * CHUNK):
    return Config(ctas_per_sm=1, chunks=4, groups=5)
  if T > 8 or rows > 32:
    return Config(ctas_per_sm=1, chunks=8, groups=3)
  return Config(chunks=2 if rows > 24 else 3 if rows > 16 else 4)


def check(rows: Rows, pending, window) -> None:
  """Raises NotImplementedError for what this kernel does not do."""
  stored = {x.dtype for x in (*rows.k, *rows.u)}
  if not stored <= {jnp.dtype(f32), jnp.dtype(bf16)} or len(stored) > 1 or len(rows.k) > 2:
    raise NotImplementedError(f"rows of {[x.dtype.name for x in rows.k]}: fp32, bf16 or two bf16")
  if rows.k[0].dtype == f32 and len(rows.k) > 1:
    raise NotImplementedError("two parts of fp32")
  if rows.g.dtype != f32:
    raise ValueError("gates are float32 in every path")
  if rows.g.shape[1] < window.parents.shape[1]:
    raise ValueError(f"{rows.g.shape[1]} rows cannot take {window.parents.shape[1]} nodes")


def places_of(pending, most: int) -> tuple[jax.Array, jax.Array]:
  """Of each batch row where its pending rows stand, [B, whole sixteens], -1 where there is none,
  and how many there are. What a path says past its length counts for nothing."""
  length = jnp.where(pending.row >= 0, pending.length, 0)
  more = history.whole(most, CHUNK) - most
  path = jnp.pad(pending.path[:, :most], ((0, 0), (0, more)))
  there = jnp.arange(path.shape[1])[None] < length[:, None]
  return jnp.where(there, path, -1), length


def step(S, rows: Rows, pending, flush, at, window, params, *, config: Config | None = None,
         out_dtype=None):  # fmt: skip
  """`flush` is a flag for each slot, or one flag, known here, for all. Slots are distinct."""
  verify.check(S, window)
  check(rows, pending, window)
  (B, T, H, _), Hk, R = window.raw.v.shape, window.raw.q.shape[2], rows.g.shape[1]
  fold = flush is True
  pending = pending._replace(row=jnp.where(window.slots < 0, -1, pending.row))
  if fold and pending.path.shape[1] > CHUNK:
    raise NotImplementedError(f"{pending.path.shape[1]} pending rows to fold: at most {CHUNK}")
  if not fold:
    # What stays pending and what the window writes are different rows of R.
    left = min(pending.path.shape[1], max(R - T, 1))
    if left > MOST:
      raise NotImplementedError(f"{left} pending rows beside the state: at most {MOST}")
    if flush is not False:
      some = pending._replace(length=jnp.where(flush, pending.length, 0))
      S = fold_rank.fold_rank(S, rows, some, window.slots)
      pending = pending._replace(length=jnp.where(flush, 0, pending.length))
  else:
    left = pending.path.shape[1]
  dtypes, usual = dtypes_of(rows.k), default(fold, T, left, S.dtype)
  places, length = places_of(pending, left)
  # What fits shared memory depends on the pending rows.
  name = f"step{'_fold' * fold}_{places.shape[1]}x{sum(d.itemsize for d in dtypes)}"
  config = config or chosen(name, usual, state=S.dtype, channels=1, tokens=T, heads=B * H)
  how, grid = verify.plan(config, B, T, H, Hk)
  if fold:
    pair = 2 if H // Hk % 2 == 0 else 1
    how = how._replace(fold=True, pair=pair, together=H // Hk // pair, split_rows=False)
    leaving = min(config.leaving, K * S.dtype.itemsize // 128)  # no more than half a head has
    how = verify.shared_out(how, config)._replace(leaving=leaving)
    grid = min(B * Hk, config.ctas_per_sm * config.sms)
  else:
    how = how._replace(beside=True)
  x = verify.inputs(window, params)
  parts = len(rows.k)

  def kernel(S_gmem, *refs, **shared):
    take = iter(refs)
    some = lambda n: tuple(itertools.islice(take, n))
    k, u, (g,) = some(parts), some(parts), some(1)
    row, places, length, first = some(4)
    waiting = history.Pending(k, u, g, row, places, length)
    x_gmem, (o, beta, decay) = Window(*some(len(x))), some(3)
    written = Written(k, u, g, row, first)
    pipeline.run(S_gmem, x_gmem, waiting, o, beta, decay, written, Shared(**shared), how)

  out = [
    jax.ShapeDtypeStruct((B, T, H, V), out_dtype or window.raw.v.dtype),
    jax.ShapeDtypeStruct((B, T, H), f32),
    jax.ShapeDtypeStruct((B, T, H, 1), f32),
  ]
  scratch = verify.scratch(how, S.dtype, config.chunks, windows=2 * (32 // how.shape.rows))
  readers = how.teams if fold or how.finisher else 2
  scratch["staged"] = history.Staged.scratch(dtypes, left, how.pair, readers, how.teams)
  scratch["decays"] = plgpu.SMEM((2, 2 * how.pair, TILE), f32)
  if how.beside:
    scratch["beside"] = plgpu.SMEM(
      (2, 3, places.shape[1], how.shape.rows), bf16,
      transforms=lanes.swizzle(bf16, CHUNK),
    )  # fmt: skip
  if fold:
    scratch["keys"] = plgpu.SMEM(
      (2, history.count_parts(dtypes), K, CHUNK), bf16, transforms=lanes.swizzle(bf16, CHUNK)
    )
    scratch["weighted"] = plgpu.SMEM(
      (how.teams, 3, TILE, CHUNK), bf16, transforms=lanes.swizzle(bf16, CHUNK)
    )
  pool = functools.partial(jax.tree.map, jax.new_ref)
  state, stored = (pool(S) if fold else S), pool(rows)
  o, beta, g = verify.launch(kernel, out, grid, scratch, how)(
    state, *stored.k, *stored.u, stored.g, pending.row, places, length, at, *x
  )
  return o, Gates(beta, g), jax.freeze(state) if fold else S, jax.tree.map(jax.freeze, stored)
