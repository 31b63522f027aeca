"""An answer to a published value: ours, how it was obtained, and a verdict by a stated rule."""

import json
from functools import cache
from typing import Any, Literal, NamedTuple

from experiments import provenance
from experiments.published_memory import printed
from experiments.record import Row, read_rows

How = Literal["derived by arithmetic", "measured on CPU", "measured on H200", "modelled", "-"]
VERDICTS = ("reproduced", "reproduced in shape", "differs", "cannot be tested here")


class Answer(NamedTuple):
  """`verdict` begins with one of VERDICTS and goes on with the reason, or with a note."""

  ours: str
  how: How
  verdict: str


class Missing(Exception):
  """An experiment whose rows are not there."""


@cache
def stored(name: str) -> tuple[Row, ...]:
  """Committed rows. Missing: there are none."""
  path = provenance.RESULTS / name / "rows.csv"
  if not path.exists():
    raise Missing(name)
  return tuple(read_rows(path))


@cache
def measured(name: str) -> How:
  """Where the committed rows of an experiment come from."""
  meta = json.loads((provenance.RESULTS / name / "meta.json").read_text())
  return "measured on H200" if "H200" in meta["device"] else "measured on CPU"


@cache
def left(name: str) -> tuple[str, ...]:
  """Parts that the committed run has not come to."""
  meta = json.loads((provenance.RESULTS / name / "meta.json").read_text())
  return tuple(meta.get("left", ()))


def cannot(reason: str) -> Answer:
  return Answer("", "-", f"cannot be tested here: {reason}")


def number(text: str) -> float | None:
  try:
    return float(text)
  except ValueError:
    return None


def short(x: float) -> str:
  return f"{x:.3g}"


def derived(row: Row, value: float, near: float = 1.0, why: str = "") -> Answer:
  """Reproduced if it prints as the source has it; in shape within a factor of `near`."""
  want = row["value"]
  digits = len(want.split("e")[0].replace(".", "")) if "e" in want else 0
  ours = f"{value:.{digits}g}" if digits else printed(value, want)
  if float(ours) == float(want):
    return Answer(ours, "derived by arithmetic", "reproduced")
  close = max(value / float(want), float(want) / value) <= near
  verdict = "reproduced in shape" if close else "differs"
  return Answer(f"{value:.4g}", "derived by arithmetic", f"{verdict}: {why}")


def judged(ratio: float, why: str, same: float, shape: float, note: str = "") -> str:
  """Reproduced within a factor of `same`, in shape within `shape`, otherwise it differs."""
  off = max(ratio, 1 / ratio) if ratio > 0 else float("inf")
  if off <= same:
    return f"reproduced: {note}" if note else "reproduced"
  verdict = "reproduced in shape" if off <= shape else "differs"
  return f"{verdict}: {short(ratio)} x the published value; {why}"


def beside(
  row: Row, value: float, how: How, why: str, *, same: float = 1.25, shape: float = 3.0,
  note: str = "",
) -> Answer:  # fmt: skip
  """One value beside one. `note` is said of a reproduced one too."""
  ratio = value / float(row["value"])
  return Answer(
    short(value), how, judged(ratio, f"{note}; {why}" if note else why, same, shape, note)
  )


def within(low: float, high: float, value: float, how: How, why: str, shape: float) -> Answer:
  """One value beside a published range: reproduced inside of it, else by the nearer end."""
  said = f"published are {short(low)} to {short(high)}"
  ratio = 1.0 if low <= value <= high else value / (low if value < low else high)
  return Answer(short(value), how, judged(ratio, f"{said}; {why}", 1.0, shape, said))


def only(rows: tuple[Row, ...], **where: Any) -> list[Row]:
  return [r for r in rows if all(r[k] == v for k, v in where.items())]
