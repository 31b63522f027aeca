"""Answers from committed rows about numbers: drift, amplification and fold ablation."""

from collections.abc import Callable, Mapping
from math import comb
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments import drift_report
from experiments import fold_ablation_report as folds
from experiments.figures import published
from experiments.published_answer import (
  Answer,
  Missing,
  beside,
  derived,
  judged,
  measured,
  only,
  short,
  stored,
  within,
)
from experiments.record import Row

Tokens = tuple[float, float]


def during(curve: folds.Curve, kept: float, cycles: Tokens | None, tokens: Tokens | None) -> float:
  """Root mean square over the probes after so many cycles, `kept` tokens each, or tokens."""
  low, high = tokens or [n * kept for n in cycles or (0, np.inf)]
  at = (low <= curve[0]) & (curve[0] <= high)
  if not at.any():
    raise Missing(f"no probe between {low:,.0f} and {high:,.0f} tokens")
  return float(np.sqrt(np.mean(np.square(curve[1][at]))))


def drifted(
  scheme: str, ablation: str = "none", column: str = "state_error", *,
  cycles: Tokens | None = None, tokens: Tokens | None = None,
) -> float:  # fmt: skip
  """Late error of a line, or that of the probes after so many cycles (or tokens)."""
  rows = list(stored("drift"))
  T = drift_report.base_window(rows)
  found = drift_report.curves(rows, column).get((scheme, ablation, T))
  if found is None:
    raise Missing("drift --config full")
  if cycles is None and tokens is None:
    return drift_report.late(found)
  kept = next(r["accept_length"] for r in rows if r["part"] == "forced" and r["window"] == T)
  return during(found, kept, cycles, tokens)


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
  return during(curve, kept, cycles, tokens)


def agreeing(**where: Any) -> float:
  """Share of outputs that are the reference's after rounding to bfloat16."""
  rows = list(stored("fold_ablation"))
  found = folds.some(folds.curves(rows, "bf16_equal"), **where)
  if not found:
    raise Missing("fold_ablation --config full")
  return float(np.mean([v[1].mean() for v in found.values()]))


def solved(block: int, correlation: float, beta: float, method: str, precision: str) -> float:
  where = {"block": block, "correlation": correlation, "beta": beta, "decay": 0.0}
  some = only(stored("amplification"), method=method, precision=precision, **where)
  if not some:
    raise Missing("amplification --config full")
  return some[0]["u_error"]


def grown(column: str, inputs: str, block: int, top: float = 1.0) -> float:
  rows = only(stored("amplification"), method="none", inputs=inputs, block=block)
  if not rows:
    raise Missing("amplification --config full")
  return max(r[column] for r in rows if (r["beta"] or 1.0) <= top)


REAL = "real streams here, synthetic keys there"
SOLVERS = {
  "sub": ("substitution", "float32"), "neu": ("Neumann doubling", "float32"),
  "neu-tf32": ("Neumann doubling", "tf32"), "blk": ("blocks of 16", "float32"),
  "blk-tf32": ("blocks of 16", "tf32"), "blk-bf16": ("blocks of 16", "bf16"),
}  # fmt: skip
FULL: dict[str, Any] = {"records": "fp32", "checkpoint": "fp32", "dots": "fp32", "phantom": False}


def power(n: int, beta: float) -> tuple[float, int]:
  """The largest entry of any power of A for equal keys without decay, and which power."""
  return max((beta**m * comb(n - 2, m - 1), m) for m in range(1, n))


TOY: Tokens = (6_400, 8_192)
AT_600, SECOND_HALF = (500.0, 700.0), (300.0, 600.0)  # cycles
FLUSHES = 16  # of a ring, each FULL_RING commits
FULL_RING = 16
AFTER_FLUSHES = (0.8 * FLUSHES * FULL_RING, 1.25 * FLUSHES * FULL_RING)
BF16_RING: dict[str, Any] = {"fold": "open_loop", "every": FULL_RING} | FULL | {"records": "bf16"}
CYCLES: Mapping[str, Callable[[], float]] = {
  "toy-exact": lambda: drifted("ring_exact", tokens=TOY),
  "toy-open": lambda: drifted("ring_open_loop", tokens=TOY),
  "toy-bf16": lambda: folded(tokens=TOY, **BF16_RING | {"dots": "tf32"}),
  "toy-bf16-ckpt": lambda: folded(tokens=TOY, **BF16_RING | {"dots": "tf32", "checkpoint": "bf16"}),
  "cycle-step": lambda: drifted("snapshot", cycles=AT_600),
  "cycle-wy": lambda: drifted("delta_cache", cycles=AT_600),
  "cycle-x3": lambda: drifted("ring_open_loop", "all dots bf16x3 (emulated)", cycles=AT_600),
  "cycle-tf32": lambda: drifted("ring_open_loop", "all dots tf32 (emulated)", cycles=AT_600),
  "cycle-bf16": lambda: drifted("ring_open_loop", "all dots bf16 (emulated)", cycles=AT_600),
  "cycle-stash": lambda: drifted("ring_open_loop", "records bf16", cycles=AT_600),
  "cycle-state": lambda: folded(
    fold="exact", every=1, cycles=AT_600, **FULL | {"checkpoint": "bf16"}
  ),
  "cycle-fold": lambda: drifted("ring_open_loop", "fold dots bf16 (emulated)", cycles=AT_600),
  "lumo-wy": lambda: drifted("delta_cache", column="output_error"),
  "lumo-scan": lambda: drifted("snapshot", column="output_error"),
  "cycles16-u": lambda: folded(cycles=AFTER_FLUSHES, **BF16_RING | {"checkpoint": "bf16"}),
  "cycles16-v": lambda: folded(
    fold="exact", every=FULL_RING, cycles=AFTER_FLUSHES, **FULL | {"checkpoint": "bf16"}
  ),
  "lumo-tf32": lambda: agreeing(fold="open_loop", **FULL | {"dots": "tf32"}),
  "lumo-fp32": lambda: agreeing(fold="open_loop", **FULL),
}


FOLDED = {
  "toy-bf16", "toy-bf16-ckpt", "cycle-state", "cycles16-u", "cycles16-v", "lumo-tf32", "lumo-fp32",
}  # fmt: skip


def of_streams(row: Row) -> Answer:
  """Errors on streams: of the same order of magnitude is in shape."""
  id = row["id"]
  stem = id.removesuffix("-lo").removesuffix("-hi")
  value, note, same = CYCLES[stem](), "", 2.0
  how = measured("fold_ablation" if stem in FOLDED else "drift")
  why = "another model and text" if stem.startswith("lumo") else REAL
  if row["unit"] == "fraction":  # near one: what does not agree is compared
    apart, there = 1 - value, 1 - float(row["value"])
    said = f"{apart:.2%} do not agree, there {there:.2%}"
    return Answer(f"{value:.5f}", how, judged(apart / there, f"{said}; {why}", 2.0, 10.0, said))
  if stem == "toy-exact":
    why += "; here the recurrence itself drifts that far, and an exact fold is the recurrence"
  elif stem == "toy-bf16-ckpt":
    slope = folds.slope(setting(**BF16_RING | {"dots": "tf32", "checkpoint": "bf16"})[0])
    why += f", where no growth was seen; here it grows as n^{slope:.2f}"
  elif stem.startswith("cycles16"):
    ratio = CYCLES["cycles16-u"]() / CYCLES["cycles16-v"]()
    note = f"u over raw v is {ratio:.2f} here and 1.97 there: a bf16 checkpoint hides it"
    same = 1.25
  if stem == id:
    return beside(row, value, how, why, same=same, shape=10.0, note=note)
  ends = {
    r["id"]: float(r["value"]) for r in published("numerics") if r["id"].startswith(f"{stem}-")
  }
  return within(ends[f"{stem}-lo"], ends[f"{stem}-hi"], value, how, why, 10.0)


def numerics(row: Row) -> Answer:
  id = row["id"]
  if id == "ring-amplification":
    gain, T = grown("gain", "captured", 16), 16
    return Answer(
      f"{gain:.2f} at BS = {T}", measured("amplification"),
      "differs: the delta rule's matrices cannot reach it; the gain of a chain is at most 2 for "
      f"beta up to 1 at any BS (docs/amplification.md), the bound is {2 ** (T - 1):,}",
    )  # fmt: skip
  if id.startswith("power-"):
    n, b = int(id.split("-")[1][1:]), int(id[-1])
    value, m = power(n, b)
    half = n // 2
    why = f"at m = {m}; published is 1.99^{half} times the binomial of the largest power at beta 1"
    return derived(row, value, 1.0, why)
  if id == "inverse-entry":
    value = max(grown("inverse_entry", "adversarial", T) for T in (4, 8, 16, 32))
    return beside(row, value, measured("amplification"), "", same=1.01)
  if id.startswith("row-sum"):
    value = grown("row_sum", "adversarial", int(id.split("-")[-1]))
    why = "gradient ascent finds worse keys than a random search; 1 + (BS - 1) beta bounds it"
    return beside(row, value, measured("amplification"), why, shape=1.5)
  if id.startswith("solve-"):
    _, n, rho, beta, way = id.split("-", 4)
    value, want = solved(int(n), float(rho), float(beta), *SOLVERS[way]), float(row["value"])
    # Of one draw each: half a decade is nothing, and what has blown up may be anything that large.
    why = "ours has A and its right-hand side in float32 too, and is the worst of two draws"
    shape = 10**0.5 if want < 1 else 100.0
    return Answer(
      short(value), measured("amplification"), judged(value / want, why, 10**0.5, shape)
    )
  if id.startswith("defer-"):
    m = int(id.rsplit("m", 1)[1])
    at = lambda m: folded(
      fold="exact", every=m, cycles=SECOND_HALF, **FULL | {"checkpoint": "bf16"}
    )
    value, base = at(m), at(1)
    gain = base / value
    if m == 1:
      return beside(row, value, measured("fold_ablation"), REAL, same=1.5, shape=10)
    kind = id.rsplit("m", 1)[0]
    there = {r["id"]: float(r["value"]) for r in published("numerics") if r["id"].startswith(kind)}
    theirs = there[f"{kind}m1"] / there[id]
    less = f"{gain:.2f} x less than at every commit, there {theirs:.2f}"
    text = f"{less}, sqrt(m) is {m**0.5:.2f}; {REAL}"
    near = max(gain / theirs, theirs / gain)
    verdict = "reproduced in shape" if near <= 1.5 else "differs"
    return Answer(short(value), measured("fold_ablation"), f"{verdict}: {text}")
  if id == "beta-bf16":
    beta = jnp.float32(row["setting"].split()[-1]).astype(jnp.bfloat16)
    return derived(row, float(beta), 1.0)
  return of_streams(row)
