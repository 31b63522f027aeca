"""Commands end in files or in one line: bad input says what is allowed, an interrupt what stays."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import provenance
from experiments.command_line import BadInput, configured, experiments, load, main
from tests.toy import FINAL

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
  "args, message",
  [
    (
      ["nonsense"],
      r"command 'nonsense', allowed: list, run NAME, figure NAME \[NAME ...\], table NAME, rem",
    ),
    (["run", "nonsense"], "experiment 'nonsense', allowed: .*memory"),
    (["run", "memory", "--config", "huge"], "--config huge, allowed: full, smoke"),
    (["run", "memory", "--wndows", "4"], "--wndows 4, allowed: .*--windows"),
    (["run", "memory", "--windows", "0"], "windows = .*0.*, allowed: each 1 to 65536"),
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


def cli(*args: str, module: tuple[str, str] = ("-m", "experiments")):
  return subprocess.run(
    [sys.executable, *module, *args],
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
  """A command that hears interrupts, also where tests run in the background of a script, which
  ignores them and hands that on."""
  command = [sys.executable, *options, "-m", "experiments", *args]
  ours = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
  finally:
    signal.signal(signal.SIGINT, ours)


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


@pytest.mark.parametrize("args", [("targets",), ("published", "--csv")], ids=" ".join)
def test_a_terminal_without_unicode_is_no_error(args: tuple[str, ...]) -> None:
  """What is for a file is UTF-8 in any locale."""
  command = [sys.executable, "-m", "experiments", "table", *args]
  env = os.environ | {"PYTHONIOENCODING": "ascii"}
  done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True)
  assert (done.returncode, done.stderr) == (0, b"")
  assert done.stdout.decode().isascii() == (args == ("targets",))


def test_figures_of_several_experiments_are_drawn_by_one_process(tmp_path: Path) -> None:
  for name in ("memory", "prefix"):
    shutil.copytree(
      provenance.RESULTS / name, tmp_path / name, ignore=shutil.ignore_patterns("*.p*")
    )
  main(["figure", "memory", "prefix", "--out", str(tmp_path)])
  assert all((tmp_path / name / "figure.pdf").exists() for name in ("memory", "prefix"))
  with pytest.raises(BadInput, match="experiment 'nonsense', allowed"):
    main(["figure", "memory", "nonsense", "--out", str(tmp_path)])


@pytest.mark.parametrize(
  "args, says",
  [
    ("cycles --seed -1", "seed = -1, allowed: 0 to 4294967295"),
    ("prefix --seed 99999999999999999999999", "seed = 99999999999999999999999, allowed"),
    ("memory --windows 4 4", "windows = (4, 4), allowed: each at most once"),
    ("memory --schemes snapshot snapshot", "allowed: each at most once"),
    ("roofline --batches 1 1", "batches = (1, 1), allowed: each at most once"),
    ("memory --windows 99999999999", "allowed: each 1 to 65536"),
  ],
)
def test_what_no_configuration_may_be(args: str, says: str, tmp_path: Path):
  with pytest.raises(BadInput, match=re.escape(says)):
    main(["run", *args.split(), "--out", str(tmp_path)])


@pytest.mark.parametrize("name", experiments())
def test_every_preset_is_one_that_may_be(name: str):
  """A distribution may have a share twice, and the ends of a range may be equal."""
  for preset in load(name).CONFIGS:
    configured(load(name), name, ["--config", preset])


def test_an_option_may_come_before_a_name(tmp_path: Path, capsys: pytest.CaptureFixture):
  shutil.copytree(provenance.RESULTS / "memory", tmp_path / "memory")
  main(["table", "--csv", "--out", str(tmp_path), "memory"])
  assert capsys.readouterr().out == (tmp_path / "memory" / "rows.csv").read_text()
  with pytest.raises(BadInput, match=r"none.memory.rows.csv: No such file"):
    main(["figure", "--out", str(tmp_path / "none"), "memory"])


def test_a_full_disk_is_one_line(tmp_path: Path):
  """Here, files that may have no more than 3000 bytes; with room, the same command goes on."""
  small = (
    "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000));"
    "runpy.run_module('experiments', run_name='__main__', alter_sys=True)"
  )
  args = "run", "memory", "--config", "smoke", "--out", str(tmp_path)
  full = cli(*args, module=("-c", small))
  kept = "File too large: finished parts are kept, the same command goes on"
  assert (full.returncode, full.stderr.splitlines()[-1]) == (2, f"experiments: {kept}")
  assert "Traceback" not in full.stderr
  assert not [name for name in FINAL if (tmp_path / "memory" / name).exists()]
  done = cli(*args)
  assert done.returncode == 0
  assert "resuming: " in done.stderr


def test_a_figure_is_not_printed(capsys: pytest.CaptureFixture):
  with pytest.raises(SystemExit):
    main(["figure", "memory", "--csv"])
  assert "unrecognized arguments: --csv" in capsys.readouterr().err


def test_ends_of_a_range_may_be_equal():
  configured(load("roofline"), "roofline", ["--accepted", "2", "2"])
