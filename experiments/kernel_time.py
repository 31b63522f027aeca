"""How long a step of a scheme takes, by what each of its kernels took on an H200.

Inputs are the rows of single kernels in results/step_time (float32 states, a decay a head) and no
others. What validates is measured apart and never read here: rows of `whole_step`, and those of
results/concurrency. The rules below were written with those in sight; no number is fitted to them.

On an H200 a kernel's time is a line through its rows, against bytes: of the windows on either side,
between their lines. A range comes of what no row says:
  the time before the first byte   without a row of one slot: from where the line through the larger
                                   batches begins to where that of the like kernel does
  kernels that were not timed      the like one's line; where it goes token by token, from its bytes
                                   to its tokens
Another device takes from what its bandwidth needs for the same bytes, at the best share that any
kernel had, to that and what the H200 took beyond it, by the ratio of bandwidths or of products,
whichever is longer; its launches are those of `devices`.
"""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import numpy as np

from commit_schemes.footprint import LayerShape
from experiments import cost, roofline, step_args
from experiments.cost import Part, Point
from experiments.devices import DEVICES, Device

Range = tuple[float, float]

# What runs a part: the kernel itself, or one that does the same reads and writes.
TIMED: Mapping[str, str] = MappingProxyType(
  {
    "verify_raw": "verify",
    "verify_rows": "verify",
    "fold_raw": "fold",
    "fold_rank": "fold",
    "partial": "snapshot",
  }
)
# Where one slot was not timed, this kernel's start is as late as any: its own code, or memory's.
LIKE: Mapping[str, str] = MappingProxyType({"step_ring": "step", "step_ring_flush": "step"})
# A row of two passes over the slots, of which the first is another kernel's.
AFTER: Mapping[str, str] = MappingProxyType({"step_ring_flush": "step_ring"})
HERE = "H200"
FEW = 1


class Line:
  """Times of a kernel with one window against its bytes; `start` is at no bytes, least and most."""

  def __init__(self, points: list[tuple[float, float]], start: Range):
    self.bytes, self.us = np.array(sorted(points)).T
    self.start = start

  def after(self, x: float) -> Range:
    """Microseconds beyond the start."""
    if x > self.bytes[-1]:
      slope = np.diff(self.us[-2:]) / np.diff(self.bytes[-2:])
      beyond = float(slope[0] * (x - self.bytes[-1]))
    else:
      beyond = 0.0
    at = lambda start: float(np.interp(x, (0.0, *self.bytes), (start, *self.us))) + beyond - start
    low, high = map(at, self.start)
    return low, high


def begins(points: list[tuple[float, float]]) -> float:
  """Where the line through the two smallest begins."""
  (x, t), (x2, t2) = sorted(points)[:2]
  return max(0.0, t - x * (t2 - t) / (x2 - x))


@cache
def lines() -> Mapping[str, Mapping[int, Line]]:
  """Kernel -> window -> its line, of what was measured at two batches or more."""
  found: dict[str, dict[int, dict[int, tuple[float, float]]]] = {}
  for r in roofline.measured():
    if r["state_dtype"] == "float32":
      at = found.setdefault(r["kernel"], {}).setdefault(r["window"], {})
      at[r["batch"]] = (r["bytes"], r["time_us"])
  known = {(kernel, T): at for kernel, of in found.items() for T, at in of.items() if len(at) > 1}
  starts = {key: begins(list(at.values())) for key, at in known.items()}

  def start(kernel: str, T: int) -> Range:
    own, like = starts[kernel, T], LIKE.get(kernel, "verify")
    ends = [s for (k, window), s in starts.items() if k == like and FEW in known[k, window]]
    return own, own if FEW in known[kernel, T] else max([own, *ends])

  out: dict[str, dict[int, Line]] = {}
  for (kernel, T), at in known.items():
    out.setdefault(kernel, {})[T] = Line(list(at.values()), start(kernel, T))
  return out


@cache
def span() -> roofline.Envelope:
  """What the kernels that memory bounds have in common."""
  return roofline.envelope(roofline.measured())


def between(of: Mapping[int, Line], T: int, x: float) -> tuple[Range, Range]:
  """Start, and microseconds beyond it, of x bytes with windows of T nodes."""
  windows = sorted(of)
  ends = [(*of[w].start, *of[w].after(x)) for w in windows]
  a, b, c, d = (float(np.interp(T, windows, of_all)) for of_all in zip(*ends, strict=True))
  return (a, b), (c, d)


def tokens(part: Part, p: Point) -> float:
  """How many times as long as by its bytes a part takes if its tokens count."""
  if part.kernel == "partial":
    return (1 + p.window) / (1 + part.n)
  timed = step_args.accepted(16)  # the records of every row of `fold`
  return max(1.0, part.n / timed) if part.kernel == "fold_raw" else 1.0


def launched(part: Part, batch: int) -> float:
  """How often any of so many slots has it done, each at a time of its own."""
  return 1 - (1 - part.share) ** batch


def part_range(part: Part, p: Point, batch: int, d: Device) -> Range:
  """Microseconds of one layer's part."""
  e, here = span(), DEVICES[HERE]
  x, often = batch * part.share * part.cost.bytes, launched(part, batch)
  peak = here.bandwidth * 1e3
  name = TIMED.get(part.kernel, part.kernel)
  if name in lines():
    start, beyond = between(lines()[name], p.window, x)
    if name in AFTER:
      first, _ = between(lines()[AFTER[name]], p.window, 0.0)
      start = max(0.0, start[0] - first[0]), max(0.0, start[1] - first[1])
    beyond = beyond[0], beyond[1] * tokens(part, p)
  else:
    start, beyond = e.launch, (x / (peak * e.share[1]), x / (peak * e.share[0]))
  if d is not here:
    least = x / (d.bandwidth * 1e3 * e.share[1])
    slower = max(here.bandwidth / d.bandwidth, here.tflops[0] / d.tflops[0])
    over = max(0.0, beyond[1] - x / (peak * e.share[1]))
    start, beyond = d.launch or start, (least, least + over * slower)
  low, high = (often * a + b for a, b in zip(start, beyond, strict=True))
  return min(low, high), max(low, high)


def step_range(scheme: str, s: LayerShape, p: Point, batch: int, layers: int, device: str) -> Range:
  """Microseconds of all recurrent layers of one step, least and most. KeyError: no such device."""
  d = DEVICES[device.removeprefix("NVIDIA ")]
  each = [part_range(x, p, batch, d) for x in cost.PARTS[scheme](s, p) if x.share]
  low, high = (layers * sum(ends) for ends in zip(*each, strict=True))
  return low, high
