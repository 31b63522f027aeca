"""Any checkpoint behind `--model`: what it reads, what experiments do with it, what they refuse."""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from experiments import (
  corpus,
  drift,
  heldout_bpb,
  models,
  prefix,
  provenance,
  rank_time,
  speculative,
  step_time,
  streams,
)
from experiments.command_line import ELSEWHERE, configured, experiments, main
from experiments.command_line import load as load_experiment
from experiments.record import BadInput, read_rows
from experiments.score import saved_model, stream_bits
from experiments.target import as_bytes, config_of, target
from gdn import hybrid
from gdn.checkpoint import fingerprint
from gdn.huggingface import load
from gdn.ops import XLA
from gdn.streaming import empty
from gdn.typing import Window
from gdn.window import chain
from tests import parity
from tests import test_dflash as dflash
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture
def folder(tmp_path) -> Path:
  """A Qwen3.5 checkpoint whose vocabulary holds bytes: layers 0 and 2 are recurrent."""
  golden = parity.of_vocabulary(parity.read("qwen3_5_r2_tied"), 256)
  golden.about["config"]["max_position_embeddings"] = 1024
  return parity.write(golden, tmp_path / "model")


@pytest.fixture
def tokenizer(folder) -> Path:
  """The folder with a byte-level tokenizer that knows one merge."""
  tokenizers = pytest.importorskip("tokenizers")
  symbols = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocab = {symbol: i for i, symbol in enumerate([*symbols[:-1], "de"])}
  made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("d", "e")]))
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  made.save(str(folder / "tokenizer.json"))
  return folder


def test_bytes_are_tokens_where_the_vocabulary_holds_them(folder, tmp_path):
  goal = target(folder, context=100)
  ids, sizes = goal.read(b"def\xff")
  assert ids.tolist() == [100, 101, 102, 255]
  assert sizes.tolist() == [1, 1, 1, 1]
  assert goal.config.window == 100
  assert target(None, context=1 << 20).config == config_of(None)
  small = parity.write(parity.read("qwen3_5_r1"), tmp_path / "small")
  with pytest.raises(BadInput, match=r"no tokenizer\.json, and its vocabulary of 40 cannot"):
    target(small, context=8)


def test_a_tokenizer_in_the_folder_is_used(tokenizer):
  ids, sizes = target(tokenizer, context=100).read("def é".encode())
  assert len(ids) == len(sizes) == 5  # de, f, space, two bytes of one character
  assert sizes.tolist() == [2, 1, 1, 2, 0]
  assert target(tokenizer, context=100).bytes(ids) == len("def é".encode())
  text = (
    b"def \xff\xc3\xa9\xe2\x82"  # a byte that is no text, é, the first two bytes of a euro sign
  )
  assert target(tokenizer, context=100).read(text).bytes.sum() == len(text)
  (tokenizer / "tokenizer.json").write_text("{}")
  with pytest.raises(BadInput, match=r"tokenizer\.json is no tokenizer"):
    target(tokenizer, context=100)


def test_tokens_that_the_model_does_not_have_are_refused(tokenizer):
  """And what the file says of lengths is not for texts."""
  path = tokenizer / "tokenizer.json"
  made = json.loads(path.read_text())
  truncated = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
  path.write_text(json.dumps(made | {"truncation": truncated}))
  assert len(target(tokenizer, context=100).read(b"def def").ids) == 5
  made["model"]["vocab"]["de"] = 256
  path.write_text(json.dumps(made))
  with pytest.raises(BadInput, match="makes token 256, allowed: below 256, the vocabulary"):
    target(tokenizer, context=100).read(b"def")


@pytest.mark.parametrize("broken", ["link", "folder", "vocab.json merges.txt", "tokenizer.model"])
def test_a_tokenizer_that_cannot_be_read_is_not_bytes(folder, broken):
  path = folder / "tokenizer.json"
  if broken == "link":
    path.symlink_to("../../blobs/none")
  elif broken == "folder":
    path.mkdir()
  else:
    for name in broken.split():
      (folder / name).symlink_to("../../blobs/none")
  says = "has .* without tokenizer.json" if "." in broken else "tokenizer.json is no tokenizer: "
  with pytest.raises(BadInput, match=says):
    target(folder, context=8)


def test_a_text_that_the_tokenizer_cannot_read_is_one_message(folder):
  tokenizers = pytest.importorskip("tokenizers")
  words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="?"))
  words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  words.save(str(folder / "tokenizer.json"))
  goal = target(folder, context=8)
  assert goal.read(b"a a").ids.tolist() == [0, 0]
  with pytest.raises(BadInput, match=r"tokenizer\.json cannot read the text: "):
    goal.read(b"a b")


@pytest.mark.parametrize(
  "text, counts",
  [
    ("a\u0301", [1, 2]),  # composed to one character of two tokens
    ("a\u0301e", [1, 0, 3]),
    ("e\u0301 a\u0301", [1, 0, 3, 1, 2]),
    ("de", [2]),
    ("", []),
  ],
)
def test_every_byte_counts_with_some_token_where_a_normaliser_composes(tokenizer, text, counts):
  tokenizers = pytest.importorskip("tokenizers")
  made = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
  made.normalizer = tokenizers.normalizers.NFC()
  made.save(str(tokenizer / "tokenizer.json"))
  sizes = target(tokenizer, context=8).read(text.encode()).bytes
  assert sizes.sum() == len(text.encode())
  assert sizes.tolist() == counts


def test_a_path_that_nobody_may_look_at_is_one_message(folder, monkeypatch):
  def hidden(path):
    raise PermissionError(13, "Permission denied", str(path))

  monkeypatch.setattr(Path, "is_dir", hidden)
  for ask in (config_of, lambda path: target(path, context=8)):
    with pytest.raises(BadInput, match="model: Permission denied"):
      ask(folder)


def test_a_tokenizer_needs_its_package(folder, monkeypatch):
  (folder / "tokenizer.json").write_text("{}")
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  monkeypatch.delitem(sys.modules, "gdn.huggingface.tokenizer", raising=False)
  with pytest.raises(BadInput, match=r"tokenizer\.json needs the package tokenizers"):
    target(folder, context=100)


def test_a_text_longer_than_the_model_was_made_for_is_refused(folder):
  with pytest.raises(BadInput, match="1025 tokens, allowed: 1024, the longest context of"):
    target(folder, context=1025)


# `bandwidth_gate` reads the rows of another, `cycles` draws its keys; `sharding` says first that it
# needs a second device.
TAKING = [n for n in experiments() if n not in ("bandwidth_gate", "cycles")]
LOADING = [n for n in TAKING if n != "sharding"]


@pytest.mark.parametrize("experiment", TAKING)
def test_every_experiment_takes_a_model(experiment):
  assert "model" in load_experiment(experiment).Config.__dataclass_fields__


def test_an_experiment_on_rows_of_another_says_what_it_takes():
  with pytest.raises(BadInput, match="--model x, allowed: --config, --out, --rows"):
    main(["run", "bandwidth_gate", "--model", "x"])


@pytest.mark.parametrize("experiment", LOADING)
def test_a_model_that_cannot_be_loaded_is_one_message(tmp_path, experiment):
  (tmp_path / "empty").mkdir()
  other = (
    ["--drafter", str(tmp_path)] if experiment in ("accept_length", "parity", "tree_budget") else []
  )
  for path, says in (("empty", "has no config.json"), ("nowhere", "nowhere")):
    model = ["--model", str(tmp_path / path), *other]
    preset = "smoke" if "smoke" in load_experiment(experiment).CONFIGS else "full"
    with pytest.raises(BadInput, match=says):
      main(["run", experiment, "--config", preset, *model, "--out", str(tmp_path)])


@pytest.mark.parametrize("experiment", LOADING)
def test_a_model_without_recurrent_layers_is_one_message(folder, tmp_path, experiment):
  path = folder / "config.json"
  kinds = {"layer_types": ["full_attention"] * 3}
  path.write_text(json.dumps(json.loads(path.read_text()) | kinds))
  other = (
    ["--drafter", str(tmp_path)] if experiment in ("accept_length", "parity", "tree_budget") else []
  )
  preset = "smoke" if "smoke" in load_experiment(experiment).CONFIGS else "full"
  model = ["--model", str(folder), *other, "--out", str(tmp_path)]
  with pytest.raises(BadInput, match="all layers are attention, allowed: a model with recurrent"):
    main(["run", experiment, "--config", preset, *model])


def test_sizes_of_a_folder_are_those_of_its_weights(tmp_path):
  """Of six experts two are at work, which is also what a step's weights are counted by."""
  path = parity.write(parity.read("qwen3_5_experts"), tmp_path / "sparse")
  params, config = load(path)
  name, recurrent, (total, active), around = models.sizes(str(path))
  assert name == "sparse"
  assert recurrent == models.shape_of(config)
  assert total == sum(x.size for x in jax.tree.leaves(params)) / 1e9
  routed = sum(x.size for p in params.layers for x in (p.mlp.gate, p.mlp.up, p.mlp.down)) / 1e9
  assert active == pytest.approx(total - 4 / 6 * routed, rel=2.0**-50)
  assert around.inner == 2 * config.expert_inner + config.shared_inner
  assert (around.attention, around.vocab) == (1, 40)
  assert round(models.parameters(models.QWEN3_5_4B)[0], 1) == 4.2
  with pytest.raises(BadInput, match="degree 3 must divide 2 key heads"):
    models.layer_of(str(path), 3)


def test_experiments_that_only_count_know_a_folder(folder, tmp_path):
  model = ["--model", str(folder), "--out", str(tmp_path)]
  main(["run", "planner", "--config", "smoke", *model])
  rows = read_rows(tmp_path / "planner" / "rows.csv")
  assert {row["model"] for row in rows if row["part"] == "plan"} == {"model"}
  state, conv, rows = prefix.entry_bytes(prefix.Config(model=str(folder), kv_window=10))
  assert (state, rows) == (2 * 4 * 8 * 16 * 4, 2 * 10 * 2 * 16 * 2)
  assert conv == 2 * 3 * (2 * 2 * 16 + 4 * 8) * 2
  group = rank_time.group_config(str(folder), 2, 64)
  assert (group.layers, group.attention_every, group.value_heads, group.width) == (3, 3, 2, 32)


def states(params, config, ids):
  """State of every layer after the tokens, by the model's own forward pass."""
  _, memories = parity.piece(
    params, config, jnp.asarray(ids)[None], jnp.int32(0), empty(config, 1, params.embed.dtype)
  )
  return memories


def test_captured_streams_replay_to_the_states_of_the_model(folder, tmp_path):
  params, config = load(folder)
  ids = as_bytes(b"import os\nprint(os.name)\n" * 2).ids
  memories = states(params, config, ids)
  found = streams.capture(params, config, ids, layers=(2, 0), piece=25)
  assert found.layers == (2, 0)
  of = fingerprint(params)
  streams.save(tmp_path / "s.safetensors", found, ids, of)
  stored, tokens = streams.load(tmp_path / "s.safetensors", of)
  assert stored.layers == found.layers
  np.testing.assert_array_equal(tokens, ids)
  jax.tree.map(np.testing.assert_array_equal, stored, found)
  T = len(ids)
  for i in (0, 2):
    one = stored.only((i,))
    raw = jax.tree.map(lambda x: x[None], one.raw)
    window = Window(raw, chain(T)[None], jnp.full(1, T, jnp.int32), jnp.zeros(1, jnp.int32))
    _, S = jax.jit(XLA.prefill)(jnp.zeros_like(memories[i].recurrent), window, one.gates)
    error = parity.largest(np.asarray(S), np.asarray(memories[i].recurrent))
    assert error <= 16 * 2.0**-24, f"layer {i}: {error:.1e}"


@pytest.mark.parametrize(
  "ids, layers, says",
  [
    ([], (0,), "text to capture is empty"),
    ([1, 256], (0,), "tokens 1 to 256, allowed: 0 to 255"),
    ([1, 2], (1,), r"layers \(1,\), allowed: some of \(0, 2\)"),
    ([1, 2], (0, 0), r"layers \(0, 0\), allowed: some of \(0, 2\), .* once each"),
  ],
)
def test_what_cannot_be_captured_is_said(folder, ids, layers, says):
  with pytest.raises(ValueError, match=says):
    streams.capture(*load(folder), np.array(ids, np.int32), layers=layers)


def test_a_file_of_something_else_holds_no_streams(folder):
  with pytest.raises(ValueError, match="holds no streams"):
    streams.load(folder / "model.safetensors", "")


def test_streams_of_another_model_are_refused_and_another_dtype_is_the_same_model(folder, tmp_path):
  params, config = load(folder)
  names = [fingerprint(x) for x in (params, hybrid.cast(params, jnp.bfloat16), saved_model()[0])]
  assert names[0] == names[1] != names[2]
  file = tmp_path / "s.safetensors"
  ids = as_bytes(b"import os").ids
  streams.save(file, streams.capture(params, config, ids, layers=(0,)), ids, names[0])
  asked = drift.Config(tokens=9, window=4, layers=(0,), streams=file)
  assert drift.followed(asked, target(folder, context=9), print)[0].tokens == 9
  says = f"holds streams of the model {names[0][:12]}, not of {names[2][:12]}"
  with pytest.raises(BadInput, match=says):
    drift.followed(asked, target(None, context=9), print)


def test_capture_feeds_drift_and_both_run_on_a_folder(folder, tmp_path):
  file = tmp_path / "s.safetensors"
  run = lambda *args: main(["run", *args, "--model", str(folder), "--out", str(tmp_path)])
  run("capture", "--config", "smoke", "--tokens", "48", "--layers", "0", "2", "--to", str(file))
  rows = read_rows(tmp_path / "capture" / "rows.csv")
  assert len(rows) == 2 * (4 + 4 + 2)  # value heads twice, key heads once
  assert {row["layer"] for row in rows} == {0, 2}
  assert all(row["tenth"] <= row["ninetieth"] for row in rows)
  smoke = ["drift", "--config", "smoke", "--streams", str(file), "--layers", "2", "--probes", "2"]
  run(*smoke, "--tokens", "40", "--window", "4", "--windows", "--factors", "--schemes", "replay_0",
      "--prompt", "8", "--free-tokens", "4")  # fmt: skip
  drifted = read_rows(tmp_path / "drift" / "rows.csv")
  forced = [row for row in drifted if row["part"] == "forced"]
  assert {row["layer"] for row in forced} == {2}
  assert all(0 <= row["state_error"] < 1 for row in forced)
  assert [row["token"] for row in drifted if row["part"] == "free"] == [4]
  with pytest.raises(BadInput, match="streams of 48 tokens, 49 are wanted"):
    run(*smoke, "--tokens", "49")
  with pytest.raises(BadInput, match=r"to = .*: it is a folder; allowed: a file in a folder"):
    run("capture", "--config", "smoke", "--tokens", "48", "--to", str(tmp_path))


def test_streams_of_any_text_are_captured(folder, tmp_path):
  text, file = tmp_path / "text", tmp_path / "s.safetensors"
  text.write_bytes(b"def f(x): return x\n")
  run = ["run", "capture", "--config", "smoke", "--model", str(folder), "--out", str(tmp_path)]
  main([*run, "--text", str(text), "--to", str(file)])
  params, config = load(folder)
  stored, ids = streams.load(file, fingerprint(params))
  assert ids.tolist() == list(text.read_bytes())
  want = streams.capture(params, config, ids, layers=(0,), piece=128)
  jax.tree.map(np.testing.assert_array_equal, stored, want)
  with pytest.raises(BadInput, match=r"text .*nothing: No such file"):
    main([*run, "--text", str(tmp_path / "nothing")])


@pytest.mark.parametrize(
  "experiment",
  [slow("accuracy"), slow("fold_ablation"), slow("model_step"), slow("roofline"), "prefix"],
)
def test_experiments_measure_a_folder(folder, tmp_path, experiment):
  main(["run", experiment, "--config", "smoke", "--model", str(folder), "--out", str(tmp_path)])
  rows = read_rows(tmp_path / experiment / "rows.csv")
  assert rows
  assert all(np.isfinite(x) for row in rows for x in row.values() if isinstance(x, float))
  if experiment == "model_step":
    assert {row["model"] for row in rows} == {"model"}
    parameters = sum(x.size for x in jax.tree.leaves(load(folder)[0]))
    assert {row["parameters"] for row in rows} == {parameters}


def published_drafter(tmp_path, longest: int) -> Path:
  """A drafter's folder, for the model of `folder`."""
  about = dflash.CONFIG | {
    "dflash_config": {"mask_token_id": 255, "target_layer_ids": [0, 1]},
    "num_target_layers": 3, "vocab_size": 256, "max_position_embeddings": longest,
  }  # fmt: skip
  own = tmp_path / "drafter"
  own.mkdir()
  (own / "config.json").write_text(json.dumps(about))
  save_file(dflash.stored(), own / "model.safetensors")
  return own


def test_a_text_longer_than_the_drafter_was_made_for_is_refused(folder, tmp_path):
  own = published_drafter(tmp_path, longest=8)
  assert speculative.models(folder, own, 7).drafter.window == 7
  with pytest.raises(BadInput, match=r"9 tokens, allowed: 8, the longest context of .*drafter"):
    speculative.models(folder, own, 9)


@pytest.mark.parametrize("experiment", [slow("accept_length"), "parity"])
def test_a_folder_is_drafted_for_by_a_published_drafter(folder, tmp_path, experiment):
  """Target and drafter both from folders; every text is the target's own."""
  own = published_drafter(tmp_path, longest=256)
  few = ["--prompts", "1", "--prompt-tokens", "16", "--tokens", "8"]
  both = ["--model", str(folder), "--drafter", str(own), "--out", str(tmp_path)]
  one = ["--schemes", "replay_1", "--topologies", "chain", "--modes", "jit"]
  more = one if experiment == "parity" else []
  main(["run", experiment, "--config", "smoke", *few, *more, *both])
  rows = read_rows(tmp_path / experiment / "rows.csv")
  assert rows
  assert all(row.get("equal", True) for row in rows)


@pytest.mark.parametrize("name", TAKING)
def test_rows_of_another_model_do_not_replace_the_committed_ones(folder, name):
  """Whether a configuration holds its model as a path or as a name that may be a path."""
  experiment = load_experiment(name)
  for preset in experiment.CONFIGS:
    assert configured(experiment, name, ["--config", preset])[1] == provenance.RESULTS
  config, out = configured(experiment, name, ["--model", str(folder)])
  assert out == ELSEWHERE
  assert configured(experiment, name, ["--model", str(folder), "--out", "x"])[1] == Path("x")
  (folder / "added_tokens.json").symlink_to(folder / "none")  # hides no other file
  before = provenance.files(config)["model"]
  assert {file for file, *_ in before} == {x.name for x in folder.iterdir()}
  (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
  assert provenance.files(config)["model"] != before, "an interrupted run starts anew"


def test_bits_per_byte_of_a_folder(folder, tmp_path):
  sizes = ["--length", "64", "--restart", "32", "--width", "32", "--piece", "32"]
  smoke = ["heldout_bpb", "--config", "smoke", *sizes, "--model", str(folder)]
  main(["run", *smoke, "--out", str(tmp_path)])
  rows = read_rows(tmp_path / "heldout_bpb" / "rows.csv")
  assert sum(row["bytes"] for row in rows) == 2 * 64
  # Random weights know nothing: at least the 8 bits that a byte has, on average.
  assert np.mean([row["heldout_bits_per_byte"] for row in rows]) > 8


@pytest.mark.slow
def test_bits_per_byte_are_of_the_bytes_that_tokens_stand_for(tokenizer, tmp_path):
  sizes = ["--length", "512", "--restart", "256", "--width", "256", "--piece", "256"]
  smoke = ["heldout_bpb", "--config", "smoke", *sizes, "--model", str(tokenizer)]
  main(["run", *smoke, "--out", str(tmp_path)])
  rows = [r for r in read_rows(tmp_path / "heldout_bpb" / "rows.csv") if r["scored"] == "whole"]
  goal = target(tokenizer, context=512)
  ids, told = (x[:513] for x in goal.read(corpus.heldout().tobytes()))
  assert told.sum() > 513, "`de` is one token"
  assert sum(r["tokens"] for r in rows) == 512
  assert sum(r["bytes"] for r in rows) == told[1:].sum()
  assert [r["first_byte"] for r in rows] == [told[1 : 1 + r["first_token"]].sum() for r in rows]
  bits = np.concatenate(list(stream_bits(goal.params, goal.config, ids[None])), axis=1).sum()
  total = sum(r["heldout_bits_per_byte"] * r["bytes"] for r in rows)
  assert total == pytest.approx(float(bits), rel=1e-4)
  heldout_bpb.figure(read_rows(tmp_path / "heldout_bpb" / "rows.csv"))


def test_shapes_of_a_folder_stand_in_for_named_models(folder, tmp_path):
  main(["run", "memory", "--config", "smoke", "--model", str(folder), "--out", str(tmp_path)])
  rows = read_rows(tmp_path / "memory" / "rows.csv")
  assert {row["model"] for row in rows} == {"model"}
  state = 2 * 4 * 8 * 16 * 4  # layers, heads, V, K, float32
  [carry] = {r["carry_bytes"] for r in rows if r["scheme"] == "snapshot" and r["memory"] == "state"}
  assert carry == state
  with pytest.raises(BadInput, match="key_dim = 16, allowed: 8"):
    step_time.of_model(step_time.Config(model=folder))
  config = json.loads((folder / "config.json").read_text()) | {"linear_value_head_dim": 16}
  (folder / "config.json").write_text(json.dumps(config))
  shaped = step_time.of_model(step_time.Config(model=folder))
  assert (shaped.key_heads, shaped.value_heads, shaped.dim) == (2, 4, 16)
