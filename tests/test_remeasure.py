"""Rows measured again: what lies within stated noise, what does not, what is missing."""

import dataclasses
import json
from contextlib import suppress
from pathlib import Path

import pytest

from experiments import memory, provenance, record, remeasure, step_time
from experiments.command_line import BadInput, caption, load, main, of_meta
from experiments.remeasure import Noise, compare

NOISE = Noise(("kernel", "batch"), {"time_us": 0.1})


def rows(*times: float | None) -> list[record.Row]:
  return [{"kernel": "fold", "batch": i, "time_us": t} for i, t in enumerate(times)]


def test_noise_is_relative_to_the_larger_value() -> None:
  found = compare(rows(100.0, 100.0, 0.0, None), rows(110.0, 112.0, 0.0, None), NOISE)
  assert [d.within for d in found] == [True, False, True, True]


def test_a_missing_row_is_never_within_noise() -> None:
  found = compare(rows(1.0, 2.0), rows(1.0), NOISE)
  assert [(d.key, d.within) for d in found] == [(("fold", 0), True), (("fold", 1), False)]
  assert not compare(rows(1.0), rows(None), NOISE)[0].within


def test_rows_that_cannot_be_told_apart_are_refused() -> None:
  with pytest.raises(ValueError, match="2 rows have 1 keys"):
    compare(rows(1.0) * 2, rows(1.0), NOISE)


@pytest.mark.parametrize("name", remeasure.NOISE)
def test_committed_rows_have_their_keys_and_equal_themselves(name: str) -> None:
  committed, _ = remeasure.stored(name)
  found = compare(committed, committed, remeasure.NOISE[name])
  assert len(found) == len(committed) * len(remeasure.NOISE[name].columns)
  assert all(d.within for d in found)


AGAIN = provenance.RESULTS / "remeasured"


@pytest.mark.parametrize("name", sorted(path.name for path in AGAIN.iterdir()))
def test_what_was_measured_again_is_what_is_committed(name: str) -> None:
  """By another machine of the same kind, a day later or so."""
  committed, meta = remeasure.stored(name)
  again = json.loads((AGAIN / name / "meta.json").read_text())
  if meta["date"] > again["date"]:
    pytest.skip(f"rows of {name} are newer than what was measured again")
  same = ("device", "jax", "config") if "seconds" not in meta["config"] else ("device", "jax")
  assert [meta[x] for x in same] == [again[x] for x in same]
  found = compare(committed, record.read_rows(AGAIN / name / "rows.csv"), remeasure.NOISE[name],
                  common=True)  # fmt: skip
  assert len(found) > 50
  assert all(d.within for d in found)


def test_a_column_that_is_not_there_is_none() -> None:
  old = [{k: v for k, v in rows(1.0)[0].items() if k != "time_us"}]
  [found] = compare(old, rows(1.0), NOISE)
  assert (found.committed, found.measured, found.within) == (None, 1.0, False)


@pytest.fixture
def committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
  """A small memory run that stands for the committed one."""
  monkeypatch.setattr(provenance, "RESULTS", tmp_path / "results")
  record.measure(memory, memory.CONFIGS["smoke"], tmp_path / "results" / "memory")
  return tmp_path


def test_one_command_measures_again_and_compares(
  committed: Path, capsys: pytest.CaptureFixture
) -> None:
  main(["remeasure", "memory", "--out", str(committed / "again")])
  assert "memory: 32 of 32 values within noise" in capsys.readouterr().out
  path = committed / "results" / "memory" / "rows.csv"
  path.write_text(path.read_text().replace("75497472", "75497473"))
  with pytest.raises(SystemExit) as exit:
    main(["remeasure", "memory", "--out", str(committed / "again")])
  assert exit.value.code == 1


@pytest.mark.slow
def test_a_time_limit_ends_it_with_the_rows_so_far(
  committed: Path, capsys: pytest.CaptureFixture
) -> None:
  """Of two committed rows the first alone is measured again."""
  config = dataclasses.replace(
    step_time.CONFIGS["smoke"], schemes=(), kernels=("append",), batches=(1, 2)
  )
  record.measure(step_time, config, committed / "results" / "step_time")
  main_ends(["remeasure", "step_time", "--out", str(committed / "again"), "--seconds", "0"])
  meta = json.loads((committed / "again" / "step_time" / "meta.json").read_text())
  assert (meta["config"]["seconds"], len(meta["left"])) == (0.0, 1)
  assert "step_time: " in capsys.readouterr().out
  with pytest.raises(BadInput, match="--seconds = -1, allowed: at least 0"):
    main(["remeasure", "step_time", "--seconds", "-1"])


def main_ends(args: list[str]) -> None:
  """Times on a shared processor may lie outside their noise."""
  with suppress(SystemExit):
    main(args)


def test_what_cannot_be_measured_again_is_named(committed: Path) -> None:
  with pytest.raises(
    BadInput, match="experiment 'drift', allowed: step_time, concurrency, model_step, "
  ):
    main(["remeasure", "drift"])
  with pytest.raises(BadInput, match="--seconds = 5: memory has no such field"):
    main(["remeasure", "memory", "--seconds", "5"])
  meta = committed / "results" / "memory" / "meta.json"
  changed = json.loads(meta.read_text())
  changed["config"]["wndows"] = [3]
  meta.write_text(json.dumps(changed))
  with pytest.raises(BadInput, match=r"configuration is of another version: .*wndows"):
    main(["remeasure", "memory"])


@pytest.mark.parametrize("name", [n for n in remeasure.NOISE if remeasure.stored(n)])
def test_committed_rows_can_be_measured_again(name: str) -> None:
  """Whatever command line they were measured with."""
  _, meta = remeasure.stored(name)
  config = of_meta(load(name), meta)
  again = json.loads(json.dumps(dataclasses.asdict(config), default=record.as_json))
  assert again.items() >= meta["config"].items()


def test_of_runs_that_were_cut_off_what_both_have_is_compared() -> None:
  [found] = compare(rows(1.0, 2.0)[:1], rows(1.05, 2.0), NOISE, common=True)
  assert found.within
  with pytest.raises(ValueError, match="no row was measured both times"):
    compare(rows(1.0), rows(1.0, 2.0)[1:], NOISE, common=True)


def test_a_caption_names_config_commit_device_and_rows(committed: Path) -> None:
  folder = committed / "results" / "memory"
  said = caption(load("memory"), [{}] * 7, folder)
  meta = json.loads((folder / "meta.json").read_text())
  for part in ("config smoke", f"commit {meta['commit'][:10]}", meta["device"], "7 rows"):
    assert part in said
  meta["dirty"] = True
  meta["read"] = {"step_time": {"commit": "f" * 40, "dirty": None, "device": "NVIDIA H200"}}
  meta["config"] |= {"windows": [7]}
  (folder / "meta.json").write_text(json.dumps(meta))
  said = caption(load("memory"), [], folder)
  assert "config smoke, but windows · " in said
  assert "changed tree · " in said
  read = "rows of step_time: commit ffffffffff, state of the tree unknown · NVIDIA H200"
  assert said.endswith(read)
