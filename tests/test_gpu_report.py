"""The report of a GPU's tests: what hangs costs its own time, what is done is not done again."""

from pathlib import Path

import pytest

from tests import gpu_report
from tests.gpu_report import Job, Outcome, ran

BODY = "def test_good(): pass\ndef test_bad(): assert 0\n"


def test_what_hangs_is_ended_and_what_it_started_too(tmp_path: Path):
  alive = tmp_path / "alive"
  child = f"import time; time.sleep(2.5); open({str(alive)!r}, 'w')"
  hangs = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}])"
  found = ran(Job("hangs", 1.0, ("-c", hangs + "; print('so far', flush=True); time.sleep(60)")))
  assert (found.passed, found.ended) == (0, "ended after 1 s")
  assert found.said.startswith("so far")
  assert found.seconds < 30
  other = ran(Job("waits for it", 30, ("-c", "import time; time.sleep(2)")))
  assert (other.passed, other.ended) == (1, "")
  assert not alive.exists()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["alone", "processes"])
def test_of_what_is_ended_the_outcomes_so_far_are_kept(tmp_path: Path, processes):
  if processes:
    pytest.importorskip("xdist")
  (tmp_path / "test_two.py").write_text(BODY + "def test_slow():\n  import time; time.sleep(99)\n")
  args = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path))
  found = ran(Job("two", 9.0, (*args, *processes)))
  assert (found.passed, found.failed, found.ended) == (1, ("test_bad",), "ended after 9 s")
  assert found.seconds < 9 + gpu_report.GRACE


def test_failures_are_named(tmp_path: Path):
  (tmp_path / "test_two.py").write_text(BODY)
  args = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path))
  found = ran(Job("two", 60, args))
  assert (found.passed, found.failed, found.skipped, found.ended) == (1, ("test_bad",), 0, "")
  assert "assert 0" in found.said


def test_a_report_is_completed_and_not_begun_anew(tmp_path: Path, monkeypatch):
  run: list[str] = []
  jobs = [Job(name, 9.0, ()) for name in ("hung", "good", "late")]

  def fake(job: Job) -> Outcome:
    run.append(job.name)
    ended = "ended after 9 s" if len(run) == 1 else ""
    return Outcome(job.name, 3, (), 0, 2.0, ended, "some --> text" if ended else "")

  monkeypatch.setattr(gpu_report, "jobs", lambda *_: iter(jobs))
  monkeypatch.setattr(gpu_report, "ran", fake)
  monkeypatch.setattr(gpu_report, "facts", lambda: {"device": "NVIDIA H200"})
  monkeypatch.setattr(gpu_report, "commit", lambda: "aaaa")
  to = tmp_path / "report.md"
  assert gpu_report.main(["--to", str(to), "--only", "hung", "good"]) == 1
  assert "| hung | 3 | 0 | 0 | 2 | aaaa | ended after 9 s |" in to.read_text()
  assert "| late | | | | | | not run |" in to.read_text()
  assert gpu_report.main(["--to", str(to)]) == 0
  assert run == ["hung", "good", "hung", "late"]
  assert "- device: NVIDIA H200" in to.read_text()
  assert gpu_report.main(["--to", str(to)]) == 0
  assert run[4:] == []
  monkeypatch.setattr(gpu_report, "commit", lambda: "bbbb")
  assert gpu_report.main(["--to", str(to), "--only", "late"]) == 0
  assert run[4:] == ["late"]
  assert "| good | 3 | 0 | 0 | 2 | aaaa |" in to.read_text()
  assert "| late | 3 | 0 | 0 | 2 | bbbb |" in to.read_text()
  run.pop()
  monkeypatch.setattr(gpu_report, "facts", lambda: {"device": "NVIDIA B200"})
  assert gpu_report.main(["--to", str(to), "--seconds", "-1"]) == 0
  assert run[4:] == ["hung"], "another device begins anew; after so many seconds none is begun"
  assert "| late | | | | | | not run |" in to.read_text()


@pytest.mark.parametrize(
  "text", ["", "words", "<!-- {} -->", '<!-- {"outcomes": [3]} -->', "<!-- [ -->"]
)
def test_a_report_that_is_none_is_begun_anew(text: str, tmp_path: Path):
  (tmp_path / "report.md").write_text(text)
  assert gpu_report.earlier(tmp_path / "report.md", {}) == []


def test_files_that_want_a_gpu_are_found(tmp_path: Path):
  names = [job.name for job in gpu_report.jobs(9.0, tmp_path)]
  assert {"test_kernels", "test_recurrent_kernels", "test_torch_kernels"} <= set(names)
  laws = [name for name in names if name.startswith("test_laws with kernels")]
  assert names[-3:] == [*laws, "soak, one layer"]
  assert "test_drift" not in names
