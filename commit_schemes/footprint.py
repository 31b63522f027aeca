"""Bytes of a scheme by abstract evaluation: what its types say, nothing allocated."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from commit_schemes.contract import CommitScheme
from gdn.typing import GateParams, Raw, Window


class Footprint(NamedTuple):
  """Bytes. `carry` per slot between steps; `flight` per batch row on top of it until commit."""

  carry: int
  flight: int


class LayerShape(NamedTuple):
  """One recurrent layer on one device: heads after tensor parallelism has divided them."""

  key_heads: int
  value_heads: int
  key_dim: int = 128
  value_dim: int = 128
  channels: int = 1

  def shard(self, degree: int) -> "LayerShape":
    """The share of one of `degree` tensor-parallel ranks."""
    if degree < 1 or self.key_heads % degree or self.value_heads % degree:
      raise ValueError(
        f"tensor-parallel degree {degree} must divide {self.key_heads} key heads "
        f"and {self.value_heads} value heads"
      )
    return self._replace(key_heads=self.key_heads // degree, value_heads=self.value_heads // degree)


def nbytes(tree: Any) -> int:
  """Bytes of every array in a tree, concrete or abstract."""
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def abstract_window(
  shape: LayerShape, B: int, T: int, dtype: Any = jnp.bfloat16
) -> tuple[Window, GateParams]:
  """Abstract inputs of `verify`."""
  Hk, H, K, V, E = shape
  x = lambda *s: jax.ShapeDtypeStruct(s, dtype)
  f32 = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
  i32 = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)
  raw = Raw(x(B, T, Hk, K), x(B, T, Hk, K), x(B, T, H, V), x(B, T, H, E), x(B, T, H))
  return Window(raw, i32(B, T), i32(B), i32(B)), GateParams(f32(H), f32(H, E), f32())


def footprint(scheme: CommitScheme, shape: LayerShape, window: int, dtype: Any = jnp.bfloat16):
  """Footprint of one layer: a pool of one slot, one batch row, a window of `window` nodes."""

  def grown(N: int) -> tuple[int, int]:
    S = jax.ShapeDtypeStruct((N, shape.value_heads, shape.value_dim, shape.key_dim), jnp.float32)
    carry = jax.eval_shape(scheme.init, S)
    _, flight = jax.eval_shape(scheme.verify, carry, *abstract_window(shape, N, window, dtype))
    return nbytes(carry), nbytes(flight)

  (c1, f1), (c2, f2) = grown(1), grown(2)
  return Footprint(c2 - c1, (f2 - f1) - (c2 - c1))
