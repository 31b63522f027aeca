"""One layer under a scheme, thousands of steps in one program: what runs is kernels and no engine.

Every step verifies chains and trees of random length in a random order of slots, some of them
padding, with NaN in rows that do not exist, and commits a random root path of each. Every `every`
steps the committed states are compared with one account for all schemes: the same tokens one by one
through `decode` of the same Ops, and in float64. Bit for bit where the scheme is exact, else within
the budget of experiments/witness.py.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes.footprint import LayerShape
from experiments.layer_step import LayerStep
from experiments.record import Row
from experiments.watched import COUNTS, Wrong
from experiments.witness import Replica, bitwise, budget
from gdn.gates import NORM_EPS
from gdn.ops import XLA, Ops
from gdn.pool import put, take
from gdn.typing import Accepted, GateParams, Raw, Window
from pallas_kernels import MOSAIC_GPU

LAYERS: Mapping[str, tuple[LayerShape, Ops]] = MappingProxyType(
  {
    "one layer, Mosaic kernels": (LayerShape(1, 2), MOSAIC_GPU),
    "a layer of 16 key heads, Mosaic kernels": (LayerShape(16, 32), MOSAIC_GPU),
    "one tiny layer": (LayerShape(1, 2, 8, 8), XLA),
  }
)


class Steps(NamedTuple):
  """Windows and what is accepted of them, with a leading axis of steps."""

  window: Window
  accepted: Accepted


def root_paths(parents: np.ndarray, node: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Paths [..., T] from the root to `node` [...] along parents [..., T], and their lengths."""
  back, at = [], node
  for _ in range(parents.shape[-1]):
    back.append(at)
    above = np.take_along_axis(parents, np.maximum(at, 0)[..., None], -1)[..., 0]
    at = np.where(at >= 0, above, -1)
  upward = np.stack(back, -1)
  length = (upward >= 0).sum(-1)
  turn = np.maximum(length[..., None] - 1 - np.arange(parents.shape[-1]), 0)
  return np.take_along_axis(upward, turn, -1), length


def token_inputs(raw: Raw, at: jax.Array) -> Raw:
  """Node `at` [B] of each row, [B, 1, ...]."""
  pick = lambda x: jnp.take_along_axis(x, at.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)
  return jax.tree.map(pick, raw)


def over_tokens(token: Any, carry: Any, x: Steps) -> Any:
  """token(carry, raw, on, slots) for the accepted tokens of every step, in order."""

  def step(carry, x: Steps):
    path, length = x.accepted

    def one(t, carry):
      on = (t < length) & (x.window.slots >= 0)
      return token(
        carry, token_inputs(x.window.raw, jnp.where(on, path[:, t], 0)), on, x.window.slots
      )

    return jax.lax.fori_loop(0, path.shape[1], one, carry), None

  return jax.lax.scan(step, carry, x)[0]


def decoded(ops: Ops, gates: GateParams, S, x: Steps):
  """The pool after the accepted tokens, one by one."""

  def token(S, raw, on, slots):
    root = jnp.full((slots.shape[0], 1), -1, jnp.int32)
    return ops.decode(S, Window(raw, root, on.astype(jnp.int32), slots), gates)[1]

  return over_tokens(token, S, x)


def widened(gates: GateParams, carry, x: Steps):
  """The same in float64, and the norm [N, H] of what records of 16 bits may have lost."""
  wide = lambda y: y.astype(jnp.float64)
  A_log, dt_bias, top = map(wide, gates)

  def token(carry, raw, on, slots):
    S, noise = carry
    _, k, v, a, b = (wide(y[:, 0]) for y in raw)
    k = k / jnp.sqrt((k * k).sum(-1, keepdims=True) + NORM_EPS)
    k = jnp.repeat(k, v.shape[1] // k.shape[1], axis=1)
    decay = jnp.exp(-jnp.exp(A_log)[None] * jax.nn.softplus(a + dt_bias[None])[..., 0])
    now = take(S, slots) * decay[..., None, None]
    u = (top * jax.nn.sigmoid(b))[..., None] * (v - (now @ k[..., None])[..., 0])
    new = now + u[..., None] * k[..., None, :]
    lost = take(noise, slots) * decay + 2.0**-16 * jnp.sqrt((u * u).sum(-1))
    at = jnp.where(on, slots, -1)
    return put(S, at, new), put(noise, at, lost)

  return over_tokens(token, carry, x)


class Truth(NamedTuple):
  """Of the whole pool, after some blocks of steps."""

  S: np.ndarray
  wide: np.ndarray
  noise: np.ndarray


class Layer:
  """Steps of one layer and what is true after them; `c` is a soak's Config."""

  def __init__(self, c: Any):
    self.c, (self.shape, self.ops) = c, LAYERS[c.model]
    self.slots = c.slots + 2
    plain = self.step("snapshot")
    self.gates = plain.gates
    S = np.asarray(plain.materialize(plain.fresh()))
    self.truths = [Truth(S, S.astype(np.float64), np.zeros(S.shape[:2]))]
    self._decoded = jax.jit(partial(decoded, self.ops), donate_argnums=1)
    self._widened = jax.jit(widened)
    self._raw = jax.jit(self._draw, static_argnums=1)

  def step(self, name: str) -> LayerStep:
    return LayerStep(
      name, self.shape, self.c.window, self.ops, {1: 1.0}, pool=self.slots, topology="tree"
    )

  def _draw(self, key, lead: tuple[int, ...]) -> Raw:
    s, keys = self.shape, jax.random.split(key, 5)
    draw = lambda key, *shape: jax.random.normal(key, (*lead, *shape), jnp.bfloat16)
    heads = (s.key_heads, s.key_dim)
    a = 3 * draw(keys[3], s.value_heads, s.channels)
    v, b = draw(keys[2], s.value_heads, s.value_dim), draw(keys[4], s.value_heads)
    return Raw(draw(keys[0], *heads), draw(keys[1], *heads), v, a, b)

  def steps(self, block: int) -> Steps:
    """The same for every scheme."""
    c, T = self.c, self.c.window
    rng, lead = np.random.default_rng([c.seed, block]), (c.every, c.slots)
    parents = np.broadcast_to(np.arange(T) - 1, (*lead, T))
    trees = np.stack([rng.integers(-1, max(t, 0), lead) for t in range(T)], -1)
    parents = np.where(rng.random((*lead, 1)) < 0.5, parents, trees)
    nodes = rng.integers(1, T + 1, lead)
    path, length = root_paths(parents, rng.integers(-1, nodes))
    pool = np.tile(np.arange(self.slots), (c.every, 1))
    slots = rng.permuted(pool, axis=1)[:, : c.slots]
    slots = np.where(rng.random(lead) < 0.1, -1, slots)
    raw = self._raw(jax.random.fold_in(jax.random.key(c.seed), block), (*lead, T))
    real = jnp.asarray(np.arange(T) < nodes[..., None])
    hide = lambda x: jnp.where(real.reshape(*real.shape, *(1,) * (x.ndim - 3)), x, jnp.nan)
    i32 = lambda x: jnp.asarray(x, jnp.int32)
    window = Window(jax.tree.map(hide, raw), i32(parents), i32(nodes), i32(slots))
    return Steps(window, Accepted(i32(path), i32(length)))

  def truth(self, blocks: int) -> Truth:
    """After that many blocks; worked out once."""
    while len(self.truths) <= blocks:
      last, x = self.truths[-1], self.steps(len(self.truths) - 1)
      S = self._decoded(self.gates, jnp.asarray(last.S), x)
      with jax.enable_x64(True):
        wide = self._widened(self.gates, (jnp.asarray(last.wide), jnp.asarray(last.noise)), x)
      self.truths.append(Truth(*map(np.asarray, (S, *wide))))
    return self.truths[blocks]


class LayerSoak:
  """One scheme's layer; `step` is a block of steps and a comparison."""

  def __init__(self, layer: Layer, name: str):
    self.layer, self.step_of = layer, layer.step(name)
    self.scheme, self.worst = self.step_of.scheme, 0.0
    self.exact, self.seen = bitwise(self.scheme, layer.ops), dict.fromkeys(COUNTS, 0)
    self.carry = self.step_of.fresh()
    made = self.step_of.made

    def steps(carry, x: Steps, gates: GateParams):
      def one(carry, x: Steps):
        _, flight = made.verify(carry, x.window, gates)
        return made.commit(flight, x.accepted), None

      return jax.lax.scan(one, carry, x)[0]

    self._steps = jax.jit(steps, donate_argnums=0)

  def step(self) -> None:
    """Wrong: a state is not what the tokens one by one have made of it."""
    layer, block = self.layer, self.seen["steps"] // self.layer.c.every
    x = layer.steps(block)
    self.carry = self._steps(self.carry, x, layer.gates)
    got, true = np.asarray(self.step_of.materialize(self.carry)), layer.truth(block + 1)
    self.seen["steps"] += layer.c.every
    self.seen["emitted"] += int(jnp.where(x.window.slots >= 0, x.accepted.length, 0).sum())
    for slot in range(layer.slots):
      self._compare(slot, got[slot], true)

  def _compare(self, slot: int, got: np.ndarray, true: Truth) -> None:
    where = f"slot {slot} after {self.seen['steps']} steps"
    if self.exact:
      if not np.array_equal(got, true.S[slot]):
        raise Wrong(f"{where}: {np.sum(got != true.S[slot])} of {got.size} elements differ")
    else:
      replica = Replica(true.S[slot : slot + 1])
      replica.wide, replica.noise = true.wide[slot], true.noise[slot]
      error = float(np.sqrt(np.mean(np.square(got.astype(np.float64) - replica.wide))))
      allowed = budget(replica, self.scheme, self.layer.ops, self.layer.c.window)
      if not error <= allowed:
        raise Wrong(f"{where}: rms error {error:.2e}, allowed {allowed:.2e}")
      self.worst = max(self.worst, error / allowed)
    self.seen["states_compared"] += 1

  def row(self) -> Row:
    """What has been compared so far; None is what only an engine has."""
    c, counted = self.layer.c, ("steps", "emitted", "states_compared")
    return {
      "model": c.model,
      "compared": "bitwise" if self.exact else "budget",
      "error_over_budget": round(self.worst, 4),
      "logit_noise": None,
      "window": c.window,
      "slots": c.slots,
      **{name: n if name in counted else None for name, n in self.seen.items()},
      "device": jax.devices()[0].device_kind,
    }
