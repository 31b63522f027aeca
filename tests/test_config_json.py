"""A config.json is this model's, or one error says everything in it that is not."""

import json
from pathlib import Path

import pytest

from gdn.huggingface import load, read_config
from tests import folders

folder = folders.folder  # a fixture


def edit(folder: Path, **changes) -> None:
  path = folder / "config.json"
  config = json.loads(path.read_text()) | changes
  path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize(
  "changes, says",
  [
    ({"architectures": ["LlamaForCausalLM"]}, r"LlamaForCausalLM.*allowed: one of Qwen3NextFor"),
    ({"architectures": None}, "architectures = None, allowed"),
    ({"architectures": ["Qwen3_5ForConditionalGeneration"]}, "text_config, which is missing"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantised .quant_method = 'fp8'"),
    ({"layer_types": ["full_attention", "linear_attention", "linear_attention"]}, "layer_types"),
    ({"linear_num_value_heads": 3}, "value_heads = 3, allowed: a multiple of key_heads = 2"),
    ({"num_hidden_layers": "3"}, "does not describe a model"),
    ({"rope_parameters": "default"}, "rope_parameters = 'default', allowed: an object"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0, allowed: an integer of at least 1"),
    ({"architectures": "Qwen3_5ForCausalLM"}, "architectures = Qwen3_5ForCausalLM, allowed: one"),
    ({"architectures": [["Qwen3_5ForCausalLM"]]}, "architectures = .*, allowed: one of"),
    ({"compression_config": {"quant_method": "int4"}}, "quantised .quant_method = 'int4'"),
    ({"hidden_size": 32.0}, "hidden_size = 32.0, allowed: an integer of at least 1"),
    ({"num_hidden_layers": True}, "num_hidden_layers = True, allowed: an integer of at least 1"),
    ({"use_sliding_window": True}, "use_sliding_window = True, allowed: False"),
    ({"layer_types": ["linear_attention", "sliding_attention", "linear_attention"]}, "'sliding_"),
    ({"attn_output_gate": False}, "attn_output_gate = False, allowed: True"),
    ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16', allowed: 'float32'"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0, allowed: None"),
    ({"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
    ({"num_experts": None}, "num_experts is missing"),
    ({"norm_topk_prob": False}, "norm_topk_prob = False, allowed: True"),
    ({"mlp_only_layers": [1]}, r"mlp_only_layers = \[1\], allowed: \[\]"),
    ({"mlp_only_layers": 5}, "mlp_only_layers = 5, allowed: a list of layers, 0 to 2"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2, allowed: 1"),
    ({"layer_types": 5}, "layer_types = 5, allowed: a list of names"),
    ({"layer_types": ["linear_attention", [1], 2]}, "layer_types = .*, allowed: a list of names"),
  ],
)
def test_a_config_of_another_model_is_refused(folder, changes, says):
  edit(folder, **changes)
  with pytest.raises(ValueError, match=says) as error:
    load(folder)
  assert str(folder / "config.json") in str(error.value)


def test_everything_unsupported_in_a_config_is_in_one_error(folder):
  edit(
    folder, hidden_act="gelu", attention_bias=True, rms_norm_eps=1e-5, head_dim=None,
    rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
  )  # fmt: skip
  with pytest.raises(ValueError) as error:
    load(folder)
  for says in (
    "hidden_act = 'gelu', allowed: 'silu'",
    "attention_bias = True, allowed: False",
    "rms_norm_eps = 1e-05, allowed: 1e-06",
    "head_dim is missing",
    "rope_parameters: rope_type = 'yarn' by 4.0, allowed: 'default', without a factor",
  ):
    assert says in str(error.value)


ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
  "changes, says",
  [
    *(
      ({"rope_parameters": ROPE | {"partial_rotary_factor": x}}, f"rotary_factor = {x!r}, allowed")
      for x in (0.0, -0.5, 2.0, 0.19, "0.5", float("nan"))
    ),
    *(
      ({"rope_parameters": ROPE | {"rope_theta": x}}, f"rope_theta = {x!r}, allowed: more than 1")
      for x in (-1, 1.0, "1e4", None, float("nan"), float("inf"), 10**400)
    ),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: rope_type = 'linear' by"),
    (
      {"rope_parameters": ROPE | {"factor": 4.0}},
      "rope_type = 'default' by 4.0, allowed: 'default'",
    ),
    (
      {"rope_scaling": ROPE | {"rope_theta": 5e5}},
      "rope_scaling = .*, allowed: as rope_parameters",
    ),
  ],
)
def test_a_rotation_that_this_model_does_not_make_is_refused(folder, changes, says):
  edit(folder, **changes)
  with pytest.raises(ValueError, match=says):
    load(folder)


def test_sections_of_a_rotation_make_no_difference_to_text_and_unknown_fields_none(folder):
  """With one position a token, every section rotates alike; what is unknown is not read."""
  want = read_config(folder).config
  sections = {"mrope_interleaved": True, "mrope_section": [1, 1, 2]}
  edit(folder, rope_parameters=ROPE | sections, rope_scaling=ROPE | sections, of_tomorrow=3)
  assert read_config(folder).config == want


def test_older_files_keep_the_rotary_base_at_the_top(folder):
  want = read_config(folder).config
  edit(folder, rope_parameters=None, rope_theta=10_000, partial_rotary_factor=0.5)
  assert read_config(folder).config == want
  edit(folder, layer_types=None, full_attention_interval=2)
  assert read_config(folder).config == want


@pytest.mark.parametrize("top", [None, False, True])
@pytest.mark.parametrize("inside", [None, False, True])
def test_the_top_of_a_nested_config_says_whether_the_head_is_tied(folder, top, inside):
  """As in transformers, whose class of text and images never asks its text model."""
  path = folder / "config.json"
  text = json.loads(path.read_text()) | {"tie_word_embeddings": inside}
  nested = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
  drop = lambda x: {k: v for k, v in x.items() if v is not None}
  nested |= {"text_config": drop(text), "tie_word_embeddings": top}
  path.write_text(json.dumps(drop(nested)))
  assert read_config(folder).config.tied == bool(top)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_config_that_is_no_object_is_named(folder, text):
  (folder / "config.json").write_text(text)
  with pytest.raises(ValueError, match=r"config\.json (is not JSON|holds a list)"):
    load(folder)


def test_a_config_nested_beyond_all_measure_is_no_json(folder):
  (folder / "config.json").write_text("[" * 100_000)
  with pytest.raises(ValueError, match="is not JSON"):
    load(folder)
