"""Which scheme, how many drafts, and which ring for a model, a device, memory and an acceptance.

Every candidate's memory comes from its types, its step time as a range from what its kernels took
on an H200 (experiments/kernel_time.py) and from the roofline of the weights; what does not fit runs
fewer requests at once. The best is the one with the highest geometric mean of the least and the
most tokens a second.

Inputs are rows of single kernels, in results/step_time. What validates is no input: that file's
rows of whole steps, and results/concurrency (experiments/plan_checks.py).
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Group

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.footprint import Footprint, LayerShape, footprint, model_footprint
from commit_schemes.ring import ring
from experiments import (
  cost,
  kernel_time,
  plan_checks,
  planner_report,
  roofline,
)
from experiments.cost import Point
from experiments.devices import DEVICES
from experiments.models import WEIGHTS, named, sizes
from experiments.record import BadInput, Record, Row

ROWS: Mapping[str, Dtypes] = MappingProxyType(
  {"bfloat16": Dtypes(rows=("bfloat16",)), "float32": Dtypes(rows=("float32",))}
)
FOLDS: Mapping[str, Any] = MappingProxyType(
  {f"ring_{fold}": fold for fold in ("open_loop", "exact", "compensated")}
)


MOST = 1_000_000  # of requests, microseconds, megabytes
READS = ("step_time", "concurrency")


@dataclass(frozen=True, kw_only=True)
class Ring:
  """Ring lengths to try; those below a window are left out for it."""

  slots: tuple[int, ...] = (8, 16, 32, 64)

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    if not self.slots or not all(1 <= n <= 1024 for n in self.slots):
      raise ValueError(f"ring.slots={self.slots} is not allowed; allowed: each 1 to 1024")


@dataclass(frozen=True, kw_only=True)
class Config:
  """`accept[i]` is the probability that i + 1 tokens of an endless window would be accepted.

  model          a name, or the path of a checkpoint
  memory         GB for weights, states and `request_mb` of KV rows and the like a request, no more
                 than the device has
  windows        nodes to try: the newest token and K = window - 1 drafts; 1 is plain decoding
  schemes        replay_K also says how many states a partial cache keeps
  draft_us       microseconds of drafting a step: of a block drafter, or what any draft takes
  draft_token_us microseconds of each drafted token: of a drafter that writes them one by one
  weight_bits    of a parameter
  exact          only schemes whose state is the recurrence's bit for bit
  """

  model: str = "Qwen3.5-35B-A3B"
  device: str = "H200"
  memory: float = 120.0
  accept: tuple[float, ...] = (0.3, 0.2, 0.15, 0.1, 0.08, 0.06, 0.05, 0.06)
  concurrency: tuple[int, ...] = (1, 4, 16, 64, 256)
  windows: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
  schemes: tuple[str, ...] = (
    "snapshot", "replay_0", "replay_1", "replay_4", "delta_cache", "tree_wy", *FOLDS,
  )  # fmt: skip
  ring: Ring = field(default_factory=Ring)
  records: str = "bfloat16"
  request_mb: float = 0.0
  draft_us: float = 0.0
  draft_token_us: float = 0.0
  weight_bits: float = 8.0
  exact: bool = False

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    some = lambda xs, known: bool(xs) and set(xs) <= set(known)
    held = DEVICES[self.device].memory if self.device in DEVICES else math.inf
    checks = (
      (
        "model",
        named(self.model, WEIGHTS),
        f"{', '.join(WEIGHTS)}, or the path of a checkpoint",
      ),
      ("device", self.device in DEVICES, ", ".join(DEVICES)),
      (
        "memory",
        0 < self.memory <= held,
        f"above 0, to the {held} GB of device={self.device}",
      ),
      (
        "accept",
        all(0 <= p <= 1 for p in self.accept) and abs(sum(self.accept) - 1) < 1e-6,
        "probabilities, each 0 to 1, that sum to 1",
      ),
      (
        "concurrency",
        bool(self.concurrency) and all(1 <= n <= MOST for n in self.concurrency),
        f"each 1 to {MOST}",
      ),
      ("windows", bool(self.windows) and all(1 <= T <= 64 for T in self.windows), "each 1 to 64"),
      ("schemes", some(self.schemes, cost.STEPS), ", ".join(cost.STEPS)),
      ("records", self.records in ROWS, ", ".join(ROWS)),
      ("request_mb", 0 <= self.request_mb <= MOST, f"0 to {MOST}"),
      ("draft_us", 0 <= self.draft_us <= MOST, f"0 to {MOST}"),
      ("draft_token_us", 0 <= self.draft_token_us <= MOST, f"0 to {MOST}"),
      ("weight_bits", 1 <= self.weight_bits <= 32, "1 to 32"),
    )
    for name, good, allowed in checks:
      if not good:
        raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; allowed: {allowed}")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "mac": Config(device="M4 Max", memory=64.0, weight_bits=4.0, concurrency=(1, 2, 4)),
    "smoke": Config(concurrency=(1, 64), windows=(4,), schemes=("snapshot", "ring_exact")),
  }
)
EXACT = (
  "snapshot",
  "replay_0",
  "replay_1",
  "replay_4",
  "replay_8",
  "ring_exact",
)  # states that are the recurrence's bit for bit


class Plan(NamedTuple):
  """A candidate and what is predicted of it."""

  scheme: str
  window: int
  ring: int | None
  accept_length: float
  running: int
  request_mb: float
  low_us: float
  high_us: float

  def tokens_per_s(self) -> tuple[float, float]:
    """Of all running requests, least and most."""
    tokens = 1e6 * self.running * self.accept_length
    return tokens / self.high_us, tokens / self.low_us


def accepted(distribution: tuple[float, ...], window: int) -> float:
  """Mean number of tokens that a window of `window` nodes accepts, anchor and all."""
  return sum(p * min(i + 1, window) for i, p in enumerate(distribution))


@cache
def request_bytes(scheme: str, window: int, slots: int | None, layer: LayerShape, rows: str) -> int:
  """Recurrent bytes of one running request in one layer: its slot, and its flight."""
  dtypes = ROWS[rows]
  spec = Spec(layer.key_heads, window, channels=layer.channels, dtypes=dtypes)
  if slots is None:
    made = SCHEMES[scheme].make(spec)
  else:
    made = ring(spec, slots=slots, fold=FOLDS[scheme])
  held: Footprint = footprint(made, layer, window)
  return held.carry + held.flight


@cache
def conv_bytes(model: str, window: int) -> int:
  held = model_footprint(SCHEMES["replay_0"].make, sizes(model).recurrent, window).conv
  return held.carry + held.flight


def plan(c: Config, scheme: str, window: int, slots: int | None, concurrency: int) -> Plan | None:
  """None where not even one request fits beside the weights."""
  _, (layers, layer), total_active, _ = sizes(c.model)
  held: float = layers * request_bytes(scheme, window, slots, layer, c.records)
  held += conv_bytes(c.model, window) + c.request_mb * 1e6
  assert total_active is not None  # WEIGHTS has it, or it was counted
  total, _ = total_active
  room = (c.memory - total * c.weight_bits / 8) * 1e9
  running = min(concurrency, int(room // held))
  if running < 1:
    return None
  kept = accepted(c.accept, window)
  row = {"bfloat16": 2, "float32": 4}[c.records]
  p = Point(window, kept, ring=slots or window, row=row)
  states = kernel_time.step_range(scheme, layer, p, running, layers, c.device)
  bits = (c.weight_bits, c.weight_bits)
  d, e = DEVICES[c.device], kernel_time.span()
  weights = roofline.weights_range(total_active, running * window, bits, d, e)
  drafting = (c.draft_us if window > 1 else 0.0) + c.draft_token_us * (window - 1)
  low, high = (drafting + a + b for a, b in zip(states, weights, strict=True))
  return Plan(scheme, window, slots, kept, running, held / 1e6, low, high)


def candidates(c: Config) -> Iterator[tuple[str, int, int | None]]:
  """Scheme, window and ring length."""
  for scheme, T in itertools.product(c.schemes, c.windows):
    if c.exact and scheme not in EXACT:
      continue
    lengths = [n for n in c.ring.slots if n >= T] if scheme in FOLDS else [None]
    yield from ((scheme, T, n) for n in lengths)


def plans(c: Config, concurrency: int) -> list[Plan]:
  """Best first. BadInput: nothing fits."""
  every = list(candidates(c))
  if not every:
    said = f"windows={c.windows}, ring.slots={c.ring.slots}, schemes={c.schemes}, exact={c.exact}"
    raise BadInput(f"{said} leave no candidate; a ring has at least as many slots as a window")
  found = [p for x in every if (p := plan(c, *x, concurrency))]
  if not found:
    raise BadInput(f"memory={c.memory} GB does not hold {c.model} and one request")
  mean = lambda p: p.tokens_per_s()[0] * p.tokens_per_s()[1]
  return sorted(found, key=mean, reverse=True)


COLUMNS = (
  "part", "model", "device", "concurrency", "rank", *Plan._fields, "tokens_per_s_low",
  "tokens_per_s_high", "drafts", "budget", "by", "best", "regret",
)  # fmt: skip


def plan_rows(c: Config, concurrency: int) -> Iterator[Row]:
  for rank, p in enumerate(plans(c, concurrency)):
    low, high = p.tokens_per_s()
    yield p._asdict() | {
      "part": "plan", "model": sizes(c.model).name, "device": c.device, "concurrency": concurrency,
      "rank": rank, "tokens_per_s_low": low, "tokens_per_s_high": high, "drafts": p.window - 1,
      "by": "kernels",
    }  # fmt: skip


def run(c: Config, record: Record) -> None:
  parts: dict[str, Any] = {str(n): partial(plan_rows, c, n) for n in c.concurrency}
  parts["validation"] = plan_checks.picks
  for part in record.parts(parts):
    for row in parts[part]():
      record(**{name: row.get(name) for name in COLUMNS})


figure = planner_report.figure


def table(rows: list[Row]) -> Group:
  """The plans, and what measured rows that are no input say of such predictions."""
  return Group(planner_report.table(rows), planner_report.picks(rows), *plan_checks.spans())
