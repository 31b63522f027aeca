"""The memory rows as a figure and a table, beside what was published."""

from textwrap import fill
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from commit_schemes import SCHEMES
from experiments.figures import HOLLOW, logarithmic, look, published, scheme_look
from experiments.record import Row

MIB = 2**20
SHOWN = "Qwen3-Next-80B-A3B"  # whose published account is complete
CARRY, FLIGHT = ("carry_bytes",), ("flight_bytes",)


def total(rows: list[Row], columns: tuple[str, ...], by: str) -> dict[str, dict[Any, float]]:
  """MiB by scheme and then by another column, states and convolutions together."""
  sums: dict[str, dict[Any, float]] = {}
  for row in rows:
    line = sums.setdefault(row["scheme"], {})
    line[row[by]] = line.get(row[by], 0.0) + sum(row[c] for c in columns) / MIB
  return sums


def only(rows: list[Row], **where: Any) -> list[Row]:
  return [row for row in rows if all(row[k] == v for k, v in where.items())]


def shared(lines: dict[str, dict[Any, float]]) -> dict[tuple[str, ...], dict[Any, float]]:
  """Schemes with the same bytes, to three digits, share one line: that of the first."""
  names: dict[tuple, list[str]] = {}
  for name, line in lines.items():
    names.setdefault(tuple((x, f"{y:.3g}") for x, y in line.items()), []).append(name)
  return {tuple(together): lines[together[0]] for together in names.values()}


class Point(NamedTuple):
  """A published value as MiB: `value` of the row `id`, times `scale`."""

  id: str
  column: str
  scheme: str
  scale: float = 1.0

  def mib(self) -> float:
    return next(float(r["value"]) for r in published("memory") if r["id"] == self.id) * self.scale


A_REQUEST = 1024 / 49  # of GiB for 48 running requests and a padding row
POINTS = (
  Point("mem-norm-slot", "carry_bytes", "snapshot"),
  Point("mem-tp1", "flight_bytes", "snapshot", A_REQUEST),
  Point("mem-k8", "flight_bytes", "replay_8", A_REQUEST),
  Point("mem-k4", "flight_bytes", "replay_4", A_REQUEST),
  Point("mem-k1", "flight_bytes", "replay_1", A_REQUEST),
  Point("mem-k0", "flight_bytes", "replay_0", A_REQUEST),
)


def against_window(ax: Axes, rows: list[Row], columns: tuple[str, ...], title: str) -> None:
  """Lines with their names at the right end, and what was published."""
  for names, line in shared(total(rows, columns, "window")).items():
    x, y = list(line), list(line.values())
    style = scheme_look(names[0])
    ax.plot(x, y, **style)
    label = fill(", ".join(names), 28) if len(names) < 5 else f"the {len(names)} others"
    ax.annotate(
      label, (x[-1], y[-1]), (7, 0), textcoords="offset points", va="center", fontsize=7.5,
      color=style["color"], annotation_clip=False,
    )  # fmt: skip
  if rows[0]["model"] == SHOWN and rows[0]["degree"] == 1:
    for point in (p for p in POINTS if p.column in columns):
      style = scheme_look(point.scheme) | HOLLOW | {"markersize": 10}
      ax.plot(16, point.mib(), **style)
  ax.set_xscale("log", base=2)
  ticks = sorted({row["window"] for row in rows})
  ax.set_xticks(ticks, [str(t) for t in ticks])
  ax.set_xlabel("window T, nodes")
  ax.set_yscale("log")
  logarithmic(ax.yaxis)
  ax.set_title(title)


def by_model(ax: Axes, rows: list[Row]) -> None:
  """A line of markers a scheme, a marker a model."""
  lines = total(rows, (*CARRY, *FLIGHT), "model")
  for i, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
    mib = [line[model] for line in lines.values()]
    # Smaller and smaller, so that models of the same size are both seen.
    style = look(i) | {"linestyle": "none", "markersize": 7 - i % 6 / 1.5}
    ax.plot(mib, list(lines), label=model, **style)
  ax.invert_yaxis()
  ax.set_xscale("log")
  logarithmic(ax.xaxis, (1,))
  ax.set_title(f"MiB a running request, slot and flight, T = {rows[0]['window']}")
  ax.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.4, -0.08))


def shown(rows: list[Row]) -> tuple[str, int]:
  """Model and window that stand for all: the published ones if they were counted."""
  models, windows = ({row[k] for row in rows} for k in ("model", "window"))
  return SHOWN if SHOWN in models else min(models), 16 if 16 in windows else max(windows)


def figure(rows: list[Row]) -> Figure:
  """One model against the window, hollow where published; then every model at one window."""
  model, window = shown(rows)
  rows = only(rows, records=rows[0]["records"])
  fig = Figure(figsize=(13.0, 4.4))
  slot, request, models = fig.subplots(1, 3)
  one = only(rows, model=model)
  against_window(slot, one, CARRY, f"{model}: MiB a slot, between steps")
  against_window(request, one, FLIGHT, f"{model}: MiB a running request, in flight")
  by_model(models, only(rows, window=window))
  fig.suptitle(
    f"Recurrent memory with {rows[0]['records']} records, tensor-parallel degree "
    f"{rows[0]['degree']}. Hollow: published in SGLang issue 28730",
    fontsize=9,
  )
  return fig


def table(rows: list[Row]) -> Table:
  """The published window on the model of the figure."""
  model, T = shown(rows)
  rows = only(rows, window=T, model=model)
  out = Table(title=f"{model}, MiB a request at T = {T}")
  out.add_column("scheme")
  for name in ("records", "carry", "flight"):
    out.add_column(name, justify="right")
  out.add_column("state written")
  for records in dict.fromkeys(row["records"] for row in rows):
    some = only(rows, records=records)
    carry, flight = total(some, CARRY, "window"), total(some, FLIGHT, "window")
    for scheme in carry:
      mib = (f"{x[scheme][T]:,.1f}" for x in (carry, flight))
      out.add_row(scheme, records, *mib, SCHEMES[scheme].writes)
  return out
