"""What the inverse of (I + A) can do: the proved bounds, their hypotheses, and every way to solve.

The bounds and their proofs are in docs/amplification.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from scipy.linalg import solve_triangular

from experiments import amplification, amplification_report
from experiments.ablation import lowered
from experiments.inverses import METHODS
from experiments.record import measure
from gdn.dots import EXACT
from gdn.recurrence import scan
from gdn.typing import Tokens
from gdn.window import ancestors, chain_decays, decayed_gram

F64 = float(np.finfo(np.float64).eps)
F32 = float(np.finfo(np.float32).eps)


@pytest.fixture(autouse=True)
def _promotion():
  """optax raises a float to an integer power, which strict promotion forbids."""
  with jax.numpy_dtype_promotion("standard"):
    yield


def draw(rng, T, K, *, kda: bool, top: float, rho: float, decay: float):
  """Unit keys of a given correlation, beta in [0, top], log decays in [-decay, 0], float64."""
  k = np.sqrt(rho) * rng.normal(size=(1, K)) + np.sqrt(1 - rho) * rng.normal(size=(T, K))
  k /= np.linalg.norm(k, axis=1, keepdims=True)
  beta = rng.choice([top, top * rng.uniform()], size=T)
  return k, beta, -decay * rng.uniform(size=(T, K if kda else 1))


def inverse(k, beta, g, M) -> np.ndarray:
  """(I + A)^-1 in float64 for ancestors M: one formula for GDN and KDA."""
  G = g + np.where(M[:, :, None], g[None], 0.0).sum(1)
  gap = np.exp(np.where(M[:, :, None], G[:, None] - G[None], 0.0))
  A = np.where(M, beta[:, None] * np.einsum("td,sd,tsd->ts", k, k, gap * np.ones_like(k[0])), 0.0)
  I = np.eye(len(k))
  return solve_triangular(I + A, I, lower=True, unit_diagonal=True)


CASES = {
  "seed": st.integers(0, 2**32 - 1),
  "T": st.integers(2, 24),
  "K": st.sampled_from([1, 2, 3, 16]),
  "kda": st.booleans(),
  "top": st.sampled_from([0.3, 1.0, 1.7, 2.0]),
  "rho": st.sampled_from([0.0, 0.5, 0.99, 1.0]),
  "decay": st.sampled_from([0.0, 0.1, 3.0, 180.0]),
}


@settings(deadline=None, max_examples=60)
@given(**CASES, tree=st.booleans())
def test_entries_of_the_inverse_are_at_most_beta(seed, T, K, kda, top, rho, decay, tree):
  rng = np.random.default_rng(seed)
  k, beta, g = draw(rng, T, K, kda=kda, top=top, rho=rho, decay=decay)
  parents = [int(rng.integers(-1, t)) if tree and t else t - 1 for t in range(T)]
  M = np.asarray(ancestors(jnp.asarray(parents, jnp.int32)))
  X = inverse(k, beta, g, M)
  rounding = F64 * T**2 * np.abs(X).sum()
  assert (np.abs(np.where(M, X, 0.0)) <= beta[:, None] + rounding).all()
  assert (np.diag(X) == 1).all()
  assert not np.where(M | np.eye(T, dtype=bool), 0.0, X).any(), "branches do not hear of each other"


@settings(deadline=None, max_examples=60)
@given(**CASES)
def test_the_gain_of_a_chain_does_not_depend_on_its_length(seed, T, K, kda, top, rho, decay):
  rng = np.random.default_rng(seed)
  k, beta, g = draw(rng, T, K, kda=kda, top=min(top, 1.7), rho=rho, decay=decay)
  X = inverse(k, beta, g, np.tril(np.ones((T, T), bool), -1))
  b = max(beta.max(), F64)
  assert np.linalg.norm(X * beta[None], 2) <= 2 * b / (2 - b) + F64 * T**2 * np.abs(X).sum()


def test_every_hypothesis_is_needed():
  """Longer keys, a growing state or beta above 2: entries beyond beta, and they multiply."""
  T = 12
  chain = np.tril(np.ones((T, T), bool), -1)
  k, one, none = np.ones((T, 1)), np.ones(T), np.zeros((T, 1))
  excess = lambda k, beta, g: (
    np.abs(np.tril(inverse(k, beta, g, chain), -1)) / beta[:, None]
  ).max()
  assert excess(k, one, none) <= 1 + F64 * T**2
  assert excess(k, 2 * one, none) <= 1 + F64 * T**3
  assert excess(1.6 * k, one, none) > 1.5**T / T
  assert excess(k, 2.5 * one, none) > 1.4 ** (T - 2)
  turned = np.stack([np.cos(np.arange(T)), np.sin(np.arange(T))], 1)
  assert excess(turned, 0.01 * one, none + 0.5) > 1.5 ** (T - 4)


def test_the_bound_is_attained_and_the_published_one_is_not_approached():
  """Identical keys, beta = 1: entry -1 beside the diagonal, gain within the bound of 2."""
  T = 16
  X = inverse(np.ones((T, 1)), np.ones(T), np.zeros((T, 1)), np.tril(np.ones((T, T), bool), -1))
  assert X[1, 0] == -1
  assert np.linalg.norm(X, 2) < 2
  found = amplification.attack(amplification.Config(ascent=100), 8, 1.0)
  assert 1.9 < found["row_sum"].max() <= 1 + 7
  assert found["row_sum"].max() < 2.0**7 / 8
  assert found["entry_over_beta"].max() <= 1 + F64 * 64


def test_growth_measures_a_matrix_whose_inverse_does_grow():
  """The published worst case, all entries -1 below the diagonal: 2^(n-2) in the first column."""
  n = 10
  A = -np.tril(np.ones((1, n, n)), -1)
  found = amplification.growth(A, np.ones((1, n)))
  assert found["inverse_entry"] == 2.0 ** (n - 2)
  assert found["row_sum"] == 2.0 ** (n - 1)
  powers = [np.linalg.matrix_power(A[0], m) for m in range(1, n)]
  assert found["power_entry"] == max(np.abs(P).max() for P in powers)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("T", [2, 7, 16, 40])
def test_every_method_is_exact_in_exact_arithmetic(name, T):
  """Small integers, few of them: every product and sum is exact."""
  rng = np.random.default_rng(T)
  A = np.zeros((T, T))
  A[rng.integers(T // 2, T, 3), rng.integers(0, T // 2, 3)] = [1, -2, 3]
  A[1:, :-1] += np.diag(rng.integers(0, 2, T - 1) * (np.arange(T - 1) % 3 == 0))
  rhs = rng.integers(-3, 4, size=(T, 2))
  want = np.linalg.solve(np.eye(T) + A, rhs)
  got = METHODS[name](jnp.asarray(A, jnp.float32), jnp.asarray(rhs, jnp.float32), EXACT)
  np.testing.assert_array_equal(got, np.rint(want))


@pytest.mark.parametrize("name", METHODS)
def test_lowered_products_are_lowered(name):
  rng = np.random.default_rng(0)
  k = rng.normal(size=(32, 8))
  k /= np.linalg.norm(k, axis=1, keepdims=True)
  A = jnp.asarray(np.tril(k @ k.T, -1), jnp.float32)
  rhs = jnp.asarray(rng.normal(size=(32, 4)), jnp.float32)
  want = np.linalg.solve(np.eye(32) + np.asarray(A, np.float64), np.asarray(rhs, np.float64))
  error = lambda p: np.linalg.norm(METHODS[name](A, rhs, p) - want) / np.linalg.norm(want)
  x3, tf32, bf16 = (error(lowered(p)) for p in ("bf16x3", "tf32", "bf16"))
  assert x3 < tf32 < bf16
  assert bf16 > 2.0**-10


def test_the_matrix_is_the_windows_own():
  """`matrix` in float64 is what `gdn.window.solve` inverts."""
  rng = np.random.default_rng(1)
  k, beta, g = draw(rng, 9, 4, kda=False, top=1.0, rho=0.5, decay=1.0)
  f32 = lambda x: jnp.asarray(x, jnp.float32)
  gram = decayed_gram(f32(k), f32(k), chain_decays(f32(g))[:, 1:])
  want = f32(beta)[:, None] * jnp.tril(gram, -1)
  got = amplification.matrix(k[None], beta[None], g[None])[0]
  np.testing.assert_allclose(got, want, atol=9 * F32, rtol=9 * F32)


def test_float64_recurrence_is_the_scan():
  cases = amplification.synthetic(amplification.CONFIGS["smoke"], 4)
  u, o, S = amplification.recurrence(cases.S, cases.tokens)
  last, outputs = jax.vmap(scan)(cases.S, Tokens(*map(jnp.asarray, cases.tokens)))
  assert amplification.relative(last, S).max() < 16 * F32
  assert amplification.relative(outputs, o).max() < 16 * F32
  assert u.shape == o.shape


def test_a_solve_by_itself_is_not_blamed_for_a_matrix_formed_in_float32():
  """Correlated keys: the errors of a float32 Gram matrix are larger than those of substitution."""
  config = amplification.Config(correlations=(0.9,), betas=(1.0,), decays=(0.0,), draws=2)
  cases = amplification.synthetic(config, 32)
  A, rhs = amplification.system(cases)
  want = amplification.recurrence(cases.S, cases.tokens)
  assert amplification.relative(np.linalg.solve(np.eye(32) + A, rhs), want[0]).max() < 100 * F64
  found = amplification.errors(cases, "substitution", "float32", want)
  assert (found["solve_error"] < 2 * F32).all()
  assert (found["solve_error"] < found["u_error"] / 2).all()


def test_a_report_of_rows(tmp_path):
  config = amplification.Config(
    blocks=(4,), correlations=(1.0,), betas=(1.0,), decays=(0.0,), dim=8, windows=0, ascent=10,
    methods=("substitution", "Neumann doubling"), precisions=("float32",),
  )  # fmt: skip
  rows = measure(amplification, config, tmp_path)
  assert {r["method"] for r in rows} == {"none", "substitution", "Neumann doubling"}
  assert isinstance(amplification.figure(rows), Figure)
  assert any("published bound 8.0e+00" in line for line in amplification_report.answer(rows))


@pytest.mark.parametrize(
  ("field", "value"),
  [("blocks", ()), ("blocks", (1,)), ("correlations", (2.0,)), ("betas", (3.0,)), ("dim", 1),
   ("decays", (0.1,)), ("methods", ("luck",)), ("precisions", ("fp8",)), ("draws", 0)],
)  # fmt: skip
def test_a_bad_field_is_named_with_what_is_allowed(field, value):
  with pytest.raises(ValueError, match=rf"{field}=.*allowed: "):
    amplification.Config(**{field: value})
