"""Tiny models of each family, and their weights from names alone: a golden needs to store neither.

Every weight is a multiple of a power of two with eight bits, so it is the same number in bfloat16
and in float32, and both models of a case differ in arithmetic only. NumPy guarantees the raw
stream of a bit generator, and nothing else is drawn from.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

PROMPT, DECODED = 40, 64
SIZES: Mapping[str, Any] = {
  "vocab_size": 40, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3,
  "layer_types": ["linear_attention", "full_attention", "linear_attention"],
  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
  "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
  "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "max_position_embeddings": 128,
  "tie_word_embeddings": False,
  "rope_parameters": {
    "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
  },
}  # fmt: skip
EXPERTS: Mapping[str, Any] = {
  "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
  "shared_expert_intermediate_size": 24, "intermediate_size": 16,
}  # fmt: skip
FOUR = {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 3, "num_key_value_heads": 4}
ONE = {
  "linear_num_value_heads": 2, "linear_value_head_dim": 24,
  "rope_parameters": {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
  },
}  # fmt: skip
TIED = {"tie_word_embeddings": True}

# Architecture, and what differs from SIZES; r is value heads to a key head. Two cases of one shape
# share what is compiled.
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
  "next_r2_experts": ("Qwen3NextForCausalLM", EXPERTS),
  "next_r1_tied_some_experts": (
    "Qwen3NextForCausalLM",
    {**EXPERTS, **ONE, **TIED, "mlp_only_layers": [1], "norm_topk_prob": False},
  ),
  "next_r4_three_taps": ("Qwen3NextForCausalLM", {**FOUR, "num_experts": 0}),
  "qwen3_5_r1": ("Qwen3_5ForCausalLM", ONE),
  "qwen3_5_r2_tied": ("Qwen3_5ForCausalLM", TIED),
  "qwen3_5_r4_three_taps": ("Qwen3_5ForCausalLM", FOUR),
  "qwen3_5_experts": ("Qwen3_5MoeForCausalLM", EXPERTS),
  "qwen3_5_vision": ("Qwen3_5ForConditionalGeneration", TIED),
}

# A block drafter and its target. Of so few tokens a drafter that was never trained guesses some.
DFLASH_TARGET: Mapping[str, Any] = {
  **SIZES, "vocab_size": 4, "num_hidden_layers": 4,
  "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
DFLASH: Mapping[str, Any] = {
  "vocab_size": 4, "hidden_size": 32, "intermediate_size": 20, "num_hidden_layers": 2,
  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
  "max_position_embeddings": 128, "num_target_layers": 4, "block_size": 6,
  "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 2]},
  "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
# What differs from DFLASH: windows shorter than a block, that end in it or before it.
DFLASH_CASES: Mapping[str, Mapping[str, Any]] = {
  "dflash": {},
  "dflash_sliding": {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5,
    "use_sliding_window": True,
  },
  "dflash_sliding_both_ways": {
    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3,
    "use_sliding_window": True, "is_causal": False,
  },
}  # fmt: skip
DFLASH_PROMPT = 12
# What the target has read when each block is drafted, and the token that the block begins with.
CONTEXTS, ANCHORS = (7, 12, 13), (3, 0, 2)


def raw(name: str, size: int, seed: int) -> np.ndarray:
  """Whole numbers from -128 to 127 that depend on the name and the seed alone."""
  bits = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(size)
  return (bits >> 56).astype(np.int64) - 128


def weight(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
  """float32; of the size that a trained model's would be."""
  n = raw(name, math.prod(shape), seed).astype(np.float32).reshape(shape)
  if name.endswith(("A_log", "dt_bias")):
    return n / 64
  plain = len(shape) == 1 and not name.startswith("model.")  # a drafter's: no prefix, no centring
  if plain or name.endswith("linear_attn.norm.weight"):
    return 1 + np.trunc(n / 4) / 128
  if len(shape) == 1:
    return n / 512
  if name.endswith("embed_tokens.weight"):
    return n / 64
  scale = 2.0 ** round(math.log2((3 / shape[-1]) ** 0.5))
  return n / 128 * np.float32(4 * scale if name.endswith("mlp.gate.weight") else scale)


def ids(name: str, seed: int) -> np.ndarray:
  """int64 [1, PROMPT + DECODED]."""
  return (raw(name, PROMPT + DECODED, seed) % SIZES["vocab_size"])[None]


def residual(layer: int, seed: int) -> np.ndarray:
  """float32 [1, CONTEXTS[-1], width]: what a target might have after so many layers."""
  shape = (1, CONTEXTS[-1], DFLASH["hidden_size"])
  return raw(f"residual.{layer}", math.prod(shape), seed).astype(np.float32).reshape(shape) / 32
