"""Shards and index agree, or are refused before data is read; the host holds a shard at a time."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gdn.checkpoint import names
from gdn.huggingface import load, shards
from tests import folders
from tests.folders import SINGLE, equal
from tests.goldens import cases

folder = folders.folder  # a fixture
INDEX = "model.safetensors.index.json"


def shard(folder: Path, count: int) -> list[Path]:
  """The same checkpoint in `count` files and an index."""
  tensors = sorted(load_file(folder / SINGLE).items())
  index = {}
  for i in range(count):
    name = f"model-{i + 1:05}-of-{count:05}.safetensors"
    save_file(dict(tensors[i::count]), folder / name)
    index |= {key: name for key, _ in tensors[i::count]}
  (folder / SINGLE).unlink()
  (folder / INDEX).write_text(json.dumps({"weight_map": index}))
  return [folder / name for name in sorted(set(index.values()))]


def test_shards_are_the_single_file(folder):
  whole = load(folder)
  shard(folder, 3)
  sharded = load(folder)
  assert sharded[1] == whole[1]
  equal(sharded[0], whole[0])


def test_a_folder_without_config_or_weights_is_named(tmp_path, folder):
  with pytest.raises(FileNotFoundError, match="nowhere is no folder"):
    load(tmp_path / "nowhere")
  (folder / SINGLE).unlink()
  with pytest.raises(FileNotFoundError, match=f"neither {SINGLE} nor {INDEX}"):
    load(folder)
  (folder / "config.json").unlink()
  with pytest.raises(FileNotFoundError, match=r"model has no config\.json"):
    load(folder)


def test_a_folder_that_cannot_be_looked_at_is_one_error(tmp_path, folder, monkeypatch):
  with pytest.raises(ValueError, match="File name too long"):
    load("x" * 300)
  with pytest.raises(ValueError, match="File name too long"):
    load(tmp_path / ("x" * 300))
  monkeypatch.setattr(Path, "read_text", lambda path, **_: path.with_name("x" * 300).open())
  with pytest.raises(ValueError, match=r"config\.json cannot be read: File name too long"):
    load(folder)


def test_one_file_beside_an_index_is_ambiguous(folder):
  whole = (folder / SINGLE).read_bytes()
  shard(folder, 2)
  (folder / SINGLE).write_bytes(whole)
  with pytest.raises(ValueError, match=f"has {SINGLE} and {INDEX}, allowed: one of the two"):
    load(folder)


def test_a_shard_that_the_index_names_must_be_there_and_whole(folder, monkeypatch):
  _, second, third = shard(folder, 3)
  monkeypatch.setattr(shards, "tensors", lambda stored: pytest.fail("data was read"))
  saved = second.read_bytes()
  for left in (saved[:-1], saved[:20], b""):
    second.write_bytes(left)
    with pytest.raises(ValueError, match=f"{second.name} is truncated or no safetensors file"):
      load(folder)
  second.unlink()
  third.unlink()
  with pytest.raises(FileNotFoundError, match=f"names {second.name}, {third.name}, not in the"):
    load(folder)


def test_a_shard_that_nobody_may_read_is_not_called_missing(folder, monkeypatch):
  lost, *_ = shard(folder, 2)
  opened = Path.open

  def closed(path, *args, **kwargs):
    if path == lost:
      raise PermissionError(13, "Permission denied", str(path))
    return opened(path, *args, **kwargs)

  monkeypatch.setattr(Path, "open", closed)
  with pytest.raises(ValueError, match=f"{lost.name}: Permission denied"):
    load(folder)


def test_index_and_shards_must_agree(folder):
  first, second, _ = shard(folder, 3)
  moved, x = next(iter(load_file(first).items()))
  save_file({**load_file(second), moved: x}, second)
  with pytest.raises(
    ValueError, match=f"{moved}: is in {second.name}, the index says {first.name}"
  ):
    load(folder)
  save_file({k: x for k, x in load_file(second).items() if k != moved}, second)
  index = json.loads((folder / INDEX).read_text())
  index["weight_map"]["ghost"] = first.name
  (folder / INDEX).write_text(json.dumps(index))
  with pytest.raises(ValueError, match=f"ghost: the index says {first.name}, which does not have"):
    load(folder)


@pytest.mark.parametrize(
  "name", ["../other.safetensors", "/other.safetensors", "sub/x", ".", 3, [], "x" * 300, "a\0b"]
)
def test_an_index_names_files_of_its_folder_and_no_others(folder, name):
  first, *_ = shard(folder, 2)
  (folder.parent / "other.safetensors").write_bytes(first.read_bytes())
  index = json.loads((folder / INDEX).read_text())
  index["weight_map"] = dict.fromkeys(index["weight_map"], name)
  (folder / INDEX).write_text(json.dumps(index))
  with pytest.raises((ValueError, FileNotFoundError), match=re.escape(str(folder))) as error:
    load(folder)
  assert str(name) in str(error.value)


def made_up(folder: Path, shards: int, experts: int = 0) -> None:
  """A Qwen3.5 checkpoint, most of it in matrices of 8 MB, or in experts of 1 MB, one by one."""
  d, n, m, vocab, layers = 512, 4096, 512, 8192, 2 if experts else 5
  gdn = {
    "linear_attn.in_proj_qkv.weight": (1024, d), "linear_attn.in_proj_z.weight": (512, d),
    "linear_attn.in_proj_b.weight": (4, d), "linear_attn.in_proj_a.weight": (4, d),
    "linear_attn.conv1d.weight": (1024, 1, 4), "linear_attn.A_log": (4,),
    "linear_attn.dt_bias": (4,), "linear_attn.norm.weight": (128,),
    "linear_attn.out_proj.weight": (d, 512),
  }  # fmt: skip
  attention = {
    "self_attn.q_proj.weight": (1024, d), "self_attn.k_proj.weight": (256, d),
    "self_attn.v_proj.weight": (256, d), "self_attn.o_proj.weight": (d, 512),
    "self_attn.q_norm.weight": (128,), "self_attn.k_norm.weight": (128,),
  }  # fmt: skip
  mlp = lambda name, n: {
    f"{name}.gate_proj.weight": (n, d), f"{name}.up_proj.weight": (n, d),
    f"{name}.down_proj.weight": (d, n),
  }  # fmt: skip
  both = {"input_layernorm.weight": (d,), "post_attention_layernorm.weight": (d,)}
  both |= mlp("mlp.shared_expert" if experts else "mlp", m if experts else n)
  if experts:
    both |= {"mlp.gate.weight": (experts, d), "mlp.shared_expert_gate.weight": (1, d)}
  for i in range(experts):
    both |= mlp(f"mlp.experts.{i}", m)
  sizes = {"model.embed_tokens.weight": (vocab, d), "model.norm.weight": (d,)}
  for i in range(layers):
    of_layer = {**(attention if i % 2 else gdn), **both}
    sizes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
  fields = {
    **cases.SIZES, **cases.TIED, "hidden_size": d, "intermediate_size": n, "vocab_size": vocab,
    "num_hidden_layers": layers, "layer_types": None, "full_attention_interval": 2,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 128,
  }  # fmt: skip
  if experts:
    fields |= {**cases.EXPERTS, "num_experts": experts, "moe_intermediate_size": m}
    fields |= {"shared_expert_intermediate_size": m}
  architecture = f"Qwen3_5{'Moe' if experts else ''}ForCausalLM"
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **fields}))
  save_file({k: np.ones(shape, np.float32) for k, shape in sizes.items()}, folder / SINGLE)
  shard(folder, shards)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
@pytest.mark.parametrize("shards, experts", [(4, 0), (12, 40)])
def test_the_host_holds_the_model_and_one_shard_and_a_mesh_gets_its_parts(
  tmp_path, folder, shards, experts
):
  """Also a stack of a layer's experts: more than a shard, and never two."""
  made_up(tmp_path / "large", shards, experts)
  largest = max(path.stat().st_size for path in (tmp_path / "large").glob("*.safetensors"))
  stack = experts * 512 * 512 * 4
  assert stack == 0 or stack > largest
  alone = [sys.executable, "-m", "tests.load_alone", str(folder), str(tmp_path / "large")]
  # What is freed goes back to the system at once, or the heap's gaps are counted.
  env = {**os.environ, "JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": str(1 << 17)}
  env["XLA_FLAGS"] = env.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
  out = subprocess.run(
    alone, capture_output=True, text=True, env=env, cwd=Path(__file__).parents[1]
  )
  assert out.returncode == 0, out.stderr
  found = json.loads(out.stdout)
  assert found["model_bytes"] > 3 * largest
  assert found["model_bytes"] <= found["peak_bytes"] <= found["model_bytes"] + largest + stack
  equal(
    load(folder)[0], load(folder, shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))[0]
  )
  with np.load(folder / "placed.npz") as placed:
    for path, x in names(load(folder)[0]).items():
      np.testing.assert_array_equal(x, placed[path], err_msg=path)
