"""Committed writes into the state, in place, without a replay. Reference: `gdn.ops.XLA.fold_rank`.

    S <- e^G S + sum_s u_s (e^(G - G_s) k_s)'

Traffic per value head: the state read once and written once, and K + V values and the decay of each
pending write. A slot with nothing pending is neither read nor written.

A few writes at a time: while some are added, the rows of the next few, and of the next tile, are on
their way to registers, one lane per key channel and value row. On the way to shared memory a key
takes up the decay of everything after it, summed from the last write backwards: a sum of the decays
that apply and never the difference of two sums, so a decay to nothing costs no digits of what
follows it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes, recurrent
from pallas_kernels.arith import bf16, f32, over_columns, over_rows
from pallas_kernels.recurrent import HALVES, SHAPE, Config, Items, K, Path, V
from pallas_kernels.tuning import chosen


def kernel(S_gmem, *refs, parts: int, in_smem, out_smem, ready, key_smem, value_smem, decay_smem):
  k_gmem, u_gmem = refs[:parts], refs[parts : 2 * parts]
  g_gmem, *path_gmem, slots_gmem = refs[2 * parts :]
  share = u_gmem[0].shape[2] // k_gmem[0].shape[2]
  path, chunk = Path(*path_gmem), key_smem.shape[0]
  items = Items(S_gmem, slots_gmem, path.count)

  def load(item, first):
    """The writes first, first + 1, ... of an item's path, parts not yet added up."""
    b, h, _ = items.split(item)
    writes = []
    for p in range(chunk):
      row, at = path.place(b, first + p)
      k = [recurrent.channels(r.at[row, at, lax.div(h, share)]) for r in k_gmem]
      u = [recurrent.channels(r.at[row, at, h]) for r in u_gmem]
      g = recurrent.channels(g_gmem.at[row, at, h])
      writes.append((k, u, jnp.where(first + p < path.length[b], g, 0.0)))
    return writes

  def stage(writes, turn):
    del turn
    after = jnp.zeros_like(writes[0][2])
    for p, (k, u, g) in reversed(list(enumerate(writes))):
      k, u = (sum(x[1:], x[0]) for x in ([y.astype(f32) for y in x] for x in (k, u)))
      key_smem.at[p][...] = k * jnp.exp(after)
      value_smem.at[p][...] = u
      after += g
    recurrent.put_channels(decay_smem, jnp.exp(after))

  def visit(item, S, turn):
    b, _, m = items.split(item)
    length = path.length[b]

    def add(S, n):
      def write(p, S):
        u, k = recurrent.value(value_smem.at[p], m), recurrent.key(key_smem.at[p])
        return S + over_rows(u, SHAPE) * over_columns(k, SHAPE)

      S = recurrent.decayed(S, recurrent.columns(decay_smem))
      return lax.fori_loop(0, jnp.minimum(n, chunk), write, S)

    def further(i, carry):
      S, writes = carry
      lanes.sync()
      stage(writes, turn)
      lanes.sync()
      ahead = load(item, (i + 1) * chunk)
      return add(S, length - i * chunk), ahead

    if path.path.shape[1] > chunk:
      ahead = load(item, chunk)
      chunks = lax.div(length + chunk - 1, chunk)
      S, _ = lax.fori_loop(1, chunks, further, (add(S, length), ahead))
    else:
      S = add(S, length)
    recurrent.leave(S, out_smem, 0, items.tile(item), pending=0)

  recurrent.walk(
    items, visit, lambda item: None, in_smem=in_smem, ready=ready,
    fetch=lambda item, turn: load(item, 0), stage=stage,
  )  # fmt: skip


# As for fold_raw; pairs of rows take the registers of a third warpgroup.
DEFAULT = Config(ctas_per_sm=3)
PAIRS = Config(ctas_per_sm=2)


def fold_rank(S, rows, pending, slots, *, config: Config | None = None):
  """Slots of one call are distinct, as everywhere. Paths of any length."""
  parts, P = len(rows.k), pending.path.shape[1]
  recurrent.check(S, rows.k[0], rows.u[0], rows.g)
  if rows.g.dtype != f32:
    raise ValueError("gates are float32 in every path")
  if not {x.dtype for x in (*rows.k, *rows.u)} <= {jnp.dtype(f32), jnp.dtype(bf16)}:
    raise NotImplementedError(f"rows of {rows.k[0].dtype}: only fp32 and bf16")
  heads, channels = slots.shape[0] * S.shape[1], rows.g.shape[3]
  name, default = ("fold_rank", DEFAULT) if parts == 1 else ("fold_rank_pairs", PAIRS)
  config = config or chosen(name, default, state=S.dtype, channels=channels, tokens=P, heads=heads)
  chunk = P if P <= 8 else 4  # of a long path two chunks are in registers at once
  pool = jax.new_ref(S)
  scratch = recurrent.scratch(S.dtype, config.arriving, 1) | {
    "key_smem": plgpu.SMEM((chunk, K), f32),
    "value_smem": plgpu.SMEM((chunk, V), f32),
    "decay_smem": plgpu.SMEM((channels,), f32),
  }
  body = functools.partial(kernel, parts=parts)
  recurrent.launch(body, (), config, heads * HALVES, scratch)(
    pool, *rows.k, *rows.u, rows.g, *pending, slots
  )
  return jax.freeze(pool)
