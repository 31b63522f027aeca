"""Answers from committed rows about numbers: drift, amplification and fold ablation."""

from collections.abc import Callable, Mapping
from math import comb
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments import drift_report
from experiments import fold_ablation_report as folds
from experiments.published_answer import Answer, Missing, beside, derived, only, short, stored
from experiments.record import Row


def drifted(scheme: str, ablation: str = "none", column: str = "state_error") -> float:
  rows = list(stored("drift"))
  found = drift_report.curves(rows, column)
  line = (scheme, ablation, drift_report.base_window(rows))
  if line not in found:
    raise Missing("drift --config full")
  return drift_report.late(found[line])


def folded(column: str = "state_error", **where: Any) -> float:
  found = folds.some(folds.curves(list(stored("fold_ablation")), column), **where)
  if not found:
    raise Missing("fold_ablation --config full")
  if column == "bf16_equal":
    return float(np.mean([v[1].mean() for v in found.values()]))
  return folds.late(next(iter(found.values())))


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


CYCLES: Mapping[str, Callable[[], float]] = {
  "toy-exact": lambda: drifted("ring_exact"),
  "toy-open": lambda: drifted("ring_open_loop"),
  "toy-bf16": lambda: folded(
    fold="open_loop", **FULL | {"records": "bf16", "dots": "tf32"}
  ),
  "toy-bf16-ckpt": lambda: folded(
    fold="open_loop", **FULL | {"records": "bf16", "dots": "tf32", "checkpoint": "bf16"}
  ),
  "cycle-step": lambda: drifted("snapshot"),
  "cycle-wy": lambda: drifted("delta_cache"),
  "cycle-x3": lambda: drifted("ring_open_loop", "all dots bf16x3 (emulated)"),
  "cycle-tf32": lambda: drifted("ring_open_loop", "all dots tf32 (emulated)"),
  "cycle-bf16": lambda: drifted("ring_open_loop", "all dots bf16 (emulated)"),
  "cycle-stash": lambda: drifted("ring_open_loop", "records bf16"),
  "cycle-state": lambda: folded(fold="exact", every=1, **FULL | {"checkpoint": "bf16"}),
  "cycle-fold": lambda: drifted("ring_open_loop", "fold dots bf16 (emulated)"),
  "lumo-wy": lambda: drifted("delta_cache", column="output_error"),
  "lumo-scan": lambda: drifted("snapshot", column="output_error"),
  "cycles16-u": lambda: folded(
    fold="open_loop", every=4, **FULL | {"records": "bf16", "checkpoint": "bf16"}
  ),
  "cycles16-v": lambda: folded(fold="exact", every=4, **FULL | {"checkpoint": "bf16"}),
  "lumo-tf32": lambda: folded("bf16_equal", fold="open_loop", **FULL | {"dots": "tf32"}),
  "lumo-fp32": lambda: folded("bf16_equal", fold="open_loop", **FULL),
}  # fmt: skip


def numerics(row: Row) -> Answer:
  id = row["id"]
  if id == "ring-amplification":
    gain, T = grown("gain", "captured", 16), 16
    return Answer(
      f"{gain:.2f} at BS = {T}", "measured on CPU",
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
    return beside(row, value, "measured on CPU", "", same=1.01)
  if id.startswith("row-sum"):
    value = grown("row_sum", "adversarial", int(id.split("-")[-1]))
    why = "gradient ascent finds worse keys than a random search; 1 + (BS - 1) beta bounds it"
    return beside(row, value, "measured on CPU", why, shape=1.5)
  if id.startswith("solve-"):
    _, n, rho, beta, way = id.split("-", 4)
    value = solved(int(n), float(rho), float(beta), *SOLVERS[way])
    want = float(row["value"])
    off = abs(np.log10(value / want))
    near = 0.5 if want < 1 else 2.0  # what has blown up depends on the draw
    why = "ours has A and its right-hand side in float32 too, and is the worst of two draws"
    verdict = "reproduced" if off <= near else f"differs: {short(value / want)} x; {why}"
    return Answer(short(value), "measured on CPU", verdict)
  if id.startswith("defer-"):
    m = int(id.rsplit("m", 1)[1])
    at = lambda m: folded(fold="exact", every=m, **FULL | {"checkpoint": "bf16"})
    value, base = at(m), at(1)
    gain = base / value
    if m == 1:
      return beside(row, value, "measured on CPU", REAL, same=1.5, shape=10)
    text = f"{gain:.2f} x less than at every commit, sqrt(m) is {m**0.5:.2f}; {REAL}"
    near = max(gain / m**0.5, m**0.5 / gain)
    verdict = "reproduced in shape" if near <= 1.5 else "differs"
    return Answer(short(value), "measured on CPU", f"{verdict}: {text}")
  if id == "beta-bf16":
    beta = jnp.float32(row["setting"].split()[-1]).astype(jnp.bfloat16)
    return derived(row, float(beta), 1.0)
  stem = id.removesuffix("-lo").removesuffix("-hi")
  value = CYCLES[stem]()
  why = "another model and text" if stem.startswith("lumo") else REAL
  return beside(row, value, "measured on CPU", why, same=2.0, shape=10.0)
