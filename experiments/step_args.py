"""Arguments of every kernel that `step_time` times, made of a window.

A window comes with what the step before has left: an accepted path, committed rows of a ring.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from commit_schemes.footprint import LayerShape
from experiments import cost
from experiments.cost import Point
from experiments.step_inputs import binary_tree
from gdn.gates import gates as reference_gates
from gdn.gates import l2norm
from gdn.pool import put
from gdn.typing import GateParams, Pending, Records, Rows, Window

f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32
Args = tuple[Any, ...]


def accepted(T: int) -> int:
  """Tokens of a window that are taken to be accepted: 5 of 16, as in published timings."""
  return -(-5 * T // 16)


class Case(NamedTuple):
  """A kernel at one shape."""

  kernel: str
  state: str
  decay: str
  window: int
  batch: int

  def __str__(self) -> str:
    return f"{self.kernel} {self.state} {self.decay} T = {self.window}, batch {self.batch}"

  def layer(self, s: LayerShape) -> LayerShape:
    return s._replace(channels=s.key_dim if self.decay == "kda" else 1)

  @property
  def rows(self) -> Any:
    """What pseudo-values are stored in beside such a state."""
    return f32 if self.state == "float32" else bf16

  @property
  def point(self) -> Point:
    width = lambda dtype: jnp.dtype(dtype).itemsize
    return Point(self.window, accepted(self.window), state=width(self.state), row=width(self.rows))


class Given(NamedTuple):
  """What a case's arguments are made of; `slots` are those of the pool."""

  layer: LayerShape
  case: Case
  window: Window
  params: GateParams
  slots: int


def plain(x: Given) -> Args:
  return x.window, x.params


def tree(x: Given) -> Args:
  return binary_tree(x.window), x.params


def pending(row: jax.Array, count: int, width: int) -> Pending:
  """`count` tokens at positions 0, 1, ... of these rows of records."""
  path = jnp.broadcast_to(jnp.arange(width, dtype=i32), (row.shape[0], width))
  return Pending(row, path, jnp.full_like(row, count))


def records(x: Given) -> Records:
  """Raw records as a window has left them; what did not exist is zero."""
  raw = x.window.raw
  beta, g = reference_gates(raw.a, raw.b, x.params)
  return Records(*map(jnp.nan_to_num, (raw.k, raw.v, beta, g)))


def written(x: Given, N: int, R: int) -> Rows:
  """R rows in each of N slots: the window's keys, values and decays again and again."""
  k, v, _, g = records(x)
  again = lambda y: jnp.take(
    jnp.take(y, jnp.arange(N) % y.shape[0], axis=0), jnp.arange(R) % y.shape[1], axis=1
  )
  narrow = lambda y: (again(y).astype(x.case.rows),)
  return Rows(narrow(l2norm(k)), narrow(0.5 * v.astype(f32)), again(g))


def own(x: Given) -> jax.Array:
  """Records by batch row; padding has none."""
  return jnp.where(x.window.slots < 0, -1, jnp.arange(x.case.batch, dtype=i32))


def to_append(x: Given) -> Args:
  """Raw inputs behind what a ring has, in each slot at another place."""
  k, v, beta, _ = records(x)
  N, R = x.slots, RING.length(x.case.window)
  pools = jax.tree.map(lambda y: jnp.ones((N, R, *y.shape[2:]), y.dtype), (k, v, beta))
  at = jnp.arange(x.case.batch, dtype=i32) * RING.history(x.case.window) % R
  return pools, x.window.slots, at, x.window.nodes, (k, v, beta)


def to_fold(x: Given) -> Args:
  T = x.case.window
  return records(x), pending(own(x), accepted(T), T), x.window.slots


def to_fold_rank(x: Given) -> Args:
  T = x.case.window
  return written(x, x.case.batch, T), pending(own(x), accepted(T), T), x.window.slots


def to_pick(x: Given) -> Args:
  """The states of a window, and the last accepted node of each row."""
  s, (_, state, _, T, B) = x.layer, x.case
  shape = (B, T, s.value_heads, s.value_dim, s.key_dim)
  states = jax.random.normal(jax.random.key(2), shape, state)
  return states, jnp.arange(B, dtype=i32) % T, x.window.slots


def pick(S, states, node, slots):
  """A commit by copying."""
  return put(S, slots, states[jnp.arange(slots.shape[0]), node])


def to_fill(x: Given) -> Args:
  return x.window.parents, jax.random.normal(jax.random.key(5), (), x.case.state)


def fill(S, parents, x):
  """A state for every node and nothing read: what memory gives to writes alone."""
  return jnp.broadcast_to(x, (*parents.shape, *S.shape[1:]))


class Ring(NamedTuple):
  """Where a step finds its slots: `length(T)` rows, of which `history(T)` are committed.

  known  what all slots do is known to who compiles; otherwise each has a flag
  """

  length: Callable[[int], int]
  history: Callable[[int], int]
  flush: bool = False
  known: bool = True

  def args(self, x: Given) -> Args:
    T, slots = x.case.window, x.window.slots
    R, h = self.length(T), self.history(T)
    at = jnp.full(x.case.batch, h % R if R > T else 0, i32)
    return written(x, x.slots, R), pending(slots, h, R), at, x.window, x.params

  def call(self, op: Callable[..., Any]) -> Callable[..., Any]:
    """The step as it takes these arguments."""

    def step(S, rows, waiting, at, window, params):
      flush = self.flush if self.known else jnp.full_like(at, self.flush, bool)
      return op(S, rows, waiting, flush, at, window, params)

    return step

  def bytes(self, s: LayerShape, c: Case) -> float:
    wrote = cost.rows(s, c.point, c.window) + (cost.state(s, c.point) if self.flush else 0.0)
    return cost.verify(s, c.point, wrote).bytes + cost.rows(s, c.point, self.history(c.window))


# TreeWY writes the state in every step. A ring of 4 T, of 16 where T is 1, finds some rows, or
# enough of them to flush: with T = 8 the 6 and 16 of published timings.
EVERY_STEP = Ring(lambda T: T, accepted, flush=True)
RING = Ring(lambda T: max(16, 4 * T), lambda T: 8 if T == 1 else 3 * T // 4)
FULL = Ring(lambda T: 4 * T, lambda T: 2 * T, flush=True, known=False)


def to_convolve(x: Given) -> Args:
  """Earlier rows, q, k and v of all heads side by side, and taps."""
  s, w = x.layer, x.window
  y = jnp.concatenate([y.reshape(*y.shape[:2], -1) for y in w.raw[:3]], axis=2)
  draw = lambda i, *shape: jax.random.normal(jax.random.key(i), (*shape, y.shape[2]), y.dtype)
  return draw(3, x.case.batch, s.taps - 1), y, draw(4, s.taps), w.parents, w.nodes, own(x)
