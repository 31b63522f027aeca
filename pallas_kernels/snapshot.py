"""Token by token, the state kept after each node. Reference: `gdn.ops.XLA.snapshot`.

Traffic per value head: the state read once, one state written per kept node, the raw inputs and
outputs of a verify. Writing dominates: seventeen states cross memory for a window of sixteen.

A node whose parent is not its predecessor reads the last state that was kept on its path back (or
the root from the pool), and repeats the writes from there to its parent. Rows past `nodes` and
states past them are not written; outputs of those rows are zero.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn.ops import Gates
from pallas_kernels import arith, lanes, recurrent, tiles
from pallas_kernels.recurrent import Inputs
from pallas_kernels.tiles import DEFAULT, HALVES, TILE, Config, Items
from pallas_kernels.tuning import chosen


def kernel(S_gmem, *refs, in_smem, out_smem, ready, back, decay_smem):
  *inputs, parents_gmem, nodes_gmem, slots_gmem, o_gmem, beta_gmem, g_gmem, states_gmem = refs
  x = Inputs(*inputs)
  T, keep, buffers = x.v.shape[1], states_gmem.shape[1], out_smem.shape[0]
  items = Items(S_gmem, slots_gmem, nodes_gmem)

  def visit(item, S, turn):
    del turn
    b, h, m = items.split(item)
    rows = pl.ds(m * TILE, TILE)
    nodes, head = nodes_gmem[b], x.head(h)

    def load(t):
      t = jnp.minimum(t, nodes - 1)
      return (
        x.query(b, t, h), x.key(b, t, h), x.value(b, t, h, m), x.gates(b, t, h),
        parents_gmem[b, t],
      )  # fmt: skip

    def climb(node, to):
      """The first node on the way from `node` to the root that is at most `to`."""
      return lax.while_loop(lambda n: n > to, lambda n: parents_gmem[b, n], node)

    def again(parent):
      """The state after `parent`."""

      def write(s, S):
        lanes.sync()  # no lane still reads the decay of the write before
        beta, g = arith.gates(*x.gates(b, s, h), *head)
        decay = recurrent.decay(g, decay_smem.at[2])
        return recurrent.advance(S, x.key(b, s, h), x.value(b, s, h, m), beta, decay)[0]

      def ancestor(s, S):
        return lax.cond(climb(parent, s) == s, lambda S: write(s, S), lambda S: S, S)

      return lax.fori_loop(keep, parent + 1, ancestor, reload(climb(parent, keep - 1)))

    def reload(parent):
      plgpu.wait_smem_to_gmem(0)
      lanes.sync()  # every lane has taken what was reloaded before

      @pl.when(parent < 0)
      def from_root():
        plgpu.copy_gmem_to_smem(items.tile(item), out_smem.at[0], back)

      @pl.when(parent >= 0)
      def from_node():
        kept = states_gmem.at[b, jnp.maximum(parent, 0), h, rows]
        plgpu.copy_gmem_to_smem(kept, out_smem.at[0], back)

      plgpu.barrier_wait(back)
      return plgpu.load(out_smem.at[0], layout=plgpu.Layout.WGMMA).astype(jnp.float32)

    def node(t, carry):
      S, (q, k, v, gate_inputs, parent) = carry
      beta, g = arith.gates(*gate_inputs, *head)
      ahead = load(t + 1)
      S = lax.cond(parent == t - 1, lambda S: S, lambda _: again(parent), S)
      # A lane that is behind still reads the decay of the node before.
      decay = recurrent.decay(g, decay_smem.at[lax.rem(t, 2)])
      S, _ = recurrent.advance(S, k, v, beta, decay)

      @pl.when(t < keep)
      def kept():
        target = states_gmem.at[b, jnp.minimum(t, keep - 1), h, rows]
        tiles.leave(S, out_smem, lax.rem(t, buffers), target, pending=buffers - 1)

      recurrent.put_row(o_gmem.at[b, t, h], m, recurrent.read(S, q))

      @pl.when(m == 0)
      def once():
        beta_gmem[b, t, h] = beta
        recurrent.put_channels(g_gmem.at[b, t, h], g)

      return S, ahead

    # The last item may have left from either buffer, whatever the parity of its window.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    lax.fori_loop(0, nodes, node, (S, load(0)))
    empty(item, nodes)

  def empty(item, start):
    b, h, m = items.split(item)
    blank = lambda t, _: recurrent.put_row(o_gmem.at[b, t, h], m, recurrent.nothing())
    lax.fori_loop(start, T, blank, None)

  miss = functools.partial(empty, start=0)
  tiles.walk(items, visit, miss, in_smem=in_smem, ready=ready)


def snapshot(S, window, params, *, keep: int, config: Config | None = None, out_dtype=None):
  _, k, v, a, _ = window.raw
  recurrent.check(S, k, v, a)
  (B, T, H, V), K, E = v.shape, k.shape[3], a.shape[3]
  if not 1 <= keep <= T:
    raise NotImplementedError(f"{keep=} of {T=} states")
  config = config or chosen("snapshot", DEFAULT, state=S.dtype, channels=E, tokens=T, heads=B * H)
  o, beta, g, states = tiles.launch(
    kernel,
    (
      jax.ShapeDtypeStruct(v.shape, out_dtype or v.dtype),
      jax.ShapeDtypeStruct((B, T, H), jnp.float32),
      jax.ShapeDtypeStruct((B, T, H, E), jnp.float32),
      jax.ShapeDtypeStruct((B, keep, H, V, K), S.dtype),
    ),
    config,
    B * H * HALVES,
    tiles.scratch(S.dtype, 1, 2)
    | {"back": plgpu.Barrier(), "decay_smem": plgpu.SMEM((3, E), jnp.float32)},
  )(S, *recurrent.inputs(window, params), window.parents, window.nodes, window.slots)
  return o, Gates(beta, g), states
