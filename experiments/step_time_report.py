"""Kernel and scheme times as a figure over the roofline, and as a table."""

from collections.abc import Iterable
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from experiments.figures import HOLLOW, look, published, scheme_look
from experiments.record import Row

# What is drawn, at which window: the panel of a dtype holds no more lines than can be told apart.
LINES = (
  ("verify", 16), ("step", 16), ("step_ring", 16), ("fold", 16), ("decode", 1), ("decode_ring", 1),
  ("snapshot", 16),
)  # fmt: skip
# Kernels of others, published or timed beside ours.
THEIRS = {
  "float32": (
    ("fla", "fused_recurrent", 16), ("sglang", "snapshot", 16), ("sglang", "verify_tf32", 16),
    ("sglang", "fold", 16),
  ),
  "bfloat16": (
    ("flashinfer", "verify", 16), ("flashinfer", "step_ring", 8),
    ("flashinfer", "step_ring_flush", 8),
  ),
}  # fmt: skip
GREY = "#888888"


def said(name: str) -> str:
  return name.replace("_", " ")


def points(rows: Iterable[Row], **where: Any) -> list[Row]:
  """By batch; columns that older rows lack are those of one decay, and of ours."""
  has = lambda r, k: r.get(k, "gdn" if k == "decay" else None)
  some = [r for r in rows if all(has(r, k) == v for k, v in where.items())]
  return sorted(some, key=lambda r: r["batch"])


def theirs() -> dict[tuple[str, str, int], list[tuple[int, float]]]:
  """(package, kernel, T) -> published (batch, microseconds)."""
  found: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
  for row in published("kernel time"):
    _, package, kernel, T, batch = row["id"].split("-")
    found.setdefault((package, kernel, int(T[1:])), []).append(
      (int(batch[1:]), float(row["value"]))
    )
  return found


def kernel_times(ax: Any, rows: list[Row], dtype: str) -> None:
  """Time against batch; dotted, what a copy of the compulsory bytes takes in the same run."""
  for i, (kernel, T) in enumerate(LINES):
    line = points(rows, kernel=kernel, window=T, state_dtype=dtype, decay="gdn", peer=None)
    if not line:
      continue
    batch = [r["batch"] for r in line]
    ax.plot(batch, [r["time_us"] for r in line], label=f"{said(kernel)}, T = {T}", **look(i))
    floor = [r["bytes"] / r["ceiling_gb_s"] * 1e-3 for r in line]
    ax.plot(batch, floor, linestyle=":", linewidth=0.9, color=look(i)["color"])
  ax.plot([], [], ":", color="black", linewidth=0.9, label="its bytes at the copy ceiling")
  for i, (package, kernel, T) in enumerate(THEIRS[dtype]):
    marker = {"marker": look(i)["marker"], "color": GREY}
    there = theirs().get((package, kernel, T), [])
    label = f"{package} {said(kernel)}, T = {T}"
    ax.plot(*zip(*there, strict=True), label=f"{label}, published", zorder=4, **marker | HOLLOW)
    measured = [
      r for r in points(rows, kernel=kernel, window=T) if (r.get("peer") or "").startswith(package)
    ]
    if measured:
      xs, ys = [r["batch"] for r in measured], [r["time_us"] for r in measured]
      ax.plot(xs, ys, label=label, linewidth=0.9, **marker)
  ax.set(xscale="log", yscale="log", xlabel="decode slots", ylabel="microseconds a layer",
         title=f"kernels, {dtype} states")  # fmt: skip


def scheme_times(axes: Any, whole: list[Row], T: int) -> None:
  """Whole steps over a flush cycle: time against batch, and that of snapshots over it."""
  time, gain = axes
  base = {r["batch"]: r["time_us"] for r in points(whole, scheme="snapshot", window=T)}
  for scheme in dict.fromkeys(r["scheme"] for r in whole):
    line = points(whole, scheme=scheme, window=T)
    batch = [r["batch"] for r in line]
    time.plot(batch, [r["time_us"] for r in line], label=said(scheme), **scheme_look(scheme))
    both = [r for r in line if r["batch"] in base]
    ratio = [base[r["batch"]] / r["time_us"] for r in both]
    gain.plot([r["batch"] for r in both], ratio, **scheme_look(scheme))
  time.set(xscale="log", yscale="log", xlabel="decode slots", ylabel="microseconds a layer",
           title=f"verify and commit, T = {T}, mean over a flush cycle")  # fmt: skip
  gain.set(xscale="log", xlabel="decode slots", ylabel="times as fast as snapshot",
           title=f"each scheme against snapshot, T = {T}", ylim=(0, None))  # fmt: skip


def finish(part: Any, axes: Any, rows: list[Row]) -> None:
  """Batches as they were measured, and one legend for both axes below them."""
  batches = sorted({r["batch"] for r in rows})
  handles: dict[str, Any] = {}
  for ax in axes:
    ax.set_xticks(batches, map(str, batches))
    ax.minorticks_off()
    for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
      handles.setdefault(label, handle)
  part.legend(handles.values(), handles, loc="outside lower center", ncols=4)


def figure(rows: list[Row]) -> Figure:
  """Kernels over the roofline, and, where they were timed, whole steps of every scheme."""
  whole = [r for r in rows if r["kernel"] == "whole_step"]
  fig = Figure(figsize=(9.6, 9.0 if whole else 4.6))
  parts = fig.subfigures(2 if whole else 1, 1, squeeze=False)[:, 0]
  axes = parts[0].subplots(1, 2)
  for ax, dtype in zip(axes, ("float32", "bfloat16"), strict=True):
    kernel_times(ax, rows, dtype)
  finish(parts[0], axes, rows)
  if whole:
    axes = parts[1].subplots(1, 2)
    scheme_times(axes, whole, max(r["window"] for r in whole))
    finish(parts[1], axes, rows)
  return fig


def table(rows: list[Row]) -> Table:
  """A line a kernel and shape: microseconds, and share of the copy ceiling, at each batch."""
  batches = sorted({r["batch"] for r in rows})
  out = Table(title="microseconds (share of the copy ceiling on compulsory bytes)")
  for name in ("what", "state", "decay", "T", *(f"B = {B}" for B in batches), "error"):
    out.add_column(name, justify="left" if name == "what" else "right")
  lines: dict[tuple[Any, ...], dict[int, Row]] = {}
  for r in rows:
    what = " ".join(filter(None, (r.get("peer"), r.get("scheme"), said(r["kernel"]))))
    key = (what, r["state_dtype"], r.get("decay", "gdn"), r["window"])
    lines.setdefault(key, {})[r["batch"]] = r
  for (what, state, decay, T), at in lines.items():
    cell = lambda r: f"{r['time_us']:.1f} ({100 * r['ceiling_share']:.0f} %)" if r else ""
    error = max(r["relative_error"] for r in at.values())
    out.add_row(what, state, decay, str(T), *(cell(at.get(B)) for B in batches), f"{error:.1e}")
  return out
