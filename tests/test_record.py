"""Rows survive an interrupt, and files appear whole or not at all."""

import contextlib
import dataclasses
import faulthandler
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from experiments import provenance
from experiments.command_line import BadInput
from experiments.record import Record, Unwritable, measure, read_rows
from tests.toy import FINAL, Config, quiet, toy

ROOT = Path(__file__).parents[1]


def journals(folder: Path) -> list[Path]:
  return sorted((folder / "partial").iterdir())


def test_a_resumed_run_measures_only_what_is_missing(tmp_path: Path) -> None:
  whole, half = tmp_path / "whole", tmp_path / "half"
  quiet(toy(), whole)
  with pytest.raises(KeyboardInterrupt):
    quiet(toy(stop=("b", 2)), half)
  assert not [name for name in FINAL if (half / name).exists()]
  rest = toy()
  quiet(rest, half)
  assert rest.measured == [(part, i) for part in "bc" for i in range(3)]
  assert (half / "rows.csv").read_bytes() == (whole / "rows.csv").read_bytes()
  assert len(json.loads((half / "meta.json").read_text())["resumed"]) == 1
  assert not journals(half)


def test_another_file_at_the_same_path_starts_anew(tmp_path: Path) -> None:
  """A checkpoint that was replaced between two sittings."""

  @dataclasses.dataclass(frozen=True, kw_only=True)
  class WithModel(Config):
    model: Path = tmp_path / "model"

  folder, other = tmp_path / "out", WithModel().model
  other.mkdir()
  (other / "weights").write_text("one")
  for change in (False, True):
    with pytest.raises(KeyboardInterrupt):
      quiet(toy(stop=("b", 2)), folder, WithModel())
    if change:
      (other / "weights").write_text("another")
    rest = toy()
    quiet(rest, folder, WithModel())
    assert {part for part, _ in rest.measured} == set("abc" if change else "bc")


def test_other_rows_that_an_experiment_reads_start_it_anew(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """Two sittings of one run must not stand on two distributions."""
  monkeypatch.setattr(provenance, "RESULTS", tmp_path)
  (tmp_path / "lengths").mkdir()
  folder = tmp_path / "out"
  for text in ("one", "one", "another"):
    (tmp_path / "lengths" / "rows.csv").write_text(text)
    reading = toy(stop=("b", 2))
    reading.READS = ("lengths",)
    with pytest.raises(KeyboardInterrupt):
      quiet(reading, folder)
  assert len(journals(folder)) == 2
  made = {"commit": "0" * 40, "dirty": True, "device": "NVIDIA H200"}
  (tmp_path / "lengths" / "meta.json").write_text(json.dumps(made | {"seconds": 1}))
  rest = toy()
  rest.READS = ("lengths",)
  quiet(rest, folder)
  assert json.loads((folder / "meta.json").read_text())["read"] == {"lengths": made}


def test_a_torn_line_is_measured_again(tmp_path: Path) -> None:
  with pytest.raises(KeyboardInterrupt):
    quiet(toy(stop=("c", 0)), tmp_path)
  [journal] = journals(tmp_path)
  with journal.open("a") as file:
    file.write('["row", {"part": "c", "i"')
  rest = toy()
  assert len(quiet(rest, tmp_path)) == 9
  assert rest.measured == [("c", i) for i in range(3)]


@pytest.mark.parametrize(
  "line", [b"[1,2,3]", b"\xff\xfe", b"{}", b'["row", {"other": 1}]', b'["row", 3]', b'["part", {}]']
)
def test_a_damaged_line_is_measured_again_and_said(line: bytes, tmp_path: Path) -> None:
  """With all that follows it; what was whole before it stays."""
  with pytest.raises(KeyboardInterrupt):
    quiet(toy(stop=("c", 1)), tmp_path)
  (journal,) = (tmp_path / "partial").iterdir()
  lines = journal.read_bytes().splitlines(keepends=True)
  second = next(i for i, x in enumerate(lines) if b'"row"' in x and b'"b"' in x)
  journal.write_bytes(b"".join([*lines[:second], line + b"\n", *lines[second:]]))
  again, out = toy(), io.StringIO()
  rows = measure(again, Config(), tmp_path, Console(file=out, width=300))
  assert {part for part, _ in again.measured} == {"b", "c"}
  assert len(rows) == 9
  assert f"{journal} is damaged" in out.getvalue()


def test_another_configuration_starts_anew_and_loses_nothing(tmp_path: Path) -> None:
  with pytest.raises(KeyboardInterrupt):
    quiet(toy(stop=("b", 0)), tmp_path)
  other = toy()
  quiet(other, tmp_path, Config(scale=2.0))
  assert len(other.measured) == 9
  rest = toy()
  quiet(rest, tmp_path)
  assert len(rest.measured) == 6


def test_a_run_that_is_cut_off_leaves_rows_and_goes_on(tmp_path: Path) -> None:
  assert len(quiet(toy(seconds=0), tmp_path)) == 3
  assert json.loads((tmp_path / "meta.json").read_text())["left"] == ["b", "c"]
  assert len(quiet(toy(seconds=0), tmp_path)) == 6
  rest = toy(seconds=60)
  assert len(quiet(rest, tmp_path)) == 9
  assert rest.measured == [("c", i) for i in range(3)]
  assert "left" not in json.loads((tmp_path / "meta.json").read_text())
  assert not journals(tmp_path)


def test_a_part_that_ends_processes_comes_last_and_then_not_at_all(
  tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  def die(record: Record) -> None:
    """Nothing is noted in the journal; the clock that would end this process dies with a run."""
    faulthandler.cancel_dump_traceback_later()
    record._file.close()

  def sitting(killed: bool = True) -> list[str]:
    experiment = toy(stop=("a", 1), limit=60.0)
    with monkeypatch.context() as patch:
      if killed:
        patch.setattr(Record, "close", die)
      with contextlib.suppress(KeyboardInterrupt):
        quiet(experiment, tmp_path)
    return [part for part, i in experiment.measured if i == 0]

  assert sitting(killed=False) == ["a"], "an interrupt is no kill"
  assert sitting() == ["a"]
  assert sitting() == ["b", "c", "a"]
  assert sitting() == [], "two kills are enough"
  assert {row["part"] for row in read_rows(tmp_path / "rows.csv")} == {"b", "c"}


def test_what_hangs_is_ended_from_within(tmp_path: Path) -> None:
  hangs = (
    "import time; from pathlib import Path; from types import SimpleNamespace as S;"
    "from experiments.record import measure; from tests.toy import Config;"
    "run = lambda c, record: [time.sleep(60) for _ in record.parts('ab', limit=0.2)];"
    f"measure(S(run=run), Config(), Path({str(tmp_path)!r}))"
  )
  done = subprocess.run(
    [sys.executable, "-c", hangs], cwd=ROOT, capture_output=True, text=True, timeout=50
  )
  assert done.returncode == 1
  assert "Timeout" in done.stderr
  [journal] = journals(tmp_path)
  assert journal.read_text().splitlines()[-1] == '["begun", "a"]'


def test_an_interrupt_leaves_the_last_result(tmp_path: Path) -> None:
  quiet(toy(), tmp_path)
  (tmp_path / "figure.png").write_text("of these rows")
  before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
  with pytest.raises(KeyboardInterrupt):
    quiet(toy(stop=("a", 1)), tmp_path)
  assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
  quiet(toy(), tmp_path, Config(scale=2.0))
  assert not (tmp_path / "figure.png").exists(), "a figure of other rows stands beside new ones"


def test_rows_read_back_as_they_were(tmp_path: Path) -> None:
  rows = quiet(toy(), tmp_path)
  assert rows == read_rows(tmp_path / "rows.csv")
  assert rows[1] == {"part": "a", "i": 1, "value": 1 / 3, "missing": None, "flag": True}


@pytest.mark.parametrize("place", ["results", "results/partial", "results/partial/deeper"])
def test_an_unwritable_folder_is_one_error_before_measuring(tmp_path: Path, place: str) -> None:
  blocked = tmp_path / place
  blocked.parent.mkdir(parents=True, exist_ok=True)
  blocked.write_text("a file, no folder")
  folder = tmp_path / "results" if place == "results/partial" else blocked
  experiment = toy()
  with pytest.raises(Unwritable, match=f"results folder {folder} cannot be written: "):
    quiet(experiment, folder)
  assert not experiment.measured


@pytest.mark.parametrize("other", [Config(), Config(scale=2.0)], ids=["same", "another"])
def test_two_runs_into_one_folder_do_not_mix(tmp_path: Path, other: Config) -> None:
  """Journals of two configurations are two files; rows.csv and meta.json are one of each."""

  def run(config: Config, record: Record) -> None:
    quiet(toy(), tmp_path, other)

  with pytest.raises(Unwritable, match="is being written by another run"):
    quiet(SimpleNamespace(run=run), tmp_path)


def test_faults_of_an_experiment_are_named(tmp_path: Path) -> None:
  def other_columns(config: Config, record: Record) -> None:
    record(a=1)
    record(b=1)

  def twice(config: Config, record: Record) -> None:
    list(record.parts("aba"))

  def before(config: Config, record: Record) -> None:
    record(a=1)
    list(record.parts("ab"))

  with pytest.raises(ValueError, match=r"columns of a row are \['b'\], allowed: \['a'\]"):
    quiet(SimpleNamespace(run=other_columns), tmp_path)
  with pytest.raises(BadInput, match=r"parts \['a'\] are named twice"):
    quiet(SimpleNamespace(run=twice), tmp_path)
  with pytest.raises(ValueError, match="rows before the first part"):
    quiet(SimpleNamespace(run=before), tmp_path)
