"""The short causal convolution with SiLU over a window. Reference: `gdn.ops.XLA.conv`.

Traffic: every input row and the W - 1 tail rows read once, every output row written once.

A warpgroup has a slot and a block of channels, up to eight of them a lane. Each lane brings its
channels of all rows to shared memory in one go and reads them back along the path of each node:
only ever its own, so nothing waits for anybody. Chains and trees are one thing to it; the rows that
a node's taps meet follow from those of its parent.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes
from pallas_kernels.arith import bf16, f32

LANES = 128
MAX_NODES = 64
SHARED_MEMORY = 64 * 1024  # a block's rows; three blocks share a multiprocessor


def kernel(tail_gmem, x_gmem, taps_gmem, parents_gmem, nodes_gmem, slots_gmem, y_gmem,
           *, rows_smem, source_smem):  # fmt: skip
  (B, T, _), W, width = x_gmem.shape, taps_gmem.shape[0], rows_smem.shape[1]
  del B
  b, back = lax.axis_index("slot"), W - 1
  block = pl.ds(lax.axis_index("block") * width, width)
  layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // LANES)
  load = lambda ref: plgpu.load(ref, layout=layout, optimized=False)
  slot = slots_gmem[b]
  nodes = jnp.where(slot >= 0, nodes_gmem[b], 0)

  @pl.when(nodes > 0)
  def window():
    # Rows past the last node repeat it: nothing reads them.
    sources = [tail_gmem.at[jnp.maximum(slot, 0), j, block] for j in range(back)]
    sources += [x_gmem.at[b, jnp.minimum(t, nodes - 1), block] for t in range(T)]
    for i, row in enumerate([load(source) for source in sources]):
      rows_smem.at[i][...] = row.astype(rows_smem.dtype)
    taps = [load(taps_gmem.at[j, block]).astype(f32) for j in range(W)]

    def node(t, _):
      parent = parents_gmem[b, t]
      above = jnp.maximum(parent, 0)
      source = t + back
      total = taps[back] * load(rows_smem.at[source]).astype(f32)
      source_smem[t, 0] = source
      for j in range(1, W):
        # Every lane writes these words and reads its own.
        source = jnp.where(parent < 0, back - j, source_smem[above, j - 1])
        source_smem[t, j] = source
        total += taps[back - j] * load(rows_smem.at[source]).astype(f32)
      y = total / (1.0 + jnp.exp(-total))
      y_gmem.at[b, t, block][...] = y.astype(y_gmem.dtype)
      lanes.fence()  # the next node's loads of these words stay behind their stores

    lax.fori_loop(0, nodes, node, None)

  def blank(t, _):
    zero = plgpu.layout_cast(jnp.zeros((width,), y_gmem.dtype), layout)
    y_gmem.at[b, t, block][...] = zero

  lax.fori_loop(nodes, T, blank, None)


def conv(tail, x, taps, parents, nodes, slots):
  (B, T, C), W = x.shape, taps.shape[0]
  if x.dtype not in (f32, bf16) or tail.dtype != x.dtype:
    raise NotImplementedError(f"inputs of {x.dtype}, tail of {tail.dtype}: one of fp32 and bf16")
  if T > MAX_NODES:
    raise NotImplementedError(f"{T=} nodes: at most {MAX_NODES}")
  row = (T + W - 1) * LANES * x.dtype.itemsize
  fits = [n for n in (8, 4, 2, 1) if C % (n * LANES) == 0 and n * row <= SHARED_MEMORY]
  if not fits:
    raise NotImplementedError(f"{C=} channels: only multiples of {LANES}")
  width = fits[0] * LANES
  return plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
    grid=(B, C // width),
    grid_names=("slot", "block"),
    scratch_types={
      "rows_smem": plgpu.SMEM((T + W - 1, width), x.dtype),
      "source_smem": plgpu.SMEM((T, W), jnp.int32),
    },
    compiler_params=lanes.COMPILER,
  )(tail, x, taps, parents, nodes, slots)
