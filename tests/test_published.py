"""Every published value has an answer, by stated rules, from rows; and the page is current."""

import csv
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from experiments import (
  provenance,
  published,
  published_answer,
  published_bounds,
  published_dflash,
  published_streams,
  record,
)
from experiments.command_line import BadInput, derived, experiments, main
from experiments.figures import PUBLISHED
from experiments.published_answer import VERDICTS, beside
from experiments.published_answer import derived as by_arithmetic

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def rows() -> list[record.Row]:
  published_answer.stored.cache_clear()
  return published.derived_rows()


def test_no_published_value_is_without_a_verdict(rows) -> None:
  with PUBLISHED.open(newline="") as file:
    ids = [r["id"] for r in csv.DictReader(file)]
  assert [r["id"] for r in rows] == ids
  assert len(set(ids)) == len(ids) > 200
  for r in rows:
    kind, _, reason = r["verdict"].partition(": ")
    assert kind in VERDICTS, r
    assert reason or kind == "reproduced", r
    assert (r["ours"] == "") == (kind == "cannot be tested here") == (r["how"] == "-"), r


def test_the_page_is_current(rows) -> None:
  """`make figures` writes it: rows and page are committed together."""
  assert (ROOT / "docs" / "published.md").read_text() == published.markdown(rows)


def test_the_figure_is_drawn(rows) -> None:
  assert isinstance(published.figure(rows), Figure)


@pytest.mark.parametrize(
  ("want", "value", "verdict"),
  [("73.7", 73.69, "reproduced"), ("73.7", 73.64, "differs"),
   ("28.1", 28.04, "reproduced in shape"), ("3.4e3", 3432.0, "reproduced"),
   ("8.4e5", 2.05e6, "differs"), ("1152", 1152.0, "reproduced")],
)  # fmt: skip
def test_arithmetic_is_reproduced_digit_for_digit(want, value, verdict) -> None:
  near = 1.01 if want == "28.1" else 1.0
  assert by_arithmetic({"value": want}, value, near, "why").verdict.split(":")[0] == verdict


@pytest.mark.parametrize(
  ("value", "verdict"),
  [(1.2, "reproduced"), (0.81, "reproduced"), (2.9, "reproduced in shape"),
   (0.3, "differs"), (3.1, "differs"), (0.0, "differs")],
)  # fmt: skip
def test_measurements_by_stated_factors(value, verdict) -> None:
  assert beside({"value": "1.0"}, value, "modelled", "why").verdict.split(":")[0] == verdict


def test_a_value_appears_with_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  """Deferral by sqrt(m) exactly, in rows of the shape that `run cycles` writes."""
  monkeypatch.setattr(provenance, "RESULTS", tmp_path)
  caches = (published_answer.stored, published_answer.measured)
  clear = lambda: [known.cache_clear() for known in caches]
  clear()
  with PUBLISHED.open(newline="") as file:
    facts = {r["id"]: r for r in csv.DictReader(file)}
  before = published.answer(facts["defer-a-m4"])
  assert published_answer.UNMEASURED in before.verdict
  found = [
    {"inputs": "a", "line": "checkpoint bf16", "every": m, "cycle": 300 * i,
     "state_error": 1e-2 / m**0.5}
    for m in (1, 4) for i in (1, 2)
  ]  # fmt: skip
  (tmp_path / "cycles").mkdir()
  (tmp_path / "cycles" / "rows.csv").write_bytes(record.rows_csv(found))
  (tmp_path / "cycles" / "meta.json").write_text('{"device": "NVIDIA H200"}')
  clear()
  after = published.answer(facts["defer-a-m4"])
  assert (after.ours, after.how) == ("0.005", "measured on H200")
  law = "2.00 x less than at every commit, sqrt(m) is 2.00"
  assert after.verdict.startswith(f"reproduced: 0.893 x the published value; {law}; of four draws")
  clear()


def test_a_changed_claim_is_noticed() -> None:
  with PUBLISHED.open(newline="") as file:
    facts = {r["id"]: r for r in csv.DictReader(file)}
  for id, wrong in (("mem-tp1", "54.5"), ("flops-verify", "2.10"), ("gate-b64", "7.5")):
    assert published.answer(facts[id]).verdict.split(":")[0].startswith("reproduced")
    assert published.answer(facts[id] | {"value": wrong}).verdict.startswith("differs")


def test_a_derived_table_is_listed_and_not_run(tmp_path: Path) -> None:
  assert set(derived()) == {"published", "targets"}
  assert not set(derived()) & set(experiments())
  with pytest.raises(BadInput, match="experiment 'published', allowed: "):
    main(["run", "published", "--out", str(tmp_path)])


def test_csv_and_markdown_are_printed(capsys: pytest.CaptureFixture) -> None:
  main(["table", "memory", "--csv"])
  assert capsys.readouterr().out == (provenance.RESULTS / "memory" / "rows.csv").read_text()
  with pytest.raises(BadInput, match="--markdown, allowed: for published"):
    main(["table", "memory", "--markdown"])


def facts() -> dict[str, record.Row]:
  with PUBLISHED.open(newline="") as file:
    return {r["id"]: r for r in csv.DictReader(file)}


def test_one_published_memory_predicts_another() -> None:
  """Five slots a request and scratch for those admitted: 48 slots run nine, 190 sixteen."""
  assert [published_dflash.running(n) for n in (48, 160, 190)] == [9, 16, 16]
  for keep, n in published_dflash.SLOTS.items():
    assert published_dflash.slots_in(published_dflash.taken(n, keep), keep) >= n
    assert published.answer(facts()[f"replay-slots-k{keep}"]).verdict.startswith("reproduced")


def test_fewer_kept_states_serve_more_at_sixteen_and_nothing_at_one() -> None:
  over = lambda keep, n: published_dflash.rate(keep, n)[0] / published_dflash.rate(16, n)[0]
  gains = [over(keep, 16) for keep in (0, 1, 4, 8)]
  assert gains == sorted(gains, reverse=True)
  assert gains[0] > 1.2
  assert 1 <= over(0, 1) < 1.1


def test_bytes_bound_a_gain_and_never_say_loss() -> None:
  served = published_bounds.Served("Qwen3.5-35B-A3B", 64, 4, 2.8)
  low, high = published_bounds.gains(served, "snapshot", "ring_exact")
  assert 1 < low < high < 7
  few = published_bounds.gains(served._replace(requests=1), "snapshot", "ring_exact")
  assert few[1] < high
  assert not published_bounds.wide((low, low * 1.2))
  verdict = lambda want: published_bounds.bounded((low, low * 1.2), want, "").verdict.split(":")[0]
  assert verdict(low) == verdict(low * 1.2) == "reproduced in shape"
  assert verdict(2 * low) == verdict(0.9) == "differs"


@pytest.mark.parametrize(
  "id", ["weaver-t16", "kvbuffer", "ring-drift-open", "us-sglang-fold-t16-b64"]
)
def test_what_cannot_be_tested_says_what_is_known_of_it(id: str) -> None:
  """Numbers of ours, worked out from rows, stand in the reason."""
  reason = published.answer(facts()[id]).verdict.removeprefix("cannot be tested here: ")
  assert re.search(r"\d\.\d|\d %", reason), reason


def test_no_two_kinds_of_values_share_a_reason(rows) -> None:
  """A reason is of one source, or of the package that was not there."""
  reasons: dict[str, set[str]] = {}
  for r in rows:
    kind, _, reason = r["verdict"].partition(": ")
    if kind == "cannot be tested here" and published_answer.UNMEASURED not in reason:
      reasons.setdefault(reason, set()).add(r["id"].split("-")[0])
  assert all(len(of) == 1 for of in reasons.values()), reasons


def kind(r: record.Row) -> str:
  return r["verdict"].partition(":")[0]


@pytest.mark.parametrize(
  ("found", "want", "verdict"),
  [((1.03, 1.56), 1.3, "cannot be tested here"), ((1.2, 1.5), 1.3, "reproduced in shape"),
   ((1.03, 1.56), 1.9, "differs"), ((1.03, 1.56), 0.9, "differs"),
   ((0.4, 1.6), 1.0, "cannot be tested here"), ((1.0, 1.04), 0.995, "reproduced in shape")],
)  # fmt: skip
def test_a_model_that_would_pass_anything_reproduces_nothing(found, want, verdict) -> None:
  assert published_bounds.bounded(found, want, "x").verdict.split(":")[0] == verdict


def test_no_range_that_is_reproduced_is_wide(rows) -> None:
  """Of every modelled row, in its own unit: x as fast, percent of gain, or tokens a second."""
  for r in rows:
    if r["how"] == "modelled" and kind(r).startswith("reproduced") and "–" in r["ours"]:
      low, high = (float(x.replace(",", "")) for x in re.findall(r"\d[\d.,]*", r["ours"]))
      if r["ours"].endswith("%"):
        low, high = 1 + low / 100, 1 + high / 100
      if not r["ours"].startswith("at most"):
        assert not published_bounds.wide((low, high)), r


def test_a_gain_that_falls_there_and_grows_here_differs(rows) -> None:
  of = {r["id"]: r for r in rows}
  for what in ("tput", "tpot"):
    for n in (16, 32):
      r = of[f"ring-122b-{what}{n}"]
      assert kind(r) == "differs", r
      assert "falls" in r["verdict"], r
  told = facts()["ring-122b-tput32"]
  grown = published.answer(told | {"value": "90"})
  assert "falls" not in grown.verdict


def test_every_modelled_ratio_goes_by_the_one_rule(rows) -> None:
  """What is above the range by more than is allowed differs, and a loss; what is below it is no
  contradiction of what is possible at most."""
  said = re.compile(r"make it ([\d.]+)–([\d.]+) x(?: at most)?, there (?:it is )?([\d.]+) x")
  verdicts = [(kind(r), m) for r in rows if (m := said.search(r["verdict"]))]
  assert len(verdicts) > 15
  assert {k for k, _ in verdicts} == {"differs", "cannot be tested here"}
  for verdict, m in verdicts:
    low, high, want = map(float, m.groups())
    lost = want < published_bounds.LOST and low >= 1
    assert (verdict == "differs") is (want / high > published_bounds.ROOM or lost), m[0]
    assert verdict == "differs" or low / want > published_bounds.ROOM, m[0]
  of = {r["id"]: r for r in rows}
  assert kind(of["recompute-tput-none"]) == "cannot be tested here"


def test_an_effect_that_was_published_is_judged(rows, monkeypatch) -> None:
  """Growth where none was seen, and an order of two errors, whatever the values are."""
  of = {r["id"]: kind(r) for r in rows}
  assert {of[f"toy-{x}-{end}"] for x in ("open", "bf16") for end in ("lo", "hi")} == {
    "reproduced in shape"
  }
  for id in ("toy-exact-lo", "toy-exact-hi", "lumo-wy-lo", "lumo-scan-hi"):
    assert of[id] == "differs", id
  monkeypatch.setattr(published_streams.drift_report, "slope", lambda curve: 0.1)
  assert published.answer(facts()["toy-exact-hi"]).verdict.startswith("reproduced in shape")
  worse = {**published_streams.STREAMS, "lumo-wy": lambda: 1e-3, "lumo-scan": lambda: 9e-4}
  monkeypatch.setattr(published_streams, "STREAMS", worse)
  assert not published.answer(facts()["lumo-wy-lo"]).verdict.startswith("differs: the window")


def test_what_is_in_shape_states_a_law_or_a_factor(rows) -> None:
  stated = re.compile(r"reproduced in shape: (the same law;|[\d.]\S* x the published )")
  for r in rows:
    if kind(r) == "reproduced in shape":
      assert stated.match(r["verdict"]), r


def test_a_setting_is_said_where_the_value_agrees_too() -> None:
  """All that is measured says why or on what; a setting that counts is in shape at most."""
  for ratio in (1.0, 1.5, 9.0):
    for same in (None, 1.25):
      verdict = published_answer.judged(ratio, "on an H200", same, 2.0)
      assert verdict.endswith("x the published value; on an H200")
      assert verdict.startswith("reproduced: ") == (ratio == 1.0 and same is not None)
  said = {
    "fi-b64-t": "fp32 states and batch 64 here; a B200, 64 heads and bf16 states",
    "fig": "another GPU",
    "toy-": "real streams here, synthetic keys there",
    "lumo-": "of a 27B model there",
    "gate-": "H20-3e",
  }
  for id, row in facts().items():
    for prefix, setting in said.items():
      if id.startswith(prefix):
        verdict = published.answer(row).verdict
        assert setting in verdict, id
        assert not verdict.startswith("reproduced:"), id


def test_nothing_that_is_measured_is_reproduced_without_a_word(rows) -> None:
  for r in rows:
    assert r["verdict"] != "reproduced" or r["how"] == "derived by arithmetic", r


def test_no_accuracy_at_a_task_is_reproduced_by_an_error_of_a_state(rows) -> None:
  of = facts()
  tasks = [r for r in rows if "accuracy" in of[r["id"]]["quantity"]]
  assert len(tasks) > 5
  for r in tasks:
    assert kind(r) == "cannot be tested here", r


def test_a_pair_whose_ratio_is_the_claim_is_judged_by_it(rows) -> None:
  """Bf16 u was published at twice the error of raw v: as large as v's is not what was found."""
  u = next(r for r in rows if r["id"] == "cycles16-u")
  assert kind(u) == "differs"
  assert "u over raw v is 1.06 here and 1.97 there" in u["verdict"]


def test_a_count_that_only_the_value_tells_reproduces_nothing() -> None:
  for slots in ("1.81", "2.22"):
    row = facts()["ring-mem-new"] | {"value": slots}
    assert published.answer(row).verdict.startswith("cannot be tested here")
  for id in ("atom-snapshots", "delta-alloc-old", "treewy-tree"):
    assert published.answer(facts()[id]).verdict.startswith("reproduced in shape"), id


def test_an_assumed_accept_length_is_said(rows) -> None:
  groups = ("throughput", "latency", "concurrency")
  of = facts()
  modelled = [
    r for r in rows
    if of[r["id"]]["group"] in groups
    and (r["how"] == "modelled" or re.search("the model is no|alone (make|allow)", r["verdict"]))
  ]  # fmt: skip
  assert len(modelled) > 30
  for r in modelled:
    assert "accepted" in r["verdict"], r


def test_what_is_not_measured_yet_is_counted_apart(rows) -> None:
  later = [r for r in rows if published_answer.UNMEASURED in r["verdict"]]
  assert f"here, {len(later)} can be where their experiment is run" in published.markdown(rows)
  assert "run tail` on an H200 writes them" in published_answer.unmeasured("tail").verdict
  assert "H200" not in published_answer.unmeasured("drift --config full").verdict
