"""Recurrent layers of the models that published numbers are about, and of the bundled one.

Sources: the models' config.json (linear_num_key_heads, linear_num_value_heads, linear_key_head_dim,
linear_conv_kernel_dim, layer_types). Layer i is full attention where i + 1 divides by 4.
"""

from collections.abc import Mapping
from types import MappingProxyType

from commit_schemes.footprint import LayerShape, ModelShape
from gdn.config import Config


def hybrid(layers: int, key_heads: int, value_heads: int) -> ModelShape:
  """Three of four layers are recurrent; K = V = 128 and four taps in the whole family."""
  return ModelShape(layers - layers // 4, LayerShape(key_heads, value_heads))


def bundled(config: Config) -> ModelShape:
  """The small model of `experiments.train`."""
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
    "bundled": bundled(Config()),
  }
)
