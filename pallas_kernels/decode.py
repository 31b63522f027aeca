"""One token per slot, the state read and written in place. Reference: `gdn.ops.XLA.decode`.

Traffic per value head: the state read once and written once, the raw inputs of one token, one
output row.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import arith, recurrent, tiles
from pallas_kernels.recurrent import Inputs
from pallas_kernels.tiles import DEFAULT, HALVES, Config, Items
from pallas_kernels.tuning import chosen


def kernel(S_gmem, *refs, in_smem, out_smem, ready, decay_smem):
  *inputs, nodes_gmem, slots_gmem, o_gmem = refs
  x = Inputs(*inputs)
  items = Items(S_gmem, slots_gmem, nodes_gmem)

  def visit(item, S, turn):
    del turn
    b, h, m = items.split(item)
    beta, g = arith.gates(*x.gates(b, 0, h), *x.head(h))
    q, k, v = x.query(b, 0, h), x.key(b, 0, h), x.value(b, 0, h, m)
    S, _ = recurrent.advance(S, k, v, beta, recurrent.decay(g, decay_smem))
    tiles.leave(S, out_smem, 0, items.tile(item), pending=0)
    recurrent.put_row(o_gmem.at[b, 0, h], m, recurrent.read(S, q))

  def miss(item):
    b, h, m = items.split(item)
    recurrent.put_row(o_gmem.at[b, 0, h], m, recurrent.nothing())

  tiles.walk(items, visit, miss, in_smem=in_smem, ready=ready)


def decode(S, window, params, *, config: Config | None = None, out_dtype=None):
  raw = window.raw
  recurrent.check(S, raw.k, raw.v, raw.a)
  (B, _, H, _), E = raw.v.shape, raw.a.shape[3]
  config = config or chosen("decode", DEFAULT, state=S.dtype, channels=E, tokens=1, heads=B * H)
  pool = jax.new_ref(S)
  out = jax.ShapeDtypeStruct(raw.v.shape, out_dtype or raw.v.dtype)
  scratch = tiles.scratch(S.dtype, 2, 1) | {"decay_smem": plgpu.SMEM((E,), jnp.float32)}
  o = tiles.launch(kernel, out, config, B * H * HALVES, scratch)(
    pool, *recurrent.inputs(window, params), window.nodes, window.slots
  )
  return o, jax.freeze(pool)
