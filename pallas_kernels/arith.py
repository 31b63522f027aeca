"""Arithmetic that the kernels share: gates, norms and the exact product of fp32 and bf16."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn.gates import NORM_EPS
from pallas_kernels import lanes

f32 = jnp.float32
bf16 = jnp.bfloat16


def log1p(x: jax.Array) -> jax.Array:
  """log(1 + x) to the last bits for x in [0, 1]: the rounding of 1 + x cancels in the quotient."""
  w = 1.0 + x
  small = w == 1.0
  return jnp.where(small, x, jnp.log(w) * x / jnp.where(small, 1.0, w - 1.0))


def gates(a, b, A_log, dt_bias, beta_max):
  """Write strength and log decay in float32 from raw gate inputs."""
  x = a.astype(f32) + dt_bias
  softplus = jnp.maximum(x, 0.0) + log1p(jnp.exp(-jnp.abs(x)))
  beta = beta_max / (1.0 + jnp.exp(-b.astype(f32)))
  return beta, -jnp.exp(A_log) * softplus


def decay_parts(g: jax.Array, bits: int = 12) -> tuple[jax.Array, jax.Array]:
  """g as coarse + fine, the coarse part a multiple of 2^-bits.

  Sums of sixteen coarse parts (of 64 with ten bits) are exact, so G_t - G_s stays exact after a
  decay to nothing, where the difference of two large rounded sums would lose the decay of the nodes
  behind it. Clamped where e^g is zero in float32 anyway.
  """
  g = jnp.maximum(g, -200.0)
  coarse = jnp.round(g * 2.0**bits) * 2.0**-bits
  return coarse, g - coarse


def inverse_norm(square: jax.Array) -> jax.Array:
  """1 / sqrt(|x|^2 + eps), the eps inside the root."""
  return jax.lax.rsqrt(square + NORM_EPS)


def exact_wgmma(acc, x: jax.Array, rhs) -> None:
  """acc += x rhs: x in registers, bf16 or fp32 in three parts; rhs bf16 in shared memory."""
  for part in (x,) if x.dtype == bf16 else lanes.three_parts(x):
    plgpu.wgmma(acc, part, rhs)


def over_rows(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """A value per row, broadcast over the columns."""
  return jax.lax.broadcast_in_dim(x, shape, (0,))


def over_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """A value per column, broadcast over the rows."""
  return jax.lax.broadcast_in_dim(x, shape, (1,))
