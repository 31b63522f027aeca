"""The recurrence in float64, in the Householder form: what every drift is measured against."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from experiments.streams import Streams


class Truth(NamedTuple):
  """float64, after token probe - 1, for each: states [probes, H, V, K], outputs [probes, H, V]."""

  states: np.ndarray
  outputs: np.ndarray


def tokens(raw, gates) -> list[np.ndarray]:
  """q, k, v, beta, g [T, H, ...] in float64 from raw inputs and gates, as Qwen3-Next has them."""
  q, k, v, a, b = (np.asarray(x, np.float64) for x in raw)
  A_log, dt_bias, beta_max = (np.asarray(x, np.float64) for x in gates)
  unit = lambda x: x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)
  share = lambda x: np.repeat(x, v.shape[1] // x.shape[1], axis=1)
  g = -np.exp(A_log)[:, None] * np.logaddexp(0, a + dt_bias)
  beta = beta_max * np.exp(-np.logaddexp(0, -b))
  return [share(unit(q)) / np.sqrt(q.shape[-1]), share(unit(k)), v, beta, g]


def walk(x: list[np.ndarray], probes: Sequence[int], tick: Callable[[], None]) -> Truth:
  """S_t = e^g S (I - beta k k') + beta v k' for a few heads, whose states fit a cache."""
  q, k, v, beta, g = x
  T, H, V = v.shape
  S = np.zeros((H, V, k.shape[-1]))
  states, outputs, wanted = [], [], set(probes)
  for t in range(T):
    k_t = k[t, :, None, :]
    S -= (S @ (beta[t, :, None, None] * k_t).swapaxes(1, 2)) * k_t
    S *= np.exp(g[t])[:, None, :]
    S += (beta[t, :, None] * v[t])[:, :, None] * k_t
    if t + 1 in wanted:
      states.append(S.copy())
      outputs.append((S @ q[t, :, :, None])[..., 0])
      tick()
  return Truth(np.stack(states), np.stack(outputs))


def truth(
  streams: Streams,
  probes: Sequence[int],
  *,
  progress: Callable[[float], None] = lambda fraction: None,
  threads: int = 2,
) -> Truth:
  """float64 states and outputs of every head of every layer at each probe, from a zero state.

  ValueError: a probe outside 1 to the length of the streams.
  """
  if not all(1 <= p <= streams.tokens for p in probes):
    raise ValueError(f"probes {min(probes)}..{max(probes)} must lie in 1..{streams.tokens}")
  Hk, H = streams.raw.k.shape[1], streams.raw.v.shape[1]
  r, done = H // Hk, []

  def tick():
    done.append(1)
    progress(len(done) / (len(set(probes)) * Hk))

  def group(h: int) -> Truth:
    """A key head and the value heads that share it."""
    key, value = slice(h, h + 1), slice(h * r, (h + 1) * r)
    q, k, v, a, b = streams.raw
    A_log, dt_bias, beta_max = streams.gates
    raw = q[:, key], k[:, key], v[:, value], a[:, value], b[:, value]
    return walk(tokens(raw, (A_log[value], dt_bias[value], beta_max)), probes, tick)

  with ThreadPoolExecutor(threads) as pool:
    parts = list(pool.map(group, range(Hk)))
  return Truth(*(np.concatenate(part, axis=1) for part in zip(*parts, strict=True)))
