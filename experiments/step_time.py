"""Time of every kernel and of every scheme's whole step against the copy ceiling, checked.

A row is recorded only after its check against float64 has passed in the same run: on hostile rows
before outputs are rounded (that error is the row's), then on what the very program that is timed
gives. Shapes are those of a Qwen3-Next layer: 32 value heads, 16 key heads, K = V = 128, bf16
inputs. `ceiling_share` counts the bytes that an operation cannot avoid (experiments/cost.py).

The most wanted rows come first. `--seconds` ends a run in time: rows and figure then have what
there is, and the same command goes on. Other processes compile what comes next. A kernel that fails
is named and left out. One that hangs cannot be stopped from inside: the process ends after
`--limit` seconds, and the same command goes on with the others, with this one last and, after a
second time, not at all. To time only some: `--kernels verify fold --schemes snapshot ring_exact
--peers fla` (a bare `--peers`: none).
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from commit_schemes import SCHEMES
from commit_schemes.footprint import LayerShape
from experiments import ahead, cost, peers, step_cases, step_time_report
from experiments.clock import Timing
from experiments.cost import Point
from experiments.layer_step import LayerStep, runs_here
from experiments.record import BadInput, Record
from experiments.step_args import Case, accepted
from experiments.step_bench import Bench
from experiments.target import config_of
from gdn.ops import XLA, Ops
from pallas_kernels import MOSAIC_GPU

CLOCK = (
  "CUPTI: device time of a call's kernels, median over calls on inputs that no cache holds; of a "
  "scheme, median over whole flush cycles of the mean call; by the wall without a GPU"
)
OPS: Mapping[str, Ops] = MappingProxyType({"mosaic_gpu": MOSAIC_GPU, "xla": XLA})
KERNELS = tuple(step_cases.kinds(XLA))
STATES, DECAYS = ("float32", "bfloat16"), ("gdn", "kda")
AHEAD = 16  # cases that are compiled while one is timed


Check = tuple[bool, str]  # whether it holds, and what is allowed


def some(given: Iterable[str], known: Iterable[str]) -> Check:
  return set(given) <= set(known), f"some of {', '.join(known)}"


def common(c: Any) -> dict[str, Check]:
  """Of what `tune` has as well."""
  return {
    "kernels": some(c.kernels, KERNELS),
    "batches": (bool(c.batches) and min(c.batches) >= 1, "each at least 1"),
    "state_dtypes": some(c.state_dtypes, STATES),
    "decays": some(c.decays, DECAYS),
    "calls": (c.calls >= 20, "at least 20"),
    "seconds": (c.seconds >= 0, "at least 0"),
    "limit": (c.limit >= 1, "at least 1"),
    "ops": (c.ops in OPS, ", ".join(OPS)),
  }


def refuse(c: Any, checks: Mapping[str, Check]) -> None:
  """ValueError: the first field that is not as its check wants it."""
  for name, (good, allowed) in checks.items():
    if not good:
      raise ValueError(f"{name} = {getattr(c, name)}, allowed: {allowed}")


@dataclass(frozen=True, kw_only=True)
class Config:
  """What is timed, `calls` times a shape. `seconds` and `limit` are explained above."""

  kernels: tuple[str, ...] = KERNELS
  schemes: tuple[str, ...] = tuple(SCHEMES)
  peers: tuple[str, ...] = tuple(peers.PEERS)
  batches: tuple[int, ...] = (1, 4, 16, 64, 256)
  windows: tuple[int, ...] = (1, 4, 8, 16)
  state_dtypes: tuple[str, ...] = STATES
  decays: tuple[str, ...] = DECAYS
  value_heads: int = 32
  key_heads: int = 16
  dim: int = 128
  calls: int = 24
  seconds: float = 1e6
  limit: float = 240.0
  seed: int = 0
  ops: str = "mosaic_gpu"
  model: Path | None = None  # its heads and dims in place of those above

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    refuse(self, common(self) | {
      "schemes": some(self.schemes, SCHEMES), "peers": some(self.peers, peers.PEERS),
    })  # fmt: skip


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "verify": Config(kernels=("verify",), schemes=(), peers=(), batches=(1, 64, 256)),
    "smoke": Config(
      kernels=("verify", "step_ring", "fold"), schemes=("replay_0",), peers=(), batches=(2,),
      windows=(4,), state_dtypes=("float32",), decays=("gdn",), value_heads=2, key_heads=1, dim=16,
      ops="xla",
    ),
  }
)  # fmt: skip


class Whole(NamedTuple):
  """A scheme's verify and commit over a flush cycle, at every batch."""

  scheme: str
  window: int

  def __str__(self) -> str:
    return f"{self.scheme}, whole steps, T = {self.window}"


class Timed(NamedTuple):
  """What becomes a row; `bytes` are compulsory ones of all slots."""

  case: Case
  bytes: float
  timing: Timing
  error: float
  scheme: str | None = None
  peer: str | None = None


def whole_steps(c: Config, bench: Bench, part: Whole) -> Iterator[Timed]:
  """AssertionError: the states are wrong, and nothing is timed."""
  T, n = part.window, accepted(part.window)
  cycle, few = 3 * T // n + 1, sorted(c.batches)[:2][-1]  # windows until a ring of 4 T is full
  pool = -(-max(c.batches) // lcm(cycle, few)) * lcm(cycle, few)
  layer = LayerStep(part.scheme, bench.shape, T, OPS[c.ops], {n: 1.0}, pool=pool)
  steps = {B: bench.threads.submit(layer.ready, B) for B in c.batches}
  error = layer.error().relative
  moved = cost.STEPS[part.scheme](bench.shape, Point(T, n, ring=4 * T, row=4)).bytes
  for B in c.batches:
    steps[B].result()
    timing = layer.cycle(layer.staggered(few, cycle), B, cycle)
    case = Case("whole_step", "float32", "gdn", T, B)
    yield Timed(case, B * moved, timing, error, scheme=part.scheme)


def timed(c: Config, bench: Bench, part: Any) -> Iterator[Timed]:
  if isinstance(part, Whole):
    yield from whole_steps(c, bench, part)
    return
  if isinstance(part, peers.Peer):
    case, timing, error = peers.measured(bench, part)
    as_theirs = case._replace(kernel=part.kernel)
    peer = peers.named(part.peer)
  else:
    case, as_theirs, peer = part, part, None
    bench.program(case).result()  # where there is no kernel, nothing is checked
    error = bench.error(case)
    timing = bench.time(case)
  moved = case.batch * bench.kinds[case.kernel].bytes(case.layer(bench.shape), case)
  yield Timed(as_theirs, moved, timing, error, peer=peer)


def wanted(c: Config, kinds: Mapping[str, step_cases.Kind]) -> list[Any]:
  """Everything, the most wanted first: kernels at large batches, the schemes that matter most.

  Whole steps are of the longest window.
  """
  cases = step_cases.cases(kinds, c.kernels, c.batches, c.windows, c.state_dtypes, c.decays)
  whole = [Whole(s, max(c.windows)) for s in c.schemes]
  first = {"snapshot", "ring_exact", "ring_open_loop", "tree_wy", "replay_0"}
  parts: list[tuple[float, Any]] = [(step_cases.late(kinds[x.kernel], x), x) for x in cases]
  parts += [(0.5 + (x.scheme not in first), x) for x in whole]
  parts += [(1 + (x.batch not in (64, 256)), x) for x in peers.every(c.peers, c.batches)]
  return [x for _, x in sorted(parts, key=lambda pair: pair[0])]


def of_model(c: Config) -> Config:
  """The configuration with the layer of its model. BadInput: key and value dims differ."""
  if c.model is None:
    return c
  config = config_of(c.model)
  if config.key_dim != config.value_dim:
    raise BadInput(f"{c.model}: key_dim = {config.key_dim}, allowed: {config.value_dim}")
  return replace(c, value_heads=config.value_heads, key_heads=config.key_heads, dim=config.key_dim)


def beside(ops: str) -> int:
  """How many other processes can compile kernels for this device."""
  if ops != "mosaic_gpu" or jax.devices()[0].device_kind not in ahead.DESCRIBED:
    return 0
  return max(0, (os.cpu_count() or 1) - 2)


def alive() -> bool:
  """Whether the GPU still computes: after a fault in a kernel nothing does in this process."""
  try:
    return bool(jnp.ones(1).sum() == 1)
  except RuntimeError:
    return False


def put(record: Record, bench: Bench, x: Timed) -> None:
  record(
    kernel=x.case.kernel,
    scheme=x.scheme,
    peer=x.peer,
    state_dtype=x.case.state,
    decay=x.case.decay,
    batch=x.case.batch,
    window=x.case.window,
    time_us=round(x.timing.median, 2),
    low_us=round(x.timing.low, 2),
    high_us=round(x.timing.high, 2),
    ceiling_share=round(x.bytes / (x.timing.median * 1e-6) / bench.ceiling, 4),
    relative_error=float(f"{x.error:.3g}"),
    device=jax.devices()[0].device_kind,
    bytes=round(x.bytes),
    calls=x.timing.calls,
    kernels=round(x.timing.kernels, 2),
    ceiling_gb_s=round(bench.ceiling / 1e9, 1),
  )


def run(c: Config, record: Record) -> None:
  """BadInput: Mosaic kernels without a GPU. RuntimeError: a kernel has taken the GPU down."""
  runs_here(f"ops = {c.ops}", OPS[c.ops])
  c, mosaic = of_model(c), c.ops == "mosaic_gpu"
  kinds = step_cases.kinds(OPS[c.ops])
  shape = LayerShape(c.key_heads, c.value_heads, c.dim, c.dim)
  record.say("copy ceiling")
  bench = Bench(
    kinds, shape, max(c.batches) + 32, c.calls, c.seed, mosaic=mosaic, processes=beside(c.ops)
  )
  parts = wanted(c, kinds)
  coming = [x for x in parts if isinstance(x, Case) and str(x) not in record.finished]
  try:
    for part in record.parts(parts, seconds=c.seconds, limit=c.limit):
      coming = [x for x in coming if x != part]
      bench.prefetch([part, *coming[:AHEAD]] if isinstance(part, Case) else coming[:AHEAD])
      if not alive():
        raise RuntimeError("the GPU is lost to this process; the same command goes on in a new one")
      try:
        for row in timed(c, bench, part):
          put(record, bench, row)
      except Exception as e:  # of ours, a compiler's or a peer's: the others are timed all the same
        record.console.print(f"{part}: {type(e).__name__}: {str(e)[:300]}", markup=False)
  finally:
    bench.close()


figure, table = step_time_report.figure, step_time_report.table
