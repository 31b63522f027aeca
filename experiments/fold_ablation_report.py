"""The fold ablation's rows as a figure, tables, and answers to what was open."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Group
from rich.table import Table

from experiments.figures import HOLLOW, between, logarithmic, look, steps, value_of
from experiments.record import Row

NAMES = ("fold", "records", "checkpoint", "dots", "every", "phantom")
Key = tuple[Any, ...]
# Fold, records, checkpoint, dots: one thing lowered, then all as they were published.
TELLING = (
  ("open_loop", "fp32", "fp32", "fp32"),
  ("open_loop", "hi+lo", "fp32", "fp32"),
  ("open_loop", "fp32", "fp32", "tf32"),
  ("open_loop", "bf16", "fp32", "fp32"),
  ("open_loop", "bf16", "bf16", "bf16"),
  ("exact", "fp32", "fp32", "fp32"),
  ("exact", "fp32", "bf16", "fp32"),
)
Curve = tuple[np.ndarray, np.ndarray]
DEFERRED = (1, 2, 4, 8, 16)  # commits between two folds of which there are published errors
# Fold, records, checkpoint, dots -> published ranges on synthetic keys, 6,400 to 8,192 tokens.
RANGES = {
  ("exact", "fp32", "fp32", "fp32"): "toy-exact",
  ("open_loop", "fp32", "fp32", "fp32"): "toy-open",
  ("open_loop", "bf16", "bf16", "bf16"): "toy-bf16-ckpt",
}


def curves(rows: list[Row], column: str = "state_error") -> dict[Key, Curve]:
  """Setting -> tokens and errors."""
  points: dict[Key, list[tuple[int, float]]] = defaultdict(list)
  for r in rows:
    if r["part"] == "forced":
      points[tuple(r[n] for n in NAMES)].append((r["token"], r[column]))
  column_of = lambda v, i: np.array([p[i] for p in sorted(v)])
  return {k: (column_of(v, 0), column_of(v, 1)) for k, v in points.items()}


def late(curve: Curve) -> float:
  """Root mean square over the second half of the text."""
  at = curve[0] >= curve[0][-1] / 2
  return float(np.sqrt(np.mean(np.square(curve[1][at]))))


def slope(curve: Curve, start: int = 256) -> float:
  """d log(error) / d log(tokens) from `start` tokens on; NaN with fewer than three probes."""
  at = (curve[0] >= start) & (curve[1] > 0) & np.isfinite(curve[1])
  if at.sum() < 3:
    return float("nan")
  return float(np.polyfit(np.log(curve[0][at]), np.log(curve[1][at]), 1)[0])


def growth(curve: Curve) -> str:
  """The slope as a power of n; nothing where the text is too short to have one."""
  power = slope(curve)
  return f"n^{power:.2f}" if np.isfinite(power) else ""


def some(found: dict[Key, Curve], **where: Any) -> dict[Key, Curve]:
  return {
    k: v for k, v in found.items() if all(k[NAMES.index(n)] == want for n, want in where.items())
  }


def deferral(rows: list[Row]) -> list[tuple[int, float, float]]:
  """(m, late error of a bf16 checkpoint that is rounded at every m-th commit, sqrt(m) x it)."""
  found = some(curves(rows), fold="exact", checkpoint="bf16", phantom=False)
  every = sorted({k[NAMES.index("every")] for k in found})
  at = {m: late(next(iter(some(found, every=m).values()))) for m in every}
  return [(m, e, e * m**0.5) for m, e in at.items()]


def floors(rows: list[Row]) -> dict[float, dict[int, list[Row]]]:
  """temperature -> mantissa bits -> rows of every prompt."""
  found: dict[float, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
  for r in rows:
    if r["part"] == "text" and r["fold"] == "rounded":
      found[r["temperature"]][r["bits"]].append(r)
  return found


def middle(rows: list[Row], column: str) -> float:
  values = [r[column] for r in rows if r[column] is not None]
  return float(np.median(values)) if values else float("nan")


def same(row: Row) -> int:
  """Tokens before a text differs; its length where it does not."""
  return row["token"] if row["first_difference"] is None else row["first_difference"]


def first(rows: list[Row]) -> float:
  """Median over prompts."""
  return float(np.median([same(r) for r in rows]))


TEXT: tuple[tuple[Callable[[Row], Any], str, str], ...] = (
  (same, "tokens", "text before it differs from the plain one"),
  (lambda r: r["bits_per_byte"], "bits per byte", "cost of the text to the exact model"),
  (lambda r: r["repeats"], "copies", "most copies of one unit in a row"),
)


def texts(axes: list[Axes], rows: list[Row]) -> list[Line2D]:
  """Every prompt's text: over the bits of rounded states, and right of them under each ring.

  Returns the rings' letters and names.
  """
  written = [r for r in rows if r["part"] == "text"]
  levels = sorted({r["bits"] for r in written if r["bits"] is not None})
  rings = list(dict.fromkeys(r["fold"] for r in written if r["bits"] is None))
  lines = sorted({(r["temperature"], r["prompt"]) for r in written})
  letters = "ABCDEFGH"[: len(rings)]
  places = [max(levels, default=0) + 3 + 2.5 * i for i in range(len(rings))]
  for ax, (value, unit, title) in zip(axes, TEXT, strict=True):
    for i, (t, prompt) in enumerate(lines):
      of = [r for r in written if (r["temperature"], r["prompt"]) == (t, prompt)]
      each = sorted((r["bits"], value(r)) for r in of if r["bits"] is not None)
      ax.plot(*zip(*each, strict=True), label=f"temperature {t:g}, prompt {prompt}", **look(i))
      aside = 0.45 * (i - (len(lines) - 1) / 2)  # equal texts side by side
      under = [(places[rings.index(r["fold"])] + aside, value(r)) for r in of if r["bits"] is None]
      if under:
        ax.plot(*zip(*under, strict=True), **look(i) | {"linestyle": "none"})
    if rings:
      ax.axvline(places[0] - 1.6, color="#999999", linewidth=0.8)
    ax.set(ylabel=unit, ylim=(0, None), title=title)
    ax.set_xlabel("mantissa bits of the state" + " | rings" * bool(rings))
    ax.set_xticks([*levels[::-2], *places], [*map(str, levels[::-2]), *letters])
  return [
    Line2D([], [], color="black", linestyle="none", marker=f"${letter}$", label=name)
    for letter, name in zip(letters, rings, strict=True)
  ]


def figure(rows: list[Row]) -> Figure:
  """Errors against tokens by what is rounded, against the flush interval; text by what is kept."""
  fig = Figure(figsize=(12.5, 8.4))
  a, b, key, c, d, e = fig.subplots(2, 3).ravel()
  found = curves(rows)
  every = sorted({k[NAMES.index("every")] for k in found})
  m = every[len(every) // 2]
  shown = [k for k in found if k[4] == m and k[:4] in TELLING]
  for i, k in enumerate(shown):
    fold, records, ckpt, dots, _, phantom = k
    fault = ", cursor fault" if phantom else ""
    name = f"{fold}: {records}, {ckpt}, {dots}{fault}"
    a.plot(*found[k], label=name, markevery=(i % 5, 5), **look(i))
    if k[:4] in RANGES and not phantom:
      id = RANGES[k[:4]]
      between(a, 7_241 * 1.5 ** (list(RANGES).index(k[:4]) - 1), f"{id}-lo", f"{id}-hi", look(i))
  a.set(xscale="log", yscale="log", xlabel="tokens")
  a.set_title(f"relative state error, a fold every {m} commits; hollow: published")
  for i, where in enumerate(
    (
      {"fold": "exact", "checkpoint": "bf16"},
      {"fold": "open_loop", "records": "fp32", "checkpoint": "bf16", "dots": "fp32"},
      {"fold": "open_loop", "records": "bf16", "checkpoint": "fp32", "dots": "fp32"},
    )
  ):
    label = ", ".join(f"{k} {v}" if k != "fold" else v for k, v in where.items())
    line = some(found, phantom=False, **where)
    pairs = sorted((k[4], late(v)) for k, v in line.items())
    if pairs:
      b.plot(*zip(*pairs, strict=True), label=label, **look(len(shown) + i))
  rule = deferral(rows)
  if rule:
    ms = [m for m, *_ in rule]
    b.plot(ms, [rule[0][1] / m**0.5 for m in ms], color="#999999", label="1 / sqrt(m)")
    for inputs, marker in zip("abc", "spD", strict=True):
      there = [value_of(f"defer-{inputs}-m{m}") for m in ms if m in DEFERRED]
      style = {"color": look(len(shown))["color"], "marker": marker} | HOLLOW
      b.plot(
        [m for m in ms if m in DEFERRED],
        there,
        label=f"published, synthetic keys {inputs}",
        **style,
      )
  b.set(xscale="log", yscale="log", xlabel="commits from fold to fold, m")
  b.set_title("the same, second half of the text")
  if every:
    steps(b.xaxis, every)
  logarithmic(b.yaxis)
  rings = texts([c, d, e], rows)
  key.axis("off")
  keys = (
    (a.get_legend_handles_labels()[0], "left: records, checkpoint, dots"),
    (b.get_legend_handles_labels()[0], "middle"),
    (rings, "below: rings, as published"),
  )
  plain: dict[str, Any] = {"loc": "upper left", "alignment": "left", "labelspacing": 0.3}
  above, lines = 0, sum(len(handles) + 2 for handles, _ in keys)
  for handles, title in keys:
    if handles:
      at = (0, 1 - above / lines)
      key.add_artist(key.legend(handles=handles, title=title, bbox_to_anchor=at, **plain))
      above += len(handles) + 2
  if c.lines:
    c.legend(loc="lower center")
  return fig


def answer(rows: list[Row]) -> list[str]:
  """The open questions, each by a number."""
  found, said = curves(rows), []
  open_loop = some(found, fold="open_loop", phantom=False)
  for where in (
    {"records": "fp32", "checkpoint": "fp32", "dots": "fp32"},
    {"records": "hi+lo", "checkpoint": "fp32", "dots": "fp32"},
    {"records": "fp32", "checkpoint": "fp32", "dots": "tf32"},
    {"records": "bf16", "checkpoint": "fp32", "dots": "tf32"},
    {"records": "bf16", "checkpoint": "bf16", "dots": "bf16"},
  ):
    line = some(open_loop, **where)
    if line:
      worst = max(line.values(), key=late)
      what = ", ".join(f"{k} {v}" for k, v in where.items())
      grows = f", grows as {growth(worst)}" if growth(worst) else ""
      said.append(f"open loop, {what}: late error {late(worst):.1e}{grows}")
  faulty = some(found, phantom=True)
  if faulty:
    worst = max(faulty.values(), key=late)
    grows = f", {growth(worst)}" if growth(worst) else ""
    said.append(f"with the cursor fault: late error {late(worst):.1e}{grows}")
  rule = deferral(rows)
  if len(rule) > 1:
    m, e, _ = rule[-1]
    said.append(
      f"a bf16 checkpoint rounded at every {m}th commit ends at {e:.1e}, {rule[0][1] / e:.2f} x "
      f"better than at every one; sqrt(m) is {m**0.5:.2f}"
    )
  for t, levels in sorted(floors(rows).items()):
    whole = levels[max(levels)][0]["token"]
    changed = [n for n in sorted(levels, reverse=True) if first(levels[n]) < whole]
    if changed:
      at = levels[changed[0]]
      said.append(
        f"text at temperature {t:g} changes within {whole} tokens from {changed[0]} bits down, "
        f"where states differ by {middle(at, 'distance'):.1e} before it does"
      )
  rings: dict[str, list[Row]] = defaultdict(list)
  for r in rows:
    if r["part"] == "text" and r["bits"] is None:
      rings[r["fold"]].append(r)
  for name, each in rings.items():
    left = sorted(r["first_difference"] for r in each if r["first_difference"] is not None)
    which = f"; first left at token {left[0]}" if left else ""
    kept = f"{len(each) - len(left)} of {len(each)} texts are the plain ones"
    said.append(f"under the ring {name}: {kept}{which}")
  return said


def table(rows: list[Row]) -> Group:
  """Late errors of every setting, then the text."""
  out = Table(title="relative error to float64, second half of the text")
  for name in (*NAMES, "state", "output", "bf16 equal", "grows as"):
    out.add_column(name, justify="left" if name in NAMES[:4] else "right")
  output, equal = curves(rows, "output_error"), curves(rows, "bf16_equal")
  for key, curve in curves(rows).items():
    out.add_row(
      *map(str, key[:5]), "yes" if key[5] else "", f"{late(curve):.1e}", f"{late(output[key]):.1e}",
      f"{float(np.mean(equal[key][1])):.3f}", growth(curve),
    )  # fmt: skip
  text = Table(title="free-running text, medians over prompts")
  for name in ("states", "bits", "temperature", "first difference", "bits per byte", "repeats"):
    text.add_column(name, justify="left" if name == "states" else "right")
  groups: dict[tuple, list[Row]] = defaultdict(list)
  for r in rows:
    if r["part"] == "text":
      groups[r["fold"], r["bits"], r["temperature"]].append(r)
  for (fold, bits, t), group in groups.items():
    text.add_row(
      fold, "" if bits is None else str(bits), f"{t:g}", f"{first(group):,.0f}",
      f"{middle(group, 'bits_per_byte'):.3f}", f"{middle(group, 'repeats'):.0f}",
    )  # fmt: skip
  return Group(out, text, *answer(rows))
