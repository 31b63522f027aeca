"""Which scheme, how many drafts, and which ring for a model, a device, memory and an acceptance.

Every candidate's memory comes from its types, its step time from the roofline's cost model as a
range; what does not fit runs fewer requests at once. The best is the one with the highest geometric
mean of the least and the most tokens a second. `validate` holds it against measured rows that
nothing here was fitted on.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from rich.console import Group

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.footprint import Footprint, LayerShape, footprint, model_footprint
from commit_schemes.ring import ring
from experiments import cost, planner_report, provenance, roofline, step_args
from experiments.cost import Point
from experiments.devices import DEVICES
from experiments.models import MODELS, WEIGHTS, named, sizes
from experiments.record import BadInput, Record, Row, read_rows

ROWS: Mapping[str, Dtypes] = MappingProxyType(
  {"bfloat16": Dtypes(rows=("bfloat16",)), "float32": Dtypes(rows=("float32",))}
)
FOLDS: Mapping[str, Any] = MappingProxyType(
  {f"ring_{fold}": fold for fold in ("open_loop", "exact", "compensated")}
)


READS = ("step_time",)


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
  memory         GB for weights, states and `request_mb` of KV rows and the like a request
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
    checks = (
      (
        "model",
        named(self.model, WEIGHTS),
        f"{', '.join(WEIGHTS)}, or the path of a checkpoint",
      ),
      ("device", self.device in DEVICES, ", ".join(DEVICES)),
      ("memory", self.memory > 0, "more than 0"),
      (
        "accept",
        bool(self.accept) and min(self.accept) >= 0 and abs(sum(self.accept) - 1) < 1e-6,
        "probabilities that sum to 1",
      ),
      ("concurrency", bool(self.concurrency) and min(self.concurrency) >= 1, "each at least 1"),
      ("windows", bool(self.windows) and all(1 <= T <= 64 for T in self.windows), "each 1 to 64"),
      ("schemes", some(self.schemes, cost.STEPS), ", ".join(cost.STEPS)),
      ("records", self.records in ROWS, ", ".join(ROWS)),
      ("request_mb", self.request_mb >= 0, "at least 0"),
      ("draft_us", self.draft_us >= 0, "at least 0"),
      ("draft_token_us", self.draft_token_us >= 0, "at least 0"),
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
def envelope(scheme: str) -> roofline.Envelope:
  return roofline.envelope(roofline.measured(), scheme)


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
  d, e = DEVICES[c.device], envelope(scheme)
  states = roofline.time_range(cost.STEPS[scheme](layer, p), running, layers, d, e)
  bits = (c.weight_bits, c.weight_bits)
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


def run(c: Config, record: Record) -> None:
  for concurrency in record.parts(c.concurrency):
    for rank, p in enumerate(plans(c, concurrency)):
      low, high = p.tokens_per_s()
      row = p._asdict() | {"tokens_per_s_low": low, "tokens_per_s_high": high}
      row["drafts"] = p.window - 1
      record(model=sizes(c.model).name, device=c.device, concurrency=concurrency, rank=rank, **row)


class Check(NamedTuple):
  """A measured choice between two schemes, and the predicted one."""

  what: str
  predicted: float
  measured: float


def step_us(
  scheme: str, p: Point, batch: int, layers: int, layer: LayerShape, device: str
) -> float:
  """The middle of the predicted range."""
  d = DEVICES[device.removeprefix("NVIDIA ")]
  low, high = roofline.time_range(cost.STEPS[scheme](layer, p), batch, layers, d, envelope(scheme))
  return (low * high) ** 0.5


def validate(rows: list[Row]) -> list[Check]:
  """Measured whole steps of a layer, over full flush cycles: how many times as fast as snapshot.

  The prediction knows bytes and the envelopes of kernels, not these rows.
  """
  layer, accept = LayerShape(16, 32), step_args.accepted
  snapshot = {(r["window"], r["batch"]): r for r in rows if r["scheme"] == "snapshot"}
  found = []
  for r in rows:
    T, batch = key = r["window"], r["batch"]
    if r["scheme"] == "snapshot" or key not in snapshot:
      continue
    p = Point(T, accept(T), ring=4 * T, row=4)
    both = [step_us(x, p, batch, 1, layer, r["device"]) for x in ("snapshot", r["scheme"])]
    measured = snapshot[key]["time_us"] / r["time_us"]
    what = f"{r['scheme']} over snapshot, T = {T}, batch {batch}"
    found.append(Check(what, both[0] / both[1], measured))
  return found


def serving_us(r: Row) -> float:
  """The middle of a predicted step of a served model: a rank's recurrent layers and bf16 weights.

  A mixture is the dense MLP of its active size, as `concurrency` times it.
  """
  layers, layer = MODELS[r["model"]]
  r = {"degree": 1, "admitted": r["concurrency"]} | r
  degree, requests = r["degree"], r["admitted"]
  p = Point(r["window"], r["accept_length"], ring=4 * r["window"])
  d = DEVICES[r["device"].removeprefix("NVIDIA ")]
  active = WEIGHTS[r["model"]][1] / degree
  e = envelope(r["scheme"])
  low, high = roofline.weights_range((active, active), requests * p.window, (16.0, 16.0), d, e)
  states = step_us(r["scheme"], p, requests, layers, layer.shard(degree), r["device"])
  return states + (low * high) ** 0.5


def validate_serving(rows: list[Row]) -> list[Check]:
  """Throughput of each scheme over the first one's, by concurrency, beside measured serving rows.

  Columns that it reads: model, device, scheme, window, concurrency, accept_length, tokens_per_s;
  and where they are there: admitted, degree, budget. ValueError: one of the first is missing.
  """
  need = ("model", "device", "scheme", "window", "concurrency", "accept_length", "tokens_per_s")
  if rows and not set(need) <= set(rows[0]):
    raise ValueError(f"columns {sorted(set(need) - set(rows[0]))} are missing, needed: {need}")
  found = []
  keys = ("model", "device", "window", "concurrency", "budget")
  groups: dict[tuple, list[Row]] = {}
  for r in rows:
    if r.get("admitted", 1) and r["model"] in MODELS and r["scheme"] in cost.STEPS:
      groups.setdefault(tuple(r.get(k) for k in keys), []).append(r)
  for (model, _, T, n, budget), group in groups.items():
    rate = lambda r: r.get("admitted", r["concurrency"]) * r["accept_length"] / serving_us(r)
    first = group[0]
    for r in group[1:]:
      of = "" if budget in (None, "common") else f", {budget} budget"
      what = f"{r['scheme']} over {first['scheme']}, {model}, T = {T}, concurrency {n}{of}"
      found.append(Check(what, rate(r) / rate(first), r["tokens_per_s"] / first["tokens_per_s"]))
  return found


figure = planner_report.figure


def table(rows: list[Row]) -> Group:
  """The plans, and what measured rows say of such predictions."""
  checks = validate(roofline.measured(whole=True))
  said = [f"{c.what}: predicted {c.predicted:.2f} x, measured {c.measured:.2f} x" for c in checks]
  path = provenance.RESULTS / "concurrency" / "rows.csv"
  served = validate_serving(read_rows(path)) if path.exists() else []
  off: dict[str, list[float]] = {}
  for c in served:  # too many to print each
    what = ", ".join(c.what.split(", ")[:2])
    off.setdefault(what, []).append(c.predicted / c.measured)
  said += [
    f"throughput of {what}: predicted is {min(x):.2f} to {max(x):.2f} x the measured, {len(x)} rows"
    for what, x in off.items()
  ]
  return Group(planner_report.table(rows), "Against rows that nothing was fitted on:", *said)
