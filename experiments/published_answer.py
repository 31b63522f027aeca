"""An answer to a published value: ours, how it was obtained, and a verdict by a stated rule."""

from functools import cache
from typing import Any, Literal, NamedTuple

from experiments import provenance
from experiments.published_memory import printed
from experiments.record import Row, read_rows

How = Literal["derived by arithmetic", "measured on CPU", "measured on H200", "modelled", "-"]
VERDICTS = ("reproduced", "reproduced in shape", "differs", "cannot be tested here")


class Answer(NamedTuple):
  """`verdict` begins with one of VERDICTS; all but the first go on with the reason."""

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


def beside(
  row: Row, value: float, how: How, why: str, *, same: float = 1.25, shape: float = 3.0
) -> Answer:
  """Reproduced within a factor of `same`, in shape within `shape`, otherwise it differs."""
  want = float(row["value"])
  ratio = max(value / want, want / value) if value > 0 and want > 0 else float("inf")
  text = f"{short(value / want)} x the published value; {why}"
  if ratio <= same:
    return Answer(short(value), how, "reproduced")
  verdict = "reproduced in shape" if ratio <= shape else "differs"
  return Answer(short(value), how, f"{verdict}: {text}")


def only(rows: tuple[Row, ...], **where: Any) -> list[Row]:
  return [r for r in rows if all(r[k] == v for k, v in where.items())]
