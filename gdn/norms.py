"""RMS norms, exactly as Qwen3-Next and Qwen3.5 define them.

The layer norm is zero-centred: its weight is what is added to one. The gated norm at the end of a
GDN layer has a plain weight; it norms first and gates after.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

NORM_EPS = 1e-6


def unit_rms(x: Float[Array, "... n"]) -> Float[Array, "... n"]:
  """x / sqrt(mean x^2 + 1e-6) over the last axis, in float32."""
  x = x.astype(jnp.float32)
  return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + NORM_EPS)


def rms_norm(x: Float[Array, "... n"], weight: Float[Array, "n"]) -> Float[Array, "... n"]:
  """unit_rms(x) (1 + weight), in float32 up to the last cast to the dtype of x."""
  scale = 1.0 + weight.astype(jnp.float32)
  return (unit_rms(x) * scale.reshape(*(1,) * (x.ndim - 1), -1)).astype(x.dtype)


def gated_rms_norm(
  x: Float[Array, "... n"], z: Float[Array, "... n"], weight: Float[Array, "n"]
) -> Float[Array, "... n"]:
  """weight unit_rms(x) silu(z). The unit vector is rounded to the dtype of x before its weight."""
  w = weight.astype(x.dtype).reshape(*(1,) * (x.ndim - 1), -1)
  y = w * unit_rms(x).astype(x.dtype)
  return (y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype)
