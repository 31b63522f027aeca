"""A drafter in its published layout: as DFlash's own code computes and decodes, its formula in
float64, and what is refused."""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gdn import checkpoint, drafter, hybrid
from gdn.config import Config
from gdn.huggingface import load_drafter
from tests import parity
from tests.budget import check
from tests.goldens import cases
from tests.test_parity import FLOAT32

pytestmark = pytest.mark.usefixtures("quick_compiles")

TARGET = Config(
  vocab=40, width=32, inner=24, layers=4, attention_every=2, key_heads=1, value_heads=2, key_dim=8,
  value_dim=8, query_heads=2, kv_heads=1, head_dim=16, rotary=4, window=64, tied=False,
)  # fmt: skip
CONFIG = {
  "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 6,
  "dflash_config": {"mask_token_id": 39, "target_layer_ids": [0, 2]}, "hidden_size": 32,
  "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
  "num_key_value_heads": 2, "head_dim": 12, "num_target_layers": 4, "rope_theta": 1e6,
  "rms_norm_eps": 1e-6, "max_position_embeddings": 48, "vocab_size": 40, "hidden_act": "silu",
  "attention_bias": False,
}  # fmt: skip
B, S, D = 1, 9, 6
EPS = 2.0**-24


def stored() -> dict[str, np.ndarray]:
  d, n, q, kv = 32, 20, 48, 24
  layer = {
    "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
    "self_attn.o_proj": (d, q), "mlp.gate_proj": (n, d), "mlp.up_proj": (n, d),
    "mlp.down_proj": (d, n), "input_layernorm": (d,), "post_attention_layernorm": (d,),
    "self_attn.q_norm": (12,), "self_attn.k_norm": (12,),
  }  # fmt: skip
  shapes = {"fc": (d, 2 * d), "hidden_norm": (d,), "norm": (d,)}
  shapes |= {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
  return {f"{n}.weight": cases.weight(f"{n}.weight", s, 0) for n, s in shapes.items()}


@pytest.fixture
def folder(tmp_path) -> Path:
  (tmp_path / "config.json").write_text(json.dumps(CONFIG))
  save_file(stored(), tmp_path / "model.safetensors")
  return tmp_path


@pytest.fixture(scope="module")
def target():
  return hybrid.init(TARGET, jax.random.key(0))


# What a layer's query at place q sees of place k, by fields of config.json.
ALL = lambda q, k: True
SIGHTS = {
  "full": ({}, [ALL, ALL]),
  "causal": ({"is_causal": True}, [lambda q, k: k <= q] * 2),
  "sliding": (
    {
      "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
      "use_sliding_window": True,
    },
    [lambda q, k: q - 4 < k <= q, ALL],
  ),
  "sliding, then causal": (
    {
      "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9,
      "use_sliding_window": True, "is_causal": True,
    },
    [lambda q, k: q - 9 < k <= q, lambda q, k: k <= q],
  ),
  "sliding both ways": (
    {
      "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3,
      "use_sliding_window": True, "is_causal": False,
    },
    [ALL, lambda q, k: q - 3 < k < q + 3],
  ),
}  # fmt: skip


def formula(w, embed, head, features, anchor, at, sees):
  """Logits of the tokens after the anchor, in the dtype of the weights, for one sequence."""
  norm = lambda x, name: w[name + ".weight"] * x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)

  def rope(x, positions):
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * 1e6 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

  context = norm(features @ w["fc.weight"].T, "hidden_norm")
  x = embed[[anchor] + [39] * (D - 1)]
  positions = np.arange(at - len(context), at + D)
  for i in range(2):
    of = lambda name, i=i: f"layers.{i}.{name}"
    linear = lambda x, name, of=of: x @ w[of(name) + ".weight"].T
    y = norm(x, of("input_layernorm"))
    both = np.concatenate([context, y])
    q = norm(linear(y, "self_attn.q_proj").reshape(D, 4, 12), of("self_attn.q_norm"))
    k = norm(linear(both, "self_attn.k_proj").reshape(-1, 2, 12), of("self_attn.k_norm"))
    v = linear(both, "self_attn.v_proj").reshape(-1, 2, 12).repeat(2, axis=1)
    q, k = rope(q, positions[-D:]), rope(k, positions).repeat(2, axis=1)
    scores = np.einsum("dhk,shk->hds", q, k) / np.sqrt(12).astype(x.dtype)
    seen = [[sees[i](q, k) for k in positions] for q in positions[-D:]]
    scores = np.where(seen, scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    o = np.einsum("hds,shk->dhk", p / p.sum(-1, keepdims=True), v).reshape(D, -1)
    x = x + linear(o, "self_attn.o_proj")
    y = norm(x, of("post_attention_layernorm"))
    gate = linear(y, "mlp.gate_proj")
    x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, "mlp.up_proj"), "mlp.down_proj")
  return norm(x[1:], "norm") @ head.T


@pytest.mark.parametrize("sight", SIGHTS)
def test_a_loaded_drafter_is_its_formula(folder, target, sight):
  fields, sees = SIGHTS[sight]
  (folder / "config.json").write_text(json.dumps(CONFIG | fields))
  params, config = load_drafter(folder, target, TARGET)
  assert (config.taps, config.block, config.window) == ((0, 2), 6, 48)
  features = 3 * jax.random.normal(jax.random.key(1), (B, S, config.features))
  at = 20

  @jax.jit
  def run(params, features):
    positions = jnp.arange(at - S, at, dtype=jnp.int32)[None]
    rows = drafter.context_rows(params, config, features, positions)
    one = lambda x: jnp.full((B, 1), x, jnp.int32)
    back = (at - positions)[:, None]
    return drafter.marginals(params, config, target.embed, one(7), one(at), rows, back, target.head)

  def in_dtype(dtype):
    tensors = {name: x.astype(dtype) for name, x in stored().items()}
    embed, head, x = (np.asarray(x, dtype) for x in (target.embed, target.head, features[0]))
    return formula(tensors, embed, head, x, 7, at, sees)

  check("logits", run(params, features)[0, 0], in_dtype(np.float64), in_dtype(np.float32), eps=EPS)


@pytest.fixture(params=cases.DFLASH_CASES)
def published(tmp_path, request):
  """A golden, and its drafter and target to load from folders."""
  golden = parity.read(request.param)
  return golden, parity.drafter_pair(golden, tmp_path)


def test_hidden_states_are_those_of_dflash(published):
  golden, loaded = published
  hidden = lambda dtype: parity.drafter_hidden(*loaded(dtype), golden.about["seed"])
  exact, own = (golden.arrays[f"{dtype}.hidden"] for dtype in ("float32", "bfloat16"))
  assert parity.largest(hidden(jnp.float32), exact) <= FLOAT32
  check("bfloat16 hidden", hidden(jnp.bfloat16), exact, own, eps=2.0**-8)


def test_a_loaded_drafter_decodes_as_dflash_does(published, tmp_path):
  """Its drafts and how many are kept, of every block; then it is stored in this layout."""
  golden, loaded = published
  pair, config = loaded(jnp.float32)
  got = parity.drafted(pair, config, golden)
  for name in ("blocks", "kept"):
    np.testing.assert_array_equal(got[name], golden.arrays[name], err_msg=name)
  np.testing.assert_array_equal(got["text"], golden.arrays["text"][: len(got["text"])])
  assert set(got["kept"]) >= {1, 2, 3}
  checkpoint.save_drafter(tmp_path / "ours.safetensors", pair.drafter, config, pair.target)
  again, stored_config = checkpoint.load_drafter(tmp_path / "ours.safetensors", pair.target)
  assert stored_config == config
  jax.tree.map(np.testing.assert_array_equal, again, pair.drafter)


def test_names_and_shapes_are_those_that_dflash_writes(published):
  """A drafter of the sizes of this file; each of its tensors is needed."""
  golden, loaded = published
  shapes = {name: tuple(shape) for name, shape in golden.about["shapes"].items()}
  assert shapes == {name: x.shape for name, x in stored().items()}
  pair, _ = loaded(jnp.float32)
  own = pair.drafter._replace(mask=None)
  assert sum(map(math.prod, shapes.values())) == sum(x.size for x in jax.tree.leaves(own))


def test_fields_of_a_drafter_alone_may_stand_in_dflash_config(folder, target):
  plain = load_drafter(folder, target, TARGET)[1]
  inner = CONFIG["dflash_config"] | {"block_size": CONFIG["block_size"]}
  moved = {k: v for k, v in CONFIG.items() if k != "block_size"} | {"dflash_config": inner}
  (folder / "config.json").write_text(json.dumps(moved))
  assert load_drafter(folder, target, TARGET)[1] == plain


@pytest.mark.parametrize(
  "changes, says",
  [
    ({"architectures": ["DFlash2DraftModel"]}, r"allowed: \['DFlashDraftModel'\]"),
    ({"hidden_size": 64}, "hidden_size = 64, the target has 32"),
    ({"num_target_layers": 5}, "num_target_layers = 5, the target has 4"),
    ({"dflash_config": {"target_layer_ids": [0]}}, "mask_token_id = None, allowed: 0 to 39"),
    (
      {"dflash_config": {"target_layer_ids": "0", "mask_token_id": 1}},
      "ids = '0', allowed: a list",
    ),
    ({"dflash_config": [1]}, r"dflash_config = \[1\], allowed: an object"),
    ({"layer_types": 5}, "layer_types = 5, allowed"),
    ({"head_dim": "12"}, "head_dim = '12', allowed: an integer of at least 1"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: rope_type = 'yarn', allowed"),
    ({"dflash_config": {"target_layer_ids": [0, 4], "mask_token_id": 1}}, r"taps = \(0, 4\)"),
    (
      {"dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 1}},
      r"ids = \[1, 3\], allowed: layers before the last, 3",
    ),
    ({"layer_types": ["sliding_attention"] * 3}, "layer_types = .'sliding_attention', .*allowed"),
    ({"layer_types": ["linear_attention"] * 2}, "layer_types = .'linear_attention', .*allowed"),
    (
      {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
      "use_sliding_window = False, allowed: True, for layer_types has sliding_attention",
    ),
    (
      {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True},
      "sliding_window = None, allowed: an integer of at least 1",
    ),
    (
      SIGHTS["sliding"][0] | {"causal": False},
      r"causal = False, allowed: none, for layers \(0,\) are causal",
    ),
    ({"is_causal": "no"}, "is_causal = 'no', allowed: None, False, True"),
    *(
      (
        {"use_sliding_window": True, "sliding_window": 4, **kinds},
        "use_sliding_window = True, allowed: False, for layer_types has no sliding_attention",
      )
      for kinds in ({}, {"max_window_layers": 1}, {"layer_types": ["full_attention"] * 2})
    ),
    *(
      (changes, "partial_rotary_factor = 0.5, allowed: 1.0")
      for part in [{"partial_rotary_factor": 0.5}]
      for changes in (
        part,
        {"rope_parameters": {"rope_theta": 1e6, **part}},
        {"rope_scaling": {"rope_type": "default", **part}},
      )
    ),
    *(
      (
        {"dflash_config": CONFIG["dflash_config"] | more, "sliding_window": 4},
        f"dflash_config has {names}, allowed: block_size, .*, mask_token_id, .*target_layer_ids",
      )
      for more, names in (
        ({"use_swa": True, "swa_window_size": 4}, "swa_window_size, use_swa"),
        ({"head_dim": 12}, "head_dim"),
        ({"is_causal": False}, "is_causal"),
        ({"selector_rank": 4}, "selector_rank"),
      )
    ),
    ({"final_logit_softcapping": 20.0}, "final_logit_softcapping = 20.0, allowed: None"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    (
      {"dflash_config": CONFIG["dflash_config"] | {"block_size": 99}},
      "block_size = .*, and 99 in dflash_config",
    ),
    ({"layer_types": ["full_attention"]}, "layer_types = .*, allowed: full_.* in each of 2 layers"),
    (
      {"num_hidden_layers": 10**9, "layer_types": ["full_attention"]},
      "num_hidden_layers = 1000000000, allowed: at most 1024",
    ),
  ],
)
def test_another_drafter_is_refused(folder, target, changes, says):
  (folder / "config.json").write_text(json.dumps(CONFIG | changes))
  with pytest.raises(ValueError, match=says) as error:
    load_drafter(folder, target, TARGET)
  assert str(folder / "config.json") in str(error.value)


def test_tensors_of_a_drafter_are_a_bijection_too(folder, target):
  tensors = load_file(folder / "model.safetensors")
  del tensors["fc.weight"]
  tensors["embed_tokens.weight"] = np.zeros((40, 32), np.float32)
  save_file(tensors, folder / "model.safetensors")
  with pytest.raises(ValueError) as error:
    load_drafter(folder, target, TARGET)
  assert re.search(r"fc\.weight: missing, wanted for context\.fuse", str(error.value))
  assert re.search(r"embed_tokens\.weight: matches 0 rules", str(error.value))
