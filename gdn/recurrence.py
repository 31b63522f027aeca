"""The gated delta rule, one token at a time. Every other form is tested against this.

    u = beta (v - e^g S k)      S_t = e^g S + u k'      o = S_t q

(Yang et al. 2024, arXiv 2412.06464, eq. 10; with g per key channel it is KDA, arXiv 2510.26692.)

`write` is the only place where a state is advanced. It stands between optimisation barriers with
its norm inside, so that XLA compiles the same arithmetic into decode, snapshot and exact fold: the
states they leave are equal bit for bit, and not merely close.
"""

import jax
import jax.numpy as jnp

from gdn.dots import exact
from gdn.gates import l2norm
from gdn.typing import Decay, Key, Scalar, State, Tokens, Value, Values


def pseudo_value(S: State, k: Key, v: Value, beta: Scalar, g: Decay) -> tuple[State, Value]:
  """The decayed state and the write u that it is about to receive."""
  S = jnp.exp(g)[None] * S
  return S, beta * (v - exact(S, k))


def step(S: State, token: Tokens) -> tuple[State, Value]:
  """One token in float32, q and k already normalised."""
  q, k, v, beta, g = token
  S, u = pseudo_value(S, k, v, beta, g)
  S = S + u[:, None] * k[None]
  return S, exact(S, q)


def scan(S: State, tokens: Tokens) -> tuple[State, Values]:
  """The state after all T tokens and every output."""
  return jax.lax.scan(step, S, tokens)


def write(S: State, k: Key, v: Value, beta: Scalar, g: Decay) -> State:
  """Advance a state by one raw token: k before its norm, k and v in the activation dtype."""
  S, k, v, beta, g = jax.lax.optimization_barrier((S, k, v, beta, g))
  k, v = l2norm(k), v.astype(jnp.float32)
  S, u = pseudo_value(S.astype(jnp.float32), k, v, beta, g)
  return jax.lax.optimization_barrier(S + u[:, None] * k[None])


def read(S: State, q: Key) -> Value:
  """The output for a raw query: q before its norm."""
  return exact(S, l2norm(q) * q.shape[-1] ** -0.5)
