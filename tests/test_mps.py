"""The service by which processes share a GPU: begun, tried, given to those it is for, ended."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments import mps
from experiments.mps import shared_gpu


@pytest.fixture
def control(tmp_path, monkeypatch) -> Path:
  """In place of NVIDIA's program: it writes down what it is told, and where."""
  said = tmp_path / "said"
  program = tmp_path / mps.CONTROL
  program.write_text(f'#!/bin/sh\necho "$1 $(cat) $CUDA_MPS_PIPE_DIRECTORY" >> {said}\n')
  program.chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
  monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
  return said


def seen() -> str:
  """What a process that is started now finds in its environment."""
  code = "import os; print(os.environ.get('CUDA_MPS_PIPE_DIRECTORY', ''))"
  return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()


def test_it_is_begun_and_ended_and_only_those_who_are_given_it_share(control, monkeypatch):
  monkeypatch.setattr(mps, "PROBE", "import os; os.environ['CUDA_MPS_PIPE_DIRECTORY']")
  with shared_gpu() as env:
    folder = env["CUDA_MPS_PIPE_DIRECTORY"]
    assert Path(folder).is_dir()
    assert seen() == ""
  assert control.read_text().split() == ["-d", folder, "quit", folder]
  assert not Path(folder).exists()


@pytest.mark.parametrize("probe", ["raise SystemExit(1)", "import time; time.sleep(60)"])
def test_where_it_does_not_work_nobody_is_given_it(control, monkeypatch, probe):
  monkeypatch.setattr(mps, "PROBE", probe)
  with shared_gpu(seconds=1.0) as env:
    assert env == {}
  assert "quit" in control.read_text(), "nothing is left running"


def test_where_there_is_none_or_somebody_elses_nothing_is_begun(control, monkeypatch):
  with monkeypatch.context() as m:
    m.setenv("PATH", "")
    with shared_gpu() as env:
      assert env == {}
  monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/theirs")
  with shared_gpu() as env:
    assert env == {}
  assert seen() == "/theirs"
  assert not control.exists()
