"""Rows on disk as they are measured, and final files only when a run is complete.

results/NAME/partial/KEY.jsonl is the journal of one configuration on one setting: a line per row
and a line per finished part. A run that finds one keeps the rows of its finished parts. KEY is a
hash of both, of what the configuration's files are and of the rows that the experiment reads, so
another configuration, or another model at the same path, starts anew beside it and loses nothing.
"""

import contextlib
import csv
import dataclasses
import datetime
import faulthandler
import fcntl
import hashlib
import io
import json
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments import provenance

Row = dict[str, Any]
T = TypeVar("T")


class BadInput(Exception):
  """What was given, and what is allowed."""


class Unwritable(OSError):
  """A results folder that cannot be written."""


def cell(text: str) -> Any:
  """A CSV cell as int, float, bool, None (empty) or str. ValueError: its row is short or long."""
  if not isinstance(text, str):
    raise ValueError("a row has more or fewer cells than there are columns")
  if text in ("", "True", "False"):
    return {"": None, "True": True, "False": False}[text]
  for kind in (int, float):
    try:
      return kind(text)
    except ValueError:
      pass
  return text


def read_rows(path: Path) -> list[Row]:
  """Rows of a rows.csv. FileNotFoundError: it is not there. BadInput: it is no table."""
  try:
    with path.open(newline="", encoding="utf-8") as file:
      return [{k: cell(v) for k, v in row.items()} for row in csv.DictReader(file)]
  except ValueError as e:
    raise BadInput(f"{path} is no table of rows: {e}") from e


def rows_csv(rows: list[Row]) -> bytes:
  """Rows as CSV. Python writes the shortest text that reads back as the same float."""
  text = io.StringIO()
  writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
  writer.writeheader()
  writer.writerows(rows)
  return text.getvalue().encode()


def write(path: Path, data: bytes) -> None:
  """The file appears whole or not at all, by way of partial/ beside it."""
  part = path.parent / "partial" / path.name
  part.parent.mkdir(parents=True, exist_ok=True)
  part.write_bytes(data)
  os.replace(part, path)


def writable(folder: Path) -> None:
  """Unwritable: no file can be made in `folder`, or it cannot be made itself."""
  try:
    (folder / "partial").mkdir(parents=True, exist_ok=True)
    for where in (folder, folder / "partial"):
      tempfile.TemporaryFile(dir=where).close()
  except OSError as e:
    raise Unwritable(f"results folder {folder} cannot be written: {e.strerror}") from e


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
  """Rows, meta.json and journals of a folder are of one run at a time. Unwritable: see `writable`;
  another process is at it."""
  writable(folder)
  held = os.open(folder / "partial", os.O_RDONLY)
  try:
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
    yield
  except BlockingIOError as e:
    raise Unwritable(f"results folder {folder} is being written by another run") from e
  finally:
    os.close(held)


def as_json(x: Any) -> Any:
  """Configs and rows hold paths, NumPy and jax scalars. A path of ours is the same anywhere."""
  if isinstance(x, Path) and x.is_relative_to(provenance.ROOT):
    x = x.relative_to(provenance.ROOT)
  return x.item() if hasattr(x, "item") else str(x)


def entry(line: str, first: list[Row]) -> tuple[str, Any]:
  """A line of a journal whose first row is known, if there is one. ValueError: it is none."""
  match json.loads(line):
    case ["facts", {"dirty": _} as value]:
      return "facts", value
    case ["part", {"name": str(), "seconds": int() | float()} as value]:
      return "part", value
    case ["row", dict(value)] if all({*value} == {*row} for row in first):
      return "row", value
    case ["begun" | "stopped" as kind, str(value)]:
      return kind, value
  raise ValueError(f"no entry: {line[:60]!r}")


class Record:
  """What `run` gets. `record(column=value, ...)` is one row; `parts` makes a run resumable."""

  def __init__(self, journal: Path, progress: Progress):
    self.rows: list[Row] = []
    self.earlier: list[dict[str, Any]] = []
    self.finished: set[str] = set()
    self.seconds = 0.0  # that the finished parts of earlier sittings took
    self.left: list[str] = []  # parts that a run cut off by `seconds` did not come to
    self._killed: Counter[str] = Counter()  # parts in which a process was ended from outside
    self._open: str | None = None
    self.console: Console = progress.console
    self._progress = progress
    self._task = progress.add_task("measuring", total=None)
    self._file = journal.open("a+", encoding="utf-8", errors="surrogateescape")
    self._keep_finished_parts()

  def _keep_finished_parts(self) -> None:
    """What follows the last finished part, down to a torn or a damaged line, is measured again."""
    self._file.seek(0)
    rows: list[Row] = []
    facts: list[dict[str, Any]] = []
    end = at = 0
    begun, kept = self._killed, Counter[str]()
    for line in self._file:
      at += len(line.encode(errors="surrogateescape"))
      if not line.endswith("\n"):
        break
      try:
        kind, value = entry(line, [*self.rows, *rows][:1])
      except ValueError as e:
        said = f"{self._file.name} is damaged; what follows its last whole part is measured again"
        self.console.print(f"{said} ({e})", markup=False)
        break
      if kind == "facts":
        facts.append(value)
      elif kind == "row":
        rows.append(value)
      elif kind in ("begun", "stopped"):
        begun[value] += 1 if kind == "begun" else -1
      else:
        self.finished.add(value["name"])
        self.seconds += value["seconds"]
        self.rows += rows
        self.earlier += facts
        rows, facts, end, kept = [], [], at, begun.copy()
    self._file.truncate(end)
    for name in (begun - kept).elements():
      self._append("begun", name)
    self._kept = len(self.rows)

  def _append(self, kind: str, value: Any) -> None:
    self._file.write(json.dumps([kind, value], default=as_json) + "\n")
    self._file.flush()

  def begin(self, facts: dict[str, Any]) -> None:
    """Notes under which commit the following rows are measured."""
    self._append("facts", facts)

  def __call__(self, **row: Any) -> None:
    """One measurement. ValueError: other columns than the first row's, or none."""
    row = json.loads(json.dumps(row, default=as_json))
    if not row or (self.rows and set(row) != set(self.rows[0])):
      want = list(self.rows[0]) if self.rows else "at least one"
      raise ValueError(f"columns of a row are {list(row)}, allowed: {want}")
    self._append("row", row)
    self.rows.append(row)

  def parts(
    self,
    items: Iterable[T],
    *,
    name: Callable[[T], str] = str,
    cost: Callable[[T], float] = lambda _: 1.0,
    seconds: float = math.inf,
    limit: float | None = None,
    arrange: Callable[[list[T]], Iterable[T]] = lambda items: items,
  ) -> Iterator[T]:
    """The items that are not yet finished, in order; rows recorded before the next one are its own.

    cost     relative, for the time left
    seconds  after these no second part is begun: the rows so far become rows.csv, and the same
             command goes on with the others
    limit    seconds after which a part ends the process, for what hangs where no signal is heard;
             in later sittings it comes last, and after two such ends it is left out
    arrange  of what is not yet finished, the items as they are to come: such as those that are made
             beside each other, each when it is done. What does not come is left

    BadInput: two items of one name. ValueError: rows before the first.
    """
    if len(self.rows) > self._kept:
      raise ValueError("rows before the first part would come twice in a resumed run")
    items = list(items)
    names = [name(item) for item in items]
    if twice := {n for n in names if names.count(n) > 1}:
      raise BadInput(f"parts {sorted(twice)} are named twice, allowed: one part a name")
    costs = dict(zip(names, map(cost, items), strict=True))
    done = sum(c for n, c in costs.items() if n in self.finished)
    if done:
      self.console.print(f"resuming: {len(self.finished)} of {len(names)} parts are kept")
    self._progress.update(self._task, total=sum(costs.values()), completed=done)
    wanted = [(n, item) for n, item in zip(names, items, strict=True) if n not in self.finished]
    if limit is not None:
      wanted.sort(key=lambda x: self._killed[x[0]])
      while wanted and self._killed[wanted[-1][0]] > 1:
        self.console.print(f"{wanted.pop()[0]} is left out: it has ended two processes")
    first = began = time.monotonic()
    for i, item in enumerate(arrange([item for _, item in wanted])):
      if i and began - first > seconds:
        break
      n = name(item)
      self._progress.update(self._task, description=n, completed=done)
      self._cost, self._done = costs[n], done
      if limit is not None:
        self._append("begun", n)
        self._open = n
        faulthandler.dump_traceback_later(limit, exit=True, file=2)
      yield item
      if limit is not None:
        faulthandler.cancel_dump_traceback_later()
        self._open = None
      before, began = began, time.monotonic()
      self._append("part", {"name": n, "seconds": began - before})
      self.finished.add(n)
      done += costs[n]
      self._progress.update(self._task, completed=done)
    if left := [n for n, _ in wanted if n not in self.finished]:
      self.left = left
      self.console.print(f"{len(left)} parts are left: the same command goes on")

  def say(self, what: str) -> None:
    """What is being done before or between parts."""
    self._progress.update(self._task, description=what)

  def advance(self, fraction: float) -> None:
    """How much of the current part is done, 0 to 1."""
    self._progress.update(self._task, completed=self._done + self._cost * min(fraction, 1.0))

  def close(self) -> None:
    """An interrupt or an error is not what ends a process from outside."""
    if self._open is not None:
      faulthandler.cancel_dump_traceback_later()
      self._append("stopped", self._open)
    self._file.close()


def bar(console: Console) -> Progress:
  return Progress(
    TextColumn("{task.description}"),
    BarColumn(),
    TextColumn("{task.percentage:3.0f}%"),
    TimeElapsedColumn(),
    TextColumn("left"),
    TimeRemainingColumn(),
    console=console,
    speed_estimate_period=600.0,
  )


def measure(
  experiment: Any, config: Any, folder: Path, console: Console | None = None
) -> list[Row]:
  """Runs `experiment.run`, or what is left of it, and writes rows.csv and meta.json to `folder`.

  Unwritable: before anything is measured. An interrupt keeps the journal and touches no final file.
  """
  with alone(folder):
    return measured(experiment, config, folder, console or Console(stderr=True))


def measured(experiment: Any, config: Any, folder: Path, console: Console) -> list[Row]:
  """`measure`, where nobody else writes."""
  setting, reads = provenance.setting(), getattr(experiment, "READS", ())
  read = provenance.files(config) | provenance.rows_read(reads)
  given = [dataclasses.asdict(config), setting, *([read] if read else [])]
  settled = json.dumps(given, sort_keys=True, default=as_json)
  journal = folder / "partial" / f"{hashlib.sha256(settled.encode()).hexdigest()[:12]}.jsonl"
  facts = provenance.commit(reads=reads) | {
    "date": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds")
  }
  began = time.monotonic()
  with bar(console) as progress:
    record = Record(journal, progress)
    try:
      record.begin(facts)
      experiment.run(config, record)
    finally:
      record.close()
  states = [x["dirty"] for x in (facts, *record.earlier)]
  meta = {
    "config": json.loads(settled)[0],
    **facts,
    # Of all sittings: rows of an early one are not clean because the tree was later.
    "dirty": True if True in states else None if None in states else False,
    **setting,
    "clock": getattr(experiment, "CLOCK", None),
    "seconds": round(record.seconds + time.monotonic() - began, 1),
    "resumed": record.earlier,
    **({"left": record.left} if record.left else {}),
    **({"read": provenance.sources(reads)} if reads else {}),
  }
  rows = rows_csv(record.rows)
  meta["rows"] = provenance.digest(rows)
  for old in ("figure.png", "figure.pdf"):  # a figure of other rows must not stand beside these
    (folder / old).unlink(missing_ok=True)
  write(folder / "rows.csv", rows)
  write(folder / "meta.json", (json.dumps(meta, indent=2) + "\n").encode())
  if not record.left:
    journal.unlink()
  return read_rows(folder / "rows.csv")
