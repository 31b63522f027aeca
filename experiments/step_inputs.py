"""Windows that are hard on a kernel, and what float64 makes of them one token at a time."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes.footprint import LayerShape, zero_window
from gdn.gates import NORM_EPS
from gdn.typing import GateParams, Raw, Window
from gdn.window import chain

CHAINS = ("random", "identical", "correlated", "total_decay", "short", "padding")
HOSTILE = (*CHAINS, "tree", "lost_branch")


def window(s: LayerShape, rng: np.random.Generator, T: int, kinds: Sequence[str], slots) -> Window:
  """A row of each kind. NaN stands wherever nothing may be read."""
  H, Hk, B = s.value_heads, s.key_heads, len(kinds)
  normal = lambda *shape: np.asarray(rng.standard_normal(shape, np.float32))
  of = lambda *names: np.isin(kinds, names)
  rho = np.select([of("identical"), of("correlated")], [1.0, 0.99], 0.0).astype(np.float32)
  rho = rho[:, None, None, None]
  common = normal(B, 1, Hk, s.key_dim)
  mix = lambda: rho**0.5 * common + (1 - rho) ** 0.5 * normal(B, T, Hk, s.key_dim)
  q, k = mix(), mix()
  v, a, b = (normal(B, T, H, *last) for last in ((s.value_dim,), (s.channels,), ()))
  a[of("identical", "correlated")], b[of("identical", "correlated")] = -20.0, 8.0
  a[of("total_decay"), T // 2, :, ::2] = 60.0
  for i in np.flatnonzero(of("lost_branch") & (T > 1)):
    (k, v)[i % 2][i, 1] = np.nan
  nodes = np.where(of("short"), rng.integers(0, T + 1, B), T)
  for x in (q, k, v, a, b):
    x[np.arange(T)[None] >= nodes[:, None]] = np.nan
  parents = np.tile(np.arange(T) - 1, (B, 1))
  for i in np.flatnonzero(of("tree", "lost_branch")):
    parents[i, 1:] = [rng.integers(-1, t) for t in range(1, T)]
  raw = Raw(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, a, b)))
  ints = (parents, nodes, np.where(of("padding"), -1, slots))
  return Window(raw, *(jnp.asarray(np.ascontiguousarray(x), jnp.int32) for x in ints))


@partial(jax.jit, static_argnums=(0, 1))
def plain(s: LayerShape, T: int, slots: jax.Array, key: jax.Array) -> Window:
  """Rows of the kind "random", drawn on the device: a host takes a second for a window of 256."""
  raw = zero_window(s, B := len(slots), T, jnp.bfloat16)[0].raw
  draw = lambda x, key: jax.random.normal(key, x.shape, jnp.float32).astype(x.dtype)
  raw = Raw(*map(draw, raw, jax.random.split(key, len(raw))))
  return Window(raw, jnp.tile(chain(T), (B, 1)), jnp.full(B, T, jnp.int32), slots)


def binary_tree(w: Window) -> Window:
  """The same nodes as a binary tree, level by level: no node's parent is the one before it."""
  B, T = w.parents.shape
  parents = jnp.broadcast_to((jnp.arange(T, dtype=jnp.int32) - 1) // 2, (B, T))
  return w._replace(parents=parents)


def gate_params(s: LayerShape, rng: np.random.Generator) -> GateParams:
  H = s.value_heads
  return GateParams(
    jnp.asarray(np.log(rng.uniform(0.5, 4.5, H)), jnp.float32),
    jnp.asarray(rng.standard_normal((H, s.channels)) * 0.1 - 4.0, jnp.float32),
    jnp.float32(1.0),
  )


SMALL = 1 << 28  # bytes: a smaller array is fetched whole, a larger one row by row


def fetch(x, rows: np.ndarray) -> np.ndarray:
  """float64 of some rows of an array on the device."""
  some = np.asarray(x)[rows] if x.nbytes < SMALL else np.asarray(x[rows])
  return some.astype(np.float64)


class Sample(NamedTuple):
  """Batch rows [n] and value heads [h] of which float64 is asked, and the layer's value heads."""

  rows: np.ndarray
  heads: np.ndarray
  value_heads: int

  def of(self, x) -> np.ndarray:
    """[n, T, h, ...] of x [B, T, heads, ...]; a key head stands for each of its value heads."""
    x = fetch(x, self.rows)
    return x[:, :, self.heads * x.shape[2] // self.value_heads]

  def states(self, pool, slots) -> np.ndarray:
    """[n, h, V, K] of the rows' slots; padding has some state, of which nothing is used."""
    at = np.maximum(np.asarray(slots)[self.rows], 0)
    return fetch(pool, at)[:, self.heads]


def sample(rng: np.random.Generator, s: LayerShape, B: int, rows: int, heads: int) -> Sample:
  """Some rows and heads, at random."""
  some = lambda n, of: np.sort(rng.permutation(of)[:n])
  return Sample(some(rows, B), some(heads, s.value_heads), s.value_heads)


class Truth(NamedTuple):
  """float64 of the sampled rows and heads: [n, T, h, ...], states [n, T, h, V, K].

  live  [n, T] nodes that exist and have no NaN on their path; lost: those that have one
  """

  o: np.ndarray
  u: np.ndarray
  S: np.ndarray
  q: np.ndarray
  k: np.ndarray
  beta: np.ndarray
  g: np.ndarray
  live: np.ndarray
  lost: np.ndarray


def unit(x: np.ndarray) -> np.ndarray:
  return x / np.sqrt((x * x).sum(-1, keepdims=True) + NORM_EPS)


def apply(S: np.ndarray, x: np.ndarray) -> np.ndarray:
  return (S @ x[..., None])[..., 0]


def write(S: np.ndarray, k: np.ndarray, v: np.ndarray, beta: np.ndarray, g: np.ndarray):
  """State and pseudo-value after one token: S [n, h, V, K], k normalised, g [n, h, E]."""
  S = S * np.exp(g)[..., None, :]
  u = beta[..., None] * (v - apply(S, k))
  return S + u[..., None] * k[..., None, :], u


def float64(roots: np.ndarray, w: Window, params: GateParams, some: Sample) -> Truth:
  """Outputs, writes and states of every node, from the roots [n, h, V, K] of its row."""
  parents, T = np.asarray(w.parents)[some.rows], w.parents.shape[1]
  q, k, v, a, b = (some.of(x) for x in w.raw)
  exists = (np.asarray(w.nodes)[:, None] > np.arange(T)) & (np.asarray(w.slots)[:, None] >= 0)
  exists = exists[some.rows]
  poison = np.isnan(k).any((2, 3)) | np.isnan(v).any((2, 3))
  lost = np.zeros_like(poison)
  q, k, v, a, b = (np.nan_to_num(x) for x in (q, k, v, a, b))
  q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
  A_log, dt_bias, top = (np.asarray(x, np.float64) for x in params)
  A_log, dt_bias = A_log[some.heads], dt_bias[some.heads]
  g = -np.exp(A_log)[:, None] * np.logaddexp(0.0, a + dt_bias)
  beta = top * np.exp(-np.logaddexp(0.0, -b))
  states, us, outs, row = [roots], [], [], np.arange(len(roots))
  for t in range(T):
    above = np.where(exists[:, t], parents[:, t], -1)
    lost[:, t] = poison[:, t] | ((above >= 0) & lost[row, above])
    before = np.stack([states[p + 1][i] for i, p in enumerate(above)])
    S, u = write(before, k[:, t], v[:, t], beta[:, t], g[:, t])
    states.append(S)
    us.append(u)
    outs.append(apply(S, q[:, t]))
  stack = lambda xs: np.stack(xs, 1)
  live = exists & ~lost
  return Truth(stack(outs), stack(us), stack(states[1:]), q, k, beta, g, live, exists & lost)


def row_norms(x: np.ndarray) -> np.ndarray:
  return np.sqrt(np.square(x).reshape(len(x), -1).sum(1))


def row_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
  """Of each row relative to it; where nothing is wanted it must be zero."""
  return row_norms(got - want) / np.maximum(row_norms(want), 1e-30)


def relative(got: np.ndarray, want: np.ndarray) -> float:
  """The largest of a row."""
  return float(np.max(row_errors(got, want), initial=0.0))
