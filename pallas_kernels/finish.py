"""From W = S [k; q]' of 64 value rows to their outputs and pseudo-values."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import history, lanes, prepare
from pallas_kernels.arith import f32, over_columns
from pallas_kernels.launch import Launch
from pallas_kernels.substitution import TILE

tile = plgpu.Layout.WGMMA


def parts_like(x, outs):
  """Each array with its part of x [.] float32: x is the float32 sum of the parts."""
  for out in outs:
    part = x.astype(out.dtype)
    yield out, part
    x = x - part.astype(f32)


def solved(run: Launch, w, v, b, p, buffer, waiting):
  """(o, u) [64, nodes] of 64 value rows from W = S [k; q]'; u is None where it is not wanted.

  waiting  staged pseudo-values of these rows that are pending, where they are met beside the state
  """
  at, n, shared = run.plan.shape, run.plan.shape.nodes, run.shared
  matrices, factors = shared.matrices.at[buffer], shared.factors.at[buffer]

  def factor(i, first, count):
    here = factors.at[i, pl.ds(p * at.rows + first, count)]
    return over_columns(plgpu.load(here, layout=lanes.COLS, optimized=False), (TILE, count))

  def rows(i, first, count):
    return matrices.at[i, pl.ds(p * at.rows + first, count)].transpose((1, 0))

  def beside(c):
    first = pl.multiple_of(c * history.CHUNK, history.CHUNK)
    here = pl.ds(first, history.CHUNK)
    decay = plgpu.load(shared.decays.at[buffer, p, here], layout=lanes.COLS, optimized=False)
    left = history.weighted(history.columns(waiting, 0, first), decay)
    return left, [shared.beside.at[buffer, i, here] for i in range(3)]

  if run.plan.beside:
    written = history.products(w.shape, run.pending.chunks(b), beside)
    met = factor(2, 0, at.rows) * w + factor(0, 0, at.rows) * written
  else:
    met = factor(0, 0, at.rows) * w
  right = factor(1, 0, n) * v.astype(f32) - lanes.columns(met, 0, n)
  first, count = (0, at.rows) if run.written.u else (n, n)

  def product(acc):
    prepare.product(acc, right, at, lambda i: rows(i, first, count))
    plgpu.wgmma_wait(0)
    return acc[...]

  both = pl.run_scoped(product, plgpu.ACC((TILE, count), f32))
  o = lanes.columns(met, n, n) + lanes.columns(both, n - first, n)
  return o, lanes.columns(both, 0, n) if run.written.u else None


def values(run: Launch, b, h, row):
  """Raw v [64, nodes] of a head from a value row on; past the last node it is repeated."""
  nodes, T = run.plan.shape.nodes, run.x.v.shape[1]
  at = lambda r, t: (t if T == nodes else t.at_most(T - 1), r)
  source = run.x.v.at[b, :, h, pl.ds(row, TILE)]
  return lanes.gather(source, (TILE, nodes), tile, source.dtype, at)


def finish(run: Launch, w, v, b, h, p, row, turn, nodes, waiting=None) -> None:
  """Writes the outputs, and pseudo-values if they are wanted, of 64 value rows.

  p  which head of the turn h is; v is what `values` gave for it; waiting as for `solved`
  """
  at, T = run.plan.shape, run.x.v.shape[1]
  exists = None if T == at.nodes else lambda r, t: t.below(T)
  o, u = solved(run, w, v, b, p, lax.rem(turn, 2), waiting)
  on = lanes.flags((TILE, at.nodes), tile, lambda r, t, n: t.below(n), [nodes])
  to = run.o.at[b, :, h, pl.ds(row, TILE)]
  lanes.scatter(to, jnp.where(on, o, 0.0).astype(to.dtype), tile, lambda r, t: (t, r), exists)

  def put(to, u, place):
    if not place:
      return lanes.scatter(to, u, tile, lambda r, t: (t, r), exists)
    at = lambda r, t, start, count: ((t + start) % to.shape[0], r)
    lanes.scatter(to, u, tile, at, lambda r, t, start, count: t.below(count), place)

  if u is not None:
    where, *place = run.written.place(b, nodes)
    for out, part in parts_like(jnp.where(on, u, 0.0), run.written.u):
      put(out.at[where, :, h, pl.ds(row, TILE)], part, place)
