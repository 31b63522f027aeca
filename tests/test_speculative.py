"""The experiments on the block drafter: smoke runs, tables, figures, and what they refuse."""

import dataclasses
import io
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from commit_schemes import SCHEMES
from experiments import accept_length, parity, speculative, tree_budget
from experiments.figures import draw
from experiments.record import BadInput, measure
from experiments.train_drafter import TINY_DRAFTER
from gdn import checkpoint, drafter, hybrid
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = TINY_DRAFTER.drafter


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """A small target and a drafter for it, random; mixers loud enough for the text to vary."""
  folder = tmp_path_factory.mktemp("models")
  target = hybrid.init(SMALL.target, jax.random.key(3), jnp.bfloat16)
  loud = lambda block: block._replace(mixer=block.mixer._replace(out=10 * block.mixer.out))
  target = target._replace(layers=tuple(map(loud, target.layers)))
  own = drafter.init(SMALL, jax.random.key(4), jnp.bfloat16)
  checkpoint.save(folder / "target.safetensors", target, SMALL.target)
  checkpoint.save_drafter(folder / "drafter.safetensors", own, SMALL, target)
  return folder


@pytest.fixture(autouse=True)
def _small(files, monkeypatch):
  monkeypatch.setattr(speculative, "BUNDLED", files / "target.safetensors")
  monkeypatch.setattr(speculative, "DRAFTER", files / "drafter.safetensors")


def smoke(experiment, folder, **other):
  config = dataclasses.replace(experiment.CONFIGS["smoke"], **other)
  rows = measure(experiment, config, folder, Console(file=io.StringIO()))
  draw(experiment.figure, rows, folder)
  Console(file=io.StringIO()).print(experiment.table(rows))
  assert (folder / "figure.png").stat().st_size > 5_000
  return rows


@pytest.mark.parametrize("mode", ["jit", slow("eager")])
def test_parity_says_of_every_prompt_whether_the_text_is_right(tmp_path, mode):
  rows = smoke(parity, tmp_path, schemes=("replay_1",), topologies=("best_first",), modes=(mode,))
  assert [r["prompt"] for r in rows] == [0, 1]
  assert {"scheme", "keep", "topology", "equal"} <= set(rows[0])
  assert all(r["equal"] and r["accept_length"] >= 1 for r in rows)
  assert {r["keep"] for r in rows} == {1}


def test_parity_gives_no_accept_length_to_a_wrong_text(tmp_path, monkeypatch):
  """A commit that forgets its last node, whether or not the text has left plain decoding's yet."""
  right = SCHEMES["replay_1"]

  def wrong(spec):
    scheme = right.make(spec)
    short = lambda a: a._replace(length=jnp.maximum(a.length - 1, 0))
    return scheme._replace(commit=lambda flight, a: scheme.commit(flight, short(a)))

  planted = dict(parity.EVERY, replay_1=right._replace(build=wrong))
  monkeypatch.setattr(parity, "EVERY", planted)
  rows = smoke(
    parity, tmp_path, schemes=("replay_1",), modes=("jit",), topologies=("chain",), tokens=40
  )
  assert not any(r["equal"] or r["accept_length"] for r in rows)
  assert {r["why"] for r in rows} == {"unexplained: wrong"}


def test_tree_budget_measures_every_window(tmp_path):
  rows = smoke(tree_budget, tmp_path, windows=(("chain", 4), ("best_first", 6)))
  assert len(rows) == 2 * 2  # schemes, windows
  assert all(r["accept_length"] >= 1 and r["low_ms"] <= r["step_ms"] <= r["high_ms"] for r in rows)
  of = {(r["scheme"], r["nodes"]): r["flight_bytes"] for r in rows}
  assert of["snapshot", 6] > of["snapshot", 4] > of["tree_wy", 6] > of["tree_wy", 4]


@pytest.mark.slow
def test_accept_lengths_add_up_to_the_text(tmp_path):
  rows = smoke(accept_length, tmp_path)
  for name in accept_length.DRAFTERS:
    for prompt in range(2):
      some = accept_length.chosen(rows, drafter=name, prompt=prompt)
      assert 24 <= sum(r["tokens"] * r["steps"] for r in some) < 24 + 4
      assert 1 <= accept_length.mean(some) <= 4


@pytest.mark.parametrize(
  "experiment, deep",
  [
    (accept_length, {"blocks": (5,)}),
    (parity, {"nodes": 5, "topologies": ("chain",)}),
    (tree_budget, {"windows": (("chain", 5),)}),
  ],
)
def test_a_window_deeper_than_the_block_is_refused_before_anything_is_decoded(
  tmp_path, monkeypatch, experiment, deep
):
  monkeypatch.delattr(experiment, "plain")
  with pytest.raises(BadInput, match="draft of 4 tokens after the anchor does not fit"):
    smoke(experiment, tmp_path, **deep)


@pytest.mark.parametrize(
  "experiment, wrong, says",
  [
    (parity, {"schemes": ("none",)}, r"schemes = \('none',\), allowed: some of snapshot"),
    (parity, {"nodes": 1}, "nodes = 1, allowed: at least 2"),
    (parity, {"modes": ()}, r"modes = \(\), allowed: some of jit, eager"),
    (tree_budget, {"slots": 0}, "slots = 0, allowed: at least 1"),
    (tree_budget, {"tokens": 6}, "tokens = 6, allowed: more than the largest window of 6"),
    (tree_budget, {"windows": (("star", 4),)}, "topology = 'star', allowed: chain, best_first"),
    (tree_budget, {"windows": (("top_2_2", 4),)}, "nodes = 4, allowed: the 7 of top_2_2"),
    (accept_length, {"blocks": (1,)}, r"blocks = \(1,\), allowed: windows of at least 2"),
    (accept_length, {"scheme": "none"}, "scheme = 'none', allowed: snapshot"),
  ],
)
def test_configs_name_the_value_and_what_is_allowed(experiment, wrong, says):
  with pytest.raises(ValueError, match=says):
    dataclasses.replace(experiment.CONFIGS["smoke"], **wrong)


def test_prompts_are_held_out_and_as_many_as_asked_for():
  models = speculative.models(None, None, 100)
  prompts = speculative.heldout_prompts(models, 3, 50)
  assert [len(p) for p in prompts] == [50] * 3
  assert len(set(map(bytes, prompts))) == 3
  with pytest.raises(BadInput, match="9 prompts of 100000 tokens, allowed: at most"):
    speculative.heldout_prompts(models, 9, 100_000)
  assert np.all([bytes(p) in speculative.corpus.heldout().tobytes() for p in prompts])


def test_a_drafter_that_does_not_belong_is_bad_input(tmp_path, monkeypatch, files):
  other = tmp_path / "drafter.safetensors"
  monkeypatch.setattr(speculative, "DRAFTER", other)
  with pytest.raises(BadInput, match=r"drafter\.safetensors"):
    speculative.models(None, None, 100)
  target, _ = checkpoint.load(files / "target.safetensors")
  own, sizes = checkpoint.load_drafter(files / "drafter.safetensors", target)
  checkpoint.save_drafter(other, own, sizes, target._replace(norm=target.norm + 1))
  with pytest.raises(BadInput, match=r"is a drafter for the target \w{12}, not for \w{12}"):
    speculative.models(None, None, 100)
  with pytest.raises(BadInput, match=r"model here is not the bundled drafter's, allowed: with a"):
    speculative.models(Path("here"), None, 100)
