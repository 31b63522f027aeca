"""The gated delta rule over a window: chains and trees by one triangular solve.

With G_ts the log decay on the way from s to t, G_t that from the root, M the strict ancestor mask
and S the state at the root,

    (I + A) u = beta (v - e^(G_t) S k)      A_ts = beta_t e^(G_ts) (k_t . k_s) M_ts
    o_t = e^(G_t) S q_t + sum_s e^(G_ts) (q_t . k_s) u_s      over ancestors s and t itself

(TreeWY, arXiv 2608.20961, eq. 1-4, for GDN; per-channel decay moves inside the dot products.) A
chain is the tree whose parent of t is t - 1. Published forms take G_ts as G_t - G_s, which loses
the digits of a short way behind a great decay: at -1000 nothing below 6e-5 is left. Here every G_ts
is the sum of its own decays, none of them positive, so nothing cancels and nothing overflows.
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


def path_decays(g: Decays, parents: Parents) -> Float[Array, "T T+1 E"]:
  """Log decay on the way to each node from the root (column 0) and from node s (column s + 1).

  -inf where s is neither t nor an ancestor of t. Row by row along the parents: what leads to the
  parent, and one decay more.
  """
  T, E = g.shape

  def add(t, gap):
    return gap.at[t + 1].set((gap[parents[t] + 1] + g[t][None]).at[t + 1].set(0.0))

  root = jnp.full((T + 1, T + 1, E), -jnp.inf, g.dtype).at[0, 0].set(0.0)
  return jax.lax.fori_loop(0, T, add, root)[1:]


def chain_decays(g: Decays) -> Float[Array, "T T+1 E"]:
  """`path_decays` of a chain, without a loop: sums down each column from its own start."""
  T = g.shape[0]
  t, s = jnp.arange(T)[:, None, None], jnp.arange(T + 1)[None, :, None]
  gap = jax.lax.cumsum(jnp.where(s <= t, g[:, None], 0.0), axis=0)
  return jnp.where(s <= t + 1, gap, -jnp.inf)


def decayed_gram(x: Keys, k: Keys, gap: Float[Array, "T T E"], dots: Dots = EXACT) -> Matrix:
  """sum_d x_td k_sd e^gap_tsd; 0 where gap is -inf. Two bodies: KDA costs K times more."""
  if gap.shape[2] == 1:
    return dots.gram(x, k.T) * jnp.exp(gap[:, :, 0])
  return jax.vmap(lambda x_t, gap_t: dots.gram(k * jnp.exp(gap_t), x_t))(x, gap)


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
  parents: Parents,
  *,
  dots: Dots = EXACT,
  inverse: Solve = substitute,
) -> tuple[Values, Values]:
  """Outputs and pseudo-values of every node of a window.

  `project(x)` is S x for rows x [T, K] of float32: from a state alone, or from a state and the
  committed writes that it has not received yet. A node with a non-finite token on its path gets
  NaN; every other node is what it would be without that token.
  """
  lost = spoiled(tokens, ancestors(parents))
  q, k, v, beta, g = jax.tree.map(
    lambda x: jnp.where(lost.reshape(-1, *(1,) * (x.ndim - 1)), 0.0, x), tokens
  )
  gap = path_decays(g, parents)
  carry = jnp.exp(gap[:, 0])
  Sk, Sq = jnp.split(project(jnp.concatenate([carry * k, carry * q])), 2)

  A = beta[:, None] * jnp.tril(decayed_gram(k, k, gap[:, 1:], dots), -1)
  u = inverse(A, beta[:, None] * (v - Sk), dots)
  o = Sq + dots.solve(decayed_gram(q, k, gap[:, 1:], dots), u)

  nan = lambda x: jnp.where(lost[:, None], jnp.nan, x)
  return nan(o), nan(u)


def weighted(writes: Writes) -> tuple[Keys, Float[Array, "1 E"]]:
  """Keys that carry the decay from their write to the end, and the decay of the whole path."""
  total = jax.lax.cumsum(writes.g, axis=0, reverse=True)
  after = jnp.concatenate([total[1:], jnp.zeros_like(total[:1])])
  return writes.k * jnp.exp(after), jnp.exp(total[:1])


def fold(S: State, writes: Writes, *, dots: Dots = EXACT) -> State:
  """The state after a path of writes: e^G S + sum_s u_s (e^(G_s) k_s)', G_s from s on."""
  k, end = weighted(writes)
  return end * S + dots.fold(writes.u.T, k)


def project(S: State, writes: Writes | None, dots: Dots) -> Callable[[Keys], Values]:
  """x -> (state after `writes`) x, without forming that state."""
  if writes is None:
    return lambda x: dots.state(x, S.T)
  k, end = weighted(writes)
  return lambda x: dots.state(end * x, S.T) + dots.fold(dots.gram(x, k.T), writes.u)
