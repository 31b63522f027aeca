"""Where rows come from: commit, versions, device and host, each as it is or said to be unknown."""

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"


def commit(root: Path = ROOT, reads: Sequence[str] = ()) -> dict[str, Any]:
  """`commit` and `dirty`; None where not known, and then `git` says why.

  Dirty is any change or new file outside the results, and in those that a measurement reads. A copy
  without its repository takes the commit from $COMMIT, and whether it was changed stays unknown.
  """
  # Who is ended while it asks must not leave a lock behind.
  git = lambda *args: subprocess.run(
    ["git", "--no-optional-locks", "-C", str(root), *args],
    capture_output=True,
    text=True,
    check=True,
  ).stdout.strip()
  try:
    if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
      raise FileNotFoundError(f"{root} is not the top of its repository")
    changes = git("status", "--porcelain", "--", ".", ":!experiments/results")
    for name in reads:
      changes += git("status", "--porcelain", "--", f"experiments/results/{name}/rows.csv")
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changes)}
  except subprocess.CalledProcessError as e:
    reason = e.stderr.strip() or str(e)
  except OSError as e:
    reason = str(e)
  return {"commit": os.environ.get("COMMIT") or None, "dirty": None, "git": reason}


def files(config: Any) -> dict[str, list[tuple[str, int, int]]]:
  """Name, bytes and time of change of what the paths of a configuration lead to, by field: a run
  must not go on with rows of what stood there before. A path that leads nowhere yet is left out. A
  model may be a name or a path: it is a path if there is something."""
  found = {}
  for field in dataclasses.fields(config):
    path = getattr(config, field.name)
    if field.name == "model" and isinstance(path, str):
      path = Path(path)
    if not isinstance(path, Path):
      continue
    try:
      some = sorted(path.iterdir()) if path.is_dir() else [path]
      stats = [(x.name, x.stat() if x.exists() else x.lstat()) for x in some]
    except OSError:  # the experiment says what is wrong with it
      continue
    found[field.name] = [(name, s.st_size, s.st_mtime_ns) for name, s in stats]
  return found


def rows_read(reads: Sequence[str]) -> dict[str, str | None]:
  """sha256 of the rows that a measurement reads, by experiment; None where there are none."""
  digest = lambda path: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
  return {name: digest(RESULTS / name / "rows.csv") for name in reads}


def sources(reads: Sequence[str]) -> dict[str, dict[str, Any]]:
  """Of what commit and device the rows are that a measurement reads, by experiment."""
  found = {}
  for name in reads:
    path = RESULTS / name / "meta.json"
    meta = json.loads(path.read_text()) if path.is_file() else {}
    found[name] = {key: meta.get(key) for key in ("commit", "dirty", "device")}
  return found


def processor() -> str:
  """The host's processor as Linux names it."""
  try:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
  except (OSError, StopIteration):
    return platform.processor() or platform.machine()


def setting() -> dict[str, Any]:
  """What rows must share to stand in one file."""
  [device, *_] = jax.devices()
  return {
    "python": platform.python_version(),
    **{name: version(name) for name in ("jax", "jaxlib", "numpy")},
    "device": device.device_kind,
    "devices": jax.device_count(),
    "host": f"{processor()}, {os.cpu_count()} cores",
  }


def digest(rows: bytes) -> str:
  """What meta.json keeps of rows.csv, so that it does not speak of others."""
  return hashlib.sha256(rows).hexdigest()[:16]
