"""What a step of every scheme costs: bytes, flops, launches, and the time that devices need for it.

The cost model (experiments/cost.py) is checked twice. Its bytes and flops are held against XLA's
own count of every kernel of every scheme (experiments/counted.py). That a time is a launch and so
many bytes is held against kernels that an H200 ran: a line through batches 1 and 64 of a kernel is
read at its other batches, which says that time is linear in bytes and predicts no kernel from
another. Then the model is applied to devices that nothing here was measured on, as ranges: the
least and the most that the measured kernels' launches and shares of bandwidth allow, and weights of
4 to 16 bits.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from commit_schemes.footprint import LayerShape
from experiments import cost, counted, provenance, roofline_report, step_args
from experiments.cost import Cost, Point
from experiments.devices import DEVICES, Device
from experiments.models import MODELS, WEIGHTS, Sizes, sizes
from experiments.record import Record, Row, read_rows

READS = ("step_time",)


@dataclass(frozen=True, kw_only=True)
class Config:
  """Steps with windows of `window` nodes, of which `accepted` (low, high) are kept; XLA counts
  those with `counted_windows`."""

  devices: tuple[str, ...] = tuple(DEVICES)
  models: tuple[str, ...] = ("Qwen3.5-35B-A3B", "Qwen3.5-27B")
  schemes: tuple[str, ...] = tuple(cost.STEPS)
  batches: tuple[int, ...] = (1, 16, 64, 256)
  window: int = 4
  accepted: tuple[float, float] = (2.0, 3.5)
  ring: int = 16
  counted_windows: tuple[int, ...] = tuple(counted.POINTS)
  weight_bits: tuple[float, float] = (4.0, 16.0)
  model: Path | None = None  # a checkpoint, in place of `models`

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    for name, known in {"devices": DEVICES, "models": WEIGHTS, "schemes": cost.STEPS}.items():
      if not getattr(self, name) or set(getattr(self, name)) - set(known):
        raise ValueError(f"{name}={getattr(self, name)!r}, allowed: some of {', '.join(known)}")
    low, high = self.accepted
    bits = self.weight_bits
    checks = (
      (
        "batches",
        bool(self.batches) and all(1 <= n <= 1_000_000 for n in self.batches),
        "each 1 to 1000000",
      ),
      ("window", 1 <= self.window <= 64, "1 to 64"),
      ("accepted", 1 <= low <= high <= self.window, f"low to high within 1 to {self.window}"),
      (
        "counted_windows",
        set(self.counted_windows) <= set(counted.POINTS),
        f"some of {', '.join(map(str, counted.POINTS))}",
      ),
      ("ring", self.window <= self.ring <= 1024, f"{self.window} to 1024"),
      ("weight_bits", 1 <= bits[0] <= bits[1] <= 32, "low to high within 1 to 32"),
    )
    for name, good, allowed in checks:
      if not good:
        raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; allowed: {allowed}")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "smoke": Config(
      devices=("M4", "H200"), batches=(1,), schemes=("snapshot", "ring_exact"), counted_windows=(4,)
    ),
  }
)
COLUMNS = (
  "part", "device", "model", "scheme", "state_dtype", "batch", "window", "bytes", "flops",
  "launches", "low_us", "high_us", "counted_bytes", "counted_flops", "measured_us",
  "step_low_us", "step_high_us", "share_low", "share_high",
)  # fmt: skip


class Roof(NamedTuple):
  """Microseconds before the first byte, and bytes a microsecond after it."""

  launch: float
  rate: float

  def time(self, bytes_: float) -> float:
    return self.launch + bytes_ / self.rate


# What memory alone bounds; of these a launch and a share of bandwidth are made.
KERNELS = ("verify", "fold", "decode", "snapshot", "snapshot_commit")
# A scheme whose verify does more than memory bounds may be as slow as that kernel is.
OWN: Mapping[str, str] = MappingProxyType(
  {
    "ring_open_loop": "step_ring",
    "ring_exact": "step_ring",
    "ring_compensated": "step_ring",
    "tree_wy": "step",
  }
)
WHOLE = "whole_step"  # a scheme's verify and commit; nothing is fitted on these


def measured(*, whole: bool = False) -> list[Row]:
  """Committed times of our kernels with a decay a head, or of whole steps, if there are any."""
  path = provenance.RESULTS / "step_time" / "rows.csv"
  rows = read_rows(path) if path.exists() else []
  ours = lambda r: not r.get("peer") and r.get("decay", "gdn") == "gdn"  # columns that are newer
  return [r for r in rows if (r["kernel"] == WHOLE) is whole and ours(r)]


KEY = ("kernel", "state_dtype", "window")
FITTED = (1, 64)  # batches that a roof is drawn through; the others are predicted


def fit(rows: list[Row]) -> dict[tuple, Roof]:
  """Kernel, state dtype, window -> the line through its times at the two fitted batches."""
  at: dict[tuple, dict[int, Row]] = {}
  for row in rows:
    at.setdefault(tuple(row[k] for k in KEY), {})[row["batch"]] = row
  roofs = {}
  for key, by_batch in at.items():
    if set(FITTED) <= set(by_batch):
      a, b = (by_batch[n] for n in FITTED)
      rate = (b["bytes"] - a["bytes"]) / (b["time_us"] - a["time_us"])
      roofs[key] = Roof(a["time_us"] - a["bytes"] / rate, rate)
  return roofs


class Envelope(NamedTuple):
  """What the fitted kernels span: launches in microseconds, shares of the peak bandwidth."""

  launch: tuple[float, float]
  share: tuple[float, float]


def envelope(rows: list[Row], scheme: str | None = None) -> Envelope:
  """Of what memory bounds, down to the scheme's own kernel where that was measured.

  ValueError: no kernel was measured at the fitted batches.
  """
  of = {*KERNELS, OWN.get(scheme or "")}
  roofs = [roof for (kernel, *_), roof in fit(rows).items() if kernel in of]
  if not roofs:
    raise ValueError(f"step_time has no kernel at batches {FITTED}: `run step_time` measures them")
  peak = DEVICES["H200"].bandwidth * 1e3  # bytes a microsecond
  span = lambda xs: (min(xs), max(xs))
  return Envelope(span([r.launch for r in roofs]), span([r.rate / peak for r in roofs]))


def time_range(c: Cost, batch: int, layers: int, d: Device, e: Envelope) -> tuple[float, float]:
  """Microseconds of all recurrent layers of one step."""
  launch = d.launch or e.launch
  rate = [d.bandwidth * 1e3 * share for share in e.share]
  low = c.launches * launch[0] + batch * c.bytes / rate[1]
  high = c.launches * launch[1] + batch * c.bytes / rate[0]
  return layers * low, layers * high


Weights = tuple[float, float]  # parameters in all, and those of one token, in 10^9


PRODUCTS = (0.5, 1.0)  # shares of the peak that large products reach; an assumption


def weights_range(
  weights: Weights, tokens: int, bits: tuple[float, float], d: Device, e: Envelope
) -> tuple[float, float]:
  """Microseconds of one step's weights: those of one token are read, or those of every token anew,
  and multiplied by every token. The longer of the two counts."""
  total, active = weights
  rate = [d.bandwidth * 1e3 * share for share in e.share]
  most = min(total, active * tokens)
  low, high = active * 1e9 * bits[0] / 8 / rate[1], most * 1e9 * bits[1] / 8 / rate[0]
  rates = d.tflops[1] * PRODUCTS[1], d.tflops[0] * PRODUCTS[0]
  least, worst = (2e3 * active * tokens / rate for rate in rates)
  return max(low, least), max(high, worst)


def fits(weights: Weights, bits: float, d: Device) -> bool:
  """The weights leave room on one device."""
  return weights[0] * bits / 8 < d.memory


def row(**values: Any) -> Row:
  return {name: values.get(name) for name in COLUMNS}


def xla_rows(c: Config) -> Iterator[Row]:
  """Every kernel of every scheme, and its whole step, beside XLA's count."""
  s = MODELS["Qwen3.5-35B-A3B"].layer
  for T in c.counted_windows:
    for scheme, kernel, ours, xla in counted.counted(s, T):
      yield row(
        part="xla" if kernel is None else "xla kernel", device=jax.devices()[0].device_kind,
        scheme=scheme if kernel is None else f"{scheme}: {kernel}", state_dtype="float32", batch=1,
        window=T, **ours._asdict(), counted_bytes=xla.bytes, counted_flops=xla.flops,
      )  # fmt: skip


def kernel_rows() -> Iterator[Row]:
  """Every measured kernel beside its prediction; rows of the fitted batches are marked as such."""
  rows = measured()
  roofs = fit(rows)
  for r in rows:
    roof = roofs.get(tuple(r[k] for k in KEY))
    if roof:
      yield row(
        part="fitted" if r["batch"] in FITTED else "predicted", device=r["device"],
        scheme=r["kernel"], state_dtype=r["state_dtype"], batch=r["batch"], window=r["window"],
        bytes=r["bytes"], launches=1, low_us=roof.time(r["bytes"]), high_us=roof.time(r["bytes"]),
        measured_us=r["time_us"],
      )  # fmt: skip


def whole_rows() -> Iterator[Row]:
  """Measured whole steps of one layer beside what bytes and launches say of them."""
  s = LayerShape(16, 32)
  for r in measured(whole=True):
    T, scheme = r["window"], r["scheme"]
    c = cost.STEPS[scheme](s, Point(T, step_args.accepted(T), ring=4 * T, row=4))
    e = envelope(measured(), scheme)
    low, high = time_range(c, r["batch"], 1, DEVICES[r["device"].removeprefix("NVIDIA ")], e)
    yield row(
      part="whole", device=r["device"], scheme=scheme, state_dtype="float32", batch=r["batch"],
      window=T, **c._asdict(), low_us=low, high_us=high, measured_us=r["time_us"],
    )  # fmt: skip


def step_rows(c: Config, models: list[Sizes], device: str) -> Iterator[Row]:
  d, rows = DEVICES[device], measured()
  envelopes = {scheme: envelope(rows, scheme) for scheme in c.schemes}
  for (model, shape, weights, _), scheme, batch in itertools.product(models, c.schemes, c.batches):
    if weights is None or not fits(weights, c.weight_bits[0], d):
      continue
    e = envelopes[scheme]
    kept = [cost.STEPS[scheme](shape.layer, Point(c.window, n, c.ring)) for n in c.accepted]
    times = [time_range(x, batch, shape.layers, d, e) for x in kept]
    low, high = min(t[0] for t in times), max(t[1] for t in times)
    bits = c.weight_bits if fits(weights, c.weight_bits[1], d) else (c.weight_bits[0],) * 2
    read = weights_range(weights, batch * c.window, bits, d, envelope(rows))
    yield row(
      part="step", device=device, model=model, scheme=scheme, state_dtype="float32", batch=batch,
      window=c.window, bytes=shape.layers * max(x.bytes for x in kept),
      flops=shape.layers * max(x.flops for x in kept),
      launches=shape.layers * max(x.launches for x in kept), low_us=low, high_us=high,
      step_low_us=low + read[0], step_high_us=high + read[1],
      share_low=low / (low + read[1]), share_high=high / (high + read[0]),
    )  # fmt: skip


def run(c: Config, record: Record) -> None:
  models = [sizes(m) for m in (c.models if c.model is None else (str(c.model),))]
  parts: dict[str, Any] = {"xla": partial(xla_rows, c), "kernels": kernel_rows, "whole": whole_rows}
  parts |= {device: partial(step_rows, c, models, device) for device in c.devices}
  for part in record.parts(parts):
    for r in parts[part]():
      record(**r)


figure, table = roofline_report.figure, roofline_report.table
