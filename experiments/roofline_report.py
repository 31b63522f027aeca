"""The roofline rows as a figure, a table, and an answer for a Mac at batch 1."""

import statistics
from typing import Any

from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table

from experiments.figures import HOLLOW, logarithmic, look, scheme_look
from experiments.record import Row

FOLDS = ("ring_open_loop", "ring_exact", "replay_0", "snapshot")


def only(rows: list[Row], **where: Any) -> list[Row]:
  return [row for row in rows if all(row[k] == v for k, v in where.items())]


def off(row: Row) -> float:
  """Relative error of a prediction."""
  return row["low_us"] / row["measured_us"] - 1


def span(rows: list[Row], what: str) -> str:
  """XLA's count over ours, least to most, of what we count any."""
  ratios = [r[f"counted_{what}"] / r[what] for r in rows if r[what]]
  return f"{min(ratios):.3f} to {max(ratios):.3f}"


def first(rows: list[Row]) -> list[Row]:
  """Steps at the smallest batch of the model whose states weigh most."""
  steps = only(rows, part="step")
  heaviest = max(steps, key=lambda r: r["share_high"])["model"]
  return only(steps, model=heaviest, batch=min(r["batch"] for r in steps))


def figure(rows: list[Row]) -> Figure:
  """Predicted against measured kernels; state time of a step and its share, by device."""
  fig = Figure(figsize=(13.0, 5.0))
  check, time, share = fig.subplots(1, 3)
  fitted, predicted = only(rows, part="fitted"), only(rows, part="predicted")
  for i, kernel in enumerate(dict.fromkeys(r["scheme"] for r in fitted)):
    for some, style in ((predicted, {"linestyle": "none"}), (fitted, HOLLOW)):
      points = only(some, scheme=kernel)
      label = {"label": f"{kernel}, other batches"} if some is predicted else {}
      xs, ys = [r["measured_us"] for r in points], [r["low_us"] for r in points]
      check.plot(xs, ys, **look(i) | style | label)
  if fitted:
    ends = [min(r["measured_us"] for r in fitted), max(r["measured_us"] for r in fitted)]
    check.plot(ends, ends, color="#999999", linewidth=0.8)
  check.set(
    xscale="log", yscale="log", xlabel="microseconds measured on an H200",
    ylabel="microseconds, modelled", title="kernels; hollow: the two batches of their lines",
  )  # fmt: skip
  check.legend()
  steps = first(rows)
  devices = list(dict.fromkeys(r["device"] for r in steps))
  schemes = [s for s in FOLDS if only(steps, scheme=s)]
  for i, scheme in enumerate(schemes):
    at = [y + 0.16 * (i - len(schemes) / 2) for y in range(len(devices))]
    by_device = {r["device"]: r for r in only(steps, scheme=scheme)}
    style = scheme_look(scheme)
    for ax, low, high, scale in (
      (time, "low_us", "high_us", 1e-3),
      (share, "share_low", "share_high", 100),
    ):
      lows, highs = ([scale * by_device[d][k] for d in devices] for k in (low, high))
      ax.hlines(at, lows, highs, color=style["color"], linestyle=style["linestyle"], linewidth=1.6)
      ax.plot(
        lows,
        at,
        highs,
        at,
        linestyle="none",
        marker=style["marker"],
        color=style["color"],
        markersize=3,
      )
      ax.plot([], [], label=scheme, **style)
  for ax in (time, share):
    ax.set_yticks(range(len(devices)), devices)
    ax.set_xscale("log")
    ax.invert_yaxis()
  logarithmic(time.xaxis)
  logarithmic(share.xaxis)
  logarithmic(check.xaxis)
  logarithmic(check.yaxis)
  model = f"{steps[0]['model']}, batch {steps[0]['batch']}, T = {steps[0]['window']}, modelled"
  time.set(title=f"recurrent layers of a step, least to most\n{model}", xlabel="milliseconds")
  share.set(title=f"their share of it, weights included\n{model}", xlabel="%")
  share.legend(loc="upper center", bbox_to_anchor=(0.1, -0.12), ncols=4)
  return fig


def extra(rows: list[Row], device: str) -> tuple[float, float]:
  """Exact fold over open loop: microseconds that a step takes longer, least to most."""
  at = {r["scheme"]: r for r in only(first(rows), device=device)}
  exact, loose = at["ring_exact"], at["ring_open_loop"]
  return exact["low_us"] - loose["low_us"], exact["high_us"] - loose["high_us"]


def misses(rows: list[Row]) -> list[str]:
  """How many times as long as modelled whole steps took, and an exact fold beyond an open loop."""
  whole = only(rows, part="whole")
  over = lambda xs: f"{min(xs):.1f} to {max(xs):.1f}"
  of = lambda scheme: {(r["window"], r["batch"]): r for r in only(whole, scheme=scheme)}
  said = [
    f"{scheme} {over([r['measured_us'] / middle(r) for r in of(scheme).values()])}"
    for scheme in dict.fromkeys(r["scheme"] for r in whole)
  ]
  exact, loose = of("ring_exact"), of("ring_open_loop")
  more = [
    (exact[k]["measured_us"] - loose[k]["measured_us"]) / (middle(exact[k]) - middle(loose[k]))
    for k in exact.keys() & loose.keys()
  ]
  lines = [f"whole steps on an H200 took so many times as long as modelled: {', '.join(said)}"]
  lines += [f"what an exact fold adds took {over(more)} times as long as modelled"] if more else []
  return lines if whole else []


def middle(row: Row) -> float:
  return (row["low_us"] * row["high_us"]) ** 0.5


def answer(rows: list[Row]) -> list[str]:
  """Is an exact fold affordable at batch 1, device by device."""
  steps = first(rows)
  said = []
  for device in dict.fromkeys(r["device"] for r in steps):
    at = {r["scheme"]: r for r in only(steps, device=device)}
    if not {"ring_exact", "ring_open_loop"} <= set(at):
      continue
    low, high = extra(rows, device)
    exact = at["ring_exact"]
    weights = [exact[f"step_{k}_us"] - exact[f"{k}_us"] for k in ("low", "high")]
    said.append(
      f"{device}: an exact fold adds {low / 1e3:.3f} to {high / 1e3:.3f} ms to a step, "
      f"{100 * low / (low + weights[1]):.2f} to {100 * high / (high + weights[0]):.1f} % of "
      "reading the weights"
    )
  return said


def table(rows: list[Row]) -> Group:
  """Checks first, then what follows for one step."""
  count = Table(title="a step by the cost model, and by XLA's count of the compiled kernels")
  for name in ("scheme", "T", "flops, model", "XLA", "bytes, model", "XLA"):
    count.add_column(name, justify="left" if name == "scheme" else "right")
  for r in only(rows, part="xla"):
    counts = (r[k] for k in ("flops", "counted_flops", "bytes", "counted_bytes"))
    count.add_row(r["scheme"], str(r["window"]), *(f"{x:,.0f}" for x in counts))
  said = []
  for part, what in (("xla kernel", "kernels"), ("xla", "steps")):
    if some := only(rows, part=part):
      said.append(
        f"of {len(some)} {what} XLA counts {span(some, 'bytes')} times the model's bytes and "
        f"{span(some, 'flops')} times its flops"
      )
  predicted = only(rows, part="predicted")
  if predicted:
    errors = sorted(abs(off(r)) for r in predicted)
    said.append(
      f"{len(errors)} times of kernels by the line through their own batches 1 and 64: median "
      f"error {100 * statistics.median(errors):.1f} %, largest {100 * errors[-1]:.0f} %"
    )
  steps = first(rows)
  ms = lambda r: f"{r['low_us'] / 1e3:.2f}–{r['high_us'] / 1e3:.2f}"
  out = Table(
    title=f"ms of the recurrent layers in one step: {steps[0]['model']}, batch {steps[0]['batch']}"
  )
  devices = list(dict.fromkeys(r["device"] for r in steps))
  out.add_column("scheme")
  for d in devices:
    out.add_column(d, justify="right")
  for scheme in dict.fromkeys(r["scheme"] for r in steps):
    at = {r["device"]: r for r in only(steps, scheme=scheme)}
    out.add_row(scheme, *(ms(at[d]) for d in devices))
  return Group(count, out, *said, *misses(rows), *answer(rows))
