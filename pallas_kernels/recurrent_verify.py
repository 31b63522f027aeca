"""Outputs of every node of a window, token by token: KDA. References: `XLA.verify`, `XLA.step`.

Traffic per value head: the state once, the raw inputs and the outputs of every node, the writes
that are pending; pseudo-values and keys only if asked for. `verify` never writes the state. The two
halves of a head and the value heads of a key head each read q and k, and find them in L2.

The state stays in registers from the root to the last node. A node whose parent is not its
predecessor starts again from the root, of which a copy waits in shared memory, and repeats the
writes of its ancestors: what a sibling holds, were it a NaN, is never touched.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn.ops import Gates, dtypes_of
from gdn.typing import Rows
from pallas_kernels import arith, fold_rank, lanes, recurrent, tiles
from pallas_kernels.append import append
from pallas_kernels.arith import f32, over_columns, over_rows
from pallas_kernels.finish import parts_like
from pallas_kernels.recurrent import Inputs, Path
from pallas_kernels.tiles import HALVES, SHAPE, TILE, Config, Items, K
from pallas_kernels.tuning import chosen

MAX_NODES = 64
WORD = 32  # ancestors of a node are the bits of so many words


def put_parts(rows, x) -> None:
  for row, part in parts_like(x, rows):
    row[...] = part


def kernel(S_gmem, *refs, parts: int, waiting: int, in_smem, root_smem, ready, beta_smem,
           decay_smem, above_smem):  # fmt: skip
  take = iter(refs)
  some = lambda n: tuple(itertools.islice(take, n))
  x, (parents_gmem, nodes_gmem, slots_gmem) = Inputs._make(some(8)), some(3)
  if waiting:
    k_waiting, u_waiting, (g_waiting, *path_gmem) = some(waiting), some(waiting), some(4)
    path = Path(*path_gmem)
  (o_gmem, beta_gmem, g_gmem), k_rows, u_rows = some(3), some(parts), some(parts)
  T, share = x.v.shape[1], x.v.shape[2] // x.k.shape[2]
  items = Items(S_gmem, slots_gmem, nodes_gmem)
  wgmma = plgpu.Layout.WGMMA

  def put_value(b, t, h, m, u):
    put_parts([r.at[b, t, h, pl.ds(m * TILE, TILE)] for r in u_rows], u)

  def put_gates(item, t, beta, g):
    b, h, m = items.split(item)

    @pl.when(m == 0)
    def _():
      beta_gmem[b, t, h] = beta
      recurrent.put_channels(g_gmem.at[b, t, h], g)

  def prepare(item):
    """Write strength and decay of every node, in shared memory and, of real ones, as results."""
    b, h, _ = items.split(item)
    nodes, head = nodes_gmem[b], x.head(h)
    for t, gate_inputs in enumerate([x.gates(b, t, h) for t in range(T)]):
      beta, g = arith.gates(*gate_inputs, *head)
      beta_smem[t] = beta
      recurrent.put_channels(decay_smem.at[t], jnp.exp(g))
      put_gates(item, t, *(jnp.where(t < nodes, y, 0.0) for y in (beta, g)))

  def receive(item, S):
    """The state with the writes that are pending."""
    b, h, m = items.split(item)

    def write(p, S):
      row, at = path.place(b, p)
      total = lambda parts: functools.reduce(jnp.add, (y.astype(f32) for y in parts))
      k = total(recurrent.key(r.at[row, at, x.key_head(h)]) for r in k_waiting)
      u = total(recurrent.value(r.at[row, at, h], m) for r in u_waiting)
      g = recurrent.channels(g_waiting.at[row, at, h])
      decay = recurrent.decay(g, decay_smem.at[lax.rem(p, decay_smem.shape[0])])
      return recurrent.decayed(S, decay) + over_rows(u, SHAPE) * over_columns(k, SHAPE)

    S = lax.fori_loop(0, path.count(b), write, S)
    lanes.sync()  # all lanes are done with the decays
    return S

  def visit(item, S, turn):
    del turn
    b, h, m = items.split(item)
    nodes = nodes_gmem[b]
    if waiting:
      S = receive(item, S)
    root_smem[...] = S.astype(root_smem.dtype)
    prepare(item)
    lanes.sync()

    def load(t):
      t = jnp.minimum(t, nodes - 1)
      return x.query(b, t, h), x.key(b, t, h), x.value(b, t, h, m), parents_gmem[b, t]

    def step(S, t, k, v):
      return recurrent.advance(S, k, v, beta_smem[t], recurrent.columns(decay_smem.at[t]))

    def again(t):
      """The state of the parent of t."""

      def ancestor(s, S):
        write = lambda S: step(S, s, x.key(b, s, h), x.value(b, s, h, m))[0]
        word = above_smem[lax.div(s, WORD), t]
        on = lax.shift_right_logical(word, lax.rem(s, WORD)) & 1 == 1
        return lax.cond(on, write, lambda S: S, S)

      root = plgpu.load(root_smem, layout=wgmma).astype(f32)
      return lax.fori_loop(0, t, ancestor, root)

    def node(t, carry):
      S, (q, k, v, parent) = carry
      ahead = load(t + 1)
      up = jnp.maximum(parent, 0)
      for i in range(above_smem.shape[0]):  # every lane writes these words and reads its own
        bit = jnp.where(lax.div(up, WORD) == i, lax.shift_left(1, lax.rem(up, WORD)), 0)
        above_smem[i, t] = jnp.where(parent < 0, 0, above_smem[i, up] | bit)
      lanes.fence()  # the next node's loads of these words stay behind their stores
      S = lax.cond(parent == t - 1, lambda S: S, lambda _: again(t), S)
      S, u = step(S, t, k, v)
      recurrent.put_row(o_gmem.at[b, t, h], m, recurrent.read(S, q))
      put_value(b, t, h, m, u)
      return S, ahead

    lax.fori_loop(0, nodes, node, (S, load(0)))
    if k_rows:
      pl.when((m == 0) & (lax.rem(h, share) == 0))(lambda: put_keys(item, nodes))
    empty(item, nodes)

  def put_keys(item, nodes):
    b, h, _ = items.split(item)
    hk = x.key_head(h)

    def put(t, _):
      k = recurrent.channels(x.k.at[b, t, hk]).astype(f32)
      inverse = arith.inverse_norm(square(x.key(b, t, h)))
      write_key(b, t, hk, k * inverse)

    lax.fori_loop(0, nodes, put, None)

  def square(k):
    k = k.astype(f32)
    return jnp.sum(k * k)

  def write_key(b, t, hk, k):
    put_parts([r.at[b, t, hk] for r in k_rows], k)

  def empty(item, start):
    b, h, m = items.split(item)

    def blank(t, _):
      nothing = recurrent.nothing()
      recurrent.put_row(o_gmem.at[b, t, h], m, nothing)
      put_value(b, t, h, m, nothing)
      if k_rows:
        zero = plgpu.layout_cast(jnp.zeros((K,), f32), lanes.PER_ROW)
        pl.when((m == 0) & (lax.rem(h, share) == 0))(lambda: write_key(b, t, x.key_head(h), zero))

    lax.fori_loop(start, T, blank, None)

  def miss(item):
    _, h, _ = items.split(item)
    zero = jnp.zeros_like(recurrent.channels(x.dt_bias.at[h]))
    lax.fori_loop(0, T, lambda t, _: put_gates(item, t, jnp.float32(0.0), zero), None)
    empty(item, 0)

  tiles.walk(items, visit, miss, in_smem=in_smem, ready=ready)


DEFAULT = Config(ctas_per_sm=2)


def verify(S, window, params, *, parts=(f32,), config: Config | None = None, out_dtype=None):
  """`parts=()` leaves keys and pseudo-values unwritten. Of nodes that do not exist everything is
  zero."""
  return _verify(S, None, window, params, parts, config, out_dtype)


def step(S, rows: Rows, pending, flush, at, window, params, *, config: Config | None = None,
         out_dtype=None):  # fmt: skip
  """`fold_rank` where flushed, `verify` on what is still pending, then `append`."""
  if flush is not False:
    some = pending._replace(length=jnp.where(flush, pending.length, 0))
    S = fold_rank.fold_rank(S, rows, some, window.slots)
    pending = pending._replace(length=jnp.where(flush, 0, pending.length))
  waiting = None if flush is True else (rows, pending)
  o, gates, left = _verify(S, waiting, window, params, dtypes_of(rows.k), config, out_dtype)
  nodes = jnp.where(window.slots >= 0, window.nodes, 0)
  return o, gates, S, append(rows, pending.row, at, nodes, left)


def _verify(S, waiting, window, params, parts, config: Config | None, out_dtype):
  _, k, v, a, _ = window.raw
  recurrent.check(S, k, v, a)
  (B, T, H, _), Hk, E, n = v.shape, k.shape[2], a.shape[3], len(parts)
  if T > MAX_NODES:
    raise NotImplementedError(f"{T=} nodes: at most {MAX_NODES}")
  name = "recurrent_step" if waiting else "recurrent_verify_rows" if parts else "recurrent_verify"
  config = config or chosen(name, DEFAULT, state=S.dtype, channels=E, tokens=T, heads=B * H)
  gates = jax.ShapeDtypeStruct((B, T, H), f32), jax.ShapeDtypeStruct((B, T, H, E), f32)
  keys = [jax.ShapeDtypeStruct((B, T, Hk, K), p) for p in parts]
  values = [jax.ShapeDtypeStruct(v.shape, p) for p in parts]
  more: tuple[jax.Array, ...] = ()
  if waiting:
    rows, pending = waiting
    more = (*rows.k, *rows.u, rows.g, *pending)
  # A branch starts again from its root: with writes that the pool does not hold, in float32.
  root = tiles.shared(jnp.dtype(f32) if waiting else S.dtype)
  o, beta, g, *left = tiles.launch(
    functools.partial(kernel, parts=n, waiting=len(rows.k) if waiting else 0),
    [jax.ShapeDtypeStruct(v.shape, out_dtype or v.dtype), *gates, *keys, *values],
    config,
    B * H * HALVES,
    tiles.scratch(S.dtype, arriving=1)
    | {
      "root_smem": root,
      "beta_smem": plgpu.SMEM((T,), f32),
      "decay_smem": plgpu.SMEM((max(T, 2), E), f32),
      "above_smem": plgpu.SMEM((pl.cdiv(T, WORD), T), jnp.int32),
    },
  )(S, *recurrent.inputs(window, params), window.parents, window.nodes, window.slots, *more)
  return o, Gates(beta, g), Rows(tuple(left[:n]), tuple(left[n:]), g)
