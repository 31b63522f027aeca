"""The recurrence over a sequence of any length, chunk by chunk.

Everything that does not need the state is worked out for all chunks at once: with

    [U | W] = (I + A)^-1 [beta v | beta e^G k]        u = U - W S'

a chunk maps the state at its start to the state at its end by one product,

    S_end = S (e^G I - W' k_end) + U' k_end           k_end = e^(G - G_t) k_t

so a short scan carries S from chunk to chunk, and then all outputs follow at once (Yang et al.
2024, arXiv 2406.06484, sec. 3). It can be differentiated; a lower precision may be put in for that.
"""

import jax
import jax.numpy as jnp

from gdn.dots import EXACT, Dots
from gdn.typing import State, Tokens, Values
from gdn.window import Solve, Writes, chain_decays, decayed_gram, substitute, weighted


def prefill(
  S: State,
  tokens: Tokens,
  *,
  chunk: int = 64,
  dots: Dots = EXACT,
  inverse: Solve = substitute,
) -> tuple[State, Values]:
  """State after all T tokens and every output, for T of any length. Neutral tokens (zeros) pass."""
  T, V = tokens.v.shape
  K = tokens.k.shape[1]
  C = min(chunk, T)
  pad = -T % C
  cut = lambda x: jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1))).reshape(-1, C, *x.shape[1:])
  chunks = jax.tree.map(cut, tokens)

  def local(x: Tokens):
    q, k, v, beta, g = x
    gap = chain_decays(g)
    decay, gap = jnp.exp(gap[:, 0]), gap[:, 1:]
    A = beta[:, None] * jnp.tril(decayed_gram(k, k, gap, dots), -1)
    rhs = beta[:, None] * jnp.concatenate([v, decay * k], axis=1)
    U, W = jnp.split(inverse(A, rhs, dots), [V], axis=1)
    k_end, end = weighted(Writes(k, v, g))
    through = end * jnp.eye(K, dtype=end.dtype) - dots.fold(W.T, k_end)
    outputs = decay * q, decayed_gram(q, k, gap, dots), U, W
    return through, dots.fold(U.T, k_end), outputs

  def carry(S, x):
    through, new = x
    return dots.state(S, through) + new, S

  def output(S, x):
    q, attention, U, W = x
    Wq = dots.state(jnp.concatenate([W, q]), S.T)
    return Wq[C:] + dots.solve(attention, U - Wq[:C])

  through, new, outputs = jax.vmap(local)(chunks)
  S, starts = jax.lax.scan(carry, S, (through, new))
  o = jax.vmap(output)(starts, outputs)
  return S, o.reshape(-1, V)[:T]
