"""The dense MLP: SwiGLU, (silu(x gate) * (x up)) down."""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Key

from gdn.config import Config
from gdn.dots import exact


class MLP(NamedTuple):
  """Weights, in the activations' dtype."""

  gate: Float[Array, "width inner"]
  up: Float[Array, "width inner"]
  down: Float[Array, "inner width"]


def mlp(weights: MLP, x: Float[Array, "... width"]) -> Float[Array, "... width"]:
  return exact(jax.nn.silu(exact(x, weights.gate)) * exact(x, weights.up), weights.down)


def init(config: Config, keys: Key[Array, "3"], dtype: Any, inner: int) -> MLP:
  """Random weights: normal over fan-in; the output projection is smaller by sqrt(2 layers)."""
  d, n = config.width, inner
  gate, up, down = keys
  normal = lambda key, n, m, scale: (jax.random.normal(key, (n, m)) * scale).astype(dtype)
  return MLP(
    normal(gate, d, n, d**-0.5),
    normal(up, d, n, d**-0.5),
    normal(down, n, d, (2 * config.layers * n) ** -0.5),
  )
