"""Outputs of every node of a window from the frozen state. Reference: `gdn.ops.XLA.verify`.

Traffic per value head: the state once (64 KiB at K = V = 128, fp32), v once, q and k once per key
head (its value heads run side by side and find them in L2), the outputs once; pseudo-values and
keys only if asked for. The state is never written.

A persistent grid of two warpgroups each walks over (slot, key head, value head). One warpgroup
projects: the state arrives by TMA in chunks of [64, 64], a chunk is requested for the next head as
soon as it is in registers, and fp32 meets the bf16 rows [k; q] on the tensor cores in three exact
parts. The other prepares and solves: gates, norms and the two Gram matrices of a window from one
[64, 2T] product of its raw rows (the diagonal holds the squared norms), for two value heads at
once; then one lane per value row does forward substitution in fp32, with coefficients that arrive
four at a time as broadcasts. So the tensor cores and the memory never wait for the solve.

Chains and trees are one thing to it: a node meets its ancestors, given as one word of bits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn.ops import Gates
from gdn.typing import Rows
from pallas_kernels import lanes
from pallas_kernels.arith import (
  bf16,
  decay_parts,
  exact_wgmma,
  f32,
  gates,
  inverse_norm,
  over_rows,
)

K = V = 128
TILE, HALF = 64, 32
CHUNKS = [(m, j) for m in range(V // TILE) for j in range(K // TILE)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """ctas_per_sm  resident warpgroups a multiprocessor: they hide each other's solve
  pair         value heads of one key head whose window is prepared at once: 1 or 2
  """

  ctas_per_sm: int = 2
  pair: int = 2
  sms: int = 132

  def __post_init__(self):
    if self.pair not in (1, 2):
      raise ValueError(f"{self.pair=} must be 1 or 2")
    if not 1 <= self.ctas_per_sm <= 4:
      raise ValueError(f"{self.ctas_per_sm=} must be in 1..4")
    if self.sms < 1:
      raise ValueError(f"{self.sms=} must be positive")


DEFAULT = Config()


def padded(T: int) -> int:
  """Nodes as the tensor cores count them."""
  return 8 if T <= 8 else 16


def ancestor_words(parents: jax.Array) -> jax.Array:
  """Bit s of word t: s is a proper ancestor of t.

  Two or three small kernels of XLA's, the same for every layer of a step, so run once a step.
  """
  T = parents.shape[1]
  words: list[jax.Array] = []
  for t in range(T):
    p = parents[:, t]
    hit = [jnp.where(p == s, w | (1 << s), 0) for s, w in enumerate(words)]
    words.append(sum(hit[1:], hit[0]) if hit else jnp.zeros_like(p))
  return jnp.stack(words, axis=1)


def prepare(kq, base, gram, coeff, nodes, a, b, words, gate_params, T: int, last: int):
  """Everything of a window that does not need the state, for one or two heads of one key head.

  Rows of a [64, T] tile are (head, k or q, node). A product takes 64 rows, of which the window's
  own 2T are looked at; they go through shared memory so that both heads' rows find them.

  kq     [64, K] raw rows of two windows; this one has k at `base` and q at `base + T`
  coeff  [5, 64] per row: factor of S x, inverse norm, cumulated g in two parts, beta
  gram   [2T, 64] first the raw products, then for head p A (rows of k) and B (rows of q) in
         columns p T and on; zero where masked
  words  bits of the ancestors of each row's node
  """
  shape, wide, tile = (TILE, T), (TILE, 2 * T), plgpu.Layout.WGMMA
  iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, layout=tile)

  def gram_product(acc):
    plgpu.wgmma(acc, kq, kq.at[pl.ds(base, 2 * T)].transpose((1, 0)))
    plgpu.wgmma_wait(0)
    return acc[...]

  lanes.put_transposed(
    gram.at[:, pl.ds(0, TILE)], pl.run_scoped(gram_product, plgpu.ACC(wide, f32))
  )

  line = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=lanes.ROWS)
  t, is_key = lax.rem(line, T), lax.rem(line, 2 * T) < T
  beta, g = gates(a, b, *gate_params)
  # Selected, never multiplied by zero: what stands in a row that does not exist must not get out.
  real = jnp.minimum(t, last) < nodes
  beta, g = jnp.where(real, beta, 0.0), jnp.where(real, g, 0.0)
  coarse, fine = decay_parts(g)
  for i, x in ((2, coarse), (3, fine), (4, beta)):
    coeff.at[i][...] = x
  lanes.sync()

  own = gram.at[:, pl.ds(base, 2 * T)]
  square = lanes.gather(own, (TILE,), lanes.ROWS, f32, lambda r: (r % (2 * T), r % (2 * T)))
  products = lanes.gather(own, shape, tile, f32, lambda r, c: (c, r % (2 * T)))
  inverse = inverse_norm(square)
  per_node = lambda i: lanes.gather(coeff.at[i], shape, tile, f32, lambda r, c: (r // T * T + c,))
  row, col = iota(shape, 0), iota(shape, 1)
  t_row = lax.rem(row, T)
  above = (lax.shift_right_logical(over_rows(words, shape), col) & 1) == 1
  path = above | (col == t_row)
  sums = [jnp.sum(jnp.where(path, per_node(i), 0.0), axis=1) for i in (2, 3)]
  lanes.sync()
  for i, x in ((1, inverse), (2, sums[0]), (3, sums[1])):
    coeff.at[i][...] = x
  scale = inverse * jnp.where(is_key, beta, K**-0.5)
  coeff.at[0][...] = scale * jnp.exp(sums[0] + sums[1])
  lanes.sync()
  gap = (over_rows(sums[0], shape) - per_node(2)) + (over_rows(sums[1], shape) - per_node(3))
  inverse_key = lanes.gather(
    coeff.at[1], shape, tile, f32, lambda r, c: (r // (2 * T) * (2 * T) + c,)
  )
  seen = jnp.where(lax.rem(row, 2 * T) < T, above, path) & (t_row < nodes)
  decayed = products * jnp.exp(jnp.where(seen, gap, 0.0)) * (over_rows(scale, shape) * inverse_key)
  at = lambda r, c: (r % (2 * T), r // (2 * T) * T + c)
  lanes.scatter(gram, jnp.where(seen, decayed, 0.0), tile, at)
  lanes.sync()
  return beta, g


def kernel(
  S_gmem, q_gmem, k_gmem, v_gmem, a_gmem, b_gmem, A_log_gmem, dt_gmem, max_gmem, words_gmem,
  nodes_gmem, plain_gmem, slots_gmem, o_gmem, beta_gmem, g_gmem, *rows_gmem,
  s_smem, kq_smem, w_smem, gram_smem, coeff, small_ready, chunk_ready, w_full, w_free,
  pair: int,
):  # fmt: skip
  (B, T, H, _), T8 = v_gmem.shape, gram_smem.shape[0] // 2
  share = H // q_gmem.shape[2]
  first, stride, items = lax.axis_index("cta"), lax.axis_size("cta"), B * H // pair
  steps = pair * lax.div(items - first + stride - 1, stride)

  def split(item):
    n = item * pair
    return lax.div(n, H), lax.rem(n, H)

  def place(step):
    """Head of the item, item, its buffer, and whether another item follows."""
    p, turn = lax.rem(step, pair), lax.div(step, pair)
    item = first + turn * stride
    return p, item, lax.rem(turn, 2), item + stride < items

  @pl.when(lax.axis_index("wg") == 0)
  def projector():
    width = TILE if s_smem.dtype == bf16 else HALF

    def load_small(item, slot):
      b, h = split(item)
      whole = pl.ds(lax.rem(item, 1), T8)  # rows past T are out of bounds and arrive as zeros
      for i, src in enumerate((k_gmem, q_gmem)):
        plgpu.copy_gmem_to_smem(
          src.at[b, whole, lax.div(h, share)],
          kq_smem.at[pl.ds((2 * slot + i) * T8, T8)],
          small_ready.at[slot],
        )

    def load_chunk(at, h, i):
      m, j = CHUNKS[i]
      source = S_gmem.at[at, h, pl.ds(m * TILE, TILE), pl.ds(j * TILE, TILE)]
      plgpu.copy_gmem_to_smem(source, s_smem.at[i], chunk_ready.at[i])

    # padding reads some state and uses nothing of it
    row = lambda item: jnp.maximum(slots_gmem[split(jnp.minimum(item, items - 1))[0]], 0)

    load_small(first, 0)
    for i in range(len(CHUNKS)):
      load_chunk(row(first), split(first)[1], i)

    def head(step, at):
      p, item, slot, more = place(step)
      base, last = slot * 2 * T8, p == pair - 1
      ahead = row(jnp.where(last, item + stride, item))
      next_h = jnp.where(last, split(item + stride)[1], split(item)[1] + p + 1)

      @pl.when(p == 0)
      def await_window():
        plgpu.barrier_wait(small_ready.at[slot])

      for m in range(V // TILE):

        def project(acc, m=m):
          for j in range(K // TILE):
            i = CHUNKS.index((m, j))
            plgpu.barrier_wait(chunk_ready.at[i])
            # By halves: three parts of a whole chunk would take too many registers for two CTAs.
            for start in range(0, TILE, width):
              s = plgpu.load(s_smem.at[i, :, pl.ds(start, width)], layout=plgpu.Layout.WGMMA)
              if start + width == TILE:
                lanes.sync()

                @pl.when(jnp.logical_not(last) | more)
                def refill(i=i):
                  load_chunk(ahead, next_h, i)

              rhs = kq_smem.at[pl.ds(base, 2 * T8), pl.ds(j * TILE + start, width)]
              exact_wgmma(acc, s, rhs.transpose((1, 0)))
            plgpu.wgmma_wait(0)
          return acc[...]

        w = pl.run_scoped(project, plgpu.ACC((TILE, 2 * T8), f32))
        if m == 0:
          # The solver is done with W of the last head, and so also with the other window's rows.
          @pl.when(step > 0)
          def await_solver():
            plgpu.barrier_wait(w_free)

          @pl.when((p == 0) & more)
          def next_window():
            load_small(item + stride, 1 - slot)

        lanes.put_transposed(w_smem.at[:, pl.ds(m * TILE, TILE)], w)
      plgpu.barrier_arrive(w_full)
      return ahead

    lax.fori_loop(0, steps, head, row(first))
    plgpu.barrier_wait(w_free)

  @pl.when(lax.axis_index("wg") == 1)
  def solver():
    beta_max = max_gmem[0]
    node = lambda r: (r % T8).at_most(T - 1)
    head_of = lambda r: r // (2 * T8) % pair  # rows past the last head repeat the first

    def fetch(item):
      """What an item needs from global memory first, asked for ahead of time."""
      b, h = split(item)
      heads = pl.ds(h, pair)
      rows = lambda ref, at: lanes.gather(ref, (TILE,), lanes.ROWS, ref.dtype, at)
      both = lambda r: (node(r), head_of(r))
      return (
        nodes_gmem[b], rows(words_gmem.at[b], lambda r: (node(r),)),
        rows(a_gmem.at[b, :, heads, 0], both), rows(b_gmem.at[b, :, heads], both),
        rows(A_log_gmem.at[heads], lambda r: (head_of(r),)),
        rows(dt_gmem.at[heads, 0], lambda r: (head_of(r),)),
      )  # fmt: skip

    def head(step, now):
      p, item, slot, _ = place(step)
      b, h0 = split(item)
      h = h0 + p
      load = lambda ref, t, h: plgpu.load(ref.at[b, t, h], layout=lanes.PER_ROW, optimized=False)
      values = lambda: [load(v_gmem, t, h) for t in range(T)]
      nodes, words, a, b_in, A_log, dt_bias = now
      following = jnp.where(p == pair - 1, jnp.minimum(item + stride, items - 1), item)
      # Of a long window, what is needed later is asked for when the preparation has given its
      # registers back, or two blocks would not fit.
      long = T8 > 8
      if not long:
        vs, ahead = values(), fetch(following)

      @pl.when(p == 0)
      def prepared():
        plgpu.barrier_wait(small_ready.at[slot])
        beta, g = prepare(
          kq_smem, slot * 2 * T8, gram_smem, coeff, nodes, a, b_in, words,
          (A_log, dt_bias, beta_max), T8, T - 1,
        )  # fmt: skip
        heads = pl.ds(h0, pair)
        for out, x in ((beta_gmem.at[b, :, heads], beta), (g_gmem.at[b, :, heads, 0], g)):
          lanes.scatter(out, x, lanes.ROWS, lambda r: (node(r), head_of(r)))

      if long:
        vs = values()
        ahead = None if rows_gmem else fetch(following)
      plgpu.barrier_wait(w_full)
      Sx = lambda t: plgpu.load(w_smem.at[t, pl.ds(0, V)], layout=lanes.PER_ROW, optimized=False)
      mine = p * 2 * T8
      # four nodes at a time: all of them at once would take 48 registers
      quad = lambda t: [
        lanes.scalars(coeff.at[i, pl.ds(mine + start + t, 4)], min(4, T - t))
        for i, start in ((0, 0), (0, T8), (4, 0))
      ]
      matrix = lambda row, n: lanes.scalars(gram_smem.at[row, pl.ds(p * T8, T8)], n)

      half = len(rows_gmem) // 2
      keep = lambda t, u: write_parts([out.at[b, t, h] for out in rows_gmem[half:]], u)

      def finish(plain: bool):
        word = None if plain else lambda t: words_gmem[b, t]
        solve(Sx, vs, quad, matrix, T, T8, o_gmem.at[b, :, h], keep, None if plain else nodes, word)

      is_plain = plain_gmem[b] == 1
      pl.when(is_plain)(lambda: finish(True))
      pl.when(jnp.logical_not(is_plain))(lambda: finish(False))
      plgpu.barrier_arrive(w_free)

      @pl.when((half > 0) & (lax.rem(h, share) == 0))
      def write_keys():
        hk = lax.div(h, share)

        def key(t, _):
          k = load(k_gmem, t, hk).astype(f32) * coeff[1, mine + t]
          write_parts([out.at[b, t, hk] for out in rows_gmem[:half]], jnp.where(t < nodes, k, 0.0))

        lax.fori_loop(0, T, key, None)

      lanes.sync()  # the next window overwrites what this one has read
      return fetch(following) if ahead is None else ahead

    lax.fori_loop(0, steps, head, fetch(first))


def solve(Sx, vs, quad, matrix, T: int, T8: int, o, keep, nodes, words) -> None:
  """Forward substitution and outputs, one lane per value row; keep(t, u) for each pseudo-value.

  Without `nodes` and `words` the window is a chain of T real nodes. With them, whatever a node that
  is no ancestor holds is left out by selection: a NaN stays on its own path.
  """
  us: list[jax.Array] = []
  real = lambda t, x: x if nodes is None else jnp.where(t < nodes, x, 0.0)

  def less(x, row, word, sign):
    for s, (m, u) in enumerate(zip(row, us, strict=True)):
      y = x + m * u if sign > 0 else x - m * u
      x = y if word is None else jnp.where((word >> s) & 1 == 1, y, x)
    return x

  for t in range(T):
    if T8 > 8:
      lanes.fence()
    if t % 4 == 0:
      of_k, of_q, betas = quad(t)
    u = betas[t % 4] * vs[t].astype(f32) - of_k[t % 4] * Sx(t)
    word = None if words is None else words(t) | (1 << t)
    us.append(real(t, less(u, matrix(t, t), word, -1)))
    out = less(of_q[t % 4] * Sx(T8 + t), matrix(T8 + t, t + 1), word, 1)
    o.at[t][...] = real(t, out).astype(o.dtype)
    keep(t, us[t])


def write_parts(outs, x) -> None:
  """A row in float32 to arrays whose float32 sum it is."""
  for out in outs:
    part = x.astype(out.dtype)
    out[...] = part
    x = x - part.astype(f32)


def check(S, window):
  """Raises NotImplementedError for what this kernel does not do."""
  raw = window.raw
  (_, T, Hk, K_), (_, _, H, V_) = raw.q.shape, raw.v.shape
  if (K_, V_) != (K, V):
    raise NotImplementedError(f"K, V = {K_}, {V_}: only {K}, {V}")
  if T > 16:
    raise NotImplementedError(f"{T=} nodes: at most 16")
  if raw.a.shape[3] != 1:
    raise NotImplementedError("per-channel decay")
  if H % Hk:
    raise ValueError(f"{H=} value heads over {Hk=} key heads")
  if S.dtype not in (f32, bf16) or {raw.q.dtype, raw.k.dtype, raw.v.dtype} != {jnp.dtype(bf16)}:
    raise NotImplementedError(f"state {S.dtype}, q {raw.q.dtype}: fp32 or bf16 state, bf16 inputs")


def verify(S, window, params, *, parts=(f32,), config: Config = DEFAULT, out_dtype=None):
  """`parts=()` leaves keys and pseudo-values unwritten."""
  check(S, window)
  q, k, v, a, b = window.raw
  (B, T, H, _), Hk, n, T8 = v.shape, q.shape[2], len(parts), padded(v.shape[1])
  pair = config.pair if H // Hk % config.pair == 0 and B * H > 2 * config.sms else 1
  halves = HALF if S.dtype == f32 else TILE
  state_tiles = lanes.swizzle(S.dtype, halves)
  words = ancestor_words(window.parents)
  nodes = jnp.where(window.slots >= 0, window.nodes, 0)
  chain = (1 << jnp.arange(T, dtype=jnp.int32)) - 1
  plain = ((nodes == T) & (words == chain[None]).all(axis=1)).astype(jnp.int32)
  out = [
    jax.ShapeDtypeStruct((B, T, H, V), out_dtype or v.dtype),
    jax.ShapeDtypeStruct((B, T, H), f32),
    jax.ShapeDtypeStruct((B, T, H, 1), f32),
    *(jax.ShapeDtypeStruct((B, T, Hk, K), p) for p in parts),
    *(jax.ShapeDtypeStruct((B, T, H, V), p) for p in parts),
  ]
  o, beta, g, *rows = plgpu.kernel(
    functools.partial(kernel, pair=pair),
    out_type=out,
    grid=(min(B * H // pair, config.ctas_per_sm * config.sms),),
    grid_names=("cta",),
    num_threads=2,
    thread_name="wg",
    scratch_types={
      "s_smem": plgpu.SMEM((len(CHUNKS), TILE, TILE), S.dtype, transforms=state_tiles),
      "kq_smem": plgpu.SMEM((TILE, K), bf16, transforms=lanes.swizzle(bf16, halves)),
      "w_smem": plgpu.SMEM((2 * T8, V + 4), f32),
      "gram_smem": plgpu.SMEM((2 * T8, TILE + 4), f32),
      "coeff": plgpu.SMEM((5, TILE), f32),
      "small_ready": plgpu.Barrier(num_arrivals=2, num_barriers=2),
      "chunk_ready": plgpu.Barrier(num_barriers=len(CHUNKS)),
      "w_full": plgpu.Barrier(),
      "w_free": plgpu.Barrier(),
    },
    compiler_params=lanes.COMPILER,
  )(
    S, q, k, v, a, b, params.A_log, params.dt_bias, params.beta_max.reshape(1),
    words, nodes, plain, window.slots,
  )  # fmt: skip
  return o, Gates(beta, g), Rows(tuple(rows[:n]), tuple(rows[n:]), g)
