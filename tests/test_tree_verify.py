"""Trees of up to 64 nodes: one body for Mosaic's interpreter, with one block that does everything,
and for a GPU; against the float64 oracle and the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("absl")  # jax.experimental.pallas.mosaic_gpu imports it

from gdn.ops import xla
from pallas_kernels.tree_verify import Config, verify
from tests import h200, oracle
from tests.slow import slow
from tests.test_kernels import close, interpreted, on_h200
from tests.test_recurrent_kernels import KINDS, abstract, case, existing, walks, within
from tests.words import lane_moves  # noqa: F401, a fixture

f32, bf16 = jnp.float32, jnp.bfloat16
XLA = xla(out=f32)
EPS = 2.0**-23
TREES = ("tree", "lost_branch")

SMALL = [
  (64, f32, ("total_decay", "identical", "lost_branch"), [pytest.mark.slow]),
  (20, bf16, ("tree", "short", "padding", "empty"), []),
]
DEVICE = [(T, dtype, KINDS) for T in (17, 20, 32, 40, 64) for dtype in (f32, bf16)]


@pytest.mark.parametrize(
  "T, dtype, kinds, copies, config",
  [
    pytest.param(*x, 1, Config(sms=1), marks=[pytest.mark.warpgroups, *marks])
    for *x, marks in SMALL
  ]
  + [pytest.param(*x, 20, Config(), marks=pytest.mark.gpu) for x in DEVICE],
)
def test_tree_verify(T: int, dtype, kinds, copies: int, config: Config, lane_moves):  # noqa: F811
  """Chains, trees, fewer nodes, padding, no nodes, hostile values, NaN where nothing may be read;
  and in a lost branch, which only its descendants may hear of."""
  S, window, params = case(copies, 1, T=T)
  S = S.astype(dtype)
  lost, decaying = (np.flatnonzero(np.tile(KINDS, copies) == x) for x in (TREES[1], "total_decay"))
  a = window.raw.a.at[lost, T - 2, 1].set(jnp.nan).at[decaying, 2::4].set(90.0)
  k = window.raw.k.at[lost, T // 2].set(jnp.nan)
  window = window._replace(raw=window.raw._replace(a=a, k=k))
  if copies == 1:
    window = jax.tree.map(lambda x: x[np.asarray([KINDS.index(kind) for kind in kinds])], window)
  with interpreted():
    o, gates, rows = jax.jit(functools.partial(verify, out_dtype=f32, config=config))(
      S, window, params
    )
  _, want_gates, want = jax.jit(XLA.verify)(S, window, params)
  on = existing(window)
  for b, kind in enumerate(np.tile(kinds, copies)):
    if kind != "identical":  # there a pseudo-value is as good as its problem's conditioning
      u, want_u = (np.asarray(x.u[0])[b][on[b]] for x in (rows, want))
      np.testing.assert_array_equal(np.isnan(u), np.isnan(want_u))
      close(jnp.nan_to_num(u), jnp.nan_to_num(want_u))
  for kind, b, n, _, exact, _, plain in walks(S, window, params, kinds):
    # As for every scheme that solves (tests/laws.py). A lost node is on nobody else's path.
    wide = lambda x: np.nan_to_num(np.asarray(x.astype(f32), np.float64))
    tokens = oracle.tokens(*(wide(x[b, :n]) for x in window.raw), *params)
    parents = window.parents[b, :n].tolist()
    bound = oracle.solve_bound(wide(S[window.slots[b]]), tokens, parents, EPS)[1]
    within(f"o of {kind}", o[b, :n], exact, plain, bound)
    if kind in TREES:
      error, size = (np.linalg.norm(np.nan_to_num(x)) for x in (o[b, :n] - exact, exact))
      assert error <= 1e-6 * size
  for x in (o, rows.u[0], rows.k[0], *gates):
    assert not np.asarray(x)[~on].any()
  finite = lambda x: jnp.nan_to_num(x[on])
  close(finite(rows.k[0]), finite(want.k[0]))
  close(finite(gates.beta), finite(want_gates.beta))
  close(finite(gates.g), finite(want_gates.g))


@on_h200
@pytest.mark.parametrize(
  "T, dtype, parts", [slow(64, f32, ()), (64, f32, (bf16, bf16)), (32, bf16, ())]
)
def test_tree_verify_compiles_without_spills(T: int, dtype, parts):
  got = h200.compiled(functools.partial(verify, parts=parts), *abstract(64, T, dtype, 1))
  assert got.spilled == 0
  assert got.resident(threads=384) == 1


@pytest.mark.parametrize(("T", "channels"), [(65, 1), (64, 128)])
def test_shapes_for_other_kernels(T: int, channels: int):
  with pytest.raises(NotImplementedError):
    jax.eval_shape(verify, *abstract(2, T, f32, channels))


@pytest.mark.parametrize("wrong", [{"chunks": 1}, {"chunks": 5}, {"sms": 0}])
def test_configs_validate_themselves(wrong):
  with pytest.raises(ValueError):
    Config(**wrong)
