"""The amplification rows as a figure, a table and an answer."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table

from experiments.figures import HOLLOW, look, value_of
from experiments.record import Row

GROWTH = ("power_entry", "row_sum", "inverse_entry", "gain")
NAMES = {
  "power_entry": "powers of A: largest entry",
  "row_sum": "inverse: largest row sum",
  "inverse_entry": "inverse: largest entry below the diagonal",
  "gain": "inverse: gain from v - S k to u",
}


# Line -> published ids by block size, for unit keys and beta up to 1.
THERE = {
  "power_entry": {n: f"power-n{n}-b1" for n in (16, 32, 64)},
  "row_sum": {n: f"row-sum-{n}" for n in (8, 16)},
}
SOLVED = {
  "substitution": {n: f"solve-{n}-0.9-1-sub" for n in (16, 32, 64)},
  "blocks of 16": {n: f"solve-{n}-0.9-1-blk" for n in (16, 32, 64)},
  "Neumann doubling": {n: f"solve-{n}-0.9-1-neu" for n in (16, 32, 64)},
}


def hollow(ax: Axes, ids: dict[int, str], style: dict[str, Any]) -> None:
  """Published values by block size, in the look of the line that they belong to."""
  there = [value_of(id) for id in ids.values()]
  ax.plot(list(ids), there, **style | HOLLOW | {"markersize": 8, "zorder": 5})


def only(rows: list[Row], **where: Any) -> list[Row]:
  return [row for row in rows if all(row[k] == v for k, v in where.items())]


def worst(rows: list[Row], column: str, by: str = "block") -> tuple[list, list[float]]:
  """The largest value of a column at each value of another."""
  at: dict[Any, float] = {}
  for row in rows:
    at[row[by]] = max(row[column], at.get(row[by], 0.0))
  return sorted(at), [at[x] for x in sorted(at)]


def finish(ax: Axes, blocks: list[int], title: str) -> None:
  ax.set(xscale="log", yscale="log", title=title, xlabel="block size BS")
  ax.set_xticks(blocks, [str(b) for b in blocks])
  ax.minorticks_off()
  ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def entries(ax: Axes, rows: list[Row], title: str) -> None:
  """Growth against block size, and the published bound."""
  blocks = sorted({row["block"] for row in rows})
  ax.plot(blocks, [2.0 ** (b - 1) for b in blocks], label="published bound 2^(BS-1)", color="black",
          marker="o", **dict(HOLLOW.items()))  # fmt: skip
  for i, column in enumerate(GROWTH):
    ax.plot(*worst(rows, column), label=NAMES[column], **look(i + 1))
    if rows[0]["inputs"] == "synthetic" and column in THERE:
      hollow(ax, THERE[column], look(i + 1))
  finish(ax, blocks, title)
  ax.set_ylim(0.1, 1e40)


def methods(ax: Axes, rows: list[Row], title: str) -> None:
  """Error of a solve by itself against block size, by method."""
  ways = list(dict.fromkeys(row["method"] for row in rows if row["method"] != "none"))
  for i, method in enumerate(ways):
    line = [r for r in only(rows, method=method) if np.isfinite(r["solve_error"])]
    ax.plot(*worst(line, "solve_error"), label=method, **look(i))
    if method in SOLVED:
      hollow(ax, SOLVED[method], look(i))
  finish(ax, sorted({row["block"] for row in rows}), title)
  ax.set_ylim(1e-8, 1e10)


def figure(rows: list[Row]) -> Figure:
  """Above: growth at identical keys and in the model. Below: what each way to solve makes of it."""
  fig = Figure(figsize=(10.0, 8.6))
  a, b, c, d = fig.subplots(2, 2).ravel()
  true = only(rows, method="none")
  synthetic, captured = only(true, inputs="synthetic"), only(true, inputs="captured")
  top = max(r["beta"] for r in synthetic if r["beta"] <= 1)
  hard = only(synthetic, beta=top, decay=max(r["decay"] for r in synthetic))
  worst_case = f"worst key correlation, beta = {top:g}, no decay"
  entries(a, hard, f"growth: {worst_case}; hollow: published")
  if captured:
    entries(b, captured, "growth: windows of the trained model")
  precisions = list(dict.fromkeys(row["precision"] for row in rows if row["method"] != "none"))
  rho = min((r["correlation"] for r in hard), key=lambda rho: abs(rho - 0.9))
  where = {"beta": top, "decay": hard[0]["decay"], "precision": precisions[0], "correlation": rho}
  said = f"correlation {rho:g}, beta = {top:g}"
  methods(
    c, only(rows, inputs="synthetic", **where),
    f"error of a solve, {precisions[0]}: {said}; hollow: published",
  )  # fmt: skip
  if captured:
    for i, precision in enumerate(precisions):
      for j, way in enumerate(("substitution", "Neumann doubling")):
        line = only(rows, inputs="captured", method=way, precision=precision)
        line = [r for r in line if np.isfinite(r["state_error"])]
        if line:
          style = look(i) | {"linestyle": ("-", ":")[j]}
          d.plot(*worst(line, "state_error"), label=f"{way}, {precision}", **style)
    finish(
      d,
      sorted({row["block"] for row in captured}),
      "relative state error: windows of the trained model",
    )
  return fig


def answer(rows: list[Row]) -> list[str]:
  """What the rows say of the published bound."""
  true = only(rows, method="none")
  said = []
  for inputs in dict.fromkeys(row["inputs"] for row in true):
    for low, high in ((0, 1), (1, 2)):
      some = [r for r in only(true, inputs=inputs) if low < (r["beta"] or 1) <= high]
      if not some:
        continue
      T = max(row["block"] for row in some)
      most = lambda column, rows: max(row[column] for row in rows)
      last = only(some, block=T)
      said.append(
        f"{inputs}, beta up to {most('beta', some) if some[0]['beta'] else 1:g}: entries of the "
        f"inverse at most {most('entry_over_beta', some):.4f} beta at any BS; at BS = {T} gain "
        f"{most('gain', last):.3g}, row sum {most('row_sum', last):.3g}, largest entry of a power "
        f"of A {most('power_entry', last):.1e}, published bound {2.0 ** (T - 1):.1e}."
      )
  return said


def table(rows: list[Row]) -> Group:
  """Largest state error of each way to solve, by block size and inputs, beta at most 1."""
  blocks = sorted({row["block"] for row in rows})
  out = Table(title="largest relative state error of one block, beta at most 1")
  for name in ("inputs", "solved by", "products"):
    out.add_column(name)
  for T in blocks:
    out.add_column(f"BS = {T}", justify="right")
  for inputs in ("synthetic", "captured"):
    some = [r for r in only(rows, inputs=inputs) if (r["beta"] or 0) <= 1 and r["method"] != "none"]
    for method, precision in dict.fromkeys((r["method"], r["precision"]) for r in some):
      _, line = worst(only(some, method=method, precision=precision), "state_error")
      out.add_row(inputs, method, precision, *(f"{x:.1e}" for x in line))
  return Group(out, *answer(rows))
