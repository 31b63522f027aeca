"""Recurrent layers of the models that published numbers are about, and of the bundled one; what
surrounds these layers in some of them; and the whole of one model, for random weights.

Sources: the models' config.json (linear_num_key_heads, linear_num_value_heads, linear_key_head_dim,
linear_conv_kernel_dim, layer_types). Layer i is full attention where i + 1 divides by 4.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from commit_schemes.footprint import LayerShape, ModelShape
from gdn.config import Config


def hybrid(layers: int, key_heads: int, value_heads: int) -> ModelShape:
  """Three of four layers are recurrent; K = V = 128 and four taps in the whole family."""
  return ModelShape(layers - layers // 4, LayerShape(key_heads, value_heads))


def shape_of(config: Config) -> ModelShape:
  """The recurrent layers of a model."""
  recurrent = sum(not config.is_attention(i) for i in range(config.layers))
  c = config
  layer = LayerShape(
    c.key_heads, c.value_heads, c.key_dim, c.value_dim, c.decay_channels, c.conv_taps
  )
  return ModelShape(recurrent, layer)


MODELS: Mapping[str, ModelShape] = MappingProxyType(
  {
    "Qwen3-Next-80B-A3B": hybrid(48, 16, 32),
    "Qwen3.5-27B": hybrid(64, 16, 48),
    "Qwen3.5-35B-A3B": hybrid(40, 16, 32),
    "Qwen3.5-122B-A10B": hybrid(48, 16, 64),
    "Qwen3.5-397B-A17B": hybrid(60, 16, 64),
    "bundled": shape_of(Config()),
  }
)


class Around(NamedTuple):
  """What surrounds the recurrence. Sources: the models' config.json; `inner` is active."""

  width: int
  inner: int
  query_heads: int
  kv_heads: int
  head_dim: int
  vocab: int
  mlp: str


AROUND: Mapping[str, Around] = MappingProxyType(
  {
    "Qwen3.5-27B": Around(5120, 17408, 24, 4, 256, 248_320, "dense"),
    "Qwen3.5-35B-A3B": Around(
      2048, 9 * 512, 16, 2, 256, 248_320, "dense MLP of the active size: 8 of 256 experts and 1"
    ),
    "bundled": Around(256, 512, 4, 2, 64, 256, "dense"),
  }
)

# Its language model, 4.2 G parameters. Width, layers, inner, query and key-value heads and the
# vocabulary are those of the published specification (apxml.com/models/qwen35-4b); the rest is its
# family's (transformers 5.24.0, Qwen3_5TextConfig). Tied: a head of its own would make 4.8 G.
QWEN3_5_4B = Config(
  vocab=248_320,
  width=2560,
  inner=9216,
  layers=32,
  key_heads=16,
  value_heads=32,
  query_heads=16,
  kv_heads=4,
  head_dim=256,
  rotary=64,
  rope_theta=1e7,
  window=2048,
)
