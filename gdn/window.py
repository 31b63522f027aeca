"""The gated delta rule over a window: chains and trees by one triangular solve.

With G the log decay summed from the root to a node, M the strict ancestor mask and S the state at
the root,

    (I + A) u = beta (v - e^G S k)      A_ts = beta_t e^(G_t - G_s) (k_t . k_s) M_ts
    o_t = e^(G_t) S q_t + sum_s e^(G_t - G_s) (q_t . k_s) u_s      over ancestors s and t itself

(TreeWY, arXiv 2608.20961, eq. 1-4, for GDN; per-channel decay moves inside the dot products.) A
chain is the tree whose parent of t is t - 1. Every decay is the exponential of a difference that
was masked before, so nothing overflows and e^(-G) is never formed.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gdn.dots import EXACT, Dots
from gdn.typing import Ancestors, Decays, Keys, Parents, State, Tokens, Values

Matrix = Float[Array, "T T"]
Solve = Callable[[Matrix, Values, Dots], Values]


class Writes(NamedTuple):
  """Rank-one writes in order: all that a state needs from a verified path."""

  k: Keys
  u: Values
  g: Decays


def chain(T: int) -> Parents:
  """Parents of a chain of T nodes."""
  return jnp.arange(T, dtype=jnp.int32) - 1


def ancestors(parents: Parents) -> Ancestors:
  """M[t, s]: s is a proper ancestor of t. Parents come before children; -1 is the root."""
  T = parents.shape[0]

  def add(t, M):
    p = parents[t]
    row = jnp.where(p < 0, False, M[p] | (jnp.arange(T) == p))
    return M.at[t].set(row)

  return jax.lax.fori_loop(0, T, add, jnp.zeros((T, T), bool))


def depth(M: Ancestors) -> Int[Array, "T"]:
  """Number of proper ancestors of each node: 0 for the anchor."""
  return jnp.sum(M, axis=1, dtype=jnp.int32)


def path_decay(g: Decays, M: Ancestors) -> Decays:
  """G: log decay from the root to a node, inclusive. Summed by selection: no 0 x NaN."""
  return g + jnp.sum(jnp.where(M[:, :, None], g[None], 0.0), axis=1)


def decayed_gram(
  x: Keys, k: Keys, G: Decays, mask: Bool[Array, "T T"], dots: Dots = EXACT
) -> Matrix:
  """sum_d x_td k_sd e^(G_td - G_sd) where `mask`, else 0. Two bodies: KDA costs K times more."""
  gap = jnp.where(mask[:, :, None], G[:, None] - G[None], -jnp.inf)
  if G.shape[1] == 1:
    return dots.gram(x, k.T) * jnp.exp(gap[:, :, 0])
  rows = jax.vmap(lambda x_t, gap_t: dots.gram(k * jnp.exp(gap_t), x_t))
  return jnp.where(mask, rows(x, gap), 0.0)


def substitute(A: Matrix, rhs: Values, dots: Dots) -> Values:
  """(I + A)^-1 rhs by forward substitution in float32. A is strictly lower triangular."""
  del dots
  return jax.lax.linalg.triangular_solve(A, rhs, left_side=True, lower=True, unit_diagonal=True)


def spoiled(tokens: Tokens, M: Ancestors) -> Bool[Array, "T"]:
  """Nodes with a non-finite input on their path. The rest must not hear of them."""
  bad = ~jnp.stack([jnp.isfinite(x).reshape(x.shape[0], -1).all(1) for x in tokens]).all(0)
  return bad | (M & bad[None]).any(1)


def solve(
  project: Callable[[Keys], Values],
  tokens: Tokens,
  M: Ancestors,
  *,
  dots: Dots = EXACT,
  inverse: Solve = substitute,
) -> tuple[Values, Values]:
  """Outputs and pseudo-values of every node of a window.

  `project(x)` is S x for rows x [T, K] of float32: from a state alone, or from a state and the
  committed writes that it has not received yet. A node with a non-finite token on its path gets
  NaN; every other node is what it would be without that token.
  """
  T = tokens.g.shape[0]
  lost = spoiled(tokens, M)
  q, k, v, beta, g = jax.tree.map(
    lambda x: jnp.where(lost.reshape(-1, *(1,) * (x.ndim - 1)), 0.0, x), tokens
  )
  G = path_decay(g, M)
  carry = jnp.exp(G)
  Sk, Sq = jnp.split(project(jnp.concatenate([carry * k, carry * q])), 2)

  A = beta[:, None] * decayed_gram(k, k, G, M, dots)
  u = inverse(A, beta[:, None] * (v - Sk), dots)
  o = Sq + dots.solve(decayed_gram(q, k, G, M | jnp.eye(T, dtype=bool), dots), u)

  nan = lambda x: jnp.where(lost[:, None], jnp.nan, x)
  return nan(o), nan(u)


def weighted(writes: Writes) -> tuple[Keys, Float[Array, "1 E"]]:
  """Keys that carry the decay from their write to the end, and the decay of the whole path."""
  G = jnp.cumsum(writes.g, axis=0)
  return writes.k * jnp.exp(G[-1:] - G), jnp.exp(G[-1:])


def fold(S: State, writes: Writes, *, dots: Dots = EXACT) -> State:
  """The state after a path of writes: e^G S + sum_s u_s (e^(G - G_s) k_s)'."""
  k, end = weighted(writes)
  return end * S + dots.fold(writes.u.T, k)


def project(S: State, writes: Writes | None, dots: Dots) -> Callable[[Keys], Values]:
  """x -> (state after `writes`) x, without forming that state."""
  if writes is None:
    return lambda x: dots.state(x, S.T)
  k, end = weighted(writes)
  return lambda x: dots.state(end * x, S.T) + dots.fold(dots.gram(x, k.T), writes.u)
