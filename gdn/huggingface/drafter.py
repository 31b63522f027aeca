"""DFlash drafters in their published layout: a folder of config.json and shards, no embedding.

Names, fields and arithmetic are those of the authors' code (github.com/z-lab/dflash, its
dflash/model.py at 1012959, and dflash 0.1.0, with which tests compare): Qwen3 layers with plain
norms and full rotation, keys and values of the fused features in front of the block's own. The mask
token's row of the target's embedding is the masked input, and the target's head is the head. Of the
target's last layer that code reads what the final norm makes of it, here features are the residual
stream: a drafter that reads it is refused. DFlash2DraftModel is another architecture.

A layer of `sliding_attention` (dflash 0.1.0, `_attention_mask`) sees what is less than
`sliding_window` places from each query's own, in the context and in the block, and no later tokens
of the block. With `is_causal` false it sees these as well, as far as earlier ones; with `is_causal`
true no layer sees them. Without `use_sliding_window` there is no window (transformers 5.15.0,
configuration_qwen3.py). All of a head is rotated, `partial_rotary_factor` or not (there,
modeling_qwen3.py): so a file that has another than 1 is refused, it means another drafter.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from gdn.bijection import Rule, transposed
from gdn.checkpoint import drafter_shapes
from gdn.config import Config, misfit
from gdn.drafter import DrafterConfig, DrafterParams, Heads
from gdn.huggingface import shards
from gdn.huggingface.config import FIXED, disagreements, quantised, read_json, rotary, whole
from gdn.huggingface.load import assembled, by_shardings, checked, stored_dtype
from gdn.hybrid import Params

ARCHITECTURE = "DFlashDraftModel"
FIELDS = (
  "hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size", "num_attention_heads",
  "num_key_value_heads", "head_dim", "max_position_embeddings",
)  # fmt: skip
# What the authors' code looks for in dflash_config; all else it reads beside it.
OWN = (
  "block_size", "final_logit_softcapping", "input_embedding_scale", "mask_token_id",
  "output_multiplier", "target_layer_ids",
)  # fmt: skip
# What later drafters have and this one does not.
FIXED_HERE: Mapping[str, Any] = MappingProxyType(
  {
    **FIXED,
    "causal": False, "input_embedding_scale": 1.0, "output_multiplier": 1.0,
    "final_logit_softcapping": None, "attention_mode": "gqa",
  }
)  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"


def zero_centred(x: Any) -> tuple[Any, ...]:
  """A plain norm's weight as what is added to one; exact for weights from 2^-16."""
  return (x.astype(np.float32) - 1.0,)


LAYER = r"layers\.(\d+)\."
LINEAR = {"self_attn.q": "q", "self_attn.k": "k", "self_attn.v": "v", "self_attn.o": "out"}
LINEAR |= {f"mlp.{name}": f"mlp.{name}" for name in ("gate", "up", "down")}
NORMS = {
  "input_layernorm": "norm", "post_attention_layernorm": "mlp_norm",
  "self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm",
}  # fmt: skip
RULES = (
  Rule(r"fc\.weight", ("context.fuse",), transposed),
  Rule(r"hidden_norm\.weight", ("context.norm",), zero_centred),
  Rule(r"norm\.weight", ("norm",), zero_centred),
  *(
    Rule(LAYER + theirs.replace(".", r"\.") + r"_proj\.weight", (rf"layers.\1.{ours}",), transposed)
    for theirs, ours in LINEAR.items()
  ),
  *(
    Rule(LAYER + theirs.replace(".", r"\.") + r"\.weight", (rf"layers.\1.{ours}",), zero_centred)
    for theirs, ours in NORMS.items()
  ),
)


def sight(merged: Mapping[str, Any], wrong: list[str]) -> dict[str, Any]:
  """Which layers see less than all there is, as fields of `DrafterConfig`."""
  layers, kinds = merged.get("num_hidden_layers"), merged.get("layer_types")
  if misfit("num_hidden_layers", layers):
    return {}  # which is said already
  assert isinstance(layers, int)
  if kinds is None:
    kinds = [FULL] * layers
  elif not (
    isinstance(kinds, list) and len(kinds) == layers and all(k in (FULL, SLIDING) for k in kinds)
  ):
    wrong.append(f"layer_types = {kinds}, allowed: {FULL} or {SLIDING} in each of {layers} layers")
    return {}
  slide = tuple(i for i, kind in enumerate(kinds) if kind == SLIDING)
  window, told = merged.get("sliding_window"), merged.get("is_causal")
  if slide and not (whole(window) and window >= 1):
    wrong.append(f"sliding_window = {window!r}, allowed: an integer of at least 1")
  if told not in (None, False, True):
    wrong.append(f"is_causal = {told!r}, allowed: None, False, True")
  if (slides := merged.get("use_sliding_window", False)) != bool(slide):
    wrong.append(
      f"use_sliding_window = {slides!r}, allowed: {bool(slide)}, for layer_types "
      f"{'has' if slide else 'has no'} {SLIDING}"
    )
  causal = slide if told is None else tuple(range(len(kinds))) if told else ()
  if causal and "causal" in merged:
    wrong.append(f"causal = {merged['causal']!r}, allowed: none, for layers {causal} are causal")
  return {"sliding": window if slide else None, "sliding_layers": slide, "causal_layers": causal}


def read_drafter_config(folder: str | Path, target: Config) -> tuple[DrafterConfig, int]:
  """What `folder`/config.json describes, and the mask token.

  `window` is the longest context; `dataclasses.replace` it by what is needed. FileNotFoundError: no
  config.json. ValueError: it is no such drafter, or lists everything that does not fit.
  """
  path = Path(folder) / "config.json"
  data = read_json(path)
  named = data.get("architectures")
  if named != [ARCHITECTURE]:
    raise ValueError(f"{path}: architectures = {named}, allowed: ['{ARCHITECTURE}']")
  if line := quantised(data):
    raise ValueError(f"{path}: {line}")
  own = data.get("dflash_config") or {}
  if not isinstance(own, dict):
    raise ValueError(f"{path}: dflash_config = {own!r}, allowed: an object")
  merged = data | own
  wrong = disagreements(merged, FIELDS, FIXED_HERE)
  if unknown := sorted(set(own) - set(OWN)):
    wrong.append(f"dflash_config has {', '.join(unknown)}, allowed: {', '.join(OWN)}")
  wrong += [
    f"{name} = {data[name]!r}, and {value!r} in dflash_config"
    for name, value in own.items()
    if name in data and data[name] != value
  ]
  seen = sight(merged, wrong)
  rope = rotary(merged, wrong, whole_head=True)
  of_target = {"hidden_size": target.width, "vocab_size": target.vocab}
  for name, value in (of_target | {"num_target_layers": target.layers}).items():
    if merged.get(name, value) != value:
      wrong.append(f"{name} = {merged[name]!r}, the target has {value!r}")
  mask: Any = merged.get("mask_token_id")
  taps: Any = merged.get("target_layer_ids")
  if not (whole(mask) and 0 <= mask < target.vocab):
    wrong.append(f"mask_token_id = {mask!r}, allowed: 0 to {target.vocab - 1}")
  if not (isinstance(taps, list) and all(map(whole, taps))):
    wrong.append(f"target_layer_ids = {taps!r}, allowed: a list of layers of the target")
  elif target.layers - 1 in taps:
    wrong.append(f"target_layer_ids = {taps}, allowed: layers before the last, {target.layers - 1}")
  if not wrong:
    try:
      config = DrafterConfig(
        target=target,
        block=merged.get("block_size", 16),
        taps=tuple(taps),
        layers=merged["num_hidden_layers"],
        inner=merged["intermediate_size"],
        window=merged["max_position_embeddings"],
        heads=Heads(
          query_heads=merged["num_attention_heads"],
          kv_heads=merged["num_key_value_heads"],
          head_dim=merged["head_dim"],
          rotary=rope["rotary"],
          rope_theta=rope["rope_theta"],
        ),
        feature_norm=False,
        **seen,
      )
      return config, mask
    except (TypeError, ValueError) as error:
      wrong.append(str(error))
  raise ValueError("\n  ".join([f"{path} does not describe a drafter that can be loaded:", *wrong]))


def load_drafter(
  folder: str | Path, target: Params, config: Config, *, dtype: Any = None, shardings: Any = None
) -> tuple[DrafterParams, DrafterConfig]:
  """A published drafter for a loaded target; arguments and errors as of `load`."""
  folder = checked(folder, dtype)
  mine, mask = read_drafter_config(folder, config)
  found = shards.contents(folder)
  dtype_ = stored_dtype(found) if dtype is None else dtype
  tree: Any = drafter_shapes(mine, dtype_)
  own = tree._replace(mask=None)
  params = assembled(folder, found, own, RULES, dtype is not None, by_shardings(own, shardings))
  return params._replace(mask=target.embed[mask].astype(dtype_)), mine
