"""What a tensor of a Qwen3-Next or Qwen3.5 checkpoint is called, and how it lies in the file.

Names and layouts are those of transformers 5.24.0 (modeling_qwen3_next.py, modeling_qwen3_5.py,
modeling_qwen3_5_moe.py, conversion_mapping.py). A linear map is stored [out, in]; ours are
[in, out]. With r = H / Hk value heads to a key head:

    Qwen3-Next  in_proj_qkvz   by key head  [q (K) | k (K) | v (r V) | z (r V)]
                in_proj_ba     by key head  [b (r) | a (r)]
    Qwen3.5     in_proj_qkv    [q of all heads | k | v]         in_proj_z, in_proj_b, in_proj_a

Experts are stored one by one, or stacked with gate and up side by side. Neither family has a bias
anywhere, the convolution included: a file that has one holds another model.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gdn.bijection import Layout, Rule, transposed
from gdn.config import Config


def ignored(name: str) -> bool:
  """Multi-token prediction and vision are models of their own beside the trunk."""
  return name.startswith(("mtp.", "model.visual."))


PREFIX = r"model\.(?:language_model\.)?"
LAYER = PREFIX + r"layers\.(\d+)\."


def by_rows(total: int, deal: Callable[[np.ndarray], tuple[np.ndarray, ...]]) -> Layout:
  """The output rows of a packed linear map, dealt out: each order makes one of our matrices."""

  def layout(x: Any) -> tuple[Any, ...]:
    if x.shape[0] != total:  # before there is an array of that many
      raise ValueError(f"{x.shape[0]} rows, wanted {total}")
    return tuple(x[order].T for order in deal(np.arange(total)))

  return layout


@functools.cache
def qkvz(config: Config) -> Layout:
  """q, k and v of all heads side by side, and z, from blocks of key heads."""
  c, r = config, config.value_heads // config.key_heads
  *ends, block = itertools.accumulate((c.key_dim, c.key_dim, r * c.value_dim, r * c.value_dim))

  def deal(rows: np.ndarray) -> tuple[np.ndarray, ...]:
    parts = np.split(rows.reshape(c.key_heads, -1), ends, axis=1)
    q, k, v, z = (part.ravel() for part in parts)
    return np.concatenate([q, k, v]), z

  return by_rows(c.key_heads * block, deal)


@functools.cache
def ba(config: Config) -> Layout:
  """b and a of all heads from blocks of key heads."""

  def deal(rows: np.ndarray) -> tuple[np.ndarray, ...]:
    blocks = rows.reshape(config.key_heads, 2, -1)
    return blocks[:, 0].ravel(), blocks[:, 1].ravel()

  return by_rows(2 * config.value_heads, deal)


def taps(x: Any) -> tuple[Any, ...]:
  """Depthwise weights [C, 1, W] as [W, C]."""
  C, _, W = x.shape
  return (x.reshape(C, W).T,)


def column(x: Any) -> tuple[Any, ...]:
  return (x[:, None],)


def gate_and_up(x: Any) -> tuple[Any, ...]:
  """An expert [2 n, width] as two [width, n]."""
  half = x.shape[0] // 2
  return x[:half].T, x[half:].T


def linear(theirs: str, ours: str) -> Rule:
  return Rule(LAYER + theirs + r"\.weight", (r"layers.\1." + ours,), transposed)


def vector(theirs: str, ours: str, prefix: str = LAYER) -> Rule:
  return Rule(prefix + theirs, (ours if prefix == PREFIX else r"layers.\1." + ours,))


def expert(theirs: str, entry: str) -> Rule:
  pattern = LAYER + rf"mlp\.experts\.(\d+)\.{theirs}\.weight"
  return Rule(pattern, (r"layers.\1.mlp." + entry,), transposed)


def stack(theirs: str, ours: tuple[str, ...], one: Layout, axes: tuple[int, ...]) -> Rule:
  """Experts along the first axis, each laid out by `one`; ours lie along an axis of each path."""
  paths = tuple(rf"layers.\1.mlp.{name}" for name in ours)
  return Rule(LAYER + rf"mlp\.experts\.{theirs}", paths, jax.vmap(one, out_axes=axes), one, axes)


TRUNK = (
  vector(r"embed_tokens\.weight", "embed", PREFIX),
  vector(r"norm\.weight", "norm", PREFIX),
  Rule(r"lm_head\.weight", ("head",)),
  vector(r"input_layernorm\.weight", "norm"),
  vector(r"post_attention_layernorm\.weight", "mlp_norm"),
)
ATTENTION = (
  linear(r"self_attn\.q_proj", "mixer.q"),
  linear(r"self_attn\.k_proj", "mixer.k"),
  linear(r"self_attn\.v_proj", "mixer.v"),
  linear(r"self_attn\.o_proj", "mixer.out"),
  vector(r"self_attn\.q_norm\.weight", "mixer.q_norm"),
  vector(r"self_attn\.k_norm\.weight", "mixer.k_norm"),
)
GDN = (
  Rule(LAYER + r"linear_attn\.conv1d\.weight", (r"layers.\1.mixer.taps",), taps),
  vector(r"linear_attn\.A_log", "mixer.A_log"),
  Rule(LAYER + r"linear_attn\.dt_bias", (r"layers.\1.mixer.dt_bias",), column),
  vector(r"linear_attn\.norm\.weight", "mixer.norm"),
  linear(r"linear_attn\.out_proj", "mixer.out"),
)
SPLIT = tuple(
  linear(rf"linear_attn\.in_proj_{name}", f"mixer.{name}") for name in ("qkv", "z", "b", "a")
)
DENSE = tuple(linear(rf"mlp\.{name}_proj", f"mlp.{name}") for name in ("gate", "up", "down"))
SPARSE = (
  linear(r"mlp\.gate", "mlp.router"),
  expert("gate_proj", r"gate[:,\2]"),
  expert("up_proj", r"up[:,\2]"),
  expert("down_proj", r"down[\2]"),
  stack("gate_up_proj", ("gate", "up"), gate_and_up, (1, 1)),
  stack("down_proj", ("down",), transposed, (0,)),
  *(linear(rf"mlp\.shared_expert\.{n}_proj", f"mlp.shared.{n}") for n in ("gate", "up", "down")),
  linear(r"mlp\.shared_expert_gate", "mlp.shared_gate"),
)


def packed(config: Config) -> tuple[Rule, ...]:
  """The two projections of Qwen3-Next."""
  mixer = lambda *names: tuple(rf"layers.\1.mixer.{name}" for name in names)
  return (
    Rule(LAYER + r"linear_attn\.in_proj_qkvz\.weight", mixer("qkv", "z"), qkvz(config)),
    Rule(LAYER + r"linear_attn\.in_proj_ba\.weight", mixer("b", "a"), ba(config)),
  )


def rules(config: Config, by_key_head: bool) -> tuple[Rule, ...]:
  """The table of one family; `by_key_head` is Qwen3-Next's packing."""
  projections = packed(config) if by_key_head else SPLIT
  return (*TRUNK, *ATTENTION, *GDN, *projections, *DENSE, *SPARSE)
