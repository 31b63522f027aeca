"""`step`: pending writes met beside the state, or folded into it, in the launch that verifies.

One body for the interpreter, with race detection, and for a GPU.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("absl")  # jax.experimental.pallas.mosaic_gpu imports it

from gdn.ops import parted, whole
from gdn.typing import Pending, Rows
from pallas_kernels import recurrent_verify
from pallas_kernels import step as step_kernel
from pallas_kernels.snapshot import snapshot
from pallas_kernels.step import step
from tests import h200
from tests.slow import slow
from tests.test_kernels import XLA, abstract, bf16, case, close, f32, i32, interpreted, poisoned
from tests.test_recurrent_kernels import EVERYWHERE, Where
from tests.test_recurrent_kernels import case as every_kind
from tests.words import lane_moves  # noqa: F401, a fixture

K = V = 128
on_h200 = pytest.mark.skipif(bool(h200.why_not()), reason=h200.why_not() or "compiles")


class Case(NamedTuple):
  """T nodes, R rows, what is folded (all, nothing or some slots), dtypes of rows and state, and how
  many value heads a key head has."""

  T: int
  R: int
  fold: bool | None
  parts: tuple
  state: type = f32
  share: int = 2


CASES = [
  Case(8, 8, True, (f32,)),
  Case(16, 40, False, (bf16,)),  # two sixteens of pending rows
  Case(5, 10, None, (bf16, bf16)),
  Case(8, 16, False, (f32,)),
  Case(16, 16, True, (bf16, bf16), bf16),
  Case(6, 6, True, (f32,), share=3),
  Case(8, 8, True, (bf16,), share=4),
  Case(12, 32, False, (f32,), share=3),
  Case(16, 16, True, (f32,)),  # parts of float32 rows are read from shared memory, chunk by chunk
]
# In the interpreter: warpgroups of a block, what the preparer finishes where they are two, how many
# folded chunks leave together. The others add other numbers of value heads to a key head, and other
# sharings of the same work.
QUICK = [
  (CASES[0], 2, 4, 1), (CASES[0], 5, 0, 2), (CASES[2], 3, 0, 1), (CASES[3], 2, 4, 1),
]  # fmt: skip
OTHERS = [
  (CASES[0], 5, 0, 4), (CASES[1], 3, 0, 1), (CASES[1], 5, 0, 1), (CASES[2], 2, 2, 1),
  (CASES[4], 5, 0, 2), (CASES[5], 2, 2, 1), (CASES[6], 2, 2, 1), (CASES[8], 5, 0, 1),
]  # fmt: skip


def rows_of(rng, N: int, R: int, H: int, Hk: int, parts, channels: int = 1) -> Rows:
  normal = lambda *s: jnp.asarray(rng.standard_normal(s, np.float32))
  k = normal(N, R, Hk, K)
  k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
  u, g = 0.3 * normal(N, R, H, V), -jnp.abs(0.2 * normal(N, R, H, channels))
  return Rows(parted(k, parts), parted(u, parts), g)


def pending_of(rng, c: Case, slots):
  """Paths that start anywhere, of all lengths; rows that nothing may read are NaN."""
  B = slots.shape[0]
  most = c.R if c.fold else c.R - c.T
  length = rng.integers(0, most + 1, B) * (rng.random(B) < 0.7)  # some slots have nothing pending
  length[0] = most
  start = rng.integers(0, c.R, B) if c.fold is not True else np.zeros(B, int)
  path = (start[:, None] + np.arange(c.R)) % c.R
  if c.fold:  # an accepted path skips nodes
    path = np.stack([np.sort(rng.permutation(c.R)) for _ in range(B)])
    for b, n in enumerate(length):
      path[b, :n] = np.sort(rng.permutation(c.R)[:n])
  flush = length > most // 2 if c.fold is None else np.full(B, c.fold)
  at = np.where(flush, 0, (start + length) % c.R) if c.fold is not True else np.zeros(B, int)
  ints = [jnp.asarray(x, i32) for x in (path, length, at)]
  return Pending(slots, *ints[:2]), jnp.asarray(flush), ints[2]


@pytest.mark.parametrize(
  "c, copies, groups, handed, leaving",
  [pytest.param(c, 0, *how, marks=pytest.mark.warpgroups) for c, *how in QUICK]
  + [
    pytest.param(c, 0, *how, marks=[pytest.mark.warpgroups, pytest.mark.slow]) for c, *how in OTHERS
  ]
  + [pytest.param(c, n, 0, 0, 0, marks=pytest.mark.gpu) for c in CASES for n in (2, 20)],
)
def test_step_is_the_reference(
  c: Case, copies: int, groups: int, handed: int, leaving: int, lane_moves  # noqa: F811
):  # fmt: skip
  rng = np.random.default_rng(c.T)
  B, Hk = (3 if c.T < 16 else 2, 1) if not copies else (copies, 16)
  H = c.share * Hk
  S, window, params = case(4, B, c.T, H, Hk, dtype=c.state)
  distinct = window.slots
  window = poisoned(window, [*rng.integers(c.T // 2, c.T + 1, B - 1), c.T])
  if c.fold and B == 2:  # no padding
    window = window._replace(slots=distinct)
  rows = rows_of(rng, S.shape[0], c.R, H, Hk, c.parts)
  pending, flush, at = pending_of(rng, c, window.slots)
  rows = spoiled(rows, pending)
  config = None
  if not copies:  # one block, whose buffers are all in use
    how = {"chunks": groups, "groups": groups, "handed": handed, "leaving": leaving}
    config = step_kernel.Config(sms=1, ctas_per_sm=1, **how)
  call = functools.partial(step, out_dtype=f32, config=config)
  known = flush if c.fold is None else c.fold
  run = jax.jit(lambda S, rows, pending, at, w: call(S, rows, pending, known, at, w, params))
  with interpreted():
    o, gates, new, left = run(S, rows, pending, at, window)
  want_o, _, want, want_left = jax.jit(XLA.step)(S, rows, pending, flush, at, window, params)
  # Of a narrow state a folded element may be rounded the other way.
  close(o, want_o, eps=2.0**-20 if c.state == f32 else 2.0**-14)
  close(new, want, eps=2.0**-20 if c.state == f32 else 2.0**-9)
  assert bool(jnp.isfinite(gates.beta).all())
  narrow = 2.0 ** {(f32,): -20, (bf16,): -8, (bf16, bf16): -15}[c.parts]
  for got, wanted in zip(parts_of(left), parts_of(want_left), strict=True):
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))  # nothing else was touched
    close(jnp.nan_to_num(got), jnp.nan_to_num(wanted), eps=narrow)


@pytest.mark.warpgroups
def test_padding_reads_no_state_that_is_written(lane_moves):  # noqa: F811
  """Behind a row that writes slot 0, in the same block: the interpreter notices a race."""
  rng = np.random.default_rng(0)
  S, window, params = case(4, 2, 8, 2, 1)
  window = window._replace(slots=jnp.asarray([0, -1], i32))
  rows = rows_of(rng, S.shape[0], 8, 2, 1, (f32,))
  path = jnp.tile(jnp.arange(8, dtype=i32), (2, 1))
  pending = Pending(window.slots, path, jnp.asarray([8, 0], i32))
  config = step_kernel.Config(sms=1, ctas_per_sm=1, chunks=4, groups=5)
  run = jax.jit(functools.partial(step, config=config), static_argnums=3)
  with interpreted():
    o, _, new, _ = run(S, rows, pending, True, jnp.zeros(2, i32), window, params)
  assert not np.asarray(o[1]).any()
  np.testing.assert_array_equal(new[1:], S[1:])


def spoiled(rows: Rows, pending: Pending) -> Rows:
  """NaN wherever no path of a slot leads."""
  keep = np.zeros(rows.g.shape[:2], bool)
  for slot, path, n in zip(*map(np.asarray, pending), strict=True):
    if slot >= 0:
      keep[slot, path[:n]] = True
  off = lambda x: jnp.where(
    jnp.asarray(keep.reshape(*keep.shape, 1, 1)), x, jnp.asarray(jnp.nan, x.dtype)
  )
  return jax.tree.map(off, rows)


def parts_of(rows: Rows):
  return whole(rows.k), whole(rows.u), rows.g


@EVERYWHERE
@pytest.mark.parametrize("fold", [True, False, None], ids=["all", "nothing", "some"])
@pytest.mark.parametrize("parts", [(f32,), (bf16, bf16)], ids=["fp32", "bf16 pairs"])
def test_step_token_by_token(fold: bool | None, parts, where: Where):
  """Per-channel decay; slots of every kind, NaN in branches and where nothing may be read."""
  if where.copies == 1 and (fold, len(parts)) not in ((False, 1), (None, 2)):
    pytest.skip("for the interpreter, two of six will do")
  S, window, params = every_kind(where.copies, K)
  (_, T), rng = window.parents.shape, np.random.default_rng(1)
  c = Case(T, 3 * T, fold, parts)
  pending, flush, at = pending_of(rng, c, window.slots)
  rows = spoiled(rows_of(rng, S.shape[0], c.R, 2, 1, parts, K), pending)
  known = flush if fold is None else fold
  call = functools.partial(recurrent_verify.step, out_dtype=f32, **where.config)
  run = jax.jit(lambda S, rows, pending, at, w: call(S, rows, pending, known, at, w, params))
  with interpreted():
    o, _, new, left = run(S, rows, pending, at, window)
  want_o, _, want, want_left = jax.jit(XLA.step)(S, rows, pending, flush, at, window, params)
  close(new, want)
  narrow = 2.0 ** (-20 if len(parts) == 1 else -14)
  pairs = zip((o, *parts_of(left)), (want_o, *parts_of(want_left)), strict=True)
  for got, wanted in pairs:
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    close(jnp.nan_to_num(got), jnp.nan_to_num(wanted), eps=narrow)


@pytest.mark.gpu
def test_gates_are_the_same_bits_in_every_kernel():
  """What an exact ring replays was recorded by `step`; `decode` and `snapshot` make their own."""
  S, window, params = case(0, 20, 16, 32, 16)
  rows = rows_of(np.random.default_rng(0), 21, 32, 32, 16, (f32,))
  none = Pending(window.slots, jnp.zeros((20, 32), i32), jnp.zeros(20, i32))
  beta, g = jax.jit(functools.partial(snapshot, keep=16))(S, window, params)[1]
  at = jnp.zeros(20, i32)
  for op in (step, recurrent_verify.step):
    got = jax.jit(lambda op=op: op(S, rows, none, False, at, window, params)[1])()
    np.testing.assert_array_equal(got.beta, beta)
    np.testing.assert_array_equal(got.g, g)


def abstract_step(B: int, T: int, R: int, parts=(f32,), dtype=f32, share: int = 2):
  """What `step` takes but the flag: S, rows, pending, at, window, params; without values."""
  N, Hk, sd = B + 1, 16, jax.ShapeDtypeStruct
  H = share * Hk
  S, window, params = abstract(B, T, dtype, H=H)
  rows = Rows(
    tuple(sd((N, R, Hk, K), d) for d in parts), tuple(sd((N, R, H, V), d) for d in parts),
    sd((N, R, H, 1), f32),
  )  # fmt: skip
  pending = Pending(sd((B,), i32), sd((B, R), i32), sd((B,), i32))
  return S, rows, pending, sd((B,), i32), window, params


@on_h200
@pytest.mark.parametrize("T, R, fold, parts, dtype, groups, share", [
  (16, 16, True, (f32,), f32, 5, 2), slow(16, 16, True, (bf16,), bf16, 2, 2),
  (16, 64, False, (f32,), f32, 5, 2), (4, 16, False, (f32,), f32, 2, 2),
  (8, 32, False, (bf16,), bf16, 2, 2), slow(8, 8, True, (f32,), f32, 5, 2),
  slow(16, 80, False, (f32,), f32, 3, 2), slow(8, 8, True, (bf16,), bf16, 2, 2),
  slow(8, 64, False, (bf16, bf16), f32, 3, 2), slow(8, 32, False, (f32,), f32, 2, 2),
  slow(4, 4, True, (bf16,), bf16, 2, 2), slow(8, 40, False, (f32,), f32, 2, 2),
  slow(16, 16, True, (f32,), f32, 5, 3), slow(8, 8, True, (f32,), f32, 5, 4),
])  # fmt: skip
def test_step_compiles_without_spills_and_copies_no_pool(
  T: int, R: int, fold: bool, parts, dtype, groups: int, share: int
):
  """Two blocks of two warpgroups share a multiprocessor, or one of three or five has it."""
  args = abstract_step(64, T, R, parts, dtype, share)
  got = h200.compiled(lambda *x: step(*x[:3], fold, *x[3:]), *args, donate=(0, 1))
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[:2]))
  assert (got.aliased, got.copies, got.spilled) == (size, 0, 0)
  assert got.resident(threads=128 * groups) >= (2 if groups == 2 else 1)
