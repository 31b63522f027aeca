"""(I + A)^-1 rhs in every way that kernels compute it, the products in a precision of one's choice.

Each is a `Solve` (gdn/window.py): A strictly lower triangular, products by `dots.solve`, sums in
float32. What engines use: substitution in SGLang's and ReplaySSM's verify kernels; blocks of 16 and
merges in flash-linear-attention; Neumann doubling in FlashInfer's output-only kernel and, in fp16,
once in FlashKDA; Newton-Schulz in tpu-inference.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp

from experiments.ablation import neumann
from gdn.block_inverse import block_substitute
from gdn.dots import Dots
from gdn.window import Solve


def substitution(A: jax.Array, rhs: jax.Array, dots: Dots) -> jax.Array:
  """Row by row: u_i = rhs_i - A_i u. Unlike `gdn.window.substitute`, in lowered precision too."""
  row = lambda i, u: u.at[i].set(rhs[i] - dots.solve(A[i][None], u)[0])
  return jax.lax.fori_loop(0, A.shape[0], row, jnp.zeros_like(rhs))


def newton_schulz(A: jax.Array, rhs: jax.Array, dots: Dots) -> jax.Array:
  """X <- X (2I - M X) from X = I - A until A^(2^j) is zero: each residual is the last one squared.

  The same sequence as Neumann doubling in exact arithmetic; it corrects itself where errors stay
  below one.
  """
  I = jnp.eye(A.shape[0], dtype=A.dtype)
  X = I - A
  for _ in range(max(A.shape[0] - 1, 1).bit_length() - 1):
    X = dots.solve(X, 2 * I - dots.solve(I + A, X))
  return dots.solve(X, rhs)


METHODS: Mapping[str, Solve] = MappingProxyType(
  {
    "substitution": substitution,
    "blocks of 16": partial(block_substitute, base=16),
    "doubling blocks": block_substitute,
    "Neumann doubling": neumann,
    "Newton-Schulz": newton_schulz,
  }
)
