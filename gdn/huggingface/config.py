"""config.json as a `Config`, or one error with everything in it that this model cannot be.

Fields and defaults are those of transformers 5.24.0 (configuration_qwen3_next.py,
configuration_qwen3_5.py, configuration_qwen3_5_moe.py).
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

from gdn.config import Config, misfit
from gdn.norms import NORM_EPS


class Family(NamedTuple):
  """nested  the text model's fields are in `text_config`
  packed  projections are packed by key head
  mixed   the file says which layers have experts, and how their shares are normalised
  sparse  there are experts: all layers have them, unless `mixed`
  """

  nested: bool
  packed: bool
  mixed: bool = False
  sparse: bool = False


ARCHITECTURES: Mapping[str, Family] = MappingProxyType(
  {
    "Qwen3NextForCausalLM": Family(nested=False, packed=True, mixed=True),
    "Qwen3_5ForCausalLM": Family(nested=False, packed=False),
    "Qwen3_5MoeForCausalLM": Family(nested=False, packed=False, sparse=True),
    "Qwen3_5ForConditionalGeneration": Family(nested=True, packed=False),
    "Qwen3_5MoeForConditionalGeneration": Family(nested=True, packed=False, sparse=True),
  }
)
FIELDS: Mapping[str, str] = MappingProxyType(
  {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "conv_taps": "linear_conv_kernel_dim",
    "query_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "window": "max_position_embeddings",
  }
)
SPARSE: Mapping[str, str] = MappingProxyType(
  {
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_inner": "moe_intermediate_size",
    "shared_inner": "shared_expert_intermediate_size",
  }
)
# What the model is built with: a checkpoint that says otherwise is another model. Fields that this
# file does not name change no arithmetic, or nothing is known of them.
FIXED: Mapping[str, Any] = MappingProxyType(
  {
    "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": NORM_EPS,
    "final_logit_softcapping": None,
  }
)  # fmt: skip
FIXED_HERE = {
  **FIXED, "use_sliding_window": False, "attn_output_gate": True, "mamba_ssm_dtype": "float32",
}  # fmt: skip
# What only a file of a mixed family may say otherwise: the others' code does not look at it.
UNMIXED: Mapping[str, Any] = MappingProxyType(
  {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
)


class Source(NamedTuple):
  """The model that a folder holds, and how its names are packed."""

  config: Config
  family: Family


def there(path: Path, kind: Callable[[Path], bool] = Path.is_file) -> bool:
  """ValueError: nobody may look, or nothing can have that name."""
  try:
    return kind(path)
  except OSError as error:
    raise ValueError(f"{path}: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
  """FileNotFoundError or ValueError, with the path."""
  if not there(path):
    raise FileNotFoundError(f"{path.parent} has no {path.name}")
  try:
    data = json.loads(path.read_text(encoding="utf-8"))
  except OSError as error:
    raise ValueError(f"{path} cannot be read: {error.strerror}") from error
  except (ValueError, RecursionError) as error:
    raise ValueError(f"{path} is not JSON: {error}") from error
  if not isinstance(data, dict):
    raise ValueError(f"{path} holds a {type(data).__name__}, allowed: an object")
  return data


def quantised(*data: Mapping[str, Any]) -> str | None:
  """What says that the weights are quantised, and how."""
  for name in ("quantization_config", "compression_config"):
    for found in (d[name] for d in data if d.get(name)):
      method = found.get("quant_method", "unknown") if isinstance(found, dict) else found
      return f"the weights are quantised (quant_method = {method!r}), allowed: bfloat16 or float32"
  return None


def whole(x: Any) -> TypeGuard[int]:
  return isinstance(x, int) and not isinstance(x, bool)


def number(x: Any) -> TypeGuard[float]:
  """One that a float32 holds."""
  return (isinstance(x, float) or whole(x)) and abs(x) < 1e30


def disagreements(
  text: Mapping[str, Any], needed: Iterable[str], fixed: Mapping[str, Any]
) -> list[str]:
  """A line for every field that is missing or no size, and that is not what it must be."""
  lines = [f"{name} is missing" for name in needed if name not in text]
  lines += [line for name in needed if name in text for line in misfit(name, text[name])]
  return lines + [
    f"{name} = {text[name]!r}, allowed: {value!r}"
    for name, value in fixed.items()
    if text.get(name, value) != value
  ]


def layer_pattern(text: Mapping[str, Any], wrong: list[str]) -> int:
  """Every how many layers one is attention."""
  layers = text.get("num_hidden_layers", 0)
  kinds = text.get("layer_types")
  if kinds is None:
    return text.get("full_attention_interval", 4)
  if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
    wrong.append(f"layer_types = {kinds!r}, allowed: a list of names")
    return 1
  attention = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
  every = attention[0] + 1 if attention else layers + 1
  made = lambda i: "linear_attention" if (i + 1) % every else "full_attention"
  if len(kinds) != layers or kinds != [made(i) for i in range(layers)]:
    wrong.append(
      f"layer_types = {kinds}, allowed: num_hidden_layers = {layers} of linear_attention, "
      "each n-th full_attention"
    )
  return every


def rotary(
  text: Mapping[str, Any], wrong: list[str], *, whole_head: bool = False
) -> dict[str, Any]:
  """Rotated dims and base, which older files keep beside `rope_scaling` and newer ones together.

  whole_head  the architecture rotates all of it, whatever the file says
  """
  ropes = {name: text[name] for name in ("rope_parameters", "rope_scaling") if text.get(name)}
  either = dict(text)
  for name, rope in ropes.items():
    if not isinstance(rope, dict):
      wrong.append(f"{name} = {rope!r}, allowed: an object")
      continue
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" or rope.get("factor") not in (None, 1.0):
      factor = f" by {rope['factor']!r}" if "factor" in rope else ""
      wrong.append(f"{name}: rope_type = {kind!r}{factor}, allowed: 'default', without a factor")
    elif rope != next(iter(ropes.values())):
      wrong.append(f"{name} = {rope}, allowed: as rope_parameters or none")
    either |= rope
  theta, dims = either.get("rope_theta"), either.get("head_dim")
  part = either.get("partial_rotary_factor", 1.0 if whole_head else 0.25)
  if "rope_theta" not in either:
    wrong.append("rope_theta is missing")
  elif not (number(theta) and theta > 1):
    wrong.append(f"rope_theta = {theta!r}, allowed: more than 1")
  if whole_head and part != 1:
    wrong.append(f"partial_rotary_factor = {part!r}, allowed: 1.0")
    part = 1.0
  rotated = int(part * dims) if number(part) and 0 < part <= 1 and whole(dims) else 0
  if whole(dims) and (rotated < 2 or rotated % 2):
    wrong.append(
      f"partial_rotary_factor = {part!r}, allowed: more than 0, at most 1, an even part of "
      f"head_dim = {dims}"
    )
  return {"rope_theta": float(theta) if number(theta) else None, "rotary": rotated}


def experts(
  text: Mapping[str, Any], layers: int, family: Family, wrong: list[str]
) -> dict[str, Any]:
  """Fields of the MLPs; a layer is dense where the file says so, or all are."""
  if family.sparse or text.get("num_experts"):
    wrong += disagreements(text, SPARSE.values(), {} if family.mixed else UNMIXED)
  named = text.get("mlp_only_layers") or []
  if not isinstance(named, list) or not all(whole(i) and 0 <= i < layers for i in named):
    wrong.append(f"mlp_only_layers = {named!r}, allowed: a list of layers, 0 to {layers - 1}")
  if wrong:
    return {}
  sparse = {ours: text.get(theirs, 0) for ours, theirs in SPARSE.items()}
  step, dense = text.get("decoder_sparse_step", 1), set(text.get("mlp_only_layers") or ())
  dense |= {i for i in range(layers) if (i + 1) % step}
  inner = text.get("intermediate_size", sparse["expert_inner"])  # no dense MLP: never used
  if not sparse["experts"] or len(dense) == layers:
    return {"inner": inner}
  normalised = text.get("norm_topk_prob", True)
  return {
    **sparse, "inner": inner, "route_normalised": normalised, "dense_layers": tuple(sorted(dense)),
  }  # fmt: skip


def read_config(folder: str | Path) -> Source:
  """What `folder`/config.json describes.

  `Config.window` is the longest context of the model; `dataclasses.replace` it by what is needed,
  for memories hold that many rows. FileNotFoundError: no config.json. ValueError: it is not JSON,
  quantised, of another architecture, or lists every field that is missing or not supported. Fields
  that this model has no use for are not read.
  """
  path = Path(folder) / "config.json"
  data = read_json(path)
  named = data.get("architectures")
  name = named[0] if isinstance(named, list) and len(named) == 1 else None
  if not isinstance(name, str) or name not in ARCHITECTURES:
    raise ValueError(f"{path}: architectures = {named}, allowed: one of {', '.join(ARCHITECTURES)}")
  family = ARCHITECTURES[name]
  text = data.get("text_config") if family.nested else data
  if not isinstance(text, dict):
    there = "missing" if text is None else f"{type(text).__name__}, allowed: an object"
    raise ValueError(f"{path}: {name} keeps its language model in text_config, which is {there}")
  if line := quantised(data, text):
    raise ValueError(f"{path}: {line}")
  rest = ("decoder_sparse_step", "full_attention_interval", "intermediate_size")
  wrong = disagreements(text, (*FIELDS.values(), *(x for x in rest if x in text)), FIXED_HERE)
  try:
    fields = {ours: text[theirs] for ours, theirs in FIELDS.items() if theirs in text}
    fields |= rotary(text, wrong)
    fields["attention_every"] = layer_pattern(text, wrong)
    fields["tied"] = data.get("tie_word_embeddings", False)  # a nested one is not looked at
    if not wrong:
      fields |= experts(text, fields["layers"], family, wrong)
    if not wrong:
      return Source(Config(**fields), family)
  except (ArithmeticError, AttributeError, TypeError, ValueError) as error:  # of values' types
    wrong.append(str(error))
  raise ValueError("\n  ".join([f"{path} does not describe a model that can be loaded:", *wrong]))
