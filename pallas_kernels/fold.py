"""Exact replay of accepted raw records into the state, in place. Reference: `gdn.ops.XLA.fold_raw`.

Traffic per value head: the state read once and written once, and K + V inputs and the gates of each
accepted token. A slot with nothing pending is neither read nor written.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes, recurrent
from pallas_kernels.recurrent import HALVES, Config, Items, K, Path, V
from pallas_kernels.tuning import chosen

STAGED = 8  # records of the next item that are brought to shared memory ahead of their use


def kernel(S_gmem, k_gmem, v_gmem, beta_gmem, g_gmem, *refs,
           in_smem, out_smem, ready, k_smem, v_smem, beta_smem, decay_smem,
           staged_ready):  # fmt: skip
  *path_gmem, slots_gmem = refs
  share = v_gmem.shape[2] // k_gmem.shape[2]
  path, staged = Path(*path_gmem), k_smem.shape[1]
  items = Items(S_gmem, slots_gmem, path.count)

  def place(item, p):
    b, h, _ = items.split(item)
    return *path.place(b, p), h

  def gates(item, p):
    row, at, h = place(item, p)
    return beta_gmem[row, at, h], recurrent.channels(g_gmem.at[row, at, h])

  def fetch(item, turn):
    buffer = lax.rem(turn, 2)
    for p in range(staged):
      row, at, h = place(item, p)
      for source, target in ((k_gmem.at[row, at, lax.div(h, share)], k_smem),
                             (v_gmem.at[row, at, h], v_smem)):  # fmt: skip
        plgpu.copy_gmem_to_smem(source, target.at[buffer, p], staged_ready.at[buffer])
    return [gates(item, p) for p in range(staged)]

  def stage(fetched, turn):
    for p, (beta, g) in enumerate(fetched):
      beta_smem[p] = beta
      recurrent.put_channels(decay_smem.at[p], jnp.exp(g))
    plgpu.barrier_wait(staged_ready.at[lax.rem(turn, 2)])

  def visit(item, S, turn):
    b, h, m = items.split(item)
    length, buffer = path.length[b], lax.rem(turn, 2)

    def near(p, S):
      k = recurrent.key(k_smem.at[buffer, p])
      v = recurrent.value(v_smem.at[buffer, p], m)
      return recurrent.advance(S, k, v, beta_smem[p], recurrent.columns(decay_smem.at[p]))[0]

    def far(p, S):
      row, at, _ = place(item, p)
      k = recurrent.key(k_gmem.at[row, at, lax.div(h, share)])
      v = recurrent.value(v_gmem.at[row, at, h], m)
      beta, g = gates(item, p)
      # A lane that is behind still reads the decay of the token before.
      decay = recurrent.decay(g, decay_smem.at[lax.rem(p, 2)])
      return recurrent.advance(S, k, v, beta, decay)[0]

    S = lax.fori_loop(0, jnp.minimum(length, staged), near, S)
    if path.path.shape[1] > staged:
      lanes.sync()  # all lanes are done with the decays that were staged
      S = lax.fori_loop(jnp.minimum(length, staged), length, far, S)
    recurrent.leave(S, out_smem, 0, items.tile(item), pending=0)

  recurrent.walk(
    items, visit, lambda item: None, in_smem=in_smem, ready=ready,
    fetch=fetch, stage=stage,
  )  # fmt: skip


# A decay per channel takes the registers of a third warpgroup.
DEFAULT = Config(ctas_per_sm=3)
PER_CHANNEL = Config(ctas_per_sm=2)


def fold_raw(S, records, pending, slots, *, config: Config | None = None):
  """Slots of one call are distinct, as everywhere."""
  recurrent.check(S, records.k, records.v, records.g)
  if records.beta.dtype != jnp.float32 or records.g.dtype != jnp.float32:
    raise ValueError("gates are float32 in every path")
  pool = jax.new_ref(S)
  heads, channels, P = slots.shape[0] * S.shape[1], records.g.shape[3], pending.path.shape[1]
  default = DEFAULT if channels == 1 else PER_CHANNEL
  config = config or chosen(
    "fold", default, state=S.dtype, channels=channels, tokens=P, heads=heads
  )
  staged = min(P, STAGED)
  scratch = recurrent.scratch(S.dtype, config.arriving, 1) | {
    "k_smem": plgpu.SMEM((2, staged, K), records.k.dtype),
    "v_smem": plgpu.SMEM((2, staged, V), records.v.dtype),
    "beta_smem": plgpu.SMEM((staged,), jnp.float32),
    "decay_smem": plgpu.SMEM((max(staged, 2), channels), jnp.float32),
    "staged_ready": plgpu.Barrier(num_arrivals=2 * staged, num_barriers=2),
  }
  recurrent.launch(kernel, (), config, heads * HALVES, scratch)(pool, *records, *pending, slots)
  return jax.freeze(pool)
