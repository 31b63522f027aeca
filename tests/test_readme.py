"""The README's code and commands do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL)
PYTHON = [code for kind, code in BLOCKS if kind == "python"]
COMMANDS = [line for kind, code in BLOCKS if not kind for line in code.splitlines() if line]


def test_the_code_runs():
  assert PYTHON
  for code in PYTHON:
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert scope["S"].shape == (2, 2, 128, 128)
    assert bool((scope["S"] != 0).any())


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_targets_exist(command):
  subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


EXPERIMENTS = [c.split()[1:] for c in COMMANDS if c.startswith("python -m experiments")]
AGAIN = [words for words in EXPERIMENTS if words[2] == "remeasure"]


def succeeds(words):
  command = [sys.executable, *words]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-2000:]


def test_experiment_commands_run(tmp_path):
  """In the README's order: figures are drawn from the rows of the runs before them."""
  commands = [words for words in EXPERIMENTS if words not in AGAIN]
  assert len(commands) >= 3
  assert all(c.startswith(("make ", "python -m experiments")) for c in COMMANDS)
  for words in commands:
    assert words[2] == "list" or "--out" in words
    succeeds(word.replace("build/results", str(tmp_path)) for word in words)
  for name in ("drift", "memory"):
    for file in ("rows.csv", "meta.json", "figure.png", "figure.pdf"):
      assert (tmp_path / name / file).stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("words", AGAIN, ids=" ".join)
def test_rows_are_measured_again(words, tmp_path):
  succeeds([*words, "--out", str(tmp_path)])


def test_every_file_and_scheme_that_is_named_exists():
  from commit_schemes import SCHEMES

  for link in re.findall(r"\]\((?!http)([^)]+)\)", TEXT):
    assert (ROOT / link).exists(), link
  named = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
  assert set(named) - {"replay_K"} == {n for n in SCHEMES if not n.startswith("replay_")}
