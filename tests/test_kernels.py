"""The kernels against the reference: in Mosaic's interpreter, compiled for an H200, and on a GPU.

All of them run in the interpreter with race detection. What it has no words for (moves between
lanes, tensor cores fed from registers) tests/words.py says in others; the instructions themselves
are covered by full compilation here, and on a GPU.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("absl")  # jax.experimental.pallas.mosaic_gpu imports it

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from gdn.ops import Gates, xla
from gdn.typing import GateParams, Pending, Raw, Records, Window
from pallas_kernels import lanes, tiles
from pallas_kernels import verify as verify_kernel
from pallas_kernels.decode import decode
from pallas_kernels.fold import fold_raw
from pallas_kernels.snapshot import snapshot
from pallas_kernels.verify import ancestor_words, verify
from tests import h200
from tests.slow import slow
from tests.words import lane_moves, speak_of_rows  # noqa: F401, a fixture

f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32
K = V = 128
XLA = xla(out=f32)

on_h200 = pytest.mark.skipif(bool(h200.why_not()), reason=h200.why_not() or "compiles")


@contextlib.contextmanager
def interpreted():
  """Where there is no GPU: barriers, copies and races as Mosaic would run them."""
  if jax.default_backend() == "gpu":
    yield
    return
  device = jax.sharding.AbstractDevice("NVIDIA H200", 132, "gpu")
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  gpu_callbacks.reset_gpu_interpret_mode_state()
  with (
    pytest.MonkeyPatch.context() as monkeypatch,
    jax.sharding.use_abstract_mesh(mesh),
    plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
  ):
    speak_of_rows(monkeypatch)
    yield
  assert not gpu_callbacks.get_races().races_found


def case(seed: int, B: int, T: int, H: int, Hk: int, *, N: int | None = None, dtype=f32):
  """A pool, a window of chains on distinct slots, and gate parameters."""
  rng = np.random.default_rng(seed)
  N = N or B + 1
  normal = lambda *s: rng.standard_normal(s, np.float32)
  S = jnp.asarray(0.3 * normal(N, H, V, K)).astype(dtype)
  raw = Raw(
    *(jnp.asarray(x, bf16) for x in (normal(B, T, Hk, K), normal(B, T, Hk, K), normal(B, T, H, V))),
    jnp.asarray(normal(B, T, H, 1), bf16),
    jnp.asarray(normal(B, T, H), bf16),
  )
  parents = jnp.asarray(np.broadcast_to(np.arange(T) - 1, (B, T)), i32)
  slots = jnp.asarray(rng.permutation(N)[:B], i32)
  window = Window(raw, parents, jnp.full((B,), T, i32), slots)
  rates = jnp.asarray(rng.uniform(-1, 1, H), f32)
  return S, window, GateParams(rates, jnp.asarray(normal(H, 1)), jnp.float32(1.0))


def poisoned(window: Window, nodes) -> Window:
  """Fewer nodes, NaN in every row that no longer exists, and the last slot padding."""
  T = window.parents.shape[1]
  off = jnp.arange(T)[None] >= jnp.asarray(nodes)[:, None]
  spoil = lambda x: jnp.where(off.reshape(*off.shape, *(1,) * (x.ndim - 2)), jnp.nan, x)
  raw = jax.tree.map(lambda x: spoil(x.astype(f32)).astype(x.dtype), window.raw)
  slots = window.slots.at[-1].set(-1)
  return window._replace(raw=raw, nodes=jnp.asarray(nodes, i32), slots=slots)


def close(got, want, *, eps: float = 2.0**-20) -> None:
  """Within rounding of each other, relative to the whole."""
  got, want = (np.asarray(x.astype(f32), np.float64) for x in (got, want))
  assert np.isfinite(got).all()
  assert np.linalg.norm(got - want) <= eps * max(np.linalg.norm(want), 1e-30)


# One warpgroup of one multiprocessor walks over everything: buffers are reused, which is where
# races are.
ALONE = tiles.Config(ctas_per_sm=1, sms=1)


def test_decode_is_the_reference():
  S, window, params = case(0, 3, 1, 2, 1)
  window = window._replace(slots=window.slots.at[1].set(-1))
  with interpreted():
    o, new = jax.jit(functools.partial(decode, config=ALONE, out_dtype=f32))(S, window, params)
  want_o, want = jax.jit(XLA.decode)(S, window, params)
  close(o, want_o)
  close(new, want)
  untouched = sorted(set(range(4)) - {int(window.slots[0]), int(window.slots[2])})
  np.testing.assert_array_equal(new[np.array(untouched)], S[np.array(untouched)])


@pytest.mark.parametrize("keep", [4, 1])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_snapshot_is_the_reference(tree: bool, keep: int):
  """Trees too when a parent's state was not kept: `keep` = 1 keeps the root's first child alone."""
  S, window, params = case(1, 3, 4, 2, 1)
  nodes = [4, 4, 4]
  if tree:
    window = window._replace(parents=jnp.asarray([[-1, 0, 0, 1], [-1, 0, 1, 1], [-1] * 4], i32))
  window = poisoned(window, nodes)
  call = functools.partial(snapshot, keep=keep, config=ALONE, out_dtype=f32)
  with interpreted():
    o, gates, states = jax.jit(call)(S, window, params)
  want_o, want_gates, want = jax.jit(XLA.snapshot, static_argnames="keep")(
    S, window, params, keep=keep
  )
  close(o, want_o)
  for b, n in enumerate(nodes[:2]):
    close(states[b, :n], want[b, :n])
    close(gates.beta[b, :n], want_gates.beta[b, :n])
    close(gates.g[b, :n], want_gates.g[b, :n])


def test_fold_and_snapshot_and_decode_leave_the_same_bits():
  """Also past the records that are staged, and for paths that skip nodes."""
  B, T, H, Hk = 2, 10, 1, 1
  S, window, params = case(2, B, T, H, Hk)
  snap = functools.partial(snapshot, keep=T, config=ALONE)
  path = jnp.broadcast_to(jnp.arange(T, dtype=i32), (B, T))
  length = jnp.asarray([T, 3], i32)
  with interpreted():
    _, gates, states = jax.jit(snap)(S, window, params)
    records = Records(window.raw.k, window.raw.v, *gates)
    pending = Pending(jnp.arange(B, dtype=i32), path, length)
    folded = jax.jit(functools.partial(fold_raw, config=ALONE))(S, records, pending, window.slots)
    one = jax.jit(functools.partial(decode, config=ALONE))
    stepped = S
    for t in range(3):
      raw = jax.tree.map(lambda x, t=t: x[:, t : t + 1], window.raw)
      token = Window(raw, window.parents[:, :1], jnp.ones((B,), i32), window.slots)
      stepped = one(stepped, token, params)[1]
  for b, n in enumerate([T, 3]):
    np.testing.assert_array_equal(folded[window.slots[b]], states[b, n - 1])
    np.testing.assert_array_equal(stepped[window.slots[b]], states[b, 2])


def test_fold_leaves_slots_without_pending_alone():
  S, window, _ = case(3, 3, 3, 2, 1)
  gates = Gates(jnp.full((3, 3, 2), 0.5), jnp.full((3, 3, 2, 1), -0.1))
  records = Records(window.raw.k.at[:, 2].set(jnp.nan), window.raw.v, *gates)
  path = jnp.asarray([[1, 0, 2], [0, 1, 2], [0, 2, 2]], i32)
  pending = Pending(jnp.asarray([2, -1, 0], i32), path, jnp.asarray([2, 2, 0], i32))
  with interpreted():
    new = jax.jit(functools.partial(fold_raw, config=ALONE))(S, records, pending, window.slots)
  close(new, jax.jit(XLA.fold_raw)(S, records, pending, window.slots))
  np.testing.assert_array_equal(new[window.slots[1:]], S[window.slots[1:]])


SMALL = [
  (T, B, dtype, {"ctas_per_sm": 1, "sms": sms, "handed": handed})
  for T, B, dtype, sms, handed in [
    (5, 3, f32, 1, 3), (8, 1, f32, 8, 2), (16, 3, bf16, 1, 1), (12, 2, f32, 2, 4),
    (3, 2, bf16, 1, 0),
  ]
]  # fmt: skip
AT_ONCE = 3  # of these CI runs, the others are slow
FIELDS: list[dict[str, int]] = [{}, {"handed": 0}, {"handed": 1}, {"handed": 3}, {"handed": 4}]
MANY = [(T, B, dtype, {}) for T in (1, 3, 8, 12, 16) for B in (2, 20) for dtype in (f32, bf16)]
MANY += [(16, 20, dtype, fields) for fields in FIELDS[1:] for dtype in (f32, bf16)]
MANY += [(16, 4, f32, {"split": 2}), (16, 20, f32, {"groups": 5, "ctas_per_sm": 1})]


@pytest.mark.parametrize(
  "T, B, dtype, fields",
  [
    pytest.param(*x, marks=[pytest.mark.warpgroups, *[pytest.mark.slow] * (i >= AT_ONCE)])
    for i, x in enumerate(SMALL)
  ]
  + [pytest.param(*x, marks=pytest.mark.gpu) for x in MANY],
)
def test_verify_is_the_reference(T: int, B: int, dtype, fields, lane_moves):  # noqa: F811
  """Trees, fewer nodes, padding, NaN where nothing may be read; half a head a block at 8 sms, and
  every way to share the work between warpgroups."""
  small = "sms" in fields
  S, window, params = case(4, B, T, *((2, 1) if small else (32, 16)), dtype=dtype)
  rng = np.random.default_rng(T)
  tree = np.stack([rng.integers(-1, t, B) if t else np.full(B, -1) for t in range(T)], 1)
  window = window._replace(parents=jnp.asarray(tree, i32))
  if B > 1:
    window = poisoned(window, [*rng.integers(T // 2, T + 1, B - 1), T])
  config = verify_kernel.Config(**fields)
  with interpreted():
    o, gates, rows = jax.jit(functools.partial(verify, out_dtype=f32, config=config))(
      S, window, params
    )
  want_o, want_gates, want = jax.jit(XLA.verify)(S, window, params)
  real = np.asarray(jnp.arange(T)[None] < window.nodes[:, None])
  real = real & (np.asarray(window.slots) >= 0)[:, None]
  close(o, want_o)
  close(rows.u[0], want.u[0])
  close(rows.k[0], want.k[0])
  close(gates.beta[real], want_gates.beta[real])
  close(rows.g[real], want.g[real])


def test_a_lane_knows_its_places():
  """Of the first lane, in the order of its registers."""
  steps = lambda shape, layout: list(lanes.Places(shape, layout).steps)
  assert steps((64,), lanes.ROWS) == [(0,), (8,)]
  assert steps((16,), lanes.COLS) == [(0,), (1,), (8,), (9,)]
  rows, columns = (0, 8), (0, 1, 8, 9)
  tile = [(r, c + 8 * j) for j in (0, 1) for r in rows for c in columns[:2]]
  assert steps((64, 16), plgpu.Layout.WGMMA) == tile


def test_ancestor_words_are_root_paths():
  words = ancestor_words(jnp.asarray([[-1, 0, 0, 1, 2, -1], [-1, 0, 1, 2, 3, 4]], i32))
  np.testing.assert_array_equal(words, [[0, 1, 1, 3, 5, 0], [0, 1, 3, 7, 15, 31]])


def abstract(B: int, T: int, dtype, *, N: int = 65, H: int = 32, Hk: int = 16):
  sd = jax.ShapeDtypeStruct
  raw = Raw(
    sd((B, T, Hk, K), bf16), sd((B, T, Hk, K), bf16), sd((B, T, H, V), bf16),
    sd((B, T, H, 1), bf16), sd((B, T, H), bf16),
  )  # fmt: skip
  window = Window(raw, sd((B, T), i32), sd((B,), i32), sd((B,), i32))
  return sd((N, H, V, K), dtype), window, GateParams(sd((H,), f32), sd((H, 1), f32), sd((), f32))


@on_h200
@pytest.mark.parametrize("dtype", [f32, bf16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
  ("T", "parts"), [(4, ()), slow(9, ()), (16, (f32,)), slow(16, (bf16, bf16))]
)
def test_verify_compiles_without_spills_and_shares_a_multiprocessor(dtype, T: int, parts):
  got = h200.compiled(functools.partial(verify, parts=parts), *abstract(64, T, dtype))
  assert got.spilled == 0
  assert got.resident(threads=256) >= (3 if dtype == bf16 and T <= 8 and not parts else 2)


@on_h200
@pytest.mark.parametrize("dtype", [f32, bf16], ids=["fp32", "bf16"])
def test_writers_of_the_pool_alias_it_and_copy_nothing(dtype):
  S, window, params = abstract(64, 16, dtype)
  _, token, _ = abstract(64, 1, dtype)
  sd = jax.ShapeDtypeStruct
  records = Records(
    sd((65, 16, 16, K), bf16), sd((65, 16, 32, V), bf16), sd((65, 16, 32), f32),
    sd((65, 16, 32, 1), f32),
  )  # fmt: skip
  pending = Pending(sd((64,), i32), sd((64, 16), i32), sd((64,), i32))
  size = S.size * S.dtype.itemsize
  for f, args in ((fold_raw, (S, records, pending, window.slots)), (decode, (S, token, params))):
    got = h200.compiled(f, *args, donate=(0,))
    assert (got.aliased, got.temporary, got.copies, got.spilled) == (size, 0, 0, 0)
    assert got.resident(threads=128) >= (3 if f is fold_raw else 2)
  got = h200.compiled(functools.partial(snapshot, keep=16), S, window, params)
  assert got.spilled == 0


def test_shapes_that_no_kernel_takes_go_to_xla_with_one_warning():
  rng = np.random.default_rng(0)
  S = jnp.asarray(rng.standard_normal((2, 1, 8, 8)), f32)
  x = lambda *s: jnp.asarray(rng.standard_normal(s), bf16)
  raw = Raw(x(1, 2, 1, 8), x(1, 2, 1, 8), x(1, 2, 1, 8), x(1, 2, 1, 1), x(1, 2, 1))
  one = lambda *s: jnp.ones(s, i32)
  window = Window(raw, jnp.asarray([[-1, 0]], i32), 2 * one(1), one(1))
  params = GateParams(jnp.zeros((1,)), jnp.zeros((1, 1)), jnp.float32(1.0))
  pallas_kernels._warn_once.cache_clear()
  verify_twice = lambda: [pallas_kernels.MOSAIC_GPU.verify(S, window, params) for _ in range(2)]
  with pytest.warns(UserWarning, match="verify runs on XLA here") as told:
    _, got = verify_twice()
  assert len(told) == 1
  np.testing.assert_array_equal(got[0], xla().verify(S, window, params)[0])


@pytest.mark.parametrize("wrong", [{"ctas_per_sm": 0}, {"sms": 0}])
def test_configs_validate_themselves(wrong):
  with pytest.raises(ValueError):
    tiles.Config(**wrong)
