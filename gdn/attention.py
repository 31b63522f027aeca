"""Gated attention as Qwen3-Next defines it: partial rotary, normed heads, a sigmoid output gate.

    [q | gate] = x Wq per head     o = softmax(q k' / sqrt(D)) v     y = (o sigmoid(gate)) Wo

`attend` is the only place where scores meet values. The memory of keys and values is not here: the
caller passes in how new rows join the old ones, as in every mixer of the model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gdn.config import Config
from gdn.dots import exact
from gdn.norms import rms_norm

Queries = Float[Array, "B T Hq D"]
KeyValues = Float[Array, "B T Hkv D"]
Attend = Callable[[Any, Queries, KeyValues, KeyValues], tuple[Queries, Any]]


class Attention(NamedTuple):
  """Weights. `q` packs [query | gate] per head; the two norms are float32 and zero-centred."""

  q: Float[Array, "width q"]
  k: Float[Array, "width kv"]
  v: Float[Array, "width kv"]
  q_norm: Float[Array, "D"]
  k_norm: Float[Array, "D"]
  out: Float[Array, "o width"]


def rotate(
  x: Float[Array, "B T heads D"], positions: Int[Array, "B T"], config: Config
) -> Float[Array, "B T heads D"]:
  """Rotary embedding of the first `config.rotary` dims, halves paired as (i, i + rotary / 2)."""
  half = config.rotary // 2
  rate = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = positions.astype(jnp.float32)[:, :, None, None] * rate[None, None, None]
  cos, sin = jnp.cos(angle), jnp.sin(angle)
  a, b, rest = jnp.split(x, [half, 2 * half], axis=-1)
  a, b = a.astype(jnp.float32), b.astype(jnp.float32)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def attend(
  q: Float[Array, "T Hq D"],
  k: Float[Array, "S Hkv D"],
  v: Float[Array, "S Hkv D"],
  visible: Bool[Array, "T S"],
) -> Float[Array, "T Hq D"]:
  """Softmax attention of one sequence over the rows that each query sees; none seen gives zeros.

  Scores and sums in float32, weights rounded to the dtype of v. A row with a non-finite number
  reaches only the queries that see it: those get NaN. Weight zero would not do, 0 x NaN is NaN.
  """
  (T, Hq, D), Hkv = q.shape, k.shape[1]
  bad = ~(jnp.isfinite(k) & jnp.isfinite(v)).all((1, 2))
  k, v = (jnp.where(bad[:, None, None], jnp.zeros((), x.dtype), x) for x in (k, v))
  dot = lambda form, x, y: jnp.einsum(
    form, x, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
  )
  scores = dot("thrd,shd->hrts", q.reshape(T, Hkv, Hq // Hkv, D), k) * D**-0.5
  scores = jnp.where(visible[None, None], scores, -jnp.inf)
  top = jnp.max(scores, axis=-1, keepdims=True)
  e = jnp.exp(scores - jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0)))
  total = jnp.sum(e, axis=-1, keepdims=True)
  weights = e / jnp.where(total > 0, total, 1.0)
  o = dot("hrts,shd->thrd", weights.astype(v.dtype), v).reshape(T, Hq, D)
  spoiled = (visible & bad[None]).any(1)
  return jnp.where(spoiled[:, None, None], jnp.nan, o).astype(q.dtype)


def attention(
  weights: Attention,
  config: Config,
  x: Float[Array, "B T width"],
  positions: Int[Array, "B T"],
  attend: Attend,
  memory: Any,
) -> tuple[Float[Array, "B T width"], Any]:
  """One attention layer; `attend(memory, q, k, v) -> (o, memory)` gets rotated queries and keys."""
  B, T = positions.shape
  D = config.head_dim
  q, gate = jnp.split(exact(x, weights.q).reshape(B, T, config.query_heads, 2 * D), 2, axis=-1)
  k, v = (exact(x, w).reshape(B, T, config.kv_heads, D) for w in (weights.k, weights.v))
  q = rotate(rms_norm(q, weights.q_norm), positions, config)
  k = rotate(rms_norm(k, weights.k_norm), positions, config)
  o, memory = attend(memory, q, k, v)
  o = (o * jax.nn.sigmoid(gate)).reshape(B, T, -1)
  return exact(o, weights.out), memory


def init(config: Config, key: Array, dtype: Any) -> Attention:
  """Random weights: normal over fan-in; the output projection is smaller by sqrt(2 layers)."""
  d, q, kv = config.width, config.query_heads * config.head_dim, config.kv_heads * config.head_dim
  keys = jax.random.split(key, 4)
  normal = lambda key, n, m: (jax.random.normal(key, (n, m)) * n**-0.5).astype(dtype)
  out = jax.random.normal(keys[3], (q, d)) * (2 * config.layers * q) ** -0.5
  zero = lambda: jnp.zeros((config.head_dim,), jnp.float32)
  return Attention(
    normal(keys[0], d, 2 * q),
    normal(keys[1], d, kv),
    normal(keys[2], d, kv),
    zero(),
    zero(),
    out.astype(dtype),
  )
