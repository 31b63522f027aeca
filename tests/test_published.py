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
  assert before.verdict.startswith("cannot be tested here: not yet measured")
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
  assert after.verdict == "reproduced: 2.00 x less than at every commit, sqrt(m) is 2.00"
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
  verdict = lambda want: published_bounds.bounded((low, high), want, "").verdict.split(":")[0]
  assert verdict(low) == verdict(high) == "reproduced in shape"
  assert verdict(2 * high) == verdict(0.9) == "differs"


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
    if kind == "cannot be tested here" and not reason.startswith("not yet measured"):
      reasons.setdefault(reason, set()).add(r["id"].split("-")[0])
  assert all(len(of) == 1 for of in reasons.values()), reasons
