"""Kernels that walk token by token against the float64 oracle and the reference.

One body for Mosaic's interpreter, with race detection and one warpgroup that does everything, and
for a GPU, with many slots and every multiprocessor.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("absl")  # jax.experimental.pallas.mosaic_gpu imports it

from gdn.ops import parted, whole, xla
from gdn.typing import GateParams, Pending, Raw, Records, Rows, Window
from pallas_kernels import recurrent_verify, tiles
from pallas_kernels.conv import conv
from pallas_kernels.decode import decode
from pallas_kernels.fold import fold_raw
from pallas_kernels.fold_rank import fold_rank
from pallas_kernels.prefill import prefill
from pallas_kernels.snapshot import snapshot
from tests import budget, h200, oracle
from tests.slow import slow
from tests.test_kernels import close, interpreted
from tests.words import lane_moves  # noqa: F401, a fixture

f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32
K = V = 128
XLA = xla(out=f32)
EPS = 2.0**-23

on_h200 = pytest.mark.skipif(bool(h200.why_not()), reason=h200.why_not() or "compiles")


class Where(NamedTuple):
  """One warpgroup walks over everything, so buffers are reused, which is where races are; on a GPU
  the kernel's own configuration and `copies` of every slot of a case."""

  config: dict
  copies: int


ALONE = tiles.Config(ctas_per_sm=1, sms=1)
EVERYWHERE = pytest.mark.parametrize(
  "where",
  [
    pytest.param(Where({"config": ALONE}, 1), id="alone"),
    pytest.param(Where({}, 20), id="device", marks=pytest.mark.gpu),
  ],
)
CHANNELS = pytest.mark.parametrize("channels", [1, K], ids=["gdn", "kda"])
KINDS = ("random", "short", "identical", "total_decay", "tree", "lost_branch", "padding", "empty")


def case(copies: int, channels: int, *, T: int = 4, H: int = 2, Hk: int = 1, seed: int = 0):
  """A pool and a window with a slot of each kind, `copies` times; two slots belong to nobody.

  NaN stands wherever nothing may be read.
  """
  rng = np.random.default_rng(seed)
  normal = lambda *s: rng.standard_normal(s, np.float32)
  B = len(KINDS) * copies
  of = lambda *kinds: np.isin(np.tile(KINDS, copies), kinds)
  q, k, v = normal(B, T, Hk, K), normal(B, T, Hk, K), normal(B, T, H, V)
  a, b = normal(B, T, H, channels), normal(B, T, H)
  k[of("identical")] = k[of("identical"), :1]
  a[of("identical")], b[of("identical")] = -20.0, 8.0  # no decay, beta near two
  a[of("total_decay"), T // 2, :, ::2] = 90.0
  v[of("lost_branch"), 1] = np.nan
  parents = np.tile(np.arange(T) - 1, (B, 1))
  for i in np.nonzero(of("tree", "lost_branch"))[0]:
    parents[i, 1:] = [0, *(rng.integers(-1, t) for t in range(2, T - 1)), 0]
  nodes = np.where(of("short"), T - 1, np.where(of("empty"), 0, T))
  for x in (q, k, v, a, b):
    x[np.arange(T)[None] >= nodes[:, None]] = np.nan
  slots = np.where(of("padding"), -1, rng.permutation(B + 2)[:B])
  raw = Raw(*(jnp.asarray(x, bf16) for x in (q, k, v, a, b)))
  ints = [jnp.asarray(x, i32) for x in (parents, nodes, slots)]
  params = GateParams(
    jnp.asarray(rng.uniform(-1, 1, H), f32), jnp.asarray(normal(H, channels)), jnp.float32(2.0)
  )
  return jnp.asarray(0.3 * normal(B + 2, H, V, K)), Window(raw, *ints), params


def walks(S, window: Window, params, kinds=KINDS):
  """States and outputs of a slot of each kind in float64 and, as a budget, plainly in float32."""
  wide = lambda x: np.asarray(x.astype(f32))
  for b, kind in enumerate(kinds):
    if kind in ("padding", "empty"):
      continue
    n = int(window.nodes[b])
    raw = [wide(x[b, :n]) for x in window.raw]
    parents = np.asarray(window.parents[b, :n])
    root = wide(S[window.slots[b]])
    result = []
    for dtype, rule in ((np.float64, oracle.householder), (np.float32, oracle.pseudo_value)):
      tokens = oracle.tokens(*raw, *params, dtype=dtype)
      result += oracle.walk(root, tokens, parents, rule)
    yield kind, b, n, *result


def existing(window: Window) -> np.ndarray:
  slots, nodes = np.asarray(window.slots), np.asarray(window.nodes)
  return (np.arange(window.parents.shape[1])[None] < nodes[:, None]) & (slots >= 0)[:, None]


def within(name, got, exact, plain, bound=0.0) -> None:
  """At most twice the error of the plain recurrence; NaN where float64 has NaN, and only there."""
  got = np.asarray(got.astype(f32))
  lost = np.isnan(exact)
  np.testing.assert_array_equal(np.isnan(got), lost)
  zero = lambda x: np.where(lost, 0.0, x)
  budget.check(name, zero(got), zero(exact), zero(plain), eps=EPS, bound=bound)


@EVERYWHERE
@CHANNELS
def test_recurrent_verify(channels: int, where: Where, monkeypatch):
  if channels == 1:  # ancestors past the bits of one word
    monkeypatch.setattr(recurrent_verify, "WORD", 1)
  S, window, params = case(where.copies, channels)
  call = functools.partial(recurrent_verify.verify, out_dtype=f32, **where.config)
  with interpreted():
    o, gates, rows = jax.jit(call)(S, window, params)
  for kind, b, n, _, exact, _, plain in walks(S, window, params):
    within(f"o of {kind}", o[b, :n], exact, plain)
  on = existing(window)
  for x in (o, rows.u[0], rows.k[0], *gates):
    assert not np.asarray(x)[~on].any()
  _, want_gates, want = jax.jit(XLA.verify)(S, window, params)
  close(rows.k[0][on], want.k[0][on])
  close(gates.beta[on], want_gates.beta[on])
  close(gates.g[on], want_gates.g[on])
  u, want_u = (np.asarray(x.u[0])[on] for x in (rows, want))
  np.testing.assert_array_equal(np.isnan(u), np.isnan(want_u))
  close(jnp.nan_to_num(u), jnp.nan_to_num(want_u))


@EVERYWHERE
def test_kda_snapshot_and_decode(where: Where):
  S, window, params = case(where.copies, K)
  T = window.parents.shape[1]
  snap = functools.partial(snapshot, keep=T, out_dtype=f32, **where.config)
  one = functools.partial(decode, out_dtype=f32, **where.config)
  raw = jax.tree.map(lambda x: x[:, :1], window.raw)
  token = Window(raw, window.parents[:, :1], jnp.minimum(window.nodes, 1), window.slots)
  with interpreted():
    o, gates, states = jax.jit(snap)(S, window, params)
    o1, new = jax.jit(one)(S, token, params)
  for kind, b, n, exact, exact_o, plain, plain_o in walks(S, window, params):
    within(f"states of {kind}", states[b, :n], exact, plain)
    within(f"o of {kind}", o[b, :n], exact_o, plain_o)
    np.testing.assert_array_equal(states[b, 0], new[window.slots[b]])
    np.testing.assert_array_equal(o[b, 0], o1[b, 0])
  on = existing(window)
  assert not np.asarray(o)[~on].any()
  close(gates.g[on], jax.jit(XLA.verify)(S, window, params)[1].g[on])
  untouched = np.setdiff1d(np.arange(S.shape[0]), np.asarray(window.slots))
  np.testing.assert_array_equal(new[untouched], S[untouched])


@EVERYWHERE
def test_kda_folds_leave_the_bits_of_decode(where: Where):
  """Also past the records that are staged, for paths that skip nodes, and where none is pending."""
  T = 10
  S, window, params = case(where.copies, K, T=T, H=1)
  raw, B = jax.tree.map(jnp.nan_to_num, window.raw), len(window.slots)
  window = window._replace(raw=raw, nodes=jnp.full_like(window.nodes, T))
  path = np.tile([[*range(T)], [0, 1, *[2**30] * 8], [1, 4, 9, *[-1] * 7], [5] * T], (B // 4, 1))
  length = np.tile([T, 2, 3, 0], B // 4)
  with interpreted():
    snap = jax.jit(functools.partial(snapshot, keep=1, **where.config))
    records = Records(raw.k, raw.v, *snap(S, window, params)[1])
    pending = Pending(jnp.arange(B, dtype=i32), *(jnp.asarray(x, i32) for x in (path, length)))
    fold = jax.jit(functools.partial(fold_raw, **where.config))
    folded = fold(S, records, pending, window.slots)
    one, stepped = jax.jit(functools.partial(decode, **where.config)), S
    for p in range(T):
      pick = lambda x, p=p: x[np.arange(B), np.clip(path[:, p], 0, T - 1)][:, None]
      token = Window(
        jax.tree.map(pick, raw), window.parents[:, :1], jnp.asarray(length > p, i32), window.slots
      )
      stepped = one(stepped, token, params)[1]
  np.testing.assert_array_equal(folded, stepped)
  assert (np.asarray(folded) != np.asarray(S)).any()
  close(folded, jax.jit(XLA.fold_raw)(S, records, pending, window.slots))


@EVERYWHERE
@CHANNELS
@pytest.mark.parametrize("parts", [(f32,), (bf16, bf16)], ids=["fp32", "pair"])
@pytest.mark.parametrize("P", [3, 10])
def test_fold_rank(P: int, parts, channels: int, where: Where):
  """Paths that skip rows, nothing pending, a decay to nothing, NaN in rows off the path."""
  if where.copies == 1 and (len(parts), channels) in ((1, K), (2, 1)):
    pytest.skip("for the interpreter, two of four will do")
  R, H, Hk, B = 11, 2, 1, 4 * where.copies
  rng = np.random.default_rng(P)
  normal = lambda *s: rng.standard_normal(s, np.float32)
  S = jnp.asarray(0.3 * normal(B + 2, H, V, K))
  path = np.stack([rng.permutation(R)[:P] for _ in range(B)])
  length = np.tile([P, P - 1, 2, 0], where.copies)
  row, slots = rng.permutation(B), rng.permutation(B + 2)[:B]
  row[2], slots[1::8] = -1, -1
  k, u, g = 0.1 * normal(B, R, Hk, K), normal(B, R, H, V), -np.exp(normal(B, R, H, channels))
  g[:, 4] = -180.0
  for b in range(B):
    path[b, length[b] :] = 2**30
    off = np.setdiff1d(np.arange(R), path[b, : length[b]])
    for x in (k, u, g):
      x[row[b], off if row[b] >= 0 else []] = np.nan
  split = lambda x: parted(jnp.asarray(x), parts)
  rows = Rows(split(k), split(u), jnp.asarray(g))
  pending = Pending(*(jnp.asarray(x, i32) for x in (row, path, length)))
  with interpreted():
    new = jax.jit(functools.partial(fold_rank, **where.config))(
      S, rows, pending, jnp.asarray(slots, i32)
    )
  k, u = (np.asarray(whole(x)) for x in (rows.k, rows.u))

  def fold(S, b, dtype):
    for t in path[b, : length[b]]:
      write = [x[row[b], t].astype(dtype) for x in (k, u, g)]
      S = np.exp(write[2])[:, None] * S + write[1][:, :, None] * write[0][:, None, :]
    return S

  idle = np.setdiff1d(np.arange(B + 2), slots[(length > 0) & (row >= 0)])
  np.testing.assert_array_equal(new[idle], S[idle])
  for b in np.nonzero((length > 0) & (row >= 0) & (slots >= 0))[0][:8]:
    root = np.asarray(S[slots[b]])
    exact, plain = (fold(root.astype(d), b, d) for d in (np.float64, np.float32))
    budget.check("S", new[slots[b]], exact, plain, eps=EPS)


@EVERYWHERE
@pytest.mark.parametrize("P", [127, slow(128), 130, 256])
def test_long_paths_are_folded_whole(P: int, where: Where):
  """No chunk ends behind the places of 128 lanes. A ring for windows of 32 is as long as these."""
  if where.copies == 1 and P != 128:
    pytest.skip("for the interpreter, one of four will do")
  B, H = where.copies, 1
  rng = np.random.default_rng(P)
  normal = lambda *s: rng.standard_normal(s, np.float32)
  S, slots = jnp.asarray(0.3 * normal(B, H, V, K)), jnp.arange(B, dtype=i32)
  path = np.stack([rng.permutation(P) for _ in range(B)])
  length = np.where(np.arange(B) % 3 == 2, 3, P)
  pending = Pending(slots, *(jnp.asarray(x, i32) for x in (path, length)))
  k, v = (jnp.asarray(x, bf16) for x in (0.1 * normal(B, P, H, K), normal(B, P, H, V)))
  beta, g = rng.uniform(0, 1, (B, P, H)).astype(f32), -0.1 * np.exp(normal(B, P, H, 1))
  with interpreted():
    for fold, reference, records in (
      (fold_raw, XLA.fold_raw, Records(k, v, jnp.asarray(beta), jnp.asarray(g))),
      (fold_rank, XLA.fold_rank, Rows((k,), (v,), jnp.asarray(g))),
    ):
      new = jax.jit(functools.partial(fold, **where.config))(S, records, pending, slots)
      close(new, jax.jit(reference)(S, records, pending, slots))


@EVERYWHERE
@pytest.mark.parametrize(
  "channels, T", [(1, 40), (K, 5), pytest.param(1, 300, marks=pytest.mark.gpu)]
)
def test_prefill(T: int, channels: int, where: Where, lane_moves):  # noqa: F811
  """Whole chunks and a part of one; KDA token by token."""
  S, window, params = case(where.copies, channels, T=T, H=1)
  v = jnp.nan_to_num(window.raw.v, nan=1.0).at[window.nodes == T - 1, T - 1].set(jnp.nan)
  window = window._replace(
    raw=window.raw._replace(v=v),
    parents=jnp.broadcast_to(jnp.arange(T) - 1, window.parents.shape),
  )
  kinds = KINDS
  if where.copies == 1:  # what the interpreter has time for
    kinds = ("short", "total_decay", "padding", "empty")
    window = jax.tree.map(lambda x: x[np.asarray([KINDS.index(kind) for kind in kinds])], window)
  call = functools.partial(prefill, out_dtype=f32, **where.config)
  with interpreted():
    o, new = jax.jit(call)(S, window, params)
  for kind, b, n, exact, exact_o, plain, plain_o in walks(S, window, params, kinds):
    wide = lambda x: np.asarray(x.astype(f32), np.float64)
    tokens = oracle.tokens(*(wide(x[b, :n]) for x in window.raw), *params)
    dS, do = oracle.solve_bound(wide(S[window.slots[b]]), tokens, range(-1, n - 1), EPS)
    if kind in ("random", "short", "total_decay"):
      got = np.asarray(o[b, :n], np.float64)
      assert np.linalg.norm(got - exact_o) <= 8 * EPS * np.linalg.norm(exact_o), kind
    within(f"o of {kind}", o[b, :n], exact_o, plain_o, do)
    within(f"S of {kind}", new[window.slots[b]], exact[-1], plain[-1], dS[-1])
  assert not np.asarray(o)[~existing(window)].any()
  idle = np.setdiff1d(np.arange(S.shape[0]), np.asarray(window.slots)[np.asarray(window.nodes) > 0])
  np.testing.assert_array_equal(new[idle], S[idle])


@pytest.mark.parametrize("dtype", [f32, bf16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
  "T, C", [(6, 384), pytest.param(16, 8192, marks=pytest.mark.gpu), (2, 256)]
)
def test_conv(T: int, C: int, dtype):
  """A chain, a tree, a short window, an empty one and a padded slot; NaN in rows off the path."""
  rng = np.random.default_rng(T)
  B, W, N = 5, 4, 7
  parents = np.tile(np.arange(T) - 1, (B, 1))
  parents[1] = [-1, *(rng.integers(-1, t) for t in range(1, T))]
  nodes = np.asarray([T, T, T - 1, 0, T])
  slots = rng.permutation(N)[:B]
  tail, x = rng.standard_normal((N, W - 1, C)), rng.standard_normal((B, T, C))
  for b, n in enumerate(nodes):
    x[b, n:], parents[b, n:] = np.nan, 2**30
  x[1, 0, 7], parents[1, -1] = np.nan, -1  # only its descendants may hear of it
  tail[np.setdiff1d(np.arange(N), slots[:4])] = np.nan
  slots[4] = -1
  args = [jnp.asarray(y, dtype) for y in (tail, x, rng.standard_normal((W, C)))]
  args += [jnp.asarray(y, i32) for y in (parents, nodes, slots)]
  with interpreted():
    y = jax.jit(conv)(*args)
  got, want = (np.asarray(z.astype(f32)) for z in (y, XLA.conv(*args)))
  assert np.isfinite(got[1, -1]).all()
  assert np.isnan(got[1, 0, 7])
  # The sum of W terms in another order and silu, then one rounding.
  rounding = (8 if dtype == f32 else 1) * 2.0 ** (-22 if dtype == f32 else -7)
  np.testing.assert_allclose(got, want, rtol=rounding, atol=8 * 2.0**-22)


def abstract(B: int, T: int, dtype, channels: int, *, N: int = 65, H: int = 32, Hk: int = 16):
  sd = jax.ShapeDtypeStruct
  raw = Raw(
    sd((B, T, Hk, K), bf16), sd((B, T, Hk, K), bf16), sd((B, T, H, V), bf16),
    sd((B, T, H, channels), bf16), sd((B, T, H), bf16),
  )  # fmt: skip
  window = Window(raw, sd((B, T), i32), sd((B,), i32), sd((B,), i32))
  return (
    sd((N, H, V, K), dtype),
    window,
    GateParams(sd((H,), f32), sd((H, channels), f32), sd((), f32)),
  )


def pool_bytes(S) -> int:
  return S.size * S.dtype.itemsize


@on_h200
@pytest.mark.parametrize("dtype", [f32, slow(bf16)], ids=["fp32", "bf16"])
def test_kda_compiles_for_an_h200(dtype):
  S, window, params = abstract(64, 16, dtype, K)
  token = abstract(64, 1, dtype, K)[1]
  sd = jax.ShapeDtypeStruct
  records = Records(
    sd((65, 16, 16, K), bf16), sd((65, 16, 32, V), bf16), sd((65, 16, 32), f32),
    sd((65, 16, 32, K), f32),
  )  # fmt: skip
  pending = Pending(sd((64,), i32), sd((64, 16), i32), sd((64,), i32))
  for f, args in ((fold_raw, (S, records, pending, window.slots)), (decode, (S, token, params))):
    got = h200.compiled(f, *args, donate=(0,))
    assert (got.aliased, got.temporary, got.copies) == (pool_bytes(S), 0, 0)
    assert got.spilled == 0
    assert got.resident(threads=128) == (3 if dtype == bf16 and f is fold_raw else 2)
  for T, parts in ((64, ()), (16, (bf16, bf16))):
    verify = functools.partial(recurrent_verify.verify, parts=parts)
    got = h200.compiled(verify, *abstract(64, T, dtype, K))
    assert got.spilled == 0
    assert got.resident(threads=128) == 2
  assert h200.compiled(functools.partial(snapshot, keep=16), S, window, params).spilled == 0


@on_h200
@pytest.mark.parametrize(
  "channels, parts",
  [(1, (f32,)), (1, (bf16,)), (K, (f32,)), (K, (bf16,)), (1, (bf16, bf16)), (K, (bf16, bf16))],
)
@pytest.mark.parametrize("P", [8, 64])
def test_fold_rank_compiles_for_an_h200(P: int, parts, channels: int):
  S, window, _ = abstract(64, 16, f32, channels)
  sd = jax.ShapeDtypeStruct
  rows = Rows(
    tuple(sd((65, 64, 16, K), p) for p in parts), tuple(sd((65, 64, 32, V), p) for p in parts),
    sd((65, 64, 32, channels), f32),
  )  # fmt: skip
  pending = Pending(sd((64,), i32), sd((64, P), i32), sd((64,), i32))
  got = h200.compiled(fold_rank, S, rows, pending, window.slots, donate=(0,))
  assert (got.aliased, got.temporary, got.copies, got.spilled) == (pool_bytes(S), 0, 0, 0)
  assert got.resident(threads=128) == (3 if len(parts) == 1 else 2)


@on_h200
@pytest.mark.parametrize("T", [1, 16, 64])
def test_conv_compiles_for_an_h200(T: int):
  sd, C, W = jax.ShapeDtypeStruct, 8192, 4
  got = h200.compiled(
    conv, sd((65, W - 1, C), bf16), sd((64, T, C), bf16), sd((W, C), bf16), sd((64, T), i32),
    sd((64,), i32), sd((64,), i32),
  )  # fmt: skip
  assert (got.spilled, got.temporary, got.copies) == (0, 0, 0)
  assert got.resident(threads=128) >= 4


@on_h200
@pytest.mark.parametrize("dtype, channels", [(f32, 1), (bf16, K)], ids=["gdn", "kda"])
def test_prefill_compiles_for_an_h200(dtype, channels: int):
  S, window, params = abstract(4, 256, dtype, channels)
  got = h200.compiled(prefill, S, window, params, donate=(0,))
  assert (got.aliased, got.temporary, got.copies, got.spilled) == (pool_bytes(S), 0, 0, 0)
  assert got.resident(threads=128) >= 1
