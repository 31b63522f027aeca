"""A mixture of experts with one shared expert, as Qwen3-Next and Qwen3.5 define it.

    p = softmax(x Wr)            the largest p of a token choose its experts
    y = sum_e p_e mlp_e(x) + sigmoid(x ws) mlp_shared(x)

Every expert sees every token, and what was not chosen is selected away: three plain products, E / k
times the arithmetic that is needed, no token sorted or dropped. A decode step's windows choose most
experts between them, and its time is that of reading the weights. (`jax.lax.ragged_dot` builds the
same masked product on a GPU, with E copies of every row in memory.)
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
  gate: Float[Array, "width experts inner"]
  up: Float[Array, "width experts inner"]
  down: Float[Array, "experts inner width"]
  shared: MLP
  shared_gate: Float[Array, "width 1"]


ROWS = 1024  # tokens whose inner activations of all experts exist at once


def route(config: Config, scores: Float[Array, "experts"]) -> Float[Array, "experts"]:
  """One token's weight of each expert, float32; zero where it is not chosen."""
  p, chosen = jax.lax.top_k(jax.nn.softmax(scores.astype(jnp.float32)), config.experts_per_token)
  if config.route_normalised:
    p = p / jnp.sum(p)
  return jnp.zeros(scores.shape, jnp.float32).at[chosen].set(p)


def mixture(
  weights: Experts, config: Config, x: Float[Array, "B T width"]
) -> Float[Array, "B T width"]:
  """The mixture of every token, in the dtype of x. A row of NaN is no other's concern."""
  flat = lambda w: w.reshape(w.shape[0], -1)
  gate, up = flat(weights.gate), flat(weights.up)
  down = weights.down.reshape(-1, weights.down.shape[-1])

  def token(x: Float[Array, "width"]) -> Float[Array, "width"]:
    p = route(config, exact(x, weights.router)).astype(x.dtype)
    inner = (jax.nn.silu(exact(x, gate)) * exact(x, up)).reshape(config.experts, -1)
    inner = jnp.where(p[:, None] == 0, jnp.zeros((), x.dtype), inner * p[:, None])
    shared = jax.nn.sigmoid(exact(x, weights.shared_gate)) * mlp(weights.shared, x)
    return exact(inner.reshape(-1), down) + shared

  return jax.lax.map(token, x.reshape(-1, x.shape[-1]), batch_size=ROWS).reshape(x.shape)


def init(config: Config, key: Array, dtype: Any) -> Experts:
  """Random weights, scaled as those of a dense MLP."""
  d, n, e = config.width, config.expert_inner, config.experts
  router, gate, up, down, shared, shared_gate = jax.random.split(key, 6)
  normal = lambda key, *shape, scale: (jax.random.normal(key, shape) * scale).astype(dtype)
  return Experts(
    normal(router, d, e, scale=d**-0.5),
    normal(gate, d, e, n, scale=d**-0.5),
    normal(up, d, e, n, scale=d**-0.5),
    normal(down, e, n, d, scale=(2 * config.layers * n) ** -0.5),
    swiglu.init(config, jax.random.split(shared, 3), dtype, config.shared_inner),
    normal(shared_gate, d, 1, scale=d**-0.5),
  )
