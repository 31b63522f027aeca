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
  """An experiment whose rows are not there, with its options."""


UNMEASURED = "its rows have not been measured yet"
ON_GPU = ("step_time", "tail")


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


def unmeasured(run: str) -> Answer:
  """What can be measured and has not been: counted apart."""
  where = " on an H200" if run.split()[0] in ON_GPU else ""
  return cannot(f"{UNMEASURED}: `python -m experiments run {run}`{where} writes them")


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
  return Answer(
    f"{value:.4g}", "derived by arithmetic", judged(value / float(want), why, None, near)
  )


def judged(ratio: float, why: str, same: float | None, shape: float) -> str:
  """Reproduced within a factor of `same`, in shape within `shape`, otherwise it differs.

  `same` is None where the setting differs in what the number depends on: in shape at most. `why` is
  said of every verdict, so a setting that is not the published one never goes unsaid.
  """
  off = max(ratio, 1 / ratio) if ratio > 0 else float("inf")
  if same is not None and off <= same:
    verdict = "reproduced"
  else:
    verdict = "reproduced in shape" if off <= shape else "differs"
  return f"{verdict}: {short(ratio)} x the published value; {why}"


def beside(
  row: Row, value: float, how: How, why: str, *, same: float | None = 1.25, shape: float = 3.0
) -> Answer:  # fmt: skip
  """One value beside one."""
  return Answer(short(value), how, judged(value / float(row["value"]), why, same, shape))


def within(
  low: float, high: float, value: float, how: How, why: str, *, same: float | None, shape: float
) -> Answer:
  """A value beside a published range: the factor is 1 inside of it, else that to the nearer end."""
  said = f"published are {short(low)} to {short(high)}"
  ratio = 1.0 if low <= value <= high else value / (low if value < low else high)
  return Answer(short(value), how, judged(ratio, f"{said}; {why}", same, shape))


def only(rows: tuple[Row, ...], **where: Any) -> list[Row]:
  return [r for r in rows if all(r[k] == v for k, v in where.items())]
