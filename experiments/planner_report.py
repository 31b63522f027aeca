"""Plans as a figure and a table."""

from matplotlib.figure import Figure
from rich.table import Table

from experiments.figures import scheme_look
from experiments.record import Row


def best(rows: list[Row]) -> list[Row]:
  """The first of every scheme at every concurrency, in order of rank."""
  found: dict[tuple, Row] = {}
  for r in sorted(rows, key=lambda r: r["rank"]):
    found.setdefault((r["concurrency"], r["scheme"]), r)
  return list(found.values())


def figure(rows: list[Row]) -> Figure:
  """Tokens a second of each scheme's best plan against concurrency, least to most."""
  fig = Figure(figsize=(7.0, 4.4))
  ax = fig.subplots()
  for scheme in dict.fromkeys(r["scheme"] for r in rows):
    line = sorted((r for r in best(rows) if r["scheme"] == scheme), key=lambda r: r["concurrency"])
    x = [r["concurrency"] for r in line]
    low, high = ([r[f"tokens_per_s_{end}"] for r in line] for end in ("low", "high"))
    style = scheme_look(scheme)
    ax.plot(x, [(a * b) ** 0.5 for a, b in zip(low, high, strict=True)], label=scheme, **style)
    ax.fill_between(x, low, high, color=style["color"], alpha=0.06, linewidth=0)
  ax.set(xscale="log", yscale="log", xlabel="concurrency", ylabel="tokens a second")
  ax.set_title(f"{rows[0]['model']} on {rows[0]['device']}: modelled, middle of the range")
  ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
  return fig


def table(rows: list[Row]) -> Table:
  """The three best plans at every concurrency."""
  out = Table(title=f"{rows[0]['model']} on {rows[0]['device']}, modelled")
  for name in ("concurrency", "scheme", "T", "ring", "running", "MB a request", "tokens a second"):
    out.add_column(name, justify="left" if name == "scheme" else "right")
  for r in sorted(best(rows), key=lambda r: (r["concurrency"], r["rank"])):
    ring = "" if r["ring"] is None else str(r["ring"])
    rate = f"{r['tokens_per_s_low']:,.0f}–{r['tokens_per_s_high']:,.0f}"
    cells = r["concurrency"], r["scheme"], r["window"], ring, r["running"]
    out.add_row(*map(str, cells), f"{r['request_mb']:.0f}", rate)
  return out
