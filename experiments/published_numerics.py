"""Answers from committed rows about numbers: what an inverse does, and errors on streams."""

from math import comb

import jax.numpy as jnp

from experiments import cycles_report
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
)
from experiments.published_streams import of_cycles, of_deferral, of_streams
from experiments.record import Row


def solved(block: int, correlation: float, beta: float, method: str, precision: str) -> float:
  where = {"block": block, "correlation": correlation, "beta": beta, "decay": 0.0}
  some = only(stored("amplification"), method=method, precision=precision, **where)
  if not some:
    raise Missing("amplification --config full")
  return some[0]["solve_error"]


def grown(column: str, inputs: str, block: int, top: float = 1.0) -> float:
  rows = only(stored("amplification"), method="none", inputs=inputs, block=block)
  if not rows:
    raise Missing("amplification --config full")
  return max(r[column] for r in rows if (r["beta"] or 1.0) <= top)


SOLVERS = {
  "sub": ("substitution", "float32"), "neu": ("Neumann doubling", "float32"),
  "neu-tf32": ("Neumann doubling", "tf32"), "blk": ("blocks of 16", "float32"),
  "blk-tf32": ("blocks of 16", "tf32"), "blk-bf16": ("blocks of 16", "bf16"),
}  # fmt: skip


def power(n: int, beta: float) -> tuple[float, int]:
  """The largest entry of any power of A for equal keys without decay, and which power."""
  return max((beta**m * comb(n - 2, m - 1), m) for m in range(1, n))


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
    why = "of keys found by gradient ascent, blocks of 4 to 32"
    return beside(row, value, measured("amplification"), why, same=1.01)
  if id.startswith("row-sum"):
    value = grown("row_sum", "adversarial", int(id.split("-")[-1]))
    why = "gradient ascent finds worse keys than a random search; 1 + (BS - 1) beta bounds it"
    return beside(row, value, measured("amplification"), why, shape=1.5)
  if id.startswith("solve-"):
    _, n, rho, beta, way = id.split("-", 4)
    value, want = solved(int(n), float(rho), float(beta), *SOLVERS[way]), float(row["value"])
    # Of one draw each: half a decade is nothing, and what has blown up may be anything that large.
    why = "ours is the worst of two draws"
    if way.startswith("neu"):
      other = solved(int(n), float(rho), float(beta), "Newton-Schulz", SOLVERS[way][1])
      why += f"; the same powers of A in another order, Newton-Schulz's, leave {short(other)}"
    shape = 10**0.5 if want < 1 else 100.0
    return Answer(
      short(value), measured("amplification"), judged(value / want, why, 10**0.5, shape)
    )
  if id.startswith("defer-"):
    return of_deferral(row)
  if id in cycles_report.LINES:
    return of_cycles(row)
  if id == "beta-bf16":
    beta = jnp.float32(row["setting"].split()[-1]).astype(jnp.bfloat16)
    return derived(row, float(beta), 1.0)
  return of_streams(row)
