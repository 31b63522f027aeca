"""The gated delta rule in NumPy, written as the paper prints it. Imports nothing of the project.

float64 and the Householder form S_t = a S (I - beta k k') + beta v k' are the oracle; the same walk
in float32 and the pseudo-value form is the plain recurrence, whose error sets the budgets.
"""

import functools

import numpy as np


def softplus(x):
  return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


def unit(x):
  return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + x.dtype.type(1e-6))


def tokens(q, k, v, a, b, A_log, dt_bias, beta_max, dtype=np.float64):
  """Raw inputs [T, heads, ...] of one sequence to what each of H heads consumes, [H, T, ...]."""
  q, k, v, a, b, A_log, dt_bias, beta_max = (
    np.asarray(x).astype(dtype) for x in (q, k, v, a, b, A_log, dt_bias, beta_max)
  )
  H = v.shape[1]
  share = lambda x: np.repeat(x, H // x.shape[1], axis=1)
  g = -np.exp(A_log)[:, None] * softplus(a + dt_bias)
  beta = beta_max * np.exp(-np.logaddexp(dtype(0), -b))
  q = share(unit(q) * dtype(q.shape[-1] ** -0.5))
  return [np.moveaxis(x, 1, 0) for x in (q, share(unit(k)), v, beta, g)]


def householder(S, k, v, beta, g):
  erase = np.eye(k.shape[-1]) - beta[:, None, None] * k[:, :, None] * k[:, None, :]
  return (np.exp(g)[:, None] * S) @ erase + beta[:, None, None] * v[:, :, None] * k[:, None, :]


def pseudo_value(S, k, v, beta, g):
  S = np.exp(g)[:, None] * S
  u = beta[:, None] * (v - np.einsum("hvk,hk->hv", S, k))
  return S + u[:, :, None] * k[:, None, :]


def walk(S, tokens, parents, rule=householder):
  """State [T, H, V, K] and output [T, H, V] at every node, from the root S [H, V, K]."""
  q, k, v, beta, g = tokens
  S = S.astype(q.dtype)
  states, outputs = [], []
  for t, p in enumerate(parents):
    new = rule(S if p < 0 else states[p], k[:, t], v[:, t], beta[:, t], g[:, t])
    states.append(new)
    outputs.append(np.einsum("hvk,hk->hv", new, q[:, t]))
  return np.stack(states), np.stack(outputs)


def solve_bound(S, tokens, parents, eps):
  """Forward bound of substitution, carried to states and outputs, in float64.

  |du| <= eps T |M^-1| |M| |u| with M = I + A (Higham, Accuracy and Stability, th. 8.5).
  """
  q, k, v, beta, g = tokens
  T = len(parents)
  anc = np.zeros((T, T), bool)
  for t, p in enumerate(parents):
    if p >= 0:
      anc[t] = anc[p]
      anc[t, p] = True
  dS, do = [], []
  states, _ = walk(S, tokens, parents)
  for h in range(k.shape[0]):
    G = g[h] + anc @ g[h]
    decay = np.exp(
      np.where((anc | np.eye(T, dtype=bool))[:, :, None], G[:, None] - G[None], -np.inf)
    )
    M = np.eye(T) + beta[h][:, None] * anc * np.einsum("td,sd,tsd->ts", k[h], k[h], decay)
    root = [S[h] if p < 0 else states[p][h] for p in parents]
    u = np.stack([beta[h, t] * (v[h, t] - (np.exp(g[h, t]) * root[t]) @ k[h, t]) for t in range(T)])
    du = eps * T * np.abs(np.linalg.inv(M)) @ (np.abs(M) @ np.abs(u))
    reach = anc | np.eye(T, dtype=bool)
    summed = functools.partial(np.einsum, optimize=True)
    do.append(summed("tsd,td,sd,sv->tv", decay, np.abs(q[h]), np.abs(k[h]), du))
    dS.append(summed("ts,tsd,sv,sd->tvd", reach, decay, du, np.abs(k[h])))
  return np.stack(dS, 1), np.stack(do, 1)
