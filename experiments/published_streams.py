"""Answers from committed rows about errors on streams: captured from a model, or synthetic keys."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments import cycles_report, drift_report
from experiments import fold_ablation_report as folds
from experiments.figures import published
from experiments.published_answer import (
  Answer,
  Missing,
  beside,
  judged,
  measured,
  short,
  stored,
  within,
)
from experiments.record import Row

Tokens = tuple[float, float]


def during(
  curve: folds.Curve, kept: float, cycles: Tokens | None, tokens: Tokens | None, run: str
) -> float:
  """Root mean square over the probes after so many cycles, `kept` tokens each, or tokens."""
  low, high = tokens or [n * kept for n in cycles or (0, np.inf)]
  at = (low <= curve[0]) & (curve[0] <= high)
  if not at.any():
    raise Missing(f"{run} --config full")
  return float(np.sqrt(np.mean(np.square(curve[1][at]))))


def drift_curve(scheme: str, ablation: str = "none", column: str = "state_error") -> folds.Curve:
  """Tokens and errors of a line of the longest window."""
  rows = list(stored("drift"))
  T = drift_report.base_window(rows)
  found = drift_report.curves(rows, column).get((scheme, ablation, T))
  if found is None:
    raise Missing("drift --config full")
  return found


def drifted(
  scheme: str, ablation: str = "none", column: str = "state_error", *,
  cycles: Tokens | None = None, tokens: Tokens | None = None,
) -> float:  # fmt: skip
  """Late error of a line, or that of the probes after so many cycles (or tokens)."""
  found = drift_curve(scheme, ablation, column)
  if cycles is None and tokens is None:
    return drift_report.late(found)
  rows = list(stored("drift"))
  T = drift_report.base_window(rows)
  kept = next(r["accept_length"] for r in rows if r["part"] == "forced" and r["window"] == T)
  return during(found, kept, cycles, tokens, "drift")


def setting(column: str = "state_error", **where: Any) -> tuple[folds.Curve, float]:
  """Tokens and errors of a setting of the fold ablation, and tokens a commit."""
  rows = list(stored("fold_ablation"))
  found = folds.some(folds.curves(rows, column), **where)
  if not found:
    raise Missing("fold_ablation --config full")
  kept = next(r["accept_length"] for r in rows if r["part"] == "forced")
  return next(iter(found.values())), kept


def folded(
  column: str = "state_error", *, cycles: Tokens | None = None, tokens: Tokens | None = None,
  **where: Any,
) -> float:  # fmt: skip
  """Late error of a setting, or that of the probes after so many commits (or tokens)."""
  curve, kept = setting(column, **where)
  if cycles is None and tokens is None:
    return folds.late(curve)
  return during(curve, kept, cycles, tokens, "fold_ablation")


def agreeing(**where: Any) -> float:
  """Share of outputs that are the reference's after rounding to bfloat16."""
  rows = list(stored("fold_ablation"))
  found = folds.some(folds.curves(rows, "bf16_equal"), **where)
  if not found:
    raise Missing("fold_ablation --config full")
  return float(np.mean([v[1].mean() for v in found.values()]))


REAL = "real streams here, synthetic keys there"
MODEL = "streams of the bundled model here, of a 27B model there"
FULL: dict[str, Any] = {"records": "fp32", "checkpoint": "fp32", "dots": "fp32", "phantom": False}


TOY: Tokens = (6_400, 8_192)
AT_600, SECOND_HALF = (500.0, 700.0), (300.0, 600.0)  # cycles
FLUSHES = 16  # of a ring, each FULL_RING commits
FULL_RING = 16
AFTER_FLUSHES = (0.8 * FLUSHES * FULL_RING, 1.25 * FLUSHES * FULL_RING)
BF16_RING: dict[str, Any] = {"fold": "open_loop", "every": FULL_RING} | FULL | {"records": "bf16"}
TOY_BF16 = BF16_RING | {"dots": "tf32"}
TOYS: Mapping[str, Callable[[], folds.Curve]] = {
  "toy-exact": lambda: drift_curve("ring_exact"),
  "toy-open": lambda: drift_curve("ring_open_loop"),
  "toy-bf16": lambda: setting(**TOY_BF16)[0],
  "toy-bf16-ckpt": lambda: setting(**TOY_BF16 | {"checkpoint": "bf16"})[0],
}
GROWS = 0.25  # a power of n above it is no plateau
STREAMS: Mapping[str, Callable[[], float]] = {
  "toy-exact": lambda: drifted("ring_exact", tokens=TOY),
  "toy-open": lambda: drifted("ring_open_loop", tokens=TOY),
  "toy-bf16": lambda: folded(tokens=TOY, **TOY_BF16),
  "toy-bf16-ckpt": lambda: folded(tokens=TOY, **TOY_BF16 | {"checkpoint": "bf16"}),
  "lumo-wy": lambda: drifted("delta_cache", column="output_error"),
  "lumo-scan": lambda: drifted("snapshot", column="output_error"),
  "cycles16-u": lambda: folded(cycles=AFTER_FLUSHES, **BF16_RING | {"checkpoint": "bf16"}),
  "cycles16-v": lambda: folded(
    fold="exact", every=FULL_RING, cycles=AFTER_FLUSHES, **FULL | {"checkpoint": "bf16"}
  ),
  "lumo-tf32": lambda: agreeing(fold="open_loop", **FULL | {"dots": "tf32"}),
  "lumo-fp32": lambda: agreeing(fold="open_loop", **FULL),
}


# What the published lines on synthetic keys come to on captured streams.
CAPTURED: Mapping[str, Callable[[], float]] = {
  "cycle-step": lambda: drifted("snapshot", cycles=AT_600),
  "cycle-wy": lambda: drifted("delta_cache", cycles=AT_600),
  "cycle-x3": lambda: drifted("ring_open_loop", "all dots bf16x3 (emulated)", cycles=AT_600),
  "cycle-tf32": lambda: drifted("ring_open_loop", "all dots tf32 (emulated)", cycles=AT_600),
  "cycle-bf16": lambda: drifted("ring_open_loop", "all dots bf16 (emulated)", cycles=AT_600),
  "cycle-stash": lambda: drifted("ring_open_loop", "records bf16", cycles=AT_600),
  "cycle-fold": lambda: drifted("ring_open_loop", "fold dots bf16 (emulated)", cycles=AT_600),
  "cycle-state": lambda: deferral(1, AT_600),
}


def deferral(every: int, cycles: Tokens) -> float:
  """State error of a bf16 checkpoint that is rounded at every `every`-th commit."""
  return folded(fold="exact", every=every, cycles=cycles, **FULL | {"checkpoint": "bf16"})


def synthetic(share: float, inputs: str, line: str, every: int = 1) -> float:
  """Mean state error over the last `share` of the cycles on synthetic keys."""
  try:
    return cycles_report.late(list(stored("cycles")), share, inputs=inputs, line=line, every=every)
  except KeyError as e:
    raise Missing("cycles") from e


DRAWS = "of four draws, where the source has one"


def of_cycles(row: Row) -> Answer:
  """Errors on synthetic keys, several draws where the source has one; captured streams beside."""
  id = row["id"]
  value = synthetic(1 / 3, *cycles_report.LINES[id])
  try:
    why = f"on captured streams {short(CAPTURED[id]())}; {DRAWS}"
  except Missing:
    why = DRAWS
  return beside(row, value, measured("cycles"), why, same=1.5, shape=3.0)


def of_deferral(row: Row) -> Answer:
  """A bf16 checkpoint rounded at every m-th commit, and what that gains over every one."""
  _, inputs, m = row["id"].split("-")
  at = lambda n: synthetic(0.5, inputs, "checkpoint bf16", n)
  every = int(m[1:])
  value, gain = at(every), at(1) / at(every)
  why = f"{gain:.2f} x less than at every commit, sqrt(m) is {every**0.5:.2f}"
  try:
    captured = deferral(1, SECOND_HALF) / deferral(every, SECOND_HALF)
    why += f"; on captured streams, without the last rounding, {captured:.2f} x"
  except Missing:
    pass
  why = DRAWS if every == 1 else f"{why}; {DRAWS}"
  return beside(row, value, measured("cycles"), why, same=1.25, shape=2.0)


FOLDED = {
  "toy-bf16", "toy-bf16-ckpt", "cycles16-u", "cycles16-v", "lumo-tf32", "lumo-fp32",
}  # fmt: skip


def of_streams(row: Row) -> Answer:
  """Errors on streams of another law: of the same order of magnitude is in shape, and no more."""
  id = row["id"]
  stem = id.removesuffix("-lo").removesuffix("-hi")
  value = STREAMS[stem]()
  how = measured("fold_ablation" if stem in FOLDED else "drift")
  why = MODEL if stem.startswith("lumo") else REAL
  if row["unit"] == "fraction":  # near one: what does not agree is compared
    apart, there = 1 - value, 1 - float(row["value"])
    said = f"{apart:.2%} do not agree, there {there:.2%}"
    verdict = judged(apart / there, f"{said}; {why}", None, 10.0)
    return Answer(f"{value:.5f}", how, verdict.replace("published value", "published share", 1))
  if stem.startswith("toy"):
    power = drift_report.slope(TOYS[stem]())
    why += f", where no growth was seen; here it goes as n^{power:.2f}"
    if stem == "toy-exact":
      why += ", as the recurrence itself does, which an exact fold is"
    if power > GROWS:
      return Answer(short(value), how, f"differs: {why}")
  elif stem.startswith("cycles16"):
    ratio = STREAMS["cycles16-u"]() / STREAMS["cycles16-v"]()
    told = {r["id"]: r["value"] for r in published("numerics")}
    there = float(told["cycles16-u"]) / float(told["cycles16-v"])
    why = (
      f"u over raw v is {ratio:.2f} here and {there:.2f} there: a bf16 checkpoint hides it; {why}"
    )
    if stem == "cycles16-u":  # that u is the worse of the two is what was published
      effect = judged((ratio - 1) / (there - 1), why, None, 2.0)
      return Answer(short(value), how, effect.replace("published value", "published excess", 1))
  elif stem in ("lumo-wy", "lumo-scan"):
    ratio = STREAMS["lumo-wy"]() / STREAMS["lumo-scan"]()
    why = f"the window solve's over the scan's is {ratio:.2f} here, and above 1 there; {why}"
    if ratio < 1:  # that the solve is the worse of the two is what was published
      return Answer(short(value), how, f"differs: {why}")
  if stem == id:
    return beside(row, value, how, why, same=None, shape=10.0)
  ends = {
    r["id"]: float(r["value"]) for r in published("numerics") if r["id"].startswith(f"{stem}-")
  }
  return within(ends[f"{stem}-lo"], ends[f"{stem}-hi"], value, how, why, same=None, shape=10.0)
