"""Weights and model agree exactly, or one error says everything that does not."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import save_file

from experiments.score import BUNDLED
from gdn import checkpoint, hybrid
from gdn.bijection import Rule, transposed
from gdn.checkpoint import assign
from tests.strategies import TINY


@pytest.fixture
def params():
  return hybrid.init(TINY, jax.random.key(0), jnp.bfloat16)


def rewrite(path, tensors, metadata=None):
  metadata = metadata or {"config": json.dumps(TINY.as_dict())}
  save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_what_is_saved_is_loaded_bit_for_bit(tmp_path, params, dtype):
  params = hybrid.cast(params, dtype)
  checkpoint.save(tmp_path / "m.safetensors", params, TINY)
  loaded, config = checkpoint.load(tmp_path / "m.safetensors")
  assert config == TINY
  assert jax.tree.structure(loaded) == jax.tree.structure(params)
  for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(loaded), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)
  assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_every_disagreement_is_in_one_error(tmp_path, params):
  tensors = dict(checkpoint.names(params))
  del tensors["layers.0.mixer.qkv"]
  tensors["mtp.fc"] = jnp.zeros((2, 2))
  tensors["norm"] = jnp.zeros((3,))
  tensors["embed"] = tensors["embed"].astype(jnp.float16)
  path = tmp_path / "m.safetensors"
  rewrite(path, tensors)
  with pytest.raises(ValueError) as error:
    checkpoint.load(path)
  for line in (
    str(path),
    "layers.0.mixer.qkv: missing",
    "mtp.fc: left over, the model has no mtp.fc",
    "norm: shape (3,) gives norm (3,), wanted norm (16,)",
    "embed: dtype float16, wanted bfloat16",
  ):
    assert line in str(error.value)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_is_named(tmp_path, params, keep):
  path = tmp_path / "m.safetensors"
  checkpoint.save(path, params, TINY)
  path.write_bytes(path.read_bytes()[:keep])
  with pytest.raises(ValueError, match=re.escape(f"{path} is truncated or no safetensors file")):
    checkpoint.load(path)


@pytest.mark.parametrize(
  "metadata, says",
  [
    ({"format": "pt"}, "metadata has ['format'], wanted config"),
    ({"config": '{"width": 16, "depth": 3}'}, "depth"),
    ({"config": '{"rotary": 3}'}, "rotary = 3, allowed"),
    ({"config": '{"layers": 1000000000}'}, "layers = 1000000000, allowed: at most 1024"),
    ({"config": '{"width": 2147483648}'}, "width = 2147483648, allowed: at most 2147483647"),
    ({"config": "{"}, "its config is not that of a model"),
  ],
)
def test_metadata_must_describe_a_model(tmp_path, params, metadata, says):
  path = tmp_path / "m.safetensors"
  rewrite(path, checkpoint.names(params), metadata)
  with pytest.raises(ValueError, match=re.escape(says)) as error:
    checkpoint.load(path)
  assert str(path) in str(error.value)


def test_a_missing_file_is_no_value_error(tmp_path):
  with pytest.raises(FileNotFoundError):
    checkpoint.load(tmp_path / "none.safetensors")


def test_rules_translate_names_and_layouts_and_must_be_a_bijection():
  wanted = {f"layers.{i}.out": jax.ShapeDtypeStruct((2, 3), jnp.float32) for i in range(2)}
  rules = (Rule(r"model\.(\d+)\.out\.weight", (r"layers.\1.out",), transposed),)
  theirs = {f"model.{i}.out.weight": np.full((3, 2), i, np.float32) for i in range(2)}
  found = assign(theirs, wanted, rules)
  assert {name: x.shape for name, x in found.items()} == dict.fromkeys(wanted, (2, 3))
  with pytest.raises(ValueError, match=r"model\.1\.out\.bias: matches 0 rules"):
    assign({**theirs, "model.1.out.bias": np.zeros(3)}, wanted, rules)
  with pytest.raises(ValueError, match=r"model\.0\.out\.weight: matches 2 rules"):
    assign(theirs, wanted, (*rules, Rule(r".*0\.out.*", ("layers.0.out",), transposed)))
  same = (Rule(r"model\.\d+\.out\.weight", ("layers.0.out",), transposed),)
  with pytest.raises(ValueError, match=r"(?s)layers\.1\.out: missing.*written a second time"):
    assign(theirs, wanted, same)


def test_bundled_weights_are_small_and_complete():
  assert BUNDLED.stat().st_size <= 15_000_000
  params, config = checkpoint.load(BUNDLED)
  assert (config.key_dim, config.value_dim) == (128, 128)
  assert params.embed.dtype == jnp.bfloat16
  assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in jax.tree.leaves(params))
