"""(I + A)^-1 rhs by substitution on blocks that double: a few products in place of T row steps.

    X <- X - X (A on the blocks below the diagonal of size s) X        s = 1, 2, 4, ... < T

Starting from X = I, after each line X holds the inverses of the diagonal blocks of size 2 s. It is
substitution, block by block, and no power of A is formed; but the inverse itself is, so its error
is that of X and not that of one solve. Used to train, where T row steps would be the longest part.
With a `base` the blocks of that size are first inverted row by row (flash-linear-attention: 16).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn.dots import EXACT, Dots
from gdn.typing import Values
from gdn.window import substitute

Matrix = Float[Array, "T T"]


def inverse(A: Matrix, dots: Dots, base: int = 1) -> Matrix:
  """(I + A)^-1 for a strictly lower triangular A of any size; `base` is a power of two."""
  T = A.shape[0]

  @jax.custom_vjp
  def invert(A):
    i, j = jnp.arange(T)[:, None], jnp.arange(T)[None]
    X, s = jnp.eye(T, dtype=A.dtype), base
    if base > 1:
      X = substitute(jnp.where(i // base == j // base, A, 0.0), X, EXACT)
    while s < T:
      below = (i // (2 * s) == j // (2 * s)) & (i // s > j // s)
      X = X - dots.solve(X, dots.solve(jnp.where(below, A, 0.0), X))
      s *= 2
    return X

  def forward(A):
    X = invert(A)
    return X, X

  def backward(X, dX):
    return (-dots.solve(X.T, dots.solve(dX, X.T)),)

  invert.defvjp(forward, backward)
  return invert(A)


def block_substitute(A: Matrix, rhs: Values, dots: Dots, base: int = 1) -> Values:
  """A `Solve` (gdn/window.py) by the explicit inverse."""
  return dots.solve(inverse(A, dots, base), rhs)
