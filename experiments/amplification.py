"""What the inverse of (I + A) does: growth of its entries, and errors of every way to apply it.

A published account of drift names an amplification of up to 2^(BS-1), the bound of any unit lower
triangular matrix with entries of at most one (SGLang PR 28695). Here is what the delta rule's own
matrices do, beside that bound: over block size, key correlation, beta and decay; on windows of the
trained model; and where gradient ascent over keys, beta and decay has tried to do harm.
Errors are against float64 recurrence, with the products of the solve lowered and every other in
float32: `u_error` of a window, which forms A and its right-hand side in float32 as well,
`solve_error` of a solve by itself, which gets both from float64, rounded once.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import amplification_report, corpus
from experiments.ablation import PRECISIONS, lowered
from experiments.inverses import METHODS
from experiments.record import Record
from experiments.streams import Streams, capture
from experiments.target import config_of, target
from experiments.truth import tokens as float64_tokens
from experiments.truth import truth
from gdn.dots import EXACT
from gdn.typing import Tokens
from gdn.window import Writes, chain, fold, project, solve, substitute

ARITHMETIC = MappingProxyType({"float32": EXACT, **{p: lowered(p, ("solve",)) for p in PRECISIONS}})


@dataclass(frozen=True, kw_only=True)
class Config:
  """Synthetic windows are a grid with `draws` a point, of which the worst is kept."""

  blocks: tuple[int, ...] = (4, 8, 16, 32, 64, 128)
  correlations: tuple[float, ...] = (0.0, 0.5, 0.9, 1.0)
  betas: tuple[float, ...] = (0.5, 1.0, 1.99)
  decays: tuple[float, ...] = (0.0, -0.1, -1.0)
  methods: tuple[str, ...] = tuple(METHODS)
  precisions: tuple[str, ...] = tuple(ARITHMETIC)
  dim: int = 128
  draws: int = 2
  windows: int = 8  # captured windows a block size, of every head
  ascent: int = 400  # steps of gradient ascent
  seed: int = 0
  model: Path | None = None  # whose streams the captured windows are; None is the bundled model

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    some = lambda xs, low, high: bool(xs) and all(low <= x <= high for x in xs)
    checks = (
      ("blocks", some(self.blocks, 2, 256), "each 2 to 256"),
      ("correlations", some(self.correlations, 0, 1), "each 0 to 1"),
      ("betas", some(self.betas, 0, 2), "each 0 to 2"),
      ("decays", some(self.decays, -180, 0), "each -180 to 0"),
      ("methods", bool(self.methods) and set(self.methods) <= set(METHODS), ", ".join(METHODS)),
      ("precisions", set(self.precisions) <= set(ARITHMETIC), ", ".join(ARITHMETIC)),
      ("dim", 2 <= self.dim <= 256, "2 to 256"),
      ("draws", 1 <= self.draws <= 64, "1 to 64"),
      ("windows", 0 <= self.windows <= 64, "0 to 64"),
      ("ascent", 0 <= self.ascent <= 10_000, "0 to 10000"),
    )
    for name, good, allowed in checks:
      if not good:
        raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; allowed: {allowed}")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "smoke": Config(
      blocks=(4, 16), correlations=(1.0,), betas=(1.0,), decays=(0.0,), dim=16, windows=1,
      ascent=20, precisions=("float32", "bf16"),
    ),
  }
)  # fmt: skip

COLUMNS = (
  "inputs", "layer", "block", "correlation", "beta", "decay", "method", "precision",
  "u_error", "solve_error", "output_error", "state_error",
  "inverse_entry", "entry_over_beta", "row_sum", "gain", "power_entry",
)  # fmt: skip


class Cases(NamedTuple):
  """Windows of one block size, float32: states [N, V, K] and tokens [N, T, ...]; a key for each."""

  S: np.ndarray
  tokens: Tokens
  keys: list[tuple]  # cases of one key are draws of one point


def f32(x: Any) -> Any:
  return np.asarray(x, np.float32)


def synthetic(c: Config, T: int) -> Cases:
  """Keys sqrt(rho) common + sqrt(1 - rho) own, normalised; beta and log decay constant."""
  rng = np.random.default_rng([c.seed, T])
  points = list(itertools.product(c.correlations, c.betas, c.decays))
  keys = [p for p in points for _ in range(c.draws)]
  N, K = len(keys), c.dim
  normal = lambda *s: rng.standard_normal((N, *s))
  rho, beta, g = (np.array(x)[:, None, None] for x in zip(*keys, strict=True))
  k = np.sqrt(rho) * normal(1, K) + np.sqrt(1 - rho) * normal(T, K)
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  flat = lambda x: np.broadcast_to(x[:, :, 0], (N, T))
  q, v = unit(normal(T, K)) * K**-0.5, normal(T, K)
  x = q, unit(k), v, flat(beta), np.broadcast_to(g, (N, T, 1))
  return Cases(f32(normal(K, K)), Tokens(*map(f32, x)), [("synthetic", None, *k) for k in keys])


@cache
def trained(c: Config) -> tuple[Streams, list[int], np.ndarray]:
  """The trained model's streams over held-out source, where windows start, the states there."""
  starts = [128 * (i + 1) for i in range(c.windows)]
  T = starts[-1] + max(c.blocks)
  params, model, read, _ = target(c.model, context=T)
  streams = capture(params, model, read(corpus.heldout().tobytes()).ids[:T])
  return streams, starts, truth(streams, starts).states  # [windows, H, V, K]


def captured(c: Config, T: int) -> Cases:
  """Windows of held-out source as the trained model's recurrent layers see them, every head."""
  streams, starts, states = trained(c)
  x = float64_tokens(streams.raw, streams.gates)
  windows = [np.stack([np.moveaxis(y[at : at + T], 1, 0) for at in starts]) for y in x]
  per = states.shape[1] // len(streams.layers)
  layers = np.repeat(streams.layers, per).tolist() * c.windows
  flat = lambda y: f32(y.reshape(-1, *y.shape[2:]))
  keys = [("captured", layer, None, None, None) for layer in layers]
  return Cases(flat(states), Tokens(*map(flat, windows)), keys)


def recurrence(S: np.ndarray, x: Tokens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Pseudo-values, outputs [N, T, V] and the last state, one token at a time in float64."""
  S, (q, k, v, beta, g) = S.astype(np.float64), (y.astype(np.float64) for y in x)
  us, os = [], []
  for t in range(q.shape[1]):
    S = S * np.exp(g[:, t, None])
    us.append(beta[:, t, None] * (v[:, t] - (S @ k[:, t, :, None])[..., 0]))
    S += us[-1][:, :, None] * k[:, t, None, :]
    os.append((S @ q[:, t, :, None])[..., 0])
  return np.stack(us, 1), np.stack(os, 1), S


def matrix(k: Any, beta: Any, g: Any) -> np.ndarray:
  """A [N, T, T] in float64, for a decay per head."""
  G = np.cumsum(g.astype(np.float64)[:, :, 0], axis=1)
  k = k.astype(np.float64)
  gap = np.minimum(G[:, :, None] - G[:, None], 0.0)
  return np.tril(beta[:, :, None] * np.exp(gap) * (k @ k.swapaxes(1, 2)), -1)


def system(cases: Cases) -> tuple[np.ndarray, np.ndarray]:
  """A [N, T, T] and beta (v - e^G S k) [N, T, V] in float64."""
  _, k, v, beta, g = (np.asarray(y, np.float64) for y in cases.tokens)
  seen = np.exp(np.cumsum(g, axis=1)) * (k @ cases.S.astype(np.float64).swapaxes(1, 2))
  return matrix(k, beta, g), beta[:, :, None] * (v - seen)


def growth(A: np.ndarray, beta: Any) -> dict[str, np.ndarray]:
  """[N]: largest entries below the diagonal, largest row sum, gain |M^-1 D|, entries of powers."""
  _N, T, _ = A.shape
  below = np.tril(np.ones((T, T), bool), -1)
  X = np.linalg.inv(np.eye(T) + A)
  largest = lambda x: np.abs(x).max(axis=(1, 2))
  power, most = A, largest(A)
  for _ in range(T - 2):
    power = power @ A
    most = np.maximum(most, largest(power))
  entries = np.where(below, X, 0.0)
  return {
    "inverse_entry": largest(entries),
    "entry_over_beta": largest(entries / np.maximum(beta[:, :, None], 1e-30)),
    "row_sum": np.abs(X).sum(2).max(1),
    "gain": np.linalg.norm(X * beta[:, None, :], 2, axis=(1, 2)),
    "power_entry": most,
  }


def attack(c: Config, T: int, top: float) -> dict[str, np.ndarray]:
  """Growth after gradient ascent on the row sums of the inverse over keys, beta and decay."""
  restarts = min(32, max(1, 1024 // T))
  key = jax.random.split(jax.random.key(c.seed), 3)
  x = {
    "k": jax.random.normal(key[0], (restarts, T, min(T, 16))),
    "b": 2 * jax.random.normal(key[1], (restarts, T)) + 2,
    "a": jax.random.normal(key[2], (restarts, T)) - 5,
  }

  def inputs(x):
    unit = x["k"] / jnp.linalg.norm(x["k"], axis=-1, keepdims=True)
    return unit, top * jax.nn.sigmoid(x["b"]), -jax.nn.softplus(x["a"])

  def harm(x):
    k, beta, g = inputs(x)
    gap = jnp.minimum(jnp.cumsum(g, 1)[:, :, None] - jnp.cumsum(g, 1)[:, None], 0.0)
    A = jnp.tril(beta[:, :, None] * jnp.exp(gap) * (k @ k.swapaxes(1, 2)), -1)
    X = jax.vmap(lambda A: substitute(A, jnp.eye(T), EXACT))(A)
    return -jnp.abs(X).sum(2).max(1).sum()

  optimiser = optax.adam(0.05)

  @jax.jit
  def ascend(x):
    def one(_, carry):
      x, state = carry
      step, state = optimiser.update(jax.grad(harm)(x), state)
      return optax.apply_updates(x, step), state

    return jax.lax.fori_loop(0, c.ascent, one, (x, optimiser.init(x)))[0]

  k, beta, g = (np.asarray(y, np.float64) for y in inputs(ascend(x)))
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  return growth(matrix(k, beta, g[:, :, None]), beta)


def relative(got: Any, want: np.ndarray) -> np.ndarray:
  """[N]: Frobenius norm of the difference over that of `want`; inf where a result is not finite."""
  flat = lambda x: np.linalg.norm(np.asarray(x, np.float64).reshape(len(want), -1), axis=1)
  error = flat(np.asarray(got, np.float64) - want) / flat(want)
  return np.where(np.isfinite(error), error, np.inf)


def errors(cases: Cases, method: str, precision: str, want) -> dict[str, np.ndarray]:
  """[N] relative errors of one way to solve."""
  T = cases.tokens.q.shape[1]
  inverse = lambda A, rhs, _: METHODS[method](A, rhs, ARITHMETIC[precision])

  @jax.jit
  @jax.vmap
  def window(S, x: Tokens):
    o, u = solve(project(S, None, EXACT), x, chain(T), inverse=inverse)
    return u, o, fold(S, Writes(x.k, u, x.g))

  got = window(cases.S, Tokens(*map(jnp.asarray, cases.tokens)))
  alone = jax.jit(jax.vmap(lambda A, rhs: inverse(A, rhs, None)))(*map(f32, system(cases)))
  names = ("u_error", "output_error", "state_error")
  found = {n: relative(g, w) for n, g, w in zip(names, got, want, strict=True)}
  return found | {"solve_error": relative(alone, want[0])}


def worst(keys: list[tuple], columns: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
  """One row a key: the largest of its cases."""
  for key in dict.fromkeys(keys):
    at = [i for i, k in enumerate(keys) if k == key]
    point = dict(zip(("inputs", "layer", "correlation", "beta", "decay"), key, strict=True))
    # Six digits: more are noise, and rows are committed.
    yield point | {name: float(f"{x[at].max():.6g}") for name, x in columns.items()}


def run(c: Config, record: Record) -> None:
  """BadInput: the model cannot be read."""
  config_of(c.model)  # before the minutes in which it is not needed
  kinds = {"synthetic": 1, "captured": c.windows, "adversarial": c.ascent}
  parts = list(itertools.product([k for k, some in kinds.items() if some], c.blocks))

  def write(T: int, rows: Iterator[dict[str, Any]], **where: Any) -> None:
    for row in rows:
      row = row | where | {"block": T}
      record(**{name: row.get(name) for name in COLUMNS})

  for kind, T in record.parts(parts, name=lambda p: f"{p[0]}, BS = {p[1]}", cost=lambda p: p[1]):
    true = {"method": "none", "precision": "float64"}
    if kind == "adversarial":
      for top in (1.0, 2.0):
        found = attack(c, T, top)
        key = (kind, None, None, top, None)
        write(T, worst([key] * len(found["gain"]), found), **true)
      continue
    cases = (synthetic if kind == "synthetic" else captured)(c, T)
    x = cases.tokens
    write(T, worst(cases.keys, growth(matrix(x.k, x.beta, x.g), x.beta)), **true)
    want = recurrence(cases.S, x)
    ways = list(itertools.product(c.methods, c.precisions))
    for i, (method, precision) in enumerate(ways):
      rows = worst(cases.keys, errors(cases, method, precision, want))
      write(T, rows, method=method, precision=precision)
      record.advance(i / len(ways))


figure, table = amplification_report.figure, amplification_report.table
