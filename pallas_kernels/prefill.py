"""The recurrence over a prompt of any length, state in place. Reference: `gdn.ops.XLA.prefill`.

Traffic per value head: the state read once and written once, the raw inputs and the outputs of
every token.

A warpgroup keeps half a head's state on chip from the first token to the last. GDN goes 32 tokens
at a time: the state, in three exact bf16 parts, meets the raw rows [k; q] on the tensor cores;
gates, norms and Gram matrix of the chunk come from one more product whose diagonals are the squared
norms; then forward substitution in fp32; and one product adds the chunk's writes to the decayed
state. KDA goes token by token through `advance`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import arith, lanes, recurrent, tiles
from pallas_kernels.arith import bf16, f32, over_columns, over_rows
from pallas_kernels.recurrent import Inputs
from pallas_kernels.tiles import HALVES, SHAPE, TILE, Config, Items, K, V
from pallas_kernels.tuning import chosen

CHUNK = 32  # [k; q] of a chunk are the 64 rows that a product has
WIDE = (TILE, CHUNK)
wgmma = plgpu.Layout.WGMMA
SX, INVERSE, COARSE, FINE, BETA, END = range(6)


def prepare(own, n, gate_inputs, head, matrix, coeff):
  """Everything of a chunk that does not need its state.

  own     [64, K] raw rows k and q of the chunk in shared memory, of which n tokens are real
  matrix  [64, C] A (rows of k) and B (rows of q), zero where masked
  coeff   [6, 64] per row: factor of S x, inverse norm, cumulated g in two parts, beta, and the norm
          and decay that a key carries to the end of the chunk
  Returns the decay of the whole chunk.
  """

  def gram(with_k, with_q):
    for acc, first in ((with_k, 0), (with_q, CHUNK)):
      plgpu.wgmma(acc, own, own.at[pl.ds(first, CHUNK)].transpose((1, 0)))
    plgpu.wgmma_wait(0)
    return with_k[...], with_q[...]

  with_k, with_q = pl.run_scoped(gram, plgpu.ACC(WIDE, f32), plgpu.ACC(WIDE, f32))
  iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, WIDE, layout=wgmma)
  row, col = iota(0), iota(1)
  t = lax.rem(row, CHUNK)
  real = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=lanes.COLS) < n
  beta, g = (jnp.where(real, y, 0.0) for y in arith.gates(*gate_inputs, *head))
  by_row = lambda mask, x: jnp.sum(jnp.where(mask, over_columns(x, WIDE), 0.0), axis=1)
  square = jnp.sum(jnp.where(col == t, jnp.where(row < CHUNK, with_k, with_q), 0.0), axis=1)
  # Sums of 32 coarse parts are exact up to a decay of e^-4096, and e^-100 is nothing already.
  parts = arith.decay_parts(jnp.maximum(g, -100.0))
  before = [by_row(col <= t, x) for x in parts]
  after = [by_row(col > t, x) for x in parts]
  beta, inverse = by_row(col == t, beta), arith.inverse_norm(square)
  is_key = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=lanes.ROWS) < CHUNK
  scale = inverse * jnp.where(is_key, beta, K**-0.5)
  for i, x in (
    (SX, scale * jnp.exp(before[0] + before[1])), (INVERSE, inverse), (COARSE, before[0]),
    (FINE, before[1]), (BETA, beta), (END, inverse * jnp.exp(after[0] + after[1])),
  ):  # fmt: skip
    coeff.at[i][...] = x
  lanes.sync()
  of_keys = lambda i: over_columns(recurrent.key(coeff.at[i, pl.ds(0, CHUNK)]), WIDE)
  seen = (col < t) | ((col == t) & (row >= CHUNK))
  gap = (over_rows(before[0], WIDE) - of_keys(COARSE)) + (
    over_rows(before[1], WIDE) - of_keys(FINE)
  )
  decayed = (
    with_k * jnp.exp(jnp.where(seen, gap, 0.0)) * (over_rows(scale, WIDE) * of_keys(INVERSE))
  )
  matrix.at[:, pl.ds(0, CHUNK)][...] = jnp.where(seen, decayed, 0.0)
  lanes.sync()
  return jnp.exp(jnp.sum(g))


def kernel(S_gmem, *refs, in_smem, out_smem, ready, decay_smem=None, kq_smem=None, v_smem=None,
           chunk_ready=None, state_smem=None, part_smem=None, w_smem=None, matrix_smem=None,
           coeff_smem=None):  # fmt: skip
  *inputs, nodes_gmem, slots_gmem, o_gmem = refs
  x = Inputs(*inputs)
  T, E = o_gmem.shape[1], x.a.shape[3]
  items = Items(S_gmem, slots_gmem, nodes_gmem)

  def visit(item, S, turn):
    del turn
    b, h, m = items.split(item)
    nodes, hk = nodes_gmem[b], x.key_head(h)
    chunks = lax.div(nodes + CHUNK - 1, CHUNK)
    put_output = lambda t, o: recurrent.put_row(o_gmem.at[b, t, h], m, o)

    def request(c):
      slot = lax.rem(c, 2)
      at = pl.ds(c * CHUNK, CHUNK)
      for source, target in (
        (x.k.at[b, at, hk], kq_smem.at[slot, pl.ds(0, CHUNK)]),
        (x.q.at[b, at, hk], kq_smem.at[slot, pl.ds(CHUNK, CHUNK)]),
        (x.v.at[b, at, h], v_smem.at[slot]),
      ):
        plgpu.copy_gmem_to_smem(source, target, chunk_ready.at[slot])

    def chunk(c, _):
      slot, first = lax.rem(c, 2), c * CHUNK
      n = nodes - first
      own = kq_smem.at[slot]
      pl.when(c + 1 < chunks)(lambda: request(c + 1))
      here = pl.ds(first, CHUNK)
      gate_inputs = [
        lanes.gather(r, (CHUNK,), lanes.COLS, r.dtype, lambda t: (t,))
        for r in (x.a.at[b, here, h, 0], x.b.at[b, here, h])
      ]
      for j in range(0, K, CHUNK):
        columns = pl.ds(j, CHUNK)
        S = plgpu.load(state_smem.at[:, columns], layout=wgmma)
        for i, part in enumerate(lanes.three_parts(S)):
          part_smem.at[i, :, columns][...] = part
      plgpu.barrier_wait(chunk_ready.at[slot])

      @pl.when(n < CHUNK)
      def clean():
        t = lax.rem(plgpu.broadcasted_iota(jnp.int32, SHAPE, 0, layout=wgmma), CHUNK)
        rows = plgpu.load(own, layout=wgmma)
        own[...] = jnp.where(t < n, rows, jnp.zeros((), bf16))

      lanes.sync()

      def project(acc):
        for i in range(3):
          plgpu.wgmma(acc, own, part_smem.at[i].transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return acc[...]

      square = w_smem.at[:, pl.ds(0, TILE)]
      square[...] = pl.run_scoped(project, plgpu.ACC((TILE, TILE), f32))
      decay = prepare(own, n, gate_inputs, x.head(h), matrix_smem, coeff_smem)
      Sx = lambda r: recurrent.value(w_smem.at[r], 0)
      us: list[jax.Array] = []
      for t in range(CHUNK):
        lanes.fence()
        u = coeff_smem[BETA, t] * recurrent.value(v_smem.at[slot, t], m).astype(f32)
        u -= coeff_smem[SX, t] * Sx(t)
        for a, earlier in zip(lanes.scalars(matrix_smem.at[t], t), us, strict=True):
          u -= a * earlier
        us.append(jnp.where(t < n, u, 0.0))
        o = coeff_smem[SX, CHUNK + t] * Sx(CHUNK + t)
        for a, known in zip(lanes.scalars(matrix_smem.at[CHUNK + t], t + 1), us, strict=True):
          o += a * known
        pl.when(t < n)(functools.partial(put_output, first + t, o))
        recurrent.put_row(w_smem.at[t], 0, coeff_smem[END, t] * us[t])
      lanes.sync()
      for j in range(0, TILE, CHUNK):
        lanes.fence()
        half = pl.ds(j, CHUNK)
        u = plgpu.load(w_smem.at[:, half], layout=wgmma, optimized=False)
        for i, part in enumerate(lanes.three_parts(u)):
          part_smem.at[i, :, half][...] = part
      lanes.sync()

      def add(acc):
        for i in range(3):
          u = part_smem.at[i, pl.ds(0, CHUNK), pl.ds(0, TILE)]
          plgpu.wgmma(acc, u.transpose((1, 0)), own.at[pl.ds(0, CHUNK)])
        plgpu.wgmma_wait(0)
        return acc[...]

      new = pl.run_scoped(add, plgpu.ACC(SHAPE, f32))
      state_smem[...] = decay * plgpu.load(state_smem, layout=wgmma) + new
      lanes.sync()

    def load(t):
      t = jnp.minimum(t, nodes - 1)
      return x.query(b, t, h), x.key(b, t, h), x.value(b, t, h, m), x.gates(b, t, h)

    def token(t, carry):
      S, (q, k, v, gate_inputs) = carry
      ahead = load(t + 1)
      beta, g = arith.gates(*gate_inputs, *x.head(h))
      decay = recurrent.decay(g, decay_smem.at[lax.rem(t, 2)])
      S, _ = recurrent.advance(S, k, v, beta, decay)
      put_output(t, recurrent.read(S, q))
      return S, ahead

    if E == 1:
      request(jnp.int32(0))
      state_smem[...] = S
      lanes.sync()
      lax.fori_loop(0, chunks, chunk, None)
      S = plgpu.load(state_smem, layout=wgmma)
    else:
      S, _ = lax.fori_loop(0, nodes, token, (S, load(0)))
    tiles.leave(S, out_smem, 0, items.tile(item), pending=0)
    empty(item, nodes)

  def empty(item, start):
    b, h, m = items.split(item)
    blank = lambda t, _: recurrent.put_row(o_gmem.at[b, t, h], m, recurrent.nothing())
    lax.fori_loop(start, T, blank, None)

  miss = functools.partial(empty, start=0)
  tiles.walk(items, visit, miss, in_smem=in_smem, ready=ready)


DEFAULT = Config(ctas_per_sm=1)


def prefill(S, window, params, *, config: Config | None = None, out_dtype=None):
  q, k, v, a, _ = window.raw
  recurrent.check(S, k, v, a)
  (B, T, H, _), E = v.shape, a.shape[3]
  if {q.dtype, k.dtype, v.dtype} != {jnp.dtype(bf16)}:
    raise NotImplementedError(f"inputs of {k.dtype}: only bf16")
  config = config or chosen("prefill", DEFAULT, state=S.dtype, channels=E, tokens=T, heads=B * H)
  if E == 1 and T % CHUNK:  # a chunk reads all its rows, whether they exist or not
    pad = lambda x: jnp.pad(x, ((0, 0), (0, -T % CHUNK), *((0, 0),) * (x.ndim - 2)))
    window = window._replace(raw=jax.tree.map(pad, window.raw))
  pool = jax.new_ref(S)
  bf16_tiles = lanes.swizzle(bf16, CHUNK)
  per_token = {"decay_smem": plgpu.SMEM((2, E), f32)}
  per_chunk = {
    "kq_smem": plgpu.SMEM((2, TILE, K), bf16, transforms=bf16_tiles),
    "v_smem": plgpu.SMEM((2, CHUNK, V), bf16),
    "chunk_ready": plgpu.Barrier(num_arrivals=3, num_barriers=2),
    "state_smem": tiles.shared(f32),
    "part_smem": plgpu.SMEM((3, TILE, K), bf16, transforms=bf16_tiles),
    "w_smem": plgpu.SMEM((TILE, TILE + 4), f32),
    "matrix_smem": plgpu.SMEM((TILE, CHUNK + 4), f32),
    "coeff_smem": plgpu.SMEM((6, TILE), f32),
  }
  scratch = tiles.scratch(S.dtype, 1, 1) | (per_chunk if E == 1 else per_token)
  out = jax.ShapeDtypeStruct(v.shape, out_dtype or v.dtype)
  o = tiles.launch(kernel, out, config, B * H * HALVES, scratch)(
    pool, *recurrent.inputs(window, params), window.nodes, window.slots
  )
  return o, jax.freeze(pool)
