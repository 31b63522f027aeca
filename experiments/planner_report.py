"""Plans as a figure and a table."""

import textwrap
from collections.abc import Callable, Mapping
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from experiments.figures import HOLLOW, logarithmic, look, scheme_look, steps, value_of
from experiments.record import Row

# Scheme -> published throughput over snapshots by concurrency: the same model, a B200, an H20-3e.
THERE: Mapping[str, Callable[[], dict[int, float]]] = MappingProxyType(
  {
    "tree_wy": lambda: {1: value_of("treewy-c1-lo"), 256: value_of("treewy-35b-c256")},
    "ring_exact": lambda: {32: value_of("ring-tput-new") / value_of("ring-tput-old")},
  }
)


def best(rows: list[Row]) -> list[Row]:
  """The first of every scheme at every concurrency, in order of rank."""
  found: dict[tuple, Row] = {}
  for r in sorted((r for r in rows if r["part"] == "plan"), key=lambda r: r["rank"]):
    found.setdefault((r["concurrency"], r["scheme"]), r)
  return list(found.values())


def validated(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
  """Picks by what was measured and what they went by; of served models under the common budget."""
  found: dict[tuple[str, str], list[Row]] = {}
  for r in rows:
    if r["part"] != "plan" and r["budget"] in (None, "common"):
      what = r["model"] or f"a {r['part']}"
      found.setdefault((what, r["by"]), []).append(r)
  return found


def regret(ax: Axes, rows: list[Row]) -> None:
  """The measured time of a pick over the best one's, by concurrency."""
  of = validated(rows)
  for i, ((what, by), some) in enumerate(of.items()):
    some = sorted(some, key=lambda r: r["concurrency"])
    x, y = ([r[k] for r in some] for k in ("concurrency", "regret"))
    ax.plot(x, y, label=f"{what}, by {by}", **look(i))
  ax.axhline(1.0, color="#999999", linewidth=0.8)
  ax.set_title("measured time of the picked scheme over the fastest one's, H200\n1: the right pick")
  ax.set(xscale="log", xlabel="concurrency, requests")
  if of:
    steps(ax.xaxis, [r["concurrency"] for some in of.values() for r in some])
    ax.set_ylim(0.97, 1.25 * max(r["regret"] for some in of.values() for r in some))
    ax.legend(ncols=2, loc="upper right")


def figure(rows: list[Row]) -> Figure:
  """Each scheme's best plan against concurrency: tokens a second, over snapshots', how many drafts;
  and what was lost by such picks where every scheme was measured.

  Without snapshots among them the slowest is what the others are held against. The ratio's range
  is from both slow to both fast: launches and bandwidth are the same device's.
  """
  fig = Figure(figsize=(13.0, 7.6))
  (rate, ratio), (drafts, lost) = fig.subplots(2, 2)
  regret(lost, rows)
  rows = [r for r in rows if r["part"] == "plan"]
  schemes = list(dict.fromkeys(r["scheme"] for r in rows))
  plans = {(r["scheme"], r["concurrency"]): r for r in best(rows)}
  last = max(r["concurrency"] for r in rows)
  mean = lambda r: (r["tokens_per_s_low"] * r["tokens_per_s_high"]) ** 0.5
  slowest = min((s for s in schemes if (s, last) in plans), key=lambda s: mean(plans[s, last]))
  slowest = "snapshot" if "snapshot" in schemes else slowest
  alike: dict[tuple[tuple, tuple], list[str]] = {}  # schemes that want as many drafts everywhere
  for i, scheme in enumerate(schemes):
    line = [plans[s, c] for s, c in sorted(plans, key=lambda x: x[1]) if s == scheme]
    x, style = [r["concurrency"] for r in line], scheme_look(scheme)
    rate.plot(x, [mean(r) for r in line], label=scheme, **style)
    alike.setdefault((tuple(x), tuple(r["drafts"] for r in line)), []).append(scheme)
    pairs = [
      (r, plans[slowest, r["concurrency"]]) for r in line if (slowest, r["concurrency"]) in plans
    ]
    over = lambda r, s, end: r[f"tokens_per_s_{end}"] / s[f"tokens_per_s_{end}"]
    if scheme != slowest and pairs:
      ends = [sorted((over(r, s, "low"), over(r, s, "high"))) for r, s in pairs]
      apart = 1.05 ** (i - len(schemes) / 2)
      x = [apart * r["concurrency"] for r, _ in pairs]
      ratio.plot(x, [mean(r) / mean(s) for r, s in pairs], label=scheme, **style)
      ratio.vlines(x, *zip(*ends, strict=True), color=style["color"], linewidth=0.8)
    if scheme in THERE and (slowest, rows[0]["model"]) == ("snapshot", "Qwen3.5-35B-A3B"):
      there = THERE[scheme]()
      ratio.plot(list(there), list(there.values()), **style | HOLLOW | {"markersize": 8})
  for (at, drafted), names in alike.items():
    label = textwrap.fill(", ".join(names), 44)
    drafts.plot(at, drafted, label=label, **scheme_look(names[0]))
  drafts.legend(loc="lower center")
  rate.set(yscale="log", ylabel="tokens a second, middle of the range")
  rate.set_title(f"{rows[0]['model']} on {rows[0]['device']}, modelled")
  ratio.set_title(
    f"over {slowest}; bars: both slowest to both fastest\nhollow: published, other devices"
  )
  ratio.axhline(1.0, color="#999999", linewidth=0.8)
  drafts.set_title("K, drafts of a window, of the same plans")
  drafts.set(ylim=(0, None))
  for ax in (rate, ratio, drafts):
    ax.set(xscale="log", xlabel="concurrency, requests")
    steps(ax.xaxis, [r["concurrency"] for r in rows])
  logarithmic(rate.yaxis)
  rate.legend()
  return fig


def table(rows: list[Row]) -> Table:
  """The best plan of every scheme at every concurrency; K drafts."""
  rows = [r for r in rows if r["part"] == "plan"]
  out = Table(title=f"{rows[0]['model']} on {rows[0]['device']}, modelled")
  for name in ("concurrency", "scheme", "K", "ring", "running", "MB a request", "tokens a second"):
    out.add_column(name, justify="left" if name == "scheme" else "right")
  for r in sorted(best(rows), key=lambda r: (r["concurrency"], r["rank"])):
    ring = "" if r["ring"] is None else str(r["ring"])
    rate = f"{r['tokens_per_s_low']:,.0f}–{r['tokens_per_s_high']:,.0f}"
    cells = r["concurrency"], r["scheme"], r["drafts"], ring, r["running"]
    out.add_row(*map(str, cells), f"{r['request_mb']:.0f}", rate)
  return out


def picks(rows: list[Row]) -> Table:
  """How often the fastest scheme was picked, and what the others cost."""
  out = Table(title="picks where every scheme was measured: time over that of the fastest")
  for name in ("measured", "picked by", "right", "mean", "worst", "worst pick"):
    out.add_column(name, justify="right" if name in ("right", "mean", "worst") else "left")
  for (what, by), some in validated(rows).items():
    lost, worst = [r["regret"] for r in some], max(some, key=lambda r: r["regret"])
    right = f"{sum(r['scheme'] == r['best'] for r in some)} of {len(some)}"
    pick = f"{worst['scheme']} at {worst['concurrency']}"
    pick = pick if worst["regret"] > 1 else ""
    out.add_row(what, by, right, f"{sum(lost) / len(lost):.2f}", f"{max(lost):.2f}", pick)
  return out
