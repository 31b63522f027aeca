"""flax nnx modules over the pure functions: to build a model by hand, look inside, or train it.

A module holds one variable per weight, in the shape of the pure function's parameters, so that
`params` is only a view: the functions and the modules can be mixed freely.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from gdn import attention, drafter, hybrid, layer
from gdn.attention import Attention
from gdn.config import Config
from gdn.drafter import DrafterConfig, DrafterParams, KeyValues
from gdn.hybrid import Memories, Mixers, Params
from gdn.layer import GDN
from gdn.ops import XLA
from gdn.streaming import empty, streaming


def variables(tree: Any) -> Any:
  """The tree with an `nnx.Param` around each array."""
  return jax.tree.map(nnx.Param, tree)


def arrays(tree: Any) -> Any:
  """The tree with each `nnx.Param` replaced by its array."""
  return jax.tree.map(lambda x: x[...], tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


class GatedDeltaNet(nnx.Module):
  """One Gated DeltaNet layer; with `decay_channels = K` it is KDA."""

  def __init__(self, config: Config, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
    self.config = config
    self.weights = nnx.data(variables(layer.init(config, rngs.params(), dtype)))

  @property
  def params(self) -> GDN:
    return arrays(self.weights)

  def __call__(
    self, x: Float[Array, "B T width"], mixers: Mixers, memory: layer.GDNMemory
  ) -> tuple[Float[Array, "B T width"], layer.GDNMemory]:
    return layer.gated_delta_net(self.params, self.config, x, mixers.conv, mixers.recurrent, memory)


class GatedAttention(nnx.Module):
  """One attention layer with output gate, normed heads and partial rotary embedding."""

  def __init__(self, config: Config, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
    self.config = config
    self.weights = nnx.data(variables(attention.init(config, rngs.params(), dtype)))

  @property
  def params(self) -> Attention:
    return arrays(self.weights)

  def __call__(
    self,
    x: Float[Array, "B T width"],
    positions: Int[Array, "B T"],
    mixers: Mixers,
    memory: Any,
  ) -> tuple[Float[Array, "B T width"], Any]:
    return attention.attention(self.params, self.config, x, positions, mixers.attend, memory)


class Hybrid(nnx.Module):
  """The whole model. Called with bytes it scores them from empty memories."""

  def __init__(self, config: Config, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
    self.config = config
    self.weights = nnx.data(variables(hybrid.init(config, rngs.params(), dtype)))

  @property
  def params(self) -> Params:
    """The weights as the pure functions take them."""
    return arrays(self.weights)

  def update(self, params: Params) -> None:
    """Take over other weights of the same shapes and dtypes, e.g. loaded ones.

    ValueError: a tree, shape or dtype differs.
    """
    old, new = self.params, params
    described = lambda tree: jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype).name), tree)
    if described(old) != described(new):
      raise ValueError(f"weights are {described(new)}, wanted {described(old)}")
    self.weights = nnx.data(variables(new))

  def __call__(self, ids: Int[Array, "B T"]) -> Float[Array, "B T vocab"]:
    """Next-token logits in float32."""
    B, T = ids.shape
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    memories = empty(self.config, B, self.params.embed.dtype)
    return self.forward(ids, positions, streaming(XLA), memories)[0]

  def forward(
    self, ids: Int[Array, "B T"], positions: Int[Array, "B T"], mixers: Mixers, memories: Memories
  ) -> tuple[Float[Array, "B T vocab"], Memories]:
    """`gdn.hybrid.forward` of these weights."""
    return hybrid.forward(self.params, self.config, ids, positions, mixers, memories)


class BlockDrafter(nnx.Module):
  """A DFlash drafter. Called with a target's embedding it scores the tokens after each anchor."""

  def __init__(self, config: DrafterConfig, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
    self.config = config
    self.weights = nnx.data(variables(drafter.init(config, rngs.params(), dtype)))

  @property
  def params(self) -> DrafterParams:
    """The weights as the pure functions take them."""
    return arrays(self.weights)

  def context_rows(
    self, features: Float[Array, "B S features"], positions: Int[Array, "B S"]
  ) -> tuple[KeyValues, ...]:
    """`gdn.drafter.context_rows` of these weights."""
    return drafter.context_rows(self.params, self.config, features, positions)

  def __call__(
    self,
    embed: Float[Array, "vocab width"],
    anchors: Int[Array, "B A"],
    positions: Int[Array, "B A"],
    rows: tuple[KeyValues, ...],
    back: Int[Array, "B A S"],
  ) -> Float[Array, "B A next vocab"]:
    """`gdn.drafter.marginals` of these weights."""
    return drafter.marginals(self.params, self.config, embed, anchors, positions, rows, back)
