"""Committed rows measured again, and compared with what is committed within stated noise.

    python -m experiments remeasure [NAME ...] [--out DIR] [--seconds N]

Without a name: every experiment listed here whose rows come from the device at hand. New rows go to
DIR (build/remeasured), the committed ones stay as they are. After N seconds no further row is
begun, and those that there are by then are compared.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from rich.table import Table

from experiments import provenance
from experiments.record import Row, read_rows

OUT = provenance.ROOT / "build" / "remeasured"


class Noise(NamedTuple):
  """What tells rows apart, and how much a column may differ, relative to the larger value."""

  keys: tuple[str, ...]
  columns: Mapping[str, float]


# Device times of one program on two H200 differed by 2 % at most, errors not at all: inputs have a
# seed (results/remeasured). Times of a host, and throughput made of them, differ by more.
NOISE: Mapping[str, Noise] = MappingProxyType(
  {
    "step_time": Noise(
      ("kernel", "scheme", "peer", "state_dtype", "decay", "batch", "window"),
      {"time_us": 0.05, "relative_error": 0.1},
    ),
    "concurrency": Noise(
      ("model", "scheme", "budget", "concurrency"),
      {"tokens_per_s": 0.1, "layer_us": 0.1, "admitted": 0.0},
    ),
    "model_step": Noise(
      ("scheme", "ops", "batch", "window"), {"step_us": 0.1, "recurrent_share": 0.1}
    ),
    "memory": Noise(
      ("scheme", "records", "model", "degree", "window", "memory"),
      {"carry_bytes": 0.0, "flight_bytes": 0.0},
    ),
    "roofline": Noise(
      ("part", "device", "model", "scheme", "state_dtype", "batch", "window"),
      {"bytes": 0.0, "flops": 0.0, "low_us": 0.1, "high_us": 0.1},
    ),
  }
)


class Difference(NamedTuple):
  """One value of one row; `off` is relative, None where one of the two is missing."""

  key: tuple[Any, ...]
  column: str
  committed: float | None
  measured: float | None
  off: float | None
  allowed: float

  @property
  def within(self) -> bool:
    return self.off is not None and self.off <= self.allowed


def difference(a: float | None, b: float | None) -> float | None:
  if a is None and b is None:
    return 0.0
  if a is None or b is None:
    return None
  largest = max(abs(a), abs(b))
  return abs(a - b) / largest if largest else 0.0


def compare(
  committed: list[Row], measured: list[Row], noise: Noise, *, common: bool = False
) -> list[Difference]:
  """Every value of every row of either side, or of those that both have; a column that is not there
  is None.

  ValueError: two rows of one key; none that both have.
  """
  sides = []
  for rows in (committed, measured):
    by_key = {tuple(r.get(k) for k in noise.keys): r for r in rows}
    if len(by_key) < len(rows):
      raise ValueError(f"{len(rows)} rows have {len(by_key)} keys {noise.keys}, allowed: one each")
    sides.append(by_key)
  old, new = sides
  keys = [key for key in dict.fromkeys([*old, *new]) if not common or (key in old and key in new)]
  if not keys:
    raise ValueError("no row was measured both times")
  found = []
  for key in keys:
    for column, allowed in noise.columns.items():
      a, b = (side[key].get(column) if key in side else None for side in (old, new))
      gone = (key in old) != (key in new)
      off = None if gone else difference(a, b)
      found.append(Difference(key, column, a, b, off, allowed))
  return found


def stored(name: str) -> tuple[list[Row], dict[str, Any]]:
  folder = provenance.RESULTS / name
  return read_rows(folder / "rows.csv"), json.loads((folder / "meta.json").read_text())


def here(name: str) -> bool:
  """Committed rows of an experiment come from a device like the one at hand."""
  try:
    return stored(name)[1].get("device") == jax.devices()[0].device_kind
  except OSError:
    return False


def table(name: str, found: list[Difference]) -> Table:
  """What lies outside its noise, and how much the rest differs."""
  beyond = [d for d in found if not d.within]
  good, rows = len(found) - len(beyond), len({d.key for d in found})
  out = Table(title=f"{name}: {good} of {len(found)} values within noise, of {rows} rows")
  for column in ("row", "column", "committed", "measured", "off", "allowed"):
    out.add_column(column, overflow="fold")
  for d in beyond:
    off = "missing" if d.off is None else f"{100 * d.off:.1f} %"
    cells = (" ".join(map(str, d.key)), d.column, d.committed, d.measured, off)
    out.add_row(*map(str, cells), f"{100 * d.allowed:.0f} %")
  return out
