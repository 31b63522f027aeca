"""Every target of the kernels beside what `step_time` has measured.

Shares are of the copy ceiling on compulsory bytes. A time of another project's kernel is the one
measured in the same run where there is one, else the published one. Beside what is measured stands
what it would be at best: if the kernel in question moved its compulsory bytes at the ceiling and
did nothing else, and what it is compared with stayed as it is.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from rich.table import Table

from experiments.bandwidth_gate import Config
from experiments.figures import look
from experiments.record import Row, read_rows
from experiments.step_time_report import points, said, theirs


class Missing(Exception):
  """A row that has not been measured."""


Where = tuple[Any, ...]  # kernel, T, batch, and of some: state dtype, scheme
Value = Callable[[list[Row]], float]


class Target(NamedTuple):
  what: str
  value: Value
  bound: float
  least: bool = False


def row(rows: list[Row], kernel: str, T: int, B: int, state="float32", scheme=None) -> Row:
  """Of ours, a decay a head. Missing: there is none."""
  where = {"kernel": kernel, "window": T, "batch": B, "state_dtype": state, "scheme": scheme}
  some = points(rows, **where, peer=None, decay="gdn")
  if not some:
    raise Missing
  return some[0]


def us(*where: Any) -> Value:
  return lambda rows: row(rows, *where)["time_us"]


def peer(package: str, kernel: str, T: int, B: int) -> Value:
  def value(rows: list[Row]) -> float:
    for r in points(rows, kernel=kernel, window=T, batch=B):
      if (r.get("peer") or "").startswith(package):
        return r["time_us"]
    return dict(theirs()[package, kernel, T])[B]

  return value


def over(a: Value, b: Value) -> Value:
  return lambda rows: a(rows) / b(rows)


def share(*kernels: Where) -> Value:
  """Of the copy ceiling, of kernels one after the other."""

  def value(rows: list[Row]) -> float:
    some = [row(rows, *where) for where in kernels]
    total = sum(r["bytes"] for r in some) / sum(r["time_us"] for r in some)
    return total / (some[0]["ceiling_gb_s"] * 1e3)

  return value


def error(name: str) -> Value:
  """The largest over the shapes of a float32 state."""

  def value(rows: list[Row]) -> float:
    some = points(rows, state_dtype="float32", peer=None, scheme=None)
    found = [r["relative_error"] for r in some if r["kernel"].startswith(name)]
    if not found:
      raise Missing
    return max(found)

  return value


def targets() -> Iterator[Target]:
  shares = (
    *(("verify", T, {64: 0.80, 256: 0.90}) for T in (4, 8, 16)),
    *(("step", T, {64: 0.85, 256: 0.92}) for T in (4, 8, 16)),
    ("step_ring", 16, {64: 0.85, 256: 0.85}),
    ("fold", 16, {64: 0.85, 256: 0.85}),
    ("decode_ring", 1, {64: 0.85, 256: 0.85}),
  )
  for kernel, T, bounds in shares:
    for B, bound in bounds.items():
      what = f"{said(kernel)}, T = {T}, batch {B}: share"
      yield Target(what, share((kernel, T, B)), bound, least=True)
  for B in (64, 256):
    what = f"snapshot and its commit, T = 16, batch {B}: share"
    yield Target(what, share(("snapshot", 16, B), ("snapshot_commit", 16, B)), 0.85, least=True)
  for B, most in ((1, 5.0), (4, 6.0)):
    yield Target(f"verify, T = 16, batch {B}: microseconds", us("verify", 16, B), most)
  flashinfer = (
    *(("verify", T, 1.05) for T in (4, 16)), ("step_ring", 8, 1.0), ("step_ring_flush", 8, 1.0),
  )  # fmt: skip
  for kernel, T, most in flashinfer:
    for B in (64, 256):
      what = f"{said(kernel)}, bf16 state, T = {T}, batch {B}: time over FlashInfer's"
      ours, other = us(kernel, T, B, "bfloat16"), peer("flashinfer", kernel, T, B)
      yield Target(what, over(ours, other), most)
  for T, B in itertools.product((4, 8), (64, 256)):
    what = f"step of a ring, T = {T}, batch {B}: time over verify"
    yield Target(what, over(us("step_ring", T, B), us("verify", T, B)), 1.15)
  yield Target(
    "decode of a ring, batch 256: time over decode that writes the state",
    over(us("decode_ring", 1, 256), us("decode", 1, 256)), 0.62,
  )  # fmt: skip
  yield Target(
    "verify of a tree of 64, batch 64: times as fast as snapshot",
    over(us("snapshot_tree", 64, 64), us("verify_tree", 64, 64)), 15.0, least=True,
  )  # fmt: skip
  for ring in ("ring_open_loop", "ring_exact"):
    whole = lambda scheme: us("whole_step", 16, 64, "float32", scheme)
    what = f"{said(ring)}, whole steps, T = 16, batch 64: times as fast as snapshot"
    yield Target(what, over(whole("snapshot"), whole(ring)), 10.0, least=True)
  yield Target(
    "verify, T = 16, batch 64: times as fast as flash-linear-attention",
    over(peer("fla", "fused_recurrent", 16, 64), us("verify", 16, 64)), 6.0, least=True,
  )  # fmt: skip
  for name in ("verify", "step"):
    yield Target(f"{name}, every shape: relative error", error(name), 1e-6)


def at_ceiling(rows: list[Row], of: set[Where]) -> list[Row]:
  """Rows of these (kernel, scheme) as if each took as long as a copy of its compulsory bytes."""
  ideal = lambda r: r | {"time_us": r["bytes"] / (r["ceiling_gb_s"] * 1e3)}
  return [ideal(r) if (r["kernel"], r["scheme"]) in of and not r["peer"] else r for r in rows]


def derived_rows(rows: list[Row] | None = None) -> list[Row]:
  """One row a target; nothing is `met` that has not been measured."""
  given = read_rows(Config().rows) if rows is None else rows
  names = {(r["kernel"], r["scheme"]) for r in given}
  ideal, found = [at_ceiling(given, of) for of in (names, *({x} for x in names))], list[Row]()
  for what, value, bound, least in targets():
    row: Row = {"what": what, "least": least, "bound": bound}
    try:
      got, best = value(given), (max if least else min)(map(value, ideal))
      row |= {"measured": got, "at_best": best, "met": got >= bound if least else got <= bound}
    except Missing:
      row |= dict.fromkeys(("measured", "at_best", "met"))
    found.append(row)
  return found


def figure(rows: list[Row]) -> Figure:
  """Measured over the bound, so that beyond 1 is met; what is not measured has no mark."""
  fig = Figure(figsize=(7.2, 0.16 * len(rows) + 1.0))
  ax = fig.subplots()
  up = lambda r, name: (r[name] / r["bound"]) ** (1 if r["least"] else -1)
  for met, style in ((True, look(3)), (False, look(2))):
    some = [(i, r) for i, r in enumerate(rows) if r["met"] is met]
    ax.plot([up(r, "measured") for _, r in some], [i for i, _ in some],
            **style | {"linestyle": "none"}, label="met" if met else "not met")  # fmt: skip
  bytes_alone = [(up(r, "at_best"), i) for i, r in enumerate(rows) if r["at_best"] != r["measured"]]
  ax.plot(*zip(*bytes_alone, strict=True), "k|", label="at best: the kernel alone at the ceiling")
  ax.axvline(1.0, color="black", linewidth=0.8)
  ax.set_yticks(range(len(rows)), [r["what"] for r in rows], fontsize=6)
  ax.set(
    xlabel="measured over what is asked for, better to the right", xlim=(0, 2), ylim=(len(rows), -1)
  )
  ax.legend()
  return fig


def table(rows: list[Row]) -> Table:
  met = sum(r["met"] is True for r in rows)
  known = sum(r["met"] is not None for r in rows)
  out = Table(title=f"{met} of {len(rows)} targets met, {len(rows) - known} not measured")
  for name in ("what", "must be", "is", "at best", ""):
    out.add_column(name, justify="left" if name == "what" else "right")
  number = lambda x: "" if x is None else f"{x:.3g}"
  verdict = {True: "met", False: "not met", None: "not measured"}
  for r in rows:
    bound = f"{'≥' if r['least'] else '≤'} {r['bound']:g}"
    out.add_row(r["what"], bound, number(r["measured"]), number(r["at_best"]), verdict[r["met"]])
  return out
