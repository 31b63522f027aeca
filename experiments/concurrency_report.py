"""The rows of `concurrency` as a figure and a table, beside what was published."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import SymmetricalLogLocator
from rich.table import Table

from experiments.figures import HOLLOW, published, scheme_look
from experiments.record import Row

KEEP = {"replay_0": 0, "replay_1": 1, "replay_4": 4, "replay_4_compact": 4, "replay_8": 8}


def value(id: str) -> float:
  """One published value. StopIteration: there is none of this id."""
  return next(float(row["value"]) for row in published("throughput") if row["id"] == id)


def points() -> list[tuple[str, int, float, str]]:
  """(scheme, concurrency, throughput over the snapshot baseline, source) as published."""
  over = lambda k, n: value(f"replay-tput{n}-k{k}") / value(f"replay-tput{n}-k16")
  out = [(f"replay_{k}", 16, over(k, 16), "SGLang PR 28010") for k in (0, 1, 4, 8)]
  out += [(f"replay_{k}", 1, over(k, 1), "SGLang PR 28010") for k in (0, 1)]
  gain = lambda n: 1 + value(f"ring-122b-tput{n}") / 100
  out += [("ring_exact", n, gain(n), "SGLang PR 28695") for n in (8, 16, 32)]
  out += [("tree_wy", 1, value(f"treewy-c1-{x}"), "TreeWY") for x in ("lo", "hi")]
  return [*out, ("tree_wy", 64, value("treewy-max"), "TreeWY, where memory binds")]


def ratios(rows: list[Row]) -> dict[tuple[str, str], dict[int, float]]:
  """(scheme, budget) -> concurrency -> throughput over snapshot's under a budget of that name."""
  base = {
    (r["budget"], r["concurrency"]): r["tokens_per_s"] for r in rows if r["scheme"] == "snapshot"
  }
  out: dict[tuple[str, str], dict[int, float]] = {}
  for r in rows:
    under = base.get((r["budget"], r["concurrency"]))
    if under:
      line = out.setdefault((r["scheme"], r["budget"]), {})
      line[r["concurrency"]] = r["tokens_per_s"] / under
  return out


def figure(rows: list[Row]) -> Figure:
  """A column a model: tokens a second, and the ratio to snapshot; hollow where published."""
  models = list(dict.fromkeys(row["model"] for row in rows))
  fig = Figure(figsize=(5.6 * len(models), 7.6))
  axes: Any = fig.subplots(2, len(models), squeeze=False, sharex=True)
  for (top, bottom), model in zip(axes.T, models, strict=True):
    mine = [r for r in rows if r["model"] == model]
    common = [r for r in mine if r["budget"] == "common"]
    for scheme in dict.fromkeys(r["scheme"] for r in common):
      line = [r for r in common if r["scheme"] == scheme]
      top.plot([r["concurrency"] for r in line], [r["tokens_per_s"] for r in line],
               label=f"{scheme} (admits {line[0]['cap']})", **scheme_look(scheme))  # fmt: skip
    for (scheme, budget), ratio in ratios(mine).items():
      if budget == "common" and scheme != "snapshot":
        bottom.plot(list(ratio), list(ratio.values()), **scheme_look(scheme))
    for scheme, n, over, _ in points():
      bottom.plot([n], [over], **scheme_look(scheme) | HOLLOW)
    bottom.axhline(1.0, color="0.5", linewidth=0.8)
    top.set_title(f"{model}: tokens a second within {common[0]['budget_gib']:g} GiB a rank")
    bottom.set_title("over snapshot at the same concurrency; hollow: published, other devices")
    bottom.set_xlabel("concurrency")
    top.set_xscale("log", base=2)
    top.set_yscale("symlog", linthresh=1.0)
    top.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=1, subs=(1, 2, 5)))
    top.yaxis.set_major_formatter("{x:,.0f}")
    top.legend()
  row = rows[0]
  fig.suptitle(
    f"{row['device']}; windows of {row['window']}, accept length {row['accept_length']} "
    f"({row['accepts']}); one layer and one group measured, the rest multiplied",
    fontsize=9,
  )
  return fig


def table(rows: list[Row]) -> Table:
  """At the highest concurrency: who is admitted, and the ratio to snapshot."""
  most = max(row["concurrency"] for row in rows)
  out = Table(title=f"concurrency {most}")
  for name in ("model", "budget", "scheme", "admits", "tokens/s", "over snapshot", "step ms"):
    out.add_column(name, justify="left" if name in ("model", "budget", "scheme") else "right")
  for model in dict.fromkeys(row["model"] for row in rows):
    mine = [r for r in rows if r["model"] == model]
    over = ratios(mine)
    for r in mine:
      if r["concurrency"] == most:
        ratio = over.get((r["scheme"], r["budget"]), {}).get(most)
        out.add_row(
          *(model, r["budget"], r["scheme"], str(r["cap"]), f"{r['tokens_per_s']:,.0f}"),
          "" if ratio is None else f"{ratio:.2f}",
          "" if r["step_ms"] is None else f"{r['step_ms']:.2f}",
        )
  return out
