"""Inputs that are hard on a window, and what float64 makes of them one token at a time."""

from typing import Protocol

import jax.numpy as jnp
import numpy as np

from gdn.gates import NORM_EPS
from gdn.typing import GateParams, Raw, Window

HOSTILE = ("random", "identical", "correlated", "total_decay", "padded", "tree", "lost_branch")


class Shape(Protocol):
  """Heads of one layer."""

  @property
  def value_heads(self) -> int: ...
  @property
  def key_heads(self) -> int: ...
  @property
  def dim(self) -> int: ...


def window(c: Shape, rng: np.random.Generator, B: int, T: int, kind: str, slots) -> Window:
  """Inputs of one kind. NaN stands wherever nothing may be read."""
  H, Hk, K = c.value_heads, c.key_heads, c.dim
  normal = lambda *s: np.asarray(rng.standard_normal(s, np.float32))
  rho: float = {"identical": 1.0, "correlated": 0.99}.get(kind, 0.0)
  common = normal(B, 1, Hk, K)
  mix = lambda: np.asarray(rho**0.5 * common + (1 - rho) ** 0.5 * normal(B, T, Hk, K))
  q, k = mix(), mix()
  v, a, b = (normal(B, T, H, *last) for last in ((K,), (1,), ()))
  nodes = np.full(B, T)
  if kind in ("identical", "correlated"):
    a, b = np.full_like(a, -20.0), np.full_like(b, 8.0)
  if kind == "total_decay":
    a[:, T // 2] = 60.0
  if kind == "padded":
    slots = np.where(np.arange(B) % 4 == 3, -1, slots)
    nodes = rng.integers(0, T + 1, B)
    for x in (q, k, v, a, b):
      x[np.arange(T)[None] >= nodes[:, None]] = np.nan
  parents = np.broadcast_to(np.arange(T) - 1, (B, T))
  if kind in ("tree", "lost_branch"):
    parents = np.stack([rng.integers(-1, t, B) if t else np.full(B, -1) for t in range(T)], 1)
  if kind == "lost_branch" and T > 1:
    for x in (k, v)[: 1 + int(rng.integers(2))]:
      x[:, 1] = np.nan
  raw = Raw(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, a, b)))
  i32 = lambda x: jnp.asarray(np.ascontiguousarray(x), jnp.int32)
  return Window(raw, i32(parents), i32(nodes), i32(slots))


def gate_params(c: Shape, rng: np.random.Generator) -> GateParams:
  H = c.value_heads
  return GateParams(
    jnp.asarray(np.log(rng.uniform(0.5, 4.5, H)), jnp.float32),
    jnp.asarray(rng.standard_normal((H, 1)) * 0.1 - 4.0, jnp.float32),
    jnp.float32(1.0),
  )


def float64(S, window: Window, params: GateParams, rows) -> tuple[np.ndarray, ...]:
  """Outputs, writes and states of the given decode slots, one token at a time in float64."""
  wide = lambda x: np.asarray(x.astype(jnp.float32), np.float64)
  q, k, v, a, b = (np.nan_to_num(wide(x[rows])) for x in window.raw)
  parents = np.asarray(window.parents)[rows]
  states = [wide(S[jnp.maximum(window.slots[rows], 0)])]
  share = v.shape[2] // q.shape[2]
  unit = lambda x: np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + NORM_EPS), share, 2)
  q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
  A_log, dt_bias, top = (np.asarray(x, np.float64) for x in params)
  g = -np.exp(A_log) * np.logaddexp(0.0, a + dt_bias)[..., 0]
  beta = top / (1 + np.exp(-b))
  outs, us = [], []
  for t in range(q.shape[1]):
    before = np.stack([states[p + 1][i] for i, p in enumerate(parents[:, t])])
    S = before * np.exp(g[:, t])[..., None, None]
    u = beta[:, t][..., None] * (v[:, t] - np.einsum("bhvk,bhk->bhv", S, k[:, t]))
    S = S + u[..., None] * k[:, t][..., None, :]
    us.append(u)
    outs.append(np.einsum("bhvk,bhk->bhv", S, q[:, t]))
    states.append(S)
  return np.stack(outs, 1), np.stack(us, 1), np.stack(states[1:], 1), g, beta


def select(x: np.ndarray, on: np.ndarray) -> np.ndarray:
  """x where [B, T] rows are on, else zero."""
  return np.where(on.reshape(*on.shape, *(1,) * (x.ndim - 2)), x, 0.0)


def root_path(parents, node: int) -> list[int]:
  path = []
  while node >= 0:
    path.append(int(node))
    node = parents[node]
  return path[::-1]


def sound(w: Window, kind: str) -> np.ndarray:
  """[B, T] nodes that exist and have no NaN on their path."""
  B, T = w.parents.shape
  parents = np.asarray(w.parents)
  on = (np.asarray(w.nodes)[:, None] > np.arange(T)) & (np.asarray(w.slots)[:, None] >= 0)
  if kind == "lost_branch" and T > 1:
    on &= np.array([[1 not in root_path(parents[b], t) for t in range(T)] for b in range(B)])
  return on


def relative(got, want) -> float:
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))
