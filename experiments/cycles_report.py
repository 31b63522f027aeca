"""Drift on synthetic keys as a figure and a table, published values hollow on the same axes."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from experiments.figures import HOLLOW, logarithmic, look, published, steps
from experiments.published_answer import number
from experiments.record import Row

# Published id -> inputs and line. The study printed most of them for one kind of inputs.
LINES: Mapping[str, tuple[str, str]] = MappingProxyType(
  {
    "cycle-step": ("a", "one-token steps"),
    "cycle-wy": ("a", "window solve and fold"),
    "cycle-x3": ("b", "all dots bf16x3"),
    "cycle-tf32": ("a", "all dots tf32"),
    "cycle-bf16": ("a", "all dots bf16"),
    "cycle-stash": ("a", "records bf16"),
    "cycle-state": ("a", "checkpoint bf16"),
    "cycle-fold": ("b", "fold dots bf16"),
  }
)


def late(rows: list[Row], share: float, column: str = "state_error", **where: object) -> float:
  """Mean over the last `share` of the cycles. KeyError: there are no such rows."""
  some = [r for r in rows if all(r[k] == v for k, v in where.items())]
  if not some:
    raise KeyError(f"no rows with {where}")
  first = (1 - share) * max(r["cycle"] for r in some)
  return float(np.mean([r[column] for r in some if r["cycle"] > first]))


def figure(rows: list[Row]) -> Figure:
  """State error against cycles for each kind of inputs; against the commits between two folds."""
  fig = Figure(figsize=(10.0, 8.0))
  axes = fig.subplots(2, 2).ravel()
  kinds = list(dict.fromkeys(r["inputs"] for r in rows))
  names = list(dict.fromkeys(r["line"] for r in rows))
  told = {r["id"]: number(r["value"]) for r in published("numerics")}
  for ax, kind in zip(axes, kinds, strict=False):
    for i, name in enumerate(names):
      line = [r for r in rows if (r["inputs"], r["line"], r["every"]) == (kind, name, 1)]
      x, y = [r["cycle"] for r in line], [r["state_error"] for r in line]
      ax.plot(x, y, label=name, markevery=(i % 6, 6), **look(i))
      for id, where in LINES.items():
        if where == (kind, name):
          style = look(i) | HOLLOW | {"markersize": 8}
          ax.plot([x[-1]], [told[id]], clip_on=False, zorder=5, **style)
    first = next(r for r in rows if r["inputs"] == kind)
    said = f"rho {first['rho']:g}, log decay {first['decay']:g}, beta {first['beta']:g}"
    ax.set(yscale="log", xlabel="cycles of verify and commit")
    ax.set_title(f"{kind}: relative state error, {said}")
  axes[0].legend(ncols=2, title="hollow: as published, after 400 to 600 cycles")
  ax = axes[3]
  for i, kind in enumerate(kinds):
    every = sorted(
      {r["every"] for r in rows if (r["inputs"], r["line"]) == (kind, "checkpoint bf16")}
    )
    at = [late(rows, 0.5, inputs=kind, line="checkpoint bf16", every=m) for m in every]
    ax.plot(every, at, label=f"inputs {kind}", **look(i))
    ax.plot(every, [at[0] / (m / every[0]) ** 0.5 for m in every], color="#999999", linewidth=0.8)
    known = [m for m in every if f"defer-{kind}-m{m}" in told]
    hollow = look(i) | HOLLOW | {"markersize": 8}
    ax.plot(known, [told[f"defer-{kind}-m{m}"] for m in known], **hollow)
    steps(ax.xaxis, every)
  ax.set(xscale="log", yscale="log", xlabel="commits from fold to fold, m")
  ax.set_title("a bf16 checkpoint, second half; grey: 1 / sqrt(m), hollow: published")
  steps(ax.xaxis, {r["every"] for r in rows})
  logarithmic(ax.yaxis)
  ax.legend()
  return fig


def table(rows: list[Row]) -> Table:
  """Mean errors over the last third of the cycles."""
  out = Table(title="mean error over the last third of the cycles")
  for name in ("inputs", "lowered", "m", "state", "unrounded", "output", "bf16 equal"):
    out.add_column(name, justify="left" if name == "lowered" else "right")
  for kind, line, m in dict.fromkeys((r["inputs"], r["line"], r["every"]) for r in rows):
    of = lambda column, k=kind, x=line, m=m: late(rows, 1 / 3, column, inputs=k, line=x, every=m)
    errors = [f"{of(x):.1e}" for x in ("state_error", "unrounded_error", "output_error")]
    out.add_row(kind, line, str(m), *errors, f"{of('bf16_equal'):.3f}")
  return out
