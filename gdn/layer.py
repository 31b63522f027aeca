"""The Gated DeltaNet layer: project, convolve, recur, norm, gate, project.

    x -> [q k v], z, a, b     [q k v] -> conv, silu     (q k v a b) -> recurrence -> o
    y = (w rmsnorm(o) silu(z)) Wo

The projections are separate, as in Qwen3.5. With `decay_channels = K` the same layer is KDA: `a`
has one entry per key channel. (KDA's published low-rank factors of `a` multiply out to this
matrix.) The two parts that hold memory, the convolution and the recurrence, are passed in.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn.config import Config
from gdn.dots import exact
from gdn.norms import gated_rms_norm
from gdn.typing import GateParams, Outputs, Raw

Hidden = Float[Array, "B T width"]
Mixed = Float[Array, "B T C"]
Conv = Callable[[Any, Mixed, Float[Array, "W C"]], tuple[Mixed, Any]]
Recurrent = Callable[[Any, Raw, GateParams], tuple[Outputs, Any]]


class GDN(NamedTuple):
  """Weights. A_log, dt_bias and the norm are float32; the rest is in the activations' dtype."""

  qkv: Float[Array, "width C"]
  z: Float[Array, "width HV"]
  a: Float[Array, "width HE"]
  b: Float[Array, "width H"]
  taps: Float[Array, "W C"]
  A_log: Float[Array, "H"]
  dt_bias: Float[Array, "H E"]
  norm: Float[Array, "V"]
  out: Float[Array, "HV width"]


class GDNMemory(NamedTuple):
  """What a GDN layer remembers: inputs of the convolution, and the recurrent state."""

  conv: Any
  recurrent: Any


def gate_params(weights: GDN, config: Config) -> GateParams:
  """The layer's gate parameters as the recurrence reads them."""
  return GateParams(weights.A_log, weights.dt_bias, jnp.float32(config.beta_max))


def heads(config: Config, mixed: Mixed, a: Array, b: Array) -> Raw:
  """The convolution's output and the gate inputs, split into heads."""
  B, T, _ = mixed.shape
  key = config.key_heads * config.key_dim
  q, k, v = jnp.split(mixed, [key, 2 * key], axis=-1)
  return Raw(
    q.reshape(B, T, config.key_heads, config.key_dim),
    k.reshape(B, T, config.key_heads, config.key_dim),
    v.reshape(B, T, config.value_heads, config.value_dim),
    a.reshape(B, T, config.value_heads, config.decay_channels),
    b,
  )


def gated_delta_net(
  weights: GDN, config: Config, x: Hidden, conv: Conv, recurrent: Recurrent, memory: GDNMemory
) -> tuple[Hidden, GDNMemory]:
  """One layer; `conv(memory, x, taps)` and `recurrent(memory, raw, gates)` return their memory."""
  B, T, _ = x.shape
  mixed, conv_memory = conv(memory.conv, exact(x, weights.qkv), weights.taps)
  raw = heads(config, mixed, exact(x, weights.a), exact(x, weights.b))
  o, state = recurrent(memory.recurrent, raw, gate_params(weights, config))
  z = exact(x, weights.z).reshape(B, T, config.value_heads, config.value_dim)
  y = gated_rms_norm(o.astype(x.dtype), z, weights.norm).reshape(B, T, -1)
  return exact(y, weights.out), GDNMemory(conv_memory, state)


def init(config: Config, key: Array, dtype: Any) -> GDN:
  """Random weights. Decay starts between 0.001 and 1.6 per token (Mamba-2's A and dt)."""
  d, H, HV = config.width, config.value_heads, config.value_heads * config.value_dim
  C, W, E = config.channels, config.conv_taps, config.decay_channels
  keys = jax.random.split(key, 8)
  normal = lambda key, n, m: (jax.random.normal(key, (n, m)) * n**-0.5).astype(dtype)
  low, high = jnp.log(0.001), jnp.log(0.1)
  dt = jnp.exp(jax.random.uniform(keys[6], (H, E), minval=low, maxval=high))
  out = jax.random.normal(keys[7], (HV, d)) * (2 * config.layers * HV) ** -0.5
  return GDN(
    qkv=normal(keys[0], d, C),
    z=normal(keys[1], d, HV),
    a=normal(keys[2], d, H * E),
    b=normal(keys[3], d, H),
    taps=normal(keys[4], W, C),
    A_log=jnp.log(jax.random.uniform(keys[5], (H,), minval=1.0, maxval=16.0)),
    dt_bias=dt + jnp.log(-jnp.expm1(-dt)),  # softplus of it is dt
    norm=jnp.ones((config.value_dim,), jnp.float32),
    out=out.astype(dtype),
  )
