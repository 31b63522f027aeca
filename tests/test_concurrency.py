"""The experiments over slots: their arithmetic, what they refuse, and a small run of each."""

import dataclasses
import io

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from experiments import (
  concurrency,
  concurrency_report,
  layer_step,
  prefix,
  rank_time,
  sharding,
  soak,
  tail,
)
from experiments.models import MODELS
from experiments.record import BadInput, measure

pytestmark = pytest.mark.usefixtures("quick_compiles")


def rows_of(experiment, folder, **changes):
  config = dataclasses.replace(experiment.CONFIGS["smoke"], **changes)
  rows = measure(experiment, config, folder, Console(file=io.StringIO()))
  assert isinstance(experiment.figure(rows), Figure)
  if hasattr(experiment, "table"):
    Console(file=io.StringIO()).print(experiment.table(rows))
  return rows


def test_concurrency_runs(tmp_path):
  rows = rows_of(concurrency, tmp_path)
  assert [(r["scheme"], r["keep"], r["concurrency"]) for r in rows] == [
    ("snapshot", 4, 1), ("snapshot", 4, 2), ("replay_0", 0, 1), ("replay_0", 0, 2),
  ]  # fmt: skip
  for r in rows:
    assert r["admitted"] == min(r["concurrency"], r["cap"])
    assert r["error_over_budget"] == 0, "both are exact"
    rate = 1e3 * r["admitted"] * r["accept_length"] / r["step_ms"]
    assert r["tokens_per_s"] == pytest.approx(rate, rel=1e-2)
    assert r["recurrent_ms"] < r["step_ms"]


def test_a_budget_for_nobody_is_said_and_no_time_is_invented(tmp_path, monkeypatch):
  monkeypatch.setattr(
    concurrency, "layer_times", lambda c, _: (dict.fromkeys(c.batches, (1, 1)), 0)
  )
  nothing = concurrency.Programs({"snapshot": None}, {}, {})
  monkeypatch.setattr(concurrency, "compiled", lambda *_: nothing)
  rows = rows_of(concurrency, tmp_path, schemes=("snapshot",), common_gib=0.001)
  assert all(r["admitted"] == r["cap"] == r["tokens_per_s"] == 0 for r in rows)
  assert all(r["step_ms"] is None for r in rows)


def test_the_published_slots_admit_what_was_published():
  """48, 160 and 190 slots of 73.4 MiB at five a request; K = 16 admits 9 of 16 requests."""
  model, caps = "Qwen3.5-27B", {}
  for scheme, slots in (("snapshot", 48), ("replay_1", 160), ("replay_0", 190)):
    carry, flight = concurrency.account(scheme, model, 16, degree=2)
    gib = concurrency.budgets(concurrency.Config(), scheme, model)["published"]
    caps[scheme] = concurrency.slots_within(
      int(gib * 2**30), carry, flight, per_request=5, spare_rows=1
    )
    assert abs(caps[scheme] - slots // 5) <= 4, "scratch and raw inputs are priced here as well"
  assert caps["snapshot"] == 48 // 5 == 9
  assert caps["replay_0"] > caps["replay_1"] > 2 * caps["snapshot"]


def test_every_published_point_is_drawn_from_the_file():
  points = concurrency_report.points()
  ratio = {(scheme, n): r for scheme, n, r, _ in points}
  for keep, published in ((0, 1.43), (1, 1.40), (4, 1.27), (8, 1.25)):
    assert round(ratio[f"replay_{keep}", 16], 2) == published
  assert ratio["tree_wy", 64] == 1.49
  assert {n for scheme, n, *_ in points if scheme == "ring_exact"} == {8, 16, 32}


def test_accept_lengths_are_drawn_from_what_is_stated():
  rng = np.random.default_rng(0)
  for name, counts in layer_step.ACCEPTS.items():
    drawn = layer_step.draw_accepts(counts, rng, 20_000, 16)
    weight = sum(counts.values())
    mean = sum(n * w for n, w in counts.items()) / weight
    spread = np.sqrt(sum((n - mean) ** 2 * w for n, w in counts.items()) / weight / 20_000)
    assert abs(drawn.mean() - mean) <= 6 * spread, name
    assert set(drawn) <= set(counts)
  assert layer_step.draw_accepts({16: 1.0}, rng, 3, 4).tolist() == [4, 4, 4]
  geometric = layer_step.ACCEPTS["geometric_4.2"]
  assert sum(n * p for n, p in geometric.items()) / sum(geometric.values()) == pytest.approx(4.2)


def test_the_trained_drafters_lengths_come_from_its_rows(tmp_path):
  rows = tmp_path / "rows.csv"
  with pytest.raises(BadInput, match=r"accepts = block: .*rows\.csv: No such file"):
    layer_step.accept_lengths("block", rows)
  for nothing in ("", "drafter,block,prompt,tokens,steps\nprompt_lookup,16,0,1,7\n"):
    rows.write_text(nothing)
    with pytest.raises(BadInput, match=r"accepts = block: .*rows\.csv has no rows of it"):
      layer_step.accept_lengths("block", rows)
  rows.write_text(
    "drafter,block,prompt,tokens,steps\nblock,8,0,2,9\nblock,16,0,3,5\nblock,16,1,3,2\n"
    "block,16,1,16,4\nprompt_lookup,16,0,1,7\n"
  )
  assert layer_step.accept_lengths("block", rows, window=16) == {3: 7, 16: 4}
  with pytest.raises(BadInput, match="window = 17, allowed with accepts = block: at most 16"):
    layer_step.accept_lengths("block", rows, window=17)
  assert layer_step.accept_lengths("none", rows) == {1: 1}
  for experiment in (concurrency, tail):
    assert "accept_length" in experiment.READS, "rows of other lengths make a measurement dirty"


def test_a_wrong_layer_is_not_timed():
  """A commit that loses a token fails the check before anything is measured."""
  c = concurrency.CONFIGS["smoke"]
  layer = layer_step.LayerStep(
    "replay_0",
    MODELS["bundled"].layer,
    c.window,
    layer_step.OPS["xla"],
    layer_step.PROMPT_LOOKUP,
    pool=2,
  )
  layer.check()
  sound = layer.step
  layer.step = lambda carry, window, gates, accepted: sound(
    carry, window, gates, accepted._replace(length=accepted.length - 1)
  )
  with pytest.raises(AssertionError, match="not bitwise a replay"):
    layer.check()


def test_tail_runs(tmp_path):
  rows = rows_of(tail, tmp_path)
  assert [(r["tail"], r["keep"]) for r in rows] == [
    ("dense", 2), ("compact", 2), ("select", 2), ("all", 4)
  ]  # fmt: skip
  assert all(r["commit_us"] > 0 for r in rows)
  assert rows[0]["rows_with_a_tail"] > 0 == rows[3]["rows_with_a_tail"]
  found = tail.claim(rows, 2, 2, "uniform")
  assert set(found) == {"slower", "blamed"}
  assert tail.claim(rows[:2], 2, 2, "uniform") is None


def test_a_verify_and_a_commit_that_are_timed_copy_no_state():
  """The pool goes through them: a copy of 64 slots would take longer than the verify of one."""
  variant = tail.Variant(tail.CONFIGS["smoke"], "dense", 2, 2)
  [(window, accepted)] = variant.layer.inputs(2, 1)
  S = variant.layer.fresh()
  _, flight = variant.verify(S, window, variant.layer.gates)
  assert S.is_deleted()
  assert flight.S.shape == S.shape
  S = variant.commit(flight.S, flight._replace(S=None), accepted)
  assert flight.S.is_deleted()
  assert S.shape == flight.S.shape


def test_a_step_is_every_layer_every_group_and_the_head():
  """Forty-eight layers of 2 us, sixteen groups of 100 and a head of 500; between batches a line."""
  layer = {1: (2.0, 20.0), 3: (4.0, 40.0)}
  parts = concurrency.Parts(48, 16, layer, {1: 100.0, 3: 300.0}, {1: 500.0, 3: 700.0})
  for n, us, recurrent in ((1, 96 + 1600 + 500, 96), (2, 144 + 3200 + 600, 144)):
    found = concurrency.costs(parts, n, 5.0)
    assert found["step_ms"] == pytest.approx(us / 1e3)
    assert found["recurrent_ms"] == pytest.approx(recurrent / 1e3)
    assert found["tokens_per_s"] == pytest.approx(1e6 * n * 5 / us, rel=1e-4)
  assert (found["layer_us"], found["layer_wall_us"]) == (3.0, 30.0)


def test_a_group_that_is_timed_attends_to_the_context_and_is_told_where_it_stands():
  load = rank_time.Load(4, 16, "none", "xla", (1,), 8)
  group = rank_time.Group(load, rank_time.group_config("bundled", 1, 16), 2)
  rows = [m for attends, m in group.split(group.fresh()) if attends]
  assert [m.length.tolist() for m in rows] == [[16, 16]]
  _, positions, _ = next(group.inputs())
  assert positions.tolist() == [[16, 17, 18, 19]] * 2


def test_prefix_runs(tmp_path):
  few, many = rows_of(prefix, tmp_path)
  assert few["budget_entries"] < many["budget_entries"]
  assert 0 <= few["hit_rate"] <= many["hit_rate"] < 1
  assert many["hit_rate"] > 0.3, "second turns find their first"
  assert few["entries"] <= 2
  assert many["forced"] == many["marks"] > 0
  assert few["emitted_tokens"] == 3 * 2 * 12


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="needs a machine without a GPU")
@pytest.mark.parametrize(
  ("experiment", "says"),
  [
    (concurrency, "ops = mosaic needs a GPU, jax runs on cpu"),
    (tail, "ops = mosaic needs a GPU, jax runs on cpu"),
    (soak, "model = 128-wide heads, bfloat16, Mosaic kernels needs a GPU"),
    (sharding, r"meshes = .*: a mesh of 1 x 2 devices; there are 1"),
  ],
)
def test_what_this_machine_cannot_do_is_said_before_anything_is_measured(
  experiment, says, tmp_path
):
  with pytest.raises(BadInput, match=says):
    measure(experiment, experiment.CONFIGS["full"], tmp_path, Console(file=io.StringIO()))
  assert not (tmp_path / "rows.csv").exists()


@pytest.mark.parametrize(
  ("experiment", "field", "value", "says"),
  [
    (concurrency, "models", ("GPT",), "models = .*GPT.*, allowed: Qwen3.5-27B, "),
    (concurrency, "models", (), r"models = \(\), allowed: Qwen3.5-27B, "),
    (concurrency, "models", ("bundled",) * 2, "models = .*, allowed: .*, each at most once"),
    (concurrency, "degrees", (1, 1), "degrees = .*, allowed: one for each model"),
    (concurrency, "schemes", ("snap",), "schemes = .*, allowed: snapshot, "),
    (concurrency, "batches", (2,), "batches = .*, allowed: 1 and larger ones"),
    (concurrency, "concurrency", (1, 99), "concurrency = .*, allowed: no more than the largest"),
    (concurrency, "window", 17, "window = 17, allowed: 1 to 16"),
    (concurrency, "accepts", "mine", "accepts = 'mine', allowed: prompt_lookup, "),
    (concurrency, "ops", "cuda", "ops = 'cuda', allowed: mosaic, xla"),
    (tail, "keeps", (4,), r"keeps = \(4,\), allowed: 1 to 3"),
    (tail, "concurrency", (2, 2), r"concurrency = \(2, 2\), allowed: each at least 1, and once"),
    (tail, "tails", ("sparse",), "tails = .*, allowed: dense, compact, select, all"),
    (prefix, "blocks", (0,), r"blocks = \(0,\), allowed: each at least 1"),
    (prefix, "model", "GPT", "model = 'GPT', allowed: Qwen3.5-27B, "),
  ],
)
def test_what_is_not_allowed_is_named(experiment, field, value, says):
  with pytest.raises(ValueError, match=says):
    dataclasses.replace(experiment.CONFIGS["smoke"], **{field: value})
