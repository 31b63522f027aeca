"""A second account of every recurrent state: the raw inputs that a request has committed, replayed.

`witnessed(scheme)` is the scheme, and beside its carry a log of what its last commit accepted. The
host takes the logs of each step and keeps them by request, not by slot; a `Replica` folds a
request's own inputs one token at a time into the state with which it was admitted.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from commit_schemes import CommitScheme, Scheme, Spec
from gdn.ops import XLA, Ops
from gdn.pool import along, put
from gdn.typing import GateParams, Raw, Slots, Window


class Log(NamedTuple):
  """Raw inputs of the tokens that a slot's last commit accepted, in order."""

  raw: Raw  # [N, T, ...]
  length: Int[Array, "N"]


class LogFlight(NamedTuple):
  log: Log
  raw: Raw
  slots: Slots


class Witnessed(NamedTuple):
  """A carry or a flight and its log's."""

  inner: Any
  log: Any


def witnessed(scheme: CommitScheme, spec: Spec, dtype: Any) -> CommitScheme:
  """`dtype` is that of the activations. Costs a window of raw inputs a slot."""

  def init(S):
    N, H, V, K = S.shape
    x = lambda *shape: jnp.zeros((N, spec.window, *shape), dtype)
    keys = (spec.key_heads, K)
    raw = Raw(x(*keys), x(*keys), x(H, V), x(H, spec.channels), x(H))
    return Witnessed(scheme.init(S), Log(raw, jnp.zeros(N, jnp.int32)))

  def verify(carry, window, gates):
    o, flight = scheme.verify(carry.inner, window, gates)
    return o, Witnessed(flight, LogFlight(carry.log, window.raw, window.slots))

  def commit(flight, accepted):
    log, raw, slots = flight.log
    on = jnp.arange(accepted.path.shape[1])[None] < accepted.length[:, None]
    path = jax.tree.map(lambda x: along(x, accepted.path, on), raw)
    new = Log(jax.tree.map(lambda pool, x: put(pool, slots, x), log.raw, path),
              put(log.length, slots, accepted.length))  # fmt: skip
    return Witnessed(scheme.commit(flight.inner, accepted), new)

  return CommitScheme(
    init,
    verify,
    commit,
    lambda flight, accepted: scheme.state_at(flight.inner, accepted),
    lambda carry: scheme.materialize(carry.inner),
  )


CHUNK = 64  # tokens of one call


def _advance(ops: Ops, S, raw: Raw, count, params: GateParams):
  """S [1, H, V, K] after the first `count` of the tokens raw [1, CHUNK, ...], one at a time."""
  root, slot = jnp.full((1, 1), -1, jnp.int32), jnp.zeros(1, jnp.int32)

  def token(t, S):
    one = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, t, 1, axis=1), raw)
    return ops.decode(S, Window(one, root, jnp.ones(1, jnp.int32), slot), params)[1]

  return jax.lax.fori_loop(0, count, token, S)


ADVANCE = jax.jit(_advance, static_argnums=0)


class Replica:
  """One recurrent layer of one request: float32 by the same Ops, and float64 beside it.

  wide   the float64 state, whose distance to `S` is the plain recurrence's own error
  noise  Frobenius norm, per head, of what records that keep 16 of 24 bits may have lost by now:
         each write u k' loses at most 2^-16 |u||k|, and a step e^g (I - beta k k') adds nothing
  solve  Frobenius norm, per head, of the most that is left by now of |M^-1| |M| |u| |k|' of a
         window, M = I + A: of what substitution may lose in one, a rounding and a node at a time
  """

  def __init__(self, S: np.ndarray):
    self.S = S  # [1, H, V, K]
    self.wide = S[0].astype(np.float64)
    self.noise, self.solve = np.zeros(S.shape[1]), np.zeros(S.shape[1])
    self._waiting: list[Raw] = []

  def copy(self) -> "Replica":
    new = Replica(self.S)
    new.wide, new.noise, new.solve = self.wide.copy(), self.noise.copy(), self.solve.copy()
    new._waiting = list(self._waiting)
    return new

  def add(self, raw: Raw) -> None:
    """The tokens that a window has committed, [n, ...] each."""
    self._waiting.append(raw)

  def catch_up(self, ops: Ops, params: GateParams, leave: int = 0, *, wide: bool) -> None:
    """Replay what has been added, all but the last `leave` tokens; in float64 too where `wide`."""
    if not self._waiting:
      return
    raw = jax.tree.map(lambda *x: np.concatenate(x), *self._waiting)
    end, windows = len(raw.b) - leave, np.cumsum([len(x.b) for x in self._waiting])
    for at in range(0, end, CHUNK):
      count = min(CHUNK, end - at)
      some = jax.tree.map(lambda x: x[at : at + count], raw)  # noqa: B023
      pad = lambda x: np.pad(x, ((0, CHUNK - len(x)), *((0, 0),) * (x.ndim - 1)))[None]
      self.S = np.asarray(ADVANCE(ops, self.S, jax.tree.map(pad, some), np.int32(count), params))
      if wide:
        exact = jax.tree.map(lambda x: np.asarray(x, np.float64), some)
        self._widen(exact, params, windows[(windows > at) & (windows < at + count)] - at)
    self._waiting = [jax.tree.map(lambda x: x[end:], raw)] if leave else []

  def _widen(self, raw: Raw, params: GateParams, cuts: np.ndarray) -> None:
    """One chunk of a scalar decay in float64, by the triangular solve of gdn/window.py; `cuts` are
    where windows end in it."""
    _, k, v, a, b = raw
    heads = lambda x: np.moveaxis(x, 1, 0)
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    k, v = heads(np.repeat(k, v.shape[1] // k.shape[1], 1)), heads(v)
    A_log, dt_bias, top = (np.asarray(x, np.float64) for x in params)
    g = -np.exp(A_log)[:, None] * np.logaddexp(0.0, a[..., 0] + dt_bias[:, 0]).T  # [H, n]
    beta, G = top / (1 + np.exp(-b.T))[..., None], np.cumsum(g, 1)
    before = np.tril(np.ones((len(b), len(b)), bool), -1)
    gap = np.exp(np.where(before, G[:, :, None] - G[:, None], -np.inf))
    A = beta * gap * (k @ np.swapaxes(k, 1, 2))
    Sk = np.exp(G)[..., None] * (k @ np.swapaxes(self.wide, 1, 2))
    M = np.eye(len(b)) + A
    u = np.linalg.solve(M, beta * (v - Sk))
    left = np.exp(G[:, -1:] - G)
    end = np.exp(G[:, -1])
    self.solve = end * self.solve
    for i, j in itertools.pairwise([0, *cuts, len(b)]):
      here, block = slice(i, j), M[:, i:j, i:j]
      du = abs(np.linalg.inv(block)) @ (abs(block) @ abs(u[:, here])) * left[:, here, None]
      lost = np.linalg.norm(np.swapaxes(du, 1, 2) @ abs(k[:, here]), axis=(1, 2))
      self.solve = np.maximum(self.solve, lost)
    self.wide = end[:, None, None] * self.wide + np.swapaxes(left[..., None] * u, 1, 2) @ k
    self.noise = end * self.noise + 2.0**-16 * (left * np.linalg.norm(u, axis=-1)).sum(1)


def bitwise(scheme: Scheme, ops: Ops) -> bool:
  """Whether a replay by one-token steps leaves the very bits that the scheme commits.

  An exact ring replays gates that `step` has made, so `step` and `decode` must be of one
  implementation: XLA and Mosaic round differently.
  """
  mixed = ops.step is XLA.step and ops.decode is not XLA.decode
  return scheme.exact and not (mixed and scheme.writes == "flush")


# What kernels are held to, relative to the answer: tensor cores cut off where float32 rounds.
PROMISED = 1e-6


def budget(replica: Replica, scheme: Scheme, ops: Ops, window: int) -> float:
  """Largest rms error of a state that is not bitwise, as in the laws: twice the plain recurrence's
  own, one rounding of the answer, or what kernels are held to, and, of windows of so many nodes
  that are solved, the forward bound of a solve (Higham, Accuracy and Stability, th. 8.5); of narrow
  records what they may have lost."""
  eps = float(np.finfo(np.float32).eps)
  rounding = eps if ops.verify is XLA.verify else PROMISED
  of_state = lambda norms: float(np.sqrt(np.sum(norms**2) / replica.wide.size))
  solved = eps * window * of_state(replica.solve) if scheme.solves else 0.0
  lost = 0.0 if scheme.lossless else of_state(replica.noise)
  plain = 2 * _rms(replica.S[0] - replica.wide)
  return plain + rounding * _rms(replica.wide) + solved + lost


def _rms(x: np.ndarray) -> float:
  return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


__all__ = ["Log", "Replica", "Witnessed", "bitwise", "budget", "witnessed"]
