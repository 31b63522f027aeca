"""Bytes of a scheme by abstract evaluation: what its types say, nothing allocated.

Recurrent states and convolution tails; the attention's KV rows are the same under every scheme.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from commit_schemes.contract import CommitScheme, Dtypes, Spec
from commit_schemes.conv_window import conv_window
from gdn.typing import GateParams, Raw, Window

FLOAT32 = Dtypes()


class Footprint(NamedTuple):
  """Bytes. `carry` per slot between steps; `flight` per batch row on top of it until commit."""

  carry: int
  flight: int

  def times(self, layers: int) -> "Footprint":
    return Footprint(self.carry * layers, self.flight * layers)


class LayerShape(NamedTuple):
  """One recurrent layer on one device: heads after tensor parallelism has divided them."""

  key_heads: int
  value_heads: int
  key_dim: int = 128
  value_dim: int = 128
  channels: int = 1  # E: 1 for GDN, the key dim for KDA
  taps: int = 4

  @property
  def conv_channels(self) -> int:
    """q, k and v of every head go through one convolution."""
    return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

  def shard(self, degree: int) -> "LayerShape":
    """The share of one of `degree` tensor-parallel ranks. ValueError: heads do not divide."""
    if degree < 1 or self.key_heads % degree or self.value_heads % degree:
      raise ValueError(
        f"tensor-parallel degree {degree} must divide {self.key_heads} key heads "
        f"and {self.value_heads} value heads"
      )
    return self._replace(key_heads=self.key_heads // degree, value_heads=self.value_heads // degree)


class ModelShape(NamedTuple):
  """The recurrent layers of a model, all of one shape."""

  layers: int
  layer: LayerShape


class ModelFootprint(NamedTuple):
  """Bytes of all recurrent layers of one tensor-parallel rank."""

  state: Footprint
  conv: Footprint


def nbytes(tree: Any) -> int:
  """Bytes of every array in a tree, concrete or abstract."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def zero_window(shape: LayerShape, B: int, T: int, dtype: Any) -> tuple[Window, GateParams]:
  """Inputs of `verify`."""
  Hk, H, K, V, E, _ = shape
  x = lambda *s: jnp.zeros(s, dtype)
  f32 = lambda *s: jnp.zeros(s, jnp.float32)
  i32 = lambda *s: jnp.zeros(s, jnp.int32)
  raw = Raw(x(B, T, Hk, K), x(B, T, Hk, K), x(B, T, H, V), x(B, T, H, E), x(B, T, H))
  return Window(raw, i32(B, T), i32(B), i32(B)), GateParams(f32(H), f32(H, E), f32())


def abstract(
  scheme: CommitScheme, shape: LayerShape, window: int, slots: int = 1, dtype: Any = jnp.bfloat16
) -> tuple[Any, Any]:
  """Carry and flight of one layer as trees of `jax.ShapeDtypeStruct`.

  The pool has `slots` rows and all are verified with `window` nodes in the activation `dtype`.
  """

  def step() -> tuple[Any, Any]:
    S = jnp.zeros((slots, shape.value_heads, shape.value_dim, shape.key_dim), jnp.float32)
    carry = scheme.init(S)
    _, flight = scheme.verify(carry, *zero_window(shape, slots, window, dtype))
    return carry, flight

  return jax.eval_shape(step)


def abstract_conv(
  shape: LayerShape, window: int, slots: int = 1, dtype: Any = jnp.bfloat16
) -> tuple[Any, Any]:
  """The same of one layer's convolution tails."""

  def step() -> tuple[Any, Any]:
    scheme, C = conv_window(), shape.conv_channels
    carry = scheme.init(jnp.zeros((slots, shape.taps - 1, C), dtype))
    parents = jnp.zeros((slots, window), jnp.int32)
    row = jnp.zeros(slots, jnp.int32)
    x, taps = jnp.zeros((slots, window, C), dtype), jnp.zeros((shape.taps, C), dtype)
    _, flight = scheme.verify(carry, x, taps, parents, row, row)
    return carry, flight

  return jax.eval_shape(step)


def grown(evaluate: Callable[[int], tuple[Any, Any]]) -> Footprint:
  """What one more slot, verified in the same batch, adds."""
  one, two = evaluate(1), evaluate(2)
  carry, both = (nbytes(b) - nbytes(a) for a, b in zip(one, two, strict=True))
  return Footprint(carry, both - carry)


def footprint(
  scheme: CommitScheme, shape: LayerShape, window: int, dtype: Any = jnp.bfloat16
) -> Footprint:
  """One layer's states, with windows of `window` nodes."""
  return grown(lambda N: abstract(scheme, shape, window, N, dtype))


def model_footprint(
  make: Callable[[Spec], CommitScheme],
  model: ModelShape,
  window: int,
  *,
  degree: int = 1,
  dtypes: Dtypes = FLOAT32,
  activations: Any = jnp.bfloat16,
) -> ModelFootprint:
  """What one slot of one of `degree` tensor-parallel ranks takes, and one running window.

  `make` is `SCHEMES[name].make`. ValueError: `degree` does not divide the heads.
  """
  layer = model.layer.shard(degree)
  scheme = make(Spec(layer.key_heads, window, channels=layer.channels, dtypes=dtypes))
  conv = grown(lambda N: abstract_conv(layer, window, N, activations))
  return ModelFootprint(
    footprint(scheme, layer, window, activations).times(model.layers), conv.times(model.layers)
  )
