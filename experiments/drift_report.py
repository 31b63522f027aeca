"""The drift rows as a figure, as a table, and as an answer to three published claims."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table

from experiments.figures import between, logarithmic, look, scheme_look
from experiments.free import within_margin

Row = dict[str, Any]
Line = tuple[str, str, int]
Curve = tuple[np.ndarray, np.ndarray]  # tokens and errors


def curves(rows: list[Row], column: str) -> dict[Line, Curve]:
  """(scheme, ablation, window) -> tokens and the root mean square of an error over layers."""
  points: dict[Line, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
  for r in rows:
    if r["part"] == "forced":
      points[r["scheme"], r["ablation"], r["window"]][r["token"]].append(r[column])
  rms = lambda xs: float(np.sqrt(np.mean(np.square(xs))))
  return {
    line: (np.array(sorted(at)), np.array([rms(at[t]) for t in sorted(at)]))
    for line, at in points.items()
  }


def late(curve: Curve) -> float:
  """Root mean square of the last eighth of the probes: one probe alone is noisy."""
  return float(np.sqrt(np.mean(np.square(curve[1][-max(len(curve[1]) // 8, 1) :]))))


def slope(curve: Curve, start: int = 256) -> float:
  """d log(error) / d log(tokens) from `start` tokens on; NaN with fewer than three probes."""
  at = (curve[0] >= start) & (curve[1] > 0)
  if at.sum() < 3:
    return float("nan")
  return float(np.polyfit(np.log(curve[0][at]), np.log(curve[1][at]), 1)[0])


def base_window(rows: list[Row]) -> int:
  return max(r["window"] for r in rows)


def figure(rows: list[Row], ablated: str) -> Figure:
  """State and output error by scheme; state error by what is lowered, and by window."""
  T, state = base_window(rows), curves(rows, "state_error")
  fig = Figure(figsize=(10.0, 9.6))
  panels = fig.subplots(2, 2).ravel()
  schemes = [line for line in state if line[1] == "none" and line[2] == T]

  def draw(ax, curve, label, style):
    # Lines may coincide: each has its markers at places of its own.
    ax.plot(*curve, label=label, markevery=(5 * len(ax.lines) % 24, 24), **style)

  for ax, column in zip(panels, ("state_error", "output_error"), strict=False):
    for line in schemes:
      draw(ax, curves(rows, column)[line], line[0], scheme_look(line[0]))
    ax.set_title(f"relative {column.replace('_', ' ')}, every scheme at its base point, T = {T}")
  lowered = [line for line in state if line[0] == ablated and line[2] == T]
  for i, line in enumerate(lowered):
    draw(panels[2], state[line], "nothing lowered" if line[1] == "none" else line[1], look(i))
  panels[2].set_title(f"relative state error of {ablated}, one thing lowered")
  windows = sorted((x for x in state if x[:2] == (ablated, "none")), key=lambda x: x[2])
  for i, line in enumerate(windows):
    draw(panels[3], state[line], f"T = {line[2]}", look(i))
  panels[3].set_title(f"relative state error of {ablated} by window")
  ranges(panels, {x[1]: look(i) for i, x in enumerate(lowered)}, schemes)
  for ax in panels:
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    if ax.lines:
      ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3 if ax is panels[3] else 2)
      if ax is not panels[2]:
        logarithmic(ax.yaxis)
    ax.set_xlabel("tokens of held-out Python source", labelpad=1)
  return fig


def ranges(panels: Any, lowered: dict[str, Any], schemes: list[Line]) -> None:
  """Published ranges beside the lines that they are about: of synthetic keys, of another model."""
  names, at = {line[0] for line in schemes}, 7_241  # the middle of 6,400 to 8,192 tokens
  for ax, id, scheme, x in (
    (panels[0], "toy-exact", "ring_exact", at),
    (panels[0], "toy-open", "ring_open_loop", at * 1.2),
    (panels[1], "lumo-scan", "snapshot", at),
    (panels[1], "lumo-wy", "delta_cache", at * 1.2),
  ):
    if scheme in names:
      between(ax, x, f"{id}-lo", f"{id}-hi", scheme_look(scheme))
  both = "records bf16, checkpoint bf16, all dots tf32 (emulated)"
  for id, ablation in (("toy-open", "none"), ("toy-bf16-ckpt", both)):
    if ablation in lowered:
      between(panels[2], at, f"{id}-lo", f"{id}-hi", lowered[ablation])
  of = ("synthetic keys", "another model", "synthetic keys")
  for ax, what in zip(panels, of, strict=False):
    ax.set_title(f"{ax.get_title(loc='left')}\nhollow: published ranges, {what}", loc="left")


class Claim(NamedTuple):
  """A published claim, what the rows say of it, and the numbers."""

  claim: str
  verdict: str
  evidence: str


def amplification(open_loop: Curve, plain: Curve, T: int) -> tuple[str, str]:
  """Supported if open-loop folds come near the bound on top of the recurrence's own error."""
  ratio, bound = late(open_loop) / late(plain), 2 ** (T - 1)
  verdict = "contradicts" if ratio < 8 else "supports" if ratio > bound / 8 else "open"
  return verdict, (
    f"open-loop folds in float32 end at {late(open_loop):.1e}, {ratio:.2f} x the error of the "
    f"recurrence itself; the bound is {bound:,}"
  )


def growth(bf16: Curve, open_loop: Curve, checkpoint: Curve) -> tuple[str, str]:
  """By the exponent of the error over the length, with records in bfloat16."""
  s = slope(bf16)
  verdict = "supports" if s > 0.25 else "contradicts" if s < 0.1 else "open"
  return verdict, (
    f"bf16 records end at {late(bf16):.1e}, {late(bf16) / late(open_loop):,.0f} x float32 ones, "
    f"and the error grows as n^{s:.2f}; with a bf16 checkpoint as n^{slope(checkpoint):.2f}, to "
    f"{late(checkpoint):.1e}"
  )


def exactness(exact: Curve, plain: Curve) -> tuple[str, str]:
  """Supported if every probe's error is the one-token recurrence's, digit for digit."""
  same = np.array_equal(exact[1], plain[1])
  return ("supports" if same else "contradicts"), (
    f"its error is {'equal to' if same else 'not equal to'} the one-token recurrence's at every "
    f"probe, {late(plain):.1e} at the end, where it grows as n^{slope(plain):.2f}"
  )


def claims(rows: list[Row], ablated: str) -> list[Claim]:
  """Verdicts by stated rules; a claim whose lines were not run is left open."""
  T, state = base_window(rows), curves(rows, "state_error")
  lines = {
    "open_loop": (ablated, "none", T),
    "plain": ("snapshot", "none", T),
    "exact": ("ring_exact", "none", T),
    "bf16": (ablated, "records bf16", T),
    "checkpoint": (ablated, "checkpoint bf16", T),
  }
  found = {name: state[line] for name, line in lines.items() if line in state}

  def claim(text: str, names: tuple[str, ...], verdict: Callable[..., tuple[str, str]]) -> Claim:
    missing = [n for n in names if n not in found]
    if missing:
      return Claim(text, "open", f"not run: {', '.join(map(str, (lines[n] for n in missing)))}")
    return Claim(text, *verdict(*(found[n] for n in names)))

  return [
    claim(
      "open-loop drift comes from an amplification of up to 2^(BS-1)",
      ("open_loop", "plain"),
      partial(amplification, T=T),
    ),
    claim("open-loop drift grows with length", ("bf16", "open_loop", "checkpoint"), growth),
    claim("exact fold has no drift of its own", ("exact", "plain"), exactness),
  ]


def table(rows: list[Row], ablated: str) -> Group:
  """One row a line of the experiment, the free-running text, then the claims."""
  state, output = curves(rows, "state_error"), curves(rows, "output_error")
  drift = Table(title="relative error to float64, last eighth of the probes")
  for name in ("scheme", "changed", "T", "state", "output", "grows as"):
    drift.add_column(name, justify="left" if name in ("scheme", "changed") else "right")
  for line, curve in state.items():
    drift.add_row(
      line[0], "" if line[1] == "none" else line[1], str(line[2]), f"{late(curve):.1e}",
      f"{late(output[line]):.1e}", f"n^{slope(curve):.2f}",
    )  # fmt: skip
  text = Table(title="free-running greedy text beside plain decoding's, float32")
  for name in ("scheme", "text", "most repeats (plain)", "accept length"):
    text.add_column(name, justify="left" if name in ("scheme", "text") else "right")
  for r in rows:
    if r["part"] == "free":
      repeats = f"{r['repeats']} ({r['plain_repeats']})"
      text.add_row(r["scheme"], free_text(r), repeats, f"{r['accept_length']:.2f}")
  said = [f"{c.verdict}: {c.claim}. {c.evidence}." for c in claims(rows, ablated)]
  return Group(drift, text, "What the rows say of three published claims:", *said)


def free_text(r: Row) -> str:
  """The margin rule's outcome."""
  if r["first_difference"] is None:
    return f"equal for {r['token']} tokens"
  rule = "within" if within_margin(r) else "beyond"
  at, margin, error = r["first_difference"], r["margin"], r["logit_error"]
  return f"differs at {at}: margin {margin:.1e} {rule} the logit error {error:.1e}"
