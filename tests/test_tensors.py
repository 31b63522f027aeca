"""Every tensor of a folder becomes the parameter it is, or one error names all that do not."""

import json
import re
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gdn.checkpoint import names
from gdn.config import LARGEST
from gdn.huggingface import load, shards
from gdn.huggingface.config import FIELDS, SPARSE
from gdn.hybrid import FLOAT32
from tests import folders, parity
from tests.folders import SINGLE, equal
from tests.goldens import cases

folder = folders.folder  # a fixture


def rewrite(folder: Path, change) -> None:
  tensors = load_file(folder / SINGLE)
  save_file({k: np.ascontiguousarray(x) for k, x in change(tensors).items()}, folder / SINGLE)


def stacked(tensors: dict, layers: int, experts: int) -> dict:
  """The same with a layer's experts in one tensor, gate and up side by side."""
  for i in range(layers):
    prefix = f"model.layers.{i}.mlp.experts."
    take = lambda name, prefix=prefix: np.stack(
      [tensors.pop(f"{prefix}{e}.{name}_proj.weight") for e in range(experts)]
    )
    tensors[prefix + "gate_up_proj"] = np.concatenate([take("gate"), take("up")], axis=1)
    tensors[prefix + "down_proj"] = take("down")
  return tensors


@pytest.mark.parametrize("mapped", [1, 3 * 32 * 32 * 4, shards.MAPPED])
def test_stacked_experts_are_those_stored_one_by_one(folder, mapped, monkeypatch):
  """The published Qwen3.5 layout against the one that transformers 5 writes, of which an expert,
  some experts or all are in memory at a time."""
  monkeypatch.setattr(shards, "MAPPED", mapped)
  one_by_one, config = load(folder)
  rewrite(folder, lambda x: stacked(x, config.layers, config.experts))
  equal(load(folder)[0], one_by_one)


def test_the_published_layout_of_a_mixture_with_vision_is_the_flat_one(folder):
  """Fields in text_config, names under language_model, stacked experts, and beside the trunk what
  is left out, of another dtype."""
  flat, config = load(folder)
  path = folder / "config.json"
  text = json.loads(path.read_text())
  text |= {"architectures": None, "model_type": "qwen3_5_moe_text"}
  nested = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
  path.write_text(
    json.dumps(nested | {"tie_word_embeddings": False, "vision_config": {"depth": 1}})
  )
  beside = (
    "mtp.fc.weight",
    "mtp.layers.0.mlp.experts.gate_up_proj",
    "model.visual.pos_embed.weight",
  )

  def publish(tensors):
    tensors = stacked(tensors, config.layers, config.experts)
    tensors = {re.sub(r"^model\.", "model.language_model.", k): x for k, x in tensors.items()}
    return tensors | {name: np.ones((2, 2), jnp.bfloat16) for name in beside}

  rewrite(folder, publish)
  got = load(folder)
  assert got[1] == config
  equal(got[0], flat)


def test_vision_and_multi_token_prediction_are_left_out_by_rule(tmp_path):
  golden = parity.read("qwen3_5_vision")
  assert any(name.startswith("model.visual.") for name in golden.about["shapes"])
  folder = parity.write(golden, tmp_path / "model")
  plain, config = load(folder)
  assert config.vocab == cases.SIZES["vocab_size"]
  rewrite(folder, lambda x: {**x, "mtp.fc.weight": np.zeros((2, 2), np.float32)})
  equal(load(folder)[0], plain)


def test_what_is_left_out_may_be_of_any_dtype(folder):
  plain, _ = load(folder)
  rewrite(folder, lambda x: {**x, "mtp.x": np.zeros(2, bool), "model.visual.y": np.ones(3, "i2")})
  equal(load(folder)[0], plain)
  rewrite(folder, lambda x: {**x, "other": np.zeros(2, bool)})
  with pytest.raises(ValueError, match="other: dtype BOOL is none of"):
    load(folder)


@pytest.mark.parametrize("prefix", ["mtp.layers.", "model.visual.blocks."])
def test_what_is_left_out_does_not_say_the_dtype(folder, prefix):
  plain, _ = load(folder)
  count = len(load_file(folder / SINGLE))
  beside = {f"{prefix}{i}.weight": np.zeros((2, 2), jnp.bfloat16) for i in range(2 * count)}
  rewrite(folder, lambda x: x | beside)
  equal(load(folder)[0], plain)
  half = lambda name, x: x if name.startswith(prefix) else x.astype(np.float16)
  rewrite(folder, lambda x: {name: half(name, y) for name, y in x.items()})
  with pytest.raises(ValueError) as error:
    load(folder)
  first = f"  lm_head.weight and {count - 1} others: dtype float16, wanted bfloat16 or float32"
  assert str(error.value).splitlines()[1:] == [first]


@pytest.mark.parametrize("stored", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("asked", [None, jnp.float32, jnp.bfloat16])
def test_matrices_have_the_dtype_asked_for_and_gates_stay_float32(tmp_path, stored, asked):
  golden = parity.read("qwen3_5_r1")
  params, _ = load(parity.write(golden, tmp_path / "model", stored), dtype=asked)
  exact, _ = load(parity.write(golden, tmp_path / "exact"))
  for path, x in names(params).items():
    float32 = path.split(".")[-1] in FLOAT32
    assert x.dtype == (jnp.float32 if float32 else asked or stored), path
    np.testing.assert_array_equal(x.astype(jnp.float32), names(exact)[path], err_msg=path)


def test_norms_and_gates_may_be_stored_in_float32_beside_bfloat16_matrices(tmp_path):
  golden = parity.read("qwen3_5_r1")
  folder = parity.write(golden, tmp_path / "model", jnp.bfloat16)
  mixed = lambda tensors: {
    k: x.astype(np.float32) if k.endswith(("A_log", "linear_attn.norm.weight")) else x
    for k, x in tensors.items()
  }
  plain, _ = load(folder)
  rewrite(folder, mixed)
  equal(load(folder)[0], plain)


def test_every_disagreement_is_in_one_error(folder, monkeypatch):
  def spoil(x):
    layer = "model.layers.0."
    del (
      x[layer + "linear_attn.in_proj_qkv.weight"],
      x["model.layers.2.mlp.experts.4.up_proj.weight"],
    )
    x["model.language_model.norm.weight"] = x["model.norm.weight"]
    x[layer + "linear_attn.conv1d.bias"] = np.zeros(96, np.float32)
    x["model.layers.7.input_layernorm.weight"] = x["model.norm.weight"]
    x["model.layers.1.mlp.experts.9.up_proj.weight"] = np.zeros((16, 32), np.float32)
    x["lm_head.weight"] = x["lm_head.weight"].astype(np.float16)
    x[layer + "linear_attn.in_proj_z.weight"] = np.zeros((31, 32), np.float32)
    x[layer + "linear_attn.out_proj.weight"] = np.zeros(4, np.float32)
    x["model.layers.2.mlp.experts.down_proj"] = np.zeros((6, 32, 16), np.float32)
    return x

  rewrite(folder, spoil)
  monkeypatch.setattr(shards, "tensors", lambda stored: pytest.fail("data was read"))
  with pytest.raises(ValueError) as error:
    load(folder)
  lines = str(error.value).splitlines()
  assert str(folder) in lines[0]
  expected = (
    "model.layers.0.linear_attn.in_proj_qkv.weight: missing, wanted for layers.0.mixer.qkv",
    "model.layers.2.mlp.experts.4.up_proj.weight: missing, wanted for layers.2.mlp.up[:,4]",
    "layers.2.mlp.down: is written as a whole and by entries",
    "norm.weight: norm is written a second time, first by model.",
    "model.layers.0.linear_attn.conv1d.bias: matches 0 rules, allowed: 1",
    "model.layers.7.input_layernorm.weight: left over, the model has no layers.7.norm",
    "model.layers.1.mlp.experts.9.up_proj.weight: left over, the model has no layers.1.mlp.up[:,9]",
    "lm_head.weight: dtype float16, wanted float32",
    "linear_attn.in_proj_z.weight: shape (31, 32) gives layers.0.mixer.z (32, 31), wanted",
    "linear_attn.out_proj.weight: shape (4,) gives layers.0.mixer.out (4,), wanted",
  )
  for text in expected:
    assert sum(text in line for line in lines) == 1, f"{text!r} in {error.value}"
  assert len(lines) == 1 + len(expected)


def test_what_is_wrong_with_every_tensor_is_one_line(folder):
  """A dtype that is none of a model's; a kind of layer that the file has under another name."""
  count = len(load_file(folder / SINGLE))
  rewrite(folder, lambda x: {name: y.astype(np.float16) for name, y in x.items()})
  with pytest.raises(ValueError) as error:
    load(folder)
  _, *lines = str(error.value).splitlines()
  first = f"  lm_head.weight and {count - 1} others: dtype float16, wanted bfloat16 or float32"
  assert lines == [first]

  renamed = lambda name: name.replace("self_attn.o_proj", "self_attn.dense").replace("experts", "e")
  rewrite(folder, lambda x: {renamed(name): y.astype(np.float32) for name, y in x.items()})
  with pytest.raises(ValueError) as error:
    load(folder)
  _, *lines = str(error.value).splitlines()
  experts = "model.layers.0.mlp.experts."
  up = f"{experts}*.up_proj.weight or {experts}gate_up_proj"
  assert f"  {up} and 2 like it: missing, wanted for layers.0.mlp.up" in lines
  gone = "model.layers.1.self_attn.o_proj.weight: missing, wanted for layers.1.mixer.out"
  assert f"  {gone}" in lines
  stray = "model.layers.0.mlp.e.0.down_proj.weight and 17 like it: matches 0 rules, allowed: 1"
  assert f"  {stray}" in lines
  assert len(lines) == 8  # missing gate, up and down; e's gate, up and down; o_proj, dense


def test_a_missing_tensor_is_named_as_its_neighbours_are(tmp_path):
  """Also by what is optional in a name, and once where it is wanted for two parameters."""
  vision = parity.write(parity.read("qwen3_5_vision"), tmp_path / "vision")
  name = "model.language_model.layers.2.input_layernorm.weight"
  rewrite(vision, lambda x: {k: y for k, y in x.items() if k != name})
  with pytest.raises(ValueError, match=f"disagree:\n  {name}: missing, wanted for layers.2.norm$"):
    load(vision)
  packed = parity.write(parity.read("next_r2_experts"), tmp_path / "packed")
  name = "model.layers.2.linear_attn.in_proj_ba.weight"
  rewrite(packed, lambda x: {k: y for k, y in x.items() if k != name})
  both = "wanted for layers.2.mixer.a and layers.2.mixer.b"
  with pytest.raises(ValueError, match=f"disagree:\n  {name}: missing, {both}$"):
    load(packed)


def test_every_missing_tensor_has_the_one_name_that_it_had(folder):
  whole = load_file(folder / SINGLE)
  for name in (x for x in whole if ".layers." in x and ".experts." not in x):
    save_file({k: y for k, y in whole.items() if k != name}, folder / SINGLE)
    with pytest.raises(ValueError, match="missing") as error:
      load(folder)
    said = re.escape(name)
    assert re.search(rf"disagree:\n  {said}: missing, wanted for [\w.]+$", str(error.value)), name


def test_where_a_whole_mixer_is_missing_its_norm_has_the_mixers_name(folder):
  rewrite(folder, lambda x: {k: y for k, y in x.items() if ".0.linear_attn." not in k})
  with pytest.raises(ValueError) as error:
    load(folder)
  says = "model.layers.0.linear_attn.norm.weight: missing, wanted for layers.0.mixer.norm"
  assert f"  {says}" in str(error.value).splitlines()


@pytest.mark.parametrize("entry", ["9" * 5000, "9" * 18, "06", "٥"])
def test_an_entry_that_no_stack_has_hides_nothing_else(folder, entry):
  prefix = "model.layers.0.mlp.experts."

  def spoil(x):
    x[f"{prefix}{entry}.up_proj.weight"] = x.pop(f"{prefix}5.up_proj.weight")
    return x | {"other": np.zeros(2, np.float32)}

  rewrite(folder, spoil)
  with pytest.raises(ValueError) as error:
    load(folder)
  says = f"left over, the model's layers.0.mlp.up has no entry {entry}"
  assert sorted(str(error.value).splitlines()[1:]) == [
    *sorted(
      [
        f"  {prefix}5.up_proj.weight: missing, wanted for layers.0.mlp.up[:,5]",
        f"  {prefix}{entry}.up_proj.weight: {says}",
      ]
    ),
    "  other: matches 0 rules, allowed: 1",
  ]


def test_sizes_that_are_wrong_by_far_take_no_memory_and_no_time(tmp_path):
  """Every size of a config, in a packed and in a split layout; nothing of that size is made."""
  fields = (*FIELDS.values(), *SPARSE.values())
  unused = ("max_position_embeddings", "intermediate_size")
  for golden in ("next_r2_experts", "qwen3_5_experts"):
    folder = parity.write(parity.read(golden), tmp_path / golden)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for field in fields:
      for size in (10**8, LARGEST + 1):
        others = {"linear_num_key_heads": "linear_num_value_heads"}
        others |= {"num_key_value_heads": "num_attention_heads", "num_hidden_layers": "layer_types"}
        also = (
          {others[field]: None if field == "num_hidden_layers" else size} if field in others else {}
        )
        path.write_text(json.dumps(config | {field: size} | also))
        if field in unused and size <= LARGEST:
          continue
        tracemalloc.start()
        with pytest.raises(ValueError, match=r"disagree|does not describe"):
          load(folder)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24, f"{field} = {size}"
        tracemalloc.stop()


def test_entries_and_layers_that_are_missing_are_counted(folder):
  path = folder / "config.json"
  config = json.loads(path.read_text())
  path.write_text(json.dumps(config | {"num_experts": 10**8}))
  with pytest.raises(ValueError) as error:
    load(folder)
  gone, first = 3 * (10**8 - 6) - 1, "model.layers.0.mlp.experts.6.up_proj.weight"
  says = f"  {first} and {gone} like it: missing, wanted for layers.0.mlp.up[:,6]"
  assert says in str(error.value).splitlines()
  path.write_text(json.dumps(config | {"num_hidden_layers": 100, "layer_types": None}))
  with pytest.raises(ValueError, match=r"layernorm\.weight and 96 like it: missing, wanted for"):
    load(folder)
  path.write_text(json.dumps(config | {"num_hidden_layers": 3000, "layer_types": None}))
  with pytest.raises(ValueError, match="num_hidden_layers = 3000, allowed: at most 1024"):
    load(folder)


def test_a_tied_model_has_no_head_of_its_own(tmp_path):
  folder = parity.write(parity.read("qwen3_5_r2_tied"), tmp_path / "model")
  rewrite(folder, lambda x: {**x, "lm_head.weight": x["model.embed_tokens.weight"]})
  with pytest.raises(ValueError, match=r"lm_head\.weight: left over, the model has no head"):
    load(folder)


def test_packed_rows_must_be_all_rows_of_all_key_heads(tmp_path):
  folder = parity.write(parity.read("next_r2_experts"), tmp_path / "model")
  name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
  rewrite(folder, lambda x: {**x, name: np.concatenate([x[name], x[name][:1]])})
  with pytest.raises(
    ValueError, match=re.escape(f"{name}: shape (129, 32) does not give layers.0")
  ):
    load(folder)


def test_numbers_that_are_none_are_counted_by_parameter(folder):
  def spoil(x):
    x["model.norm.weight"][:2] = np.nan, -np.inf
    x["model.layers.2.mlp.experts.5.up_proj.weight"][0, 0] = np.inf
    return x

  rewrite(folder, spoil)
  with pytest.raises(ValueError) as error:
    load(folder)
  assert str(error.value).splitlines() == [
    f"{folder} cannot be used:",
    "  layers.2.mlp.up: 1 of 3072 numbers are NaN or infinite",
    "  norm: 2 of 32 numbers are NaN or infinite",
  ]


def test_one_integer_matrix_is_the_only_disagreement(folder):
  name = "model.embed_tokens.weight"
  rewrite(folder, lambda x: {**x, name: x[name].astype(np.int8)})
  with pytest.raises(ValueError) as error:
    load(folder)
  assert str(error.value).splitlines()[1:] == [f"  {name}: dtype int8, wanted float32"]


def test_only_two_dtypes_can_be_asked_for(folder):
  for dtype, name in ((jnp.float16, "float16"), (float, "float64"), ("bf16", "bf16"), (3, "3")):
    with pytest.raises(ValueError, match=f"dtype = {name}, allowed: bfloat16, float32"):
      load(folder, dtype=dtype)
  equal(load(folder, dtype="float32")[0], load(folder)[0])


def test_shardings_and_put_exclude_each_other(folder):
  put = lambda path, x: jnp.asarray(x)
  equal(load(folder, put=put)[0], load(folder)[0])
  with pytest.raises(ValueError, match="shardings and put, allowed: one of the two"):
    load(folder, shardings=5, put=put)
