"""`append`: a window's records behind the cursors of a ring. One body for Mosaic's interpreter and
for a GPU; and compiled for an H200, where it may copy nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("absl")  # jax.experimental.pallas.mosaic_gpu imports it

from gdn.ops import XLA
from pallas_kernels.append import append
from tests import h200
from tests.test_kernels import interpreted
from tests.words import lane_moves  # noqa: F401, a fixture

f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32
RAW = ((2, 16, bf16), (4, 16, bf16), (4, None, f32))  # heads and dims: k, v, beta
ROWS = ((2, 16, f32), (4, 16, f32), (4, 1, f32))  # k, u, g
PER_CHANNEL = (*ROWS[:2], (4, 16, f32))
QWEN = ((16, 128, bf16), (32, 128, bf16), (32, None, f32))


def records(rng, shape, kinds) -> tuple[jax.Array, ...]:
  draw = lambda h, d, dtype: jnp.asarray(
    rng.standard_normal((*shape, h, *(() if d is None else (d,)))), dtype
  )
  return tuple(draw(*kind) for kind in kinds)


@pytest.mark.parametrize(
  ("B", "T", "R", "kinds"),
  [
    pytest.param(3, 3, 8, RAW, id="raw"),
    pytest.param(3, 3, 3, ROWS, id="rows, no longer than a window"),
    pytest.param(2, 2, 5, PER_CHANNEL, id="a decay per channel"),
    pytest.param(2, 2, 5, ((130, 8, bf16), (130, None, f32)), id="more heads than lanes"),
    pytest.param(64, 16, 64, QWEN, id="Qwen3-Next", marks=pytest.mark.gpu),
  ],
)
def test_append_is_the_reference(B: int, T: int, R: int, kinds, lane_moves):  # noqa: F811
  """Rings that wrap, fewer nodes, none, padding; everything else in the pools keeps its bits, NaN
  among it, and what does not exist may be NaN."""
  rng = np.random.default_rng(T)
  pools = records(rng, (B + 2, R), kinds)
  pools = jax.tree.map(lambda x: x.at[:, R // 2].set(jnp.nan), pools)
  row = rng.permutation(B + 2)[:B]
  nodes = np.resize([T, T - 1, 0], B)
  row[-1] = -1
  new = records(rng, (B, T), kinds)
  off = jnp.asarray(np.arange(T)[None] >= nodes[:, None])
  spoil = lambda x: jnp.where(off.reshape(B, T, *(1,) * (x.ndim - 2)), jnp.nan, x).astype(x.dtype)
  args = [jnp.asarray(x, i32) for x in (row, np.resize([R - 1, 0], B), nodes)]
  want = XLA.append(pools, *args, jax.tree.map(spoil, new))
  with interpreted():
    got = jax.jit(append)(pools, *args, jax.tree.map(spoil, new))
  for x, y in zip(got, want, strict=True):
    np.testing.assert_array_equal(x.astype(f32), y.astype(f32))


@pytest.mark.skipif(bool(h200.why_not()), reason=h200.why_not() or "compiles")
def test_append_copies_no_pool():
  shape = lambda first, kinds: tuple(
    jax.ShapeDtypeStruct((*first, h, *(() if d is None else (d,))), t) for h, d, t in kinds
  )
  pools, ints = shape((65, 64), QWEN), [jax.ShapeDtypeStruct((64,), i32)] * 3
  got = h200.compiled(append, pools, *ints, shape((64, 16), QWEN), donate=(0,))
  size = sum(x.size * x.dtype.itemsize for x in pools)
  assert (got.aliased, got.temporary, got.copies, got.spilled) == (size, 0, 0, 0)
  assert got.launches == 1
  assert got.resident(threads=128) >= 8


def test_records_that_no_copy_takes_are_for_xla():
  pool = jax.ShapeDtypeStruct((2, 4, 3, 5), bf16)  # ten bytes
  ints = [jax.ShapeDtypeStruct((1,), i32)] * 3
  with pytest.raises(NotImplementedError, match="records of bfloat16"):
    jax.eval_shape(append, (pool,), *ints, (jax.ShapeDtypeStruct((1, 2, 3, 5), bf16),))
