"""A mixture of experts with one shared expert, as Qwen3-Next and Qwen3.5 define it.

    p = softmax(x Wr)            the largest p of a token choose its experts
    y = sum_e p_e mlp_e(x) + sigmoid(x ws) mlp_shared(x)

Tokens are sorted by expert and every expert multiplies its own rows, so nothing is dropped and no
token hears of another: a row of NaN stays a row of NaN.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from gdn import swiglu
from gdn.config import Config
from gdn.dots import exact
from gdn.swiglu import MLP, mlp


class Experts(NamedTuple):
  """Weights: the router, the experts side by side, the shared expert and its gate."""

  router: Float[Array, "width experts"]
  gate: Float[Array, "experts width inner"]
  up: Float[Array, "experts width inner"]
  down: Float[Array, "experts inner width"]
  shared: MLP
  shared_gate: Float[Array, "width 1"]


def route(
  config: Config, scores: Float[Array, "rows experts"]
) -> tuple[Float[Array, "rows chosen"], Array]:
  """Weights, in the dtype of the scores, and indices of each row's experts."""
  p, chosen = jax.lax.top_k(jax.nn.softmax(scores.astype(jnp.float32)), config.experts_per_token)
  if config.route_normalised:
    p = p / jnp.sum(p, axis=-1, keepdims=True)
  return p.astype(scores.dtype), chosen


def mixture(
  weights: Experts, config: Config, x: Float[Array, "B T width"]
) -> Float[Array, "B T width"]:
  """The mixture of every token, in the dtype of x; each product rounds once, as in `mlp`."""
  rows = x.reshape(-1, x.shape[-1])
  p, chosen = route(config, exact(rows, weights.router))
  order = jnp.argsort(chosen.reshape(-1))
  sizes = jnp.bincount(chosen.reshape(-1), length=config.experts).astype(jnp.int32)
  grouped = lambda x, w: jax.lax.ragged_dot(x, w, sizes, precision=jax.lax.Precision.HIGHEST)
  mine = rows[order // config.experts_per_token]
  y = grouped(jax.nn.silu(grouped(mine, weights.gate)) * grouped(mine, weights.up), weights.down)
  y = jnp.zeros_like(y).at[order].set(y, unique_indices=True).reshape(*p.shape, -1)
  y = jnp.sum(y.astype(jnp.float32) * p.astype(jnp.float32)[..., None], axis=1).astype(x.dtype)
  shared = jax.nn.sigmoid(exact(rows, weights.shared_gate)) * mlp(weights.shared, rows)
  return (y + shared).reshape(x.shape)


def init(config: Config, key: Array, dtype: Any) -> Experts:
  """Random weights, scaled as those of a dense MLP."""
  d, n, e = config.width, config.expert_inner, config.experts
  router, gate, up, down, shared, shared_gate = jax.random.split(key, 6)
  normal = lambda key, *shape, scale: (jax.random.normal(key, shape) * scale).astype(dtype)
  return Experts(
    normal(router, d, e, scale=d**-0.5),
    normal(gate, e, d, n, scale=d**-0.5),
    normal(up, e, d, n, scale=d**-0.5),
    normal(down, e, n, d, scale=(2 * config.layers * n) ** -0.5),
    swiglu.init(config, jax.random.split(shared, 3), dtype, config.shared_inner),
    normal(shared_gate, d, 1, scale=d**-0.5),
  )
