"""Windows, trees and hostile values to draw from, and the smallest hybrid model."""

import os
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from gdn.config import Config
from gdn.typing import Accepted, GateParams, Raw, Window

TINY = Config(
  width=16,
  inner=16,
  layers=2,
  attention_every=2,
  key_heads=1,
  value_heads=2,
  key_dim=8,
  value_dim=8,
  query_heads=2,
  kv_heads=1,
  head_dim=8,
  rotary=4,
  window=8,
)

# LAWS_OPS=mosaic_gpu: the same laws of the kernels, which take these heads and bfloat16 inputs.
LAWS_OPS = os.environ.get("LAWS_OPS", "")
N, B, T = 5, 3, 6
HK, H, K, V = (1, 2, 128, 128) if LAWS_OPS else (2, 4, 16, 8)
RAW = jnp.bfloat16 if LAWS_OPS else np.float32

HOSTILE = (
  "random",
  "identical_keys",
  "beta_zero",
  "beta_one",
  "beta_near_two",
  "no_decay",
  "total_decay",
  "one_great_decay",
  "identical_keys_beta_near_two_no_decay",
)


class Case(NamedTuple):
  """A pool, a window and an acceptance, all as NumPy so that tests may poison them."""

  S: np.ndarray
  raw: Raw
  gates: GateParams
  parents: np.ndarray  # [B, T]
  nodes: np.ndarray
  slots: np.ndarray
  path: np.ndarray  # [B, T]
  length: np.ndarray

  def window(self) -> Window:
    arrays = (self.parents, self.nodes, self.slots)
    return Window(Raw(*map(jnp.asarray, self.raw)), *map(jnp.asarray, arrays))

  def accepted(self) -> Accepted:
    return Accepted(jnp.asarray(self.path), jnp.asarray(self.length))


def draw_raw(rng, *, kind="random", channels=1, B=B, T=T, dtype=RAW) -> Raw:
  E = channels
  x = lambda *s: rng.normal(size=s).astype(np.float32)
  q, k, v = x(B, T, HK, K), x(B, T, HK, K), x(B, T, H, V)
  a, b = x(B, T, H, E), x(B, T, H)
  if "identical_keys" in kind:
    k = np.broadcast_to(k[:, :1], k.shape).copy()
  if "beta_zero" in kind:
    b[:] = -100
  if "beta_one" in kind:
    b[:] = 30
  if "beta_near_two" in kind:
    b[:] = 6
  if "no_decay" in kind:
    a[:] = -200
  if "total_decay" in kind:
    a[:] = 180
  if "one_great_decay" in kind:
    a[:, T // 3] = 4000
  return Raw(*(np.asarray(z, dtype) for z in (q, k, v, a, b)))


def draw_gates(rng, *, kind="random", channels=1) -> GateParams:
  return GateParams(
    jnp.asarray(rng.normal(size=H) * 0.5 - 1.0 * ("decay" not in kind), jnp.float32),
    jnp.asarray(rng.normal(size=(H, channels)) * 0.1, jnp.float32),
    jnp.asarray(2.0 if "two" in kind else 1.0, jnp.float32),
  )


def chain(T=T):
  return list(range(-1, T - 1))


def path_to(parents, node):
  path = []
  while node >= 0:
    path.insert(0, node)
    node = parents[node]
  return path


@st.composite
def trees(draw, T=T):
  """Parents of T nodes and the root path to some node, possibly empty."""
  parents = [draw(st.integers(-1, t - 1)) for t in range(T)]
  return parents, path_to(parents, draw(st.integers(-1, T - 1)))


@st.composite
def chains(draw, T=T):
  return chain(T), list(range(draw(st.integers(0, T))))


def make_case(seed, forest, *, kind="random", channels=1, slots=(3, 0, -1)) -> Case:
  """One case from a seed and (parents, path) of each batch row. Unused positions hold garbage."""
  rng = np.random.default_rng(seed)
  garbage = lambda *s: rng.integers(-(2**30), 2**30, size=s).astype(np.int32)
  parents, path = garbage(B, T), garbage(B, T)
  nodes, length = np.zeros(B, np.int32), np.zeros(B, np.int32)
  for i, (p, a) in enumerate(forest):
    parents[i, : len(p)], path[i, : len(a)] = p, a
    nodes[i], length[i] = len(p), len(a)
  raw = draw_raw(rng, kind=kind, channels=channels)
  dead = np.arange(T)[None] >= nodes[:, None]
  for x in raw:
    x[dead] = np.nan
  S = rng.normal(size=(N, H, V, K)).astype(np.float32)
  return Case(
    S, raw, draw_gates(rng, kind=kind, channels=channels), parents, nodes,
    np.asarray(slots, np.int32), path, length,
  )  # fmt: skip


@st.composite
def cases(draw, *, channels=1, forests=trees, kinds=HOSTILE):
  forest = []
  for _ in range(B):
    n = draw(st.integers(1, T))
    forest.append(draw(forests(n)))
  slots = draw(st.permutations(range(N)))[:B]
  if draw(st.booleans()):
    slots[draw(st.integers(0, B - 1))] = -1
  return make_case(
    draw(st.integers(0, 2**31)), forest, kind=draw(st.sampled_from(kinds)), channels=channels,
    slots=slots,
  )  # fmt: skip
