"""Every test that wants a GPU, each file in a process of its own, and a report of it to commit.

    python -m tests.gpu_report [--seconds N] [--only WORD ...] [--to FILE]

What is run: test files that mark something `gpu` (all of each: the bodies of the interpreter run on
the device too), the laws of the schemes with the kernels as their ops, and 100,000 steps of random
acceptance under every scheme. Processes share the GPU (experiments/mps.py). A file that takes
longer than its time is ended and said to have hung; the others run all the same. With `--seconds`
no further one is begun after so many. A report of the same device and versions that is there
already is completed: what ended in good order is run again only at another commit, and what is not
run again keeps the commit that it was run at.
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from experiments.mps import shared_gpu

ROOT = Path(__file__).parents[1]
GRACE = 20.0  # seconds to write down what was done, after an interrupt
TO = ROOT / "experiments" / "results" / "gpu_tests.md"
# The laws compile thousands of small programs: timing the variants of a product takes longer than
# running it, and threads of one process's compiler wait for those of the others.
QUICKLY = "--xla_gpu_autotune_level=0 --xla_gpu_force_compilation_parallelism=1"
SOAK = (
  "from experiments import record, soak; from pathlib import Path; import sys\n"
  "for r in record.measure(soak, soak.CONFIGS['layer'], Path(sys.argv[1])):\n"
  "  print(r['scheme'], r['steps'], 'steps', r['states_compared'], 'states', r['compared'],"
  " r['error_over_budget'])"
)


class Job(NamedTuple):
  """A process: name, seconds that it may take, arguments behind python, environment."""

  name: str
  seconds: float
  args: tuple[str, ...]
  env: Mapping[str, str] = MappingProxyType({})


def pytest_of(path: str) -> tuple[str, ...]:
  """Arguments of pytest. Not everything that CI has is on a GPU machine. Most of the time goes into
  compiling, so there are almost as many processes as cores, and all share the GPU."""
  args = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--durations=9", path]
  if find_spec("beartype") is None:
    args += ["-o", "addopts="]
  if find_spec("xdist") is not None:
    args += ["-n", str(max(1, (os.cpu_count() or 1) - 3)), "--dist", "loadgroup"]
  return tuple(args)


def jobs(seconds: float, soak_rows: Path) -> Iterator[Job]:
  for path in sorted((ROOT / "tests").glob("test_*.py")):
    if "mark.gpu" in path.read_text(encoding="utf-8"):
      # Threads for what the interpreter would need them for: here those tests run on the device.
      yield Job(path.stem, seconds, pytest_of(f"tests/{path.name}"), {"NPROC": "8"})
  laws = pytest_of("tests/test_laws.py")
  env = {"LAWS_OPS": "mosaic_gpu", "XLA_FLAGS": QUICKLY}
  yield Job("test_laws with kernels", seconds, (*laws, "-k", "not kda"), env)
  yield Job("test_laws with kernels, a decay a channel", seconds, (*laws, "-k", "kda"), env)
  yield Job("soak, one layer", 2 * seconds, ("-c", SOAK, str(soak_rows)))


class Outcome(NamedTuple):
  name: str
  passed: int
  failed: tuple[str, ...]
  skipped: int
  seconds: float
  ended: str  # empty: in good order
  said: str  # its last lines, where something is wrong
  commit: str = "unknown"


def heeds_interrupts() -> None:
  """In a new process, also where this one was started in the background, which ignores them."""
  signal.signal(signal.SIGINT, signal.SIG_DFL)


def ran(job: Job) -> Outcome:
  """Runs a job to its end, or ends it and all that it has started.

  It is interrupted first: pytest then writes down what it has come to.
  """
  with tempfile.TemporaryDirectory() as folder:
    found, said = Path(folder) / "junit.xml", Path(folder) / "said"
    args = [sys.executable, *job.args]
    if "pytest" in args:
      # A test that was interrupted has had its setup alone, which is not to count.
      args += ["--junitxml", str(found), "-o", "junit_duration_report=call"]
    began = time.monotonic()
    with said.open("wb") as out:
      process = subprocess.Popen(
        args, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **job.env},
        start_new_session=True, preexec_fn=heeds_interrupts,
      )  # fmt: skip
      try:
        code = process.wait(job.seconds)
        ended = "" if code in (0, 1) else f"exit code {code}"
      except subprocess.TimeoutExpired:
        code, ended = 1, f"ended after {job.seconds:.0f} s"
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
          process.wait(GRACE)
      finally:
        with contextlib.suppress(ProcessLookupError):
          os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    text = said.read_text(errors="replace").splitlines()
    passed, failed, skipped = counts(found) if found.exists() else (code == 0, (), 0)
    wrong = failed or ended or code
    keep = text[-40:] if wrong else text[-12:] if "pytest" not in args else []
    took = round(time.monotonic() - began, 1)
    return Outcome(job.name, passed, failed, skipped, took, ended, "\n".join(keep))


def counts(path: Path) -> tuple[int, tuple[str, ...], int]:
  """Passed, names of failed, skipped of a junit file."""
  passed, failed, skipped = 0, [], 0
  for case in ET.parse(path).iter("testcase"):
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
      failed.append(case.attrib["name"])
    elif "skipped" in kinds:
      skipped += 1
    else:
      passed += 1
  return passed, tuple(failed), skipped


def output(*args: str) -> str:
  try:
    return subprocess.run(args, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
  except (OSError, subprocess.CalledProcessError):
    return ""


def facts() -> dict[str, str]:
  """Device, driver, versions; asked of other processes, so that no GPU is held here."""
  seen = output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
  device, _, driver = (seen.splitlines() or ["none"])[0].partition(", ")

  def installed(name: str) -> str:
    try:
      return version(name)
    except PackageNotFoundError:
      return "none"

  packages = ("jax", "jaxlib", "jax-cuda13-plugin", "numpy", "torch")
  return {
    "device": device,
    "driver": driver or "none",
    "python": sys.version.split()[0],
    **{name: installed(name) for name in packages},
  }


def commit() -> str:
  """That of the tree, and whether it is changed."""
  named = output("git", "rev-parse", "HEAD")[:9] or os.environ.get("COMMIT", "unknown")
  changed = output(
    "git", "--no-optional-locks", "status", "--porcelain", "--", ".", ":!experiments/results"
  )
  return named + (", changed" if changed else "")


def earlier(to: Path, about: dict[str, str]) -> list[Outcome]:
  """Outcomes of a report of the same facts that ended in good order; none of one that is not
  ours."""
  try:
    *_, data = to.read_text().split("<!-- ")
    old = json.loads(data.rsplit(" -->", 1)[0])
    known = [Outcome(**{**o, "failed": tuple(o["failed"])}) for o in old["outcomes"]]
    return [o for o in known if not o.ended] if old["facts"] == about else []
  except (OSError, ValueError, KeyError, TypeError):
    return []


def report(about: dict[str, str], outcomes: list[Outcome], left: list[str]) -> str:
  """Markdown for people; what a later call goes on from is in a comment at its end."""
  date = datetime.datetime.now(datetime.UTC).isoformat("T", "seconds")
  good = lambda o: not (o.failed or o.ended) and o.passed
  lines = ["# Tests on a GPU", "", "Written by `python -m tests.gpu_report`.", ""]
  lines += [f"- {name}: {value}" for name, value in (about | {"date": date}).items()]
  lines += [
    "",
    "| what | passed | failed | skipped | seconds | commit | |",
    "|---|---|---|---|---|---|---|",
  ]
  lines += [
    f"| {o.name} | {int(o.passed)} | {len(o.failed)} | {o.skipped} | {o.seconds:.0f} | {o.commit} "
    f"| {'' if good(o) else o.ended or 'wrong'} |"
    for o in outcomes
  ]
  lines += [f"| {name} | | | | | | not run |" for name in left]
  for o in outcomes:
    if o.said:
      lines += ["", f"## {o.name}", "", *(f"- failed: `{name}`" for name in o.failed)]
      lines += ["", "```", o.said, "```"]
  data: dict[str, Any] = {"facts": about, "outcomes": [o._asdict() for o in outcomes]}
  return "\n".join([*lines, "", f"<!-- {json.dumps(data)} -->", ""])


def main(args: list[str]) -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
  parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after these")
  parser.add_argument("--each", type=float, default=240.0, help="that a file may take")
  parser.add_argument("--only", nargs="*", default=[""], help="words, one of which a name has")
  parser.add_argument("--to", type=Path, default=TO)
  parser.add_argument("--soak-rows", type=Path, default=ROOT / "experiments" / "results" / "soak")
  given = parser.parse_args(args)
  about, at = facts(), commit()
  outcomes = {o.name: o for o in earlier(given.to, about)}
  every = list(jobs(given.each, given.soak_rows))
  known = {o.name for o in outcomes.values() if o.commit == at}
  wanted = [
    job for job in every
    if job.name not in known and any(word in job.name for word in given.only)
  ]  # fmt: skip
  began = time.monotonic()
  with shared_gpu() as shared:
    for i, job in enumerate(wanted):
      if i and time.monotonic() - began > given.seconds:
        break
      print(job.name, flush=True)
      new = ran(job._replace(env={**shared, **job.env}))._replace(commit=at)
      print(f"  {new._replace(said='')}", flush=True)
      outcomes[job.name] = new
      left = [j.name for j in every if j.name not in outcomes]
      given.to.parent.mkdir(parents=True, exist_ok=True)
      given.to.write_text(report(about, list(outcomes.values()), left))
  return any(o.failed or o.ended or not o.passed for o in outcomes.values())


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
