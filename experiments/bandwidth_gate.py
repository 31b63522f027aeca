"""The published bandwidth gate for every kernel and scheme: share of a copy, at four batches.

SGLang PR 28695 gates its verify by its share of an H20's peak bandwidth at batch 1, 16, 64 and 256:
6.7, 60.8, 74.7 and 79.4 %. Here is the same of all that `step_time` has measured, on the bytes that
an operation cannot avoid; nothing is timed again, so there is no model to choose but that of those
rows (`run step_time --model`). A kernel passes at a batch if its share of the
device's stated peak is no smaller than the published one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from experiments import provenance
from experiments.devices import DEVICES
from experiments.figures import HOLLOW, look, published, scheme_look
from experiments.record import BadInput, Record, Row, read_rows
from experiments.step_time_report import LINES, points, said

READS = ("step_time",)


@dataclass(frozen=True, kw_only=True)
class Config:
  """`rows` are those that `run step_time` has written."""

  rows: Path = provenance.RESULTS / "step_time" / "rows.csv"


CONFIGS: Mapping[str, Config] = MappingProxyType({"full": Config()})


def gate() -> dict[int, float]:
  """Batch -> published share of the peak, per cent."""
  rows = published("bandwidth")
  return {int(r["id"][6:]): float(r["value"]) for r in rows if r["id"].startswith("gate-b")}


def of_peak(r: Row) -> float | None:
  """Per cent of what the maker states; None for a device that is not in the list."""
  device = DEVICES.get(r["device"].removeprefix("NVIDIA "))
  return 100 * r["ceiling_share"] * r["ceiling_gb_s"] / device.bandwidth if device else None


def run(c: Config, record: Record) -> None:
  """BadInput: there are no rows."""
  try:
    rows = read_rows(c.rows)
  except OSError as e:
    raise BadInput(f"{c.rows}: {e.strerror}; `run step_time` writes it") from e
  there = gate()
  line = lambda r: (
    r.get("scheme"),
    r["kernel"],
    r["state_dtype"],
    r.get("decay", "gdn"),
    r["window"],
  )
  ours = [r for r in rows if not r.get("peer") and r["batch"] in there]
  for key in record.parts(dict.fromkeys(map(line, ours)), name=str):
    for r in sorted((r for r in ours if line(r) == key), key=lambda r: r["batch"]):
      share = of_peak(r)
      record(
        kernel=r["kernel"], scheme=r.get("scheme"), state_dtype=r["state_dtype"],
        decay=r.get("decay", "gdn"), window=r["window"], batch=r["batch"],
        copy_percent=round(100 * r["ceiling_share"], 1),
        peak_percent=None if share is None else round(share, 1),
        published_percent=there[r["batch"]],
        passes=None if share is None else share >= there[r["batch"]], device=r["device"],
      )  # fmt: skip


def draw(ax: Any, rows: list[Row], lines: list[tuple[dict[str, Any], str, dict[str, Any]]]) -> None:
  for where, label, style in lines:
    some = points(rows, **where)
    if some:
      ax.plot([r["batch"] for r in some], [r["copy_percent"] for r in some], label=label, **style)
  there = gate()
  ax.plot(list(there), list(there.values()), "o", color="black", markersize=8,
          label="published gate, an H20's peak", **HOLLOW)  # fmt: skip
  ax.set(xscale="log", xlabel="decode slots", ylim=(0, 105))
  ax.set_xticks(list(there), map(str, there))
  ax.minorticks_off()
  ax.legend(loc="best", fontsize=6.5)


def figure(rows: list[Row]) -> Figure:
  """Share of the copy ceiling against batch, the published gate beside it."""
  schemes = dict.fromkeys(r["scheme"] for r in rows if r["scheme"])
  fig = Figure(figsize=(12.6 if schemes else 8.6, 4.2))
  axes = fig.subplots(1, 3 if schemes else 2, sharey=True)
  for ax, dtype in zip(axes, ("float32", "bfloat16"), strict=False):
    draw(ax, rows, [
      ({"kernel": k, "window": T, "state_dtype": dtype, "decay": "gdn", "scheme": None},
       f"{said(k)}, T = {T}", look(i))
      for i, (k, T) in enumerate((*LINES, ("verify_tree", 64)))
    ])  # fmt: skip
    ax.set_title(f"kernels, {dtype} states")
  if schemes:
    T = max(r["window"] for r in rows if r["scheme"])
    draw(axes[2], rows, [
      ({"scheme": s, "window": T}, said(s), scheme_look(s)) for s in schemes
    ])  # fmt: skip
    axes[2].set_title(f"whole steps over a flush cycle, T = {T}")
  axes[0].set_ylabel("share of the copy ceiling, %")
  return fig


def table(rows: list[Row]) -> Table:
  """A line a kernel and shape: per cent of the peak at each batch, and whether that passes."""
  there = gate()
  out = Table(title="per cent of the peak on compulsory bytes; * below the published gate")
  for name in ("what", "state", "decay", "T", *(f"B = {B}: {there[B]}" for B in there)):
    out.add_column(name, justify="left" if name == "what" else "right")
  lines: dict[tuple[Any, ...], dict[int, Row]] = {}
  for r in rows:
    key = (r["scheme"] or said(r["kernel"]), r["state_dtype"], r["decay"], r["window"])
    lines.setdefault(key, {})[r["batch"]] = r
  for (what, *shape), at in lines.items():
    cell = lambda r: "" if r is None else f"{r['peak_percent']}{'' if r['passes'] else ' *'}"
    out.add_row(what, *map(str, shape), *(cell(at.get(B)) for B in there))
  return out
