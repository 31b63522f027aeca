"""The recurrence over a sequence of any length, chunk by chunk.

Within a chunk everything that does not need the state is solved for all chunks at once,

    [U | W] = (I + A)^-1 [beta v | beta e^G k]        u = U - W S'

and a short scan carries the state from chunk to chunk (Yang et al. 2024, arXiv 2406.06484, sec. 3).
"""

import jax
import jax.numpy as jnp

from gdn.dots import exact
from gdn.typing import State, Tokens, Values
from gdn.window import ancestors, chain, decayed_gram, substitute, weighted, Writes, EXACT


def prefill(S: State, tokens: Tokens, *, chunk: int = 64) -> tuple[State, Values]:
  """State after all T tokens and every output, for T of any length. Neutral tokens (zeros) pass."""
  T, V = tokens.v.shape
  C = min(chunk, T)
  pad = -T % C
  cut = lambda x: jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))).reshape(-1, C, *x.shape[1:])
  chunks = jax.tree.map(cut, tokens)
  M = ancestors(chain(C))
  seen = M | jnp.eye(C, dtype=bool)

  def local(x: Tokens):
    q, k, v, beta, g = x
    G = jnp.cumsum(g, axis=0)
    A = beta[:, None] * decayed_gram(k, k, G, M)
    rhs = beta[:, None] * jnp.concatenate([v, jnp.exp(G) * k], axis=1)
    U, W = jnp.split(substitute(A, rhs, EXACT), [V], axis=1)
    k_end, end = weighted(Writes(k, v, g))
    return U, W, jnp.exp(G) * q, decayed_gram(q, k, G, seen), k_end, end

  def carry(S, x):
    U, W, q, attention, k_end, end = x
    u = U - exact(W, S.T)
    o = exact(q, S.T) + exact(attention, u)
    return end * S + exact(u.T, k_end), o

  S, o = jax.lax.scan(carry, S, jax.vmap(local)(chunks))
  return S, o.reshape(-1, V)[:T]
