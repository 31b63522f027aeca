"""Bad input and interrupts are one line; every experiment keeps one protocol and its rows draw."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from experiments import figures, provenance, record
from experiments.command_line import BadInput, experiments, load, main
from experiments.record import read_rows
from tests.toy import FINAL

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
  "args, message",
  [
    (
      ["nonsense"],
      "command 'nonsense', allowed: list, run NAME, figure NAME, table NAME, remeasure",
    ),
    (["run", "nonsense"], "experiment 'nonsense', allowed: .*memory"),
    (["run", "memory", "--config", "huge"], "--config huge, allowed: full, smoke"),
    (["run", "memory", "--wndows", "4"], "--wndows 4, allowed: .*--windows"),
    (["run", "memory", "--windows", "0"], "windows = .*0.*, allowed: each at least 1"),
    (["run", "memory", "--schemes", "snap"], "schemes = .*snap.*, allowed: some of snapshot, "),
    (["run", "memory", "--degree", "3"], "degree 3 must divide"),
    (["run", "drift", "--schemes"], r"schemes=\(\) is not allowed; allowed: snapshot, "),
    (["run", "drift", "--layers"], r"layers=\(\) is not allowed; allowed: at least one"),
    (
      ["run", "drift", "--prompt-at", "599999"],
      "prompt_at=599999 is not allowed; allowed: 0 to 598976",
    ),
  ],
)
def test_bad_input_names_the_value_and_what_is_allowed(
  args: list[str], message: str, tmp_path: Path
) -> None:
  with pytest.raises(BadInput, match=message):
    main([*args, "--out", str(tmp_path)] if args[0] == "run" else args)
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "args, message",
  [
    (["drift", "--model", "{}/none"], "/none"),
    (["drift", "--model", "{}/torn"], "torn is truncated or no safetensors file"),
    (["heldout_bpb", "--config", "smoke", "--model", "{}/torn"], "torn is truncated or no safe"),
    (["drift", "--layers", "3"], r"layers=\(3,\) is not allowed; allowed: some of \(0, 1, 2, 4, "),
  ],
)
def test_bad_input_that_a_run_finds_leaves_no_result(
  args: list[str], message: str, tmp_path: Path
) -> None:
  (tmp_path / "torn").write_bytes(b"torn")
  with pytest.raises(BadInput, match=message):
    main(["run", *(x.format(tmp_path) for x in args), "--out", str(tmp_path)])
  assert not [p for p in tmp_path.rglob("*") if p.name in FINAL]


def test_what_is_asked_for_twice_is_measured_once(tmp_path: Path) -> None:
  twice = ["--schemes", "snapshot", "snapshot", "--windows", "4"]
  main(["run", "memory", "--config", "smoke", *twice, "--out", str(tmp_path)])
  rows = read_rows(tmp_path / "memory" / "rows.csv")
  assert len(rows) == len({tuple(r.values()) for r in rows}) == 4


def test_a_field_of_the_wrong_type_is_refused(capsys: pytest.CaptureFixture) -> None:
  with pytest.raises(SystemExit) as exit:
    main(["run", "memory", "--degree", "many"])
  assert exit.value.code == 2
  error = capsys.readouterr().err
  assert "--degree" in error
  assert "many" in error


def test_rows_that_are_not_there_are_named(tmp_path: Path) -> None:
  with pytest.raises(BadInput, match=r"memory.rows.csv: No such file or directory; `run memory`"):
    main(["figure", "memory", "--out", str(tmp_path)])


def cli(*args: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, "-m", "experiments", *args],
    cwd=ROOT, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"},
  )  # fmt: skip


def test_command_line(tmp_path: Path) -> None:
  done = cli("run", "memory", "--config", "smoke", "--windows", "2", "4", "--out", str(tmp_path))
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1] == f"16 rows and their figure are in {tmp_path / 'memory'}"
  assert {path.name for path in (tmp_path / "memory").iterdir() if path.is_file()} == set(FINAL)
  assert json.loads((tmp_path / "memory" / "meta.json").read_text())["config"]["windows"] == [2, 4]


def test_command_line_refuses_in_one_line() -> None:
  done = cli("run", "nonsense")
  assert (done.returncode, done.stdout) == (2, "")
  assert len(done.stderr.splitlines()) == 1
  assert "nonsense" in done.stderr


INTERRUPTED = ["\n", "interrupted: finished parts are kept, the same command goes on\n"]


def started(*args: str, options: tuple[str, ...] = ()) -> subprocess.Popen:
  command = [sys.executable, *options, "-m", "experiments", *args]
  return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_an_interrupt_during_imports_is_one_line() -> None:
  with started("list", options=("-X", "importtime")) as run:
    assert run.stderr is not None
    next(line for line in run.stderr if " jax._src" in line)
    run.send_signal(signal.SIGINT)
    rest = [line for line in run.stderr if not line.startswith("import time:")]
  assert (run.returncode, rest) == (130, INTERRUPTED)


def test_an_interrupted_command_keeps_its_finished_parts(tmp_path: Path) -> None:
  memory = tmp_path / "memory"
  shown = lambda: "".join(p.read_text() for p in memory.glob("partial/*.jsonl"))
  with started("run", "memory", "--models", "bundled", "--out", str(tmp_path)) as run:
    while '["part"' not in shown() and run.poll() is None:
      time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    assert run.stderr is not None
    rest = list(run.stderr)
  assert (run.returncode, rest[-2:]) == (130, INTERRUPTED)
  assert '["part", {"name": "snapshot"' in shown()
  assert not [name for name in FINAL if (memory / name).exists()]


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_keeps_the_protocol(name: str) -> None:
  experiment = load(name)
  assert experiments()[name].endswith("."), "its docstring's first line is what `list` shows"
  assert callable(experiment.run)
  assert callable(experiment.figure)
  assert {"config", "out"}.isdisjoint(experiment.Config.__dataclass_fields__)
  for config in experiment.CONFIGS.values():
    assert type(config) is experiment.Config
    with pytest.raises(dataclasses.FrozenInstanceError):
      setattr(config, dataclasses.fields(config)[0].name, None)
    json.dumps(dataclasses.asdict(config), default=record.as_json)


def test_no_experiment_needs_the_plugin_of_a_gpu_to_be_imported() -> None:
  """As after `make setup`: the committed rows of every experiment must draw there."""
  code = "import sys; sys.modules['jax._src.lib.mosaic_gpu'] = None\n" + "".join(
    f"import experiments.{name}\n" for name in experiments()
  )
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr


COMMITTED = [n for n in experiments() if (provenance.RESULTS / n / "rows.csv").exists()]


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_results_name_no_folder_of_who_measured(name: str) -> None:
  meta = json.loads((provenance.RESULTS / name / "meta.json").read_text())
  names = [x for x in meta["config"].values() if isinstance(x, str)]
  assert not [x for x in names if Path(x).is_absolute()]


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_rows_draw(name: str, tmp_path: Path) -> None:
  rows = read_rows(provenance.RESULTS / name / "rows.csv")
  experiment = load(name)
  assert isinstance(experiment.figure(rows), Figure)
  figures.draw(experiment.figure, rows, tmp_path)
  assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
  assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
  if hasattr(experiment, "table"):
    Console(file=io.StringIO()).print(experiment.table(rows))
