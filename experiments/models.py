"""Sizes of the models that published numbers are about, of the bundled one, and of any checkpoint;
and the whole of one model, for random weights.

Sources: the models' config.json (linear_num_key_heads, linear_num_value_heads, linear_key_head_dim,
linear_conv_kernel_dim, layer_types). Layer i is full attention where i + 1 divides by 4.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp

from commit_schemes.footprint import LayerShape, ModelShape
from experiments.record import BadInput
from experiments.target import config_of
from gdn import checkpoint
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

# Parameters in all and those that one token uses, in 10^9: the models' names say both.
WEIGHTS: Mapping[str, tuple[float, float]] = MappingProxyType(
  {
    "Qwen3-Next-80B-A3B": (80, 3),
    "Qwen3.5-27B": (27, 27),
    "Qwen3.5-35B-A3B": (35, 3),
    "Qwen3.5-122B-A10B": (122, 10),
    "Qwen3.5-397B-A17B": (397, 17),
  }
)


class Around(NamedTuple):
  """What surrounds the recurrence: `attention` layers, MLPs with `inner` for one token."""

  width: int
  inner: int
  query_heads: int
  kv_heads: int
  head_dim: int
  vocab: int
  mlp: str
  attention: int


AROUND: Mapping[str, Around] = MappingProxyType(
  {
    "Qwen3.5-27B": Around(5120, 17408, 24, 4, 256, 248_320, "dense", 16),
    "Qwen3.5-35B-A3B": Around(
      2048, 9 * 512, 16, 2, 256, 248_320,
      "dense MLP of the active size: 8 of 256 experts and 1", 10,
    ),
    "bundled": Around(256, 512, 4, 2, 64, 256, "dense", 2),
  }
)  # fmt: skip


class Sizes(NamedTuple):
  """What is known of a model without its weights; `weights` and `around` as in WEIGHTS, AROUND."""

  name: str
  recurrent: ModelShape
  weights: tuple[float, float] | None
  around: Around | None


def parameters(config: Config) -> tuple[float, float]:
  """In all, and without the experts that a token does not go to, in 10^9."""
  shapes = checkpoint.names(checkpoint.shapes(config, jnp.bfloat16))
  sizes = {name: x.size for name, x in shapes.items()}
  stacks = [
    sizes[f"layers.{i}.mlp.{name}"]
    for i in range(config.layers) if config.is_sparse(i) for name in ("gate", "up", "down")
  ]  # fmt: skip
  total = sum(sizes.values())
  idle = sum(stacks) * (1 - config.experts_per_token / max(config.experts, 1))
  return total / 1e9, (total - idle) / 1e9


def around(config: Config) -> Around:
  """A mixture of experts as a dense MLP of the size that is active."""
  c, inner, mlp = config, config.inner, "dense"
  if c.experts:
    inner = c.experts_per_token * c.expert_inner + c.shared_inner
    mlp = f"dense MLP of the active size: {c.experts_per_token} of {c.experts} experts and 1"
  heads = (c.query_heads, c.kv_heads, c.head_dim)
  return Around(c.width, inner, *heads, c.vocab, mlp, c.layers // c.attention_every)


def named(model: str, known: Iterable[str]) -> bool:
  """`model` is one of the known names, or a path."""
  try:
    return model in known or Path(model).exists()
  except OSError:  # there is something; what is wrong with it is said when it is opened
    return True


@cache
def sizes(model: str) -> Sizes:
  """Of a name in MODELS, or of the checkpoint at a path. BadInput: it cannot be read."""
  if model in MODELS:
    return Sizes(model, MODELS[model], WEIGHTS.get(model), AROUND.get(model))
  if not named(model, ()):
    raise BadInput(f"model {model}, allowed: {', '.join(MODELS)}, or the path of a checkpoint")
  config = config_of(Path(model))
  return Sizes(Path(model).name, shape_of(config), parameters(config), around(config))


def layer_of(model: str, degree: int) -> LayerShape:
  """A recurrent layer as one of `degree` devices holds it. BadInput: it does not divide."""
  try:
    return sizes(model).recurrent.layer.shard(degree)
  except ValueError as error:
    raise BadInput(f"model {model}: {error}") from error


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
