"""Write strength and log decay from the raw gate inputs, and the L2 norm: Qwen3-Next, Qwen3.5, KDA.

    beta = beta_max sigmoid(b)          g = -exp(A_log) softplus(a + dt_bias)

Always float32: one bfloat16 round trip of beta in only one of decode and verify makes the two
drift apart (SGLang issue 38975).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn.typing import GateParams

NORM_EPS = 1e-6


def gates(
  a: Float[Array, "... H E"], b: Float[Array, "... H"], params: GateParams
) -> tuple[Float[Array, "... H"], Float[Array, "... H E"]]:
  """`beta` and `g` in float32 from raw gate inputs of any float dtype."""
  x = a.astype(jnp.float32)
  lead = (1,) * (x.ndim - 2)
  dt_bias = params.dt_bias.reshape(*lead, *params.dt_bias.shape)
  rate = jnp.exp(params.A_log).reshape(*lead, -1, 1)
  g = -rate * jax.nn.softplus(x + dt_bias)
  beta = params.beta_max * jax.nn.sigmoid(b.astype(jnp.float32))
  return beta, g


def l2norm(x: Float[Array, "... K"]) -> Float[Array, "... K"]:
  """x / sqrt(sum x^2 + 1e-6) over the last axis, in float32 (eps inside, as in Qwen3-Next)."""
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + NORM_EPS)
