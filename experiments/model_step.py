"""Time of a whole decode step, by scheme, and how much of it the recurrent layers take.

A step verifies a window of known tokens in every slot, picks each node's most likely next token and
commits a part of the window; the model has Qwen3.5-4B's shape and random weights, or is a
checkpoint. Shares are differences: the same step is timed without its recurrent layers, and with
their projections but no convolution and no state. Before a scheme is timed, its logits are compared
with those of `replay_0` on XLA; the limit is what weights one rounding away do to them.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.model import ModelMemory, model_memory
from experiments import steps
from experiments.figures import scheme_look
from experiments.models import QWEN3_5_4B
from experiments.record import Record, Row
from experiments.steps import Step
from experiments.target import target
from gdn import config as shape
from gdn import hybrid
from gdn.hybrid import Params
from gdn.ops import XLA, Ops
from gdn.streaming import empty
from pallas_kernels import MOSAIC_GPU

CLOCK = "wall clock of `inner` steps in a row, waited for once; median over `runs`"
OPS: Mapping[str, Ops] = MappingProxyType({"xla": XLA, "mosaic_gpu": MOSAIC_GPU})
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
PLAIN = ("replay_0", "xla")
REST, BARE, PROJECTED = "none", "no recurrent layers", "no states, projections only"
SLACK = 16.0
TINY = shape.Config(
  vocab=64, width=32, inner=32, layers=2, attention_every=2, key_heads=1, value_heads=2, key_dim=16,
  value_dim=16, query_heads=2, kv_heads=1, head_dim=16, rotary=8, window=64,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config:
  """What is timed. `accepted` tokens of a window of `window` are committed in every step."""

  shape: str = "Qwen3.5-4B"
  model: Path | None = None  # a checkpoint in place of random weights of that shape
  dtype: str = "bfloat16"
  batches: tuple[int, ...] = (1, 32)
  window: int = 16
  accepted: int = 5
  context: int = 2048
  schemes: tuple[str, ...] = tuple(SCHEMES)
  ops: tuple[str, ...] = ("mosaic_gpu",)
  inner: int = 8
  runs: int = 9

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    checks = (
      ("shape", self.shape in SHAPES, ", ".join(SHAPES)),
      ("dtype", self.dtype in DTYPES, ", ".join(DTYPES)),
      ("batches", bool(self.batches) and min(self.batches) >= 1, "each at least 1"),
      ("window", 1 <= self.window <= 64, "1 to 64"),
      ("accepted", 1 <= self.accepted <= self.window, f"1 to window = {self.window}"),
      ("context", self.context >= self.window, f"at least window = {self.window}"),
      ("schemes", bool(self.schemes) and set(self.schemes) <= set(SCHEMES), ", ".join(SCHEMES)),
      ("ops", bool(self.ops) and set(self.ops) <= set(OPS), ", ".join(OPS)),
      ("inner", self.inner >= 1, "at least 1"),
      ("runs", self.runs >= 3, "at least 3"),
    )
    for name, good, allowed in checks:
      if not good:
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: {allowed}")


SHAPES: Mapping[str, shape.Config] = MappingProxyType({"Qwen3.5-4B": QWEN3_5_4B, "tiny": TINY})
CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "xla": Config(ops=("xla",), schemes=("replay_0", "ring_exact")),
    "smoke": Config(
      shape="tiny", dtype="float32", batches=(2,), window=4, accepted=2, context=64,
      schemes=("replay_0", "ring_exact"), ops=("xla",), inner=2, runs=3,
    ),
  }
)  # fmt: skip


class Cell(NamedTuple):
  """One row: a scheme with its arithmetic, or what is left without (scheme REST)."""

  batch: int
  scheme: str
  ops: str

  def __str__(self) -> str:
    return f"{self.scheme} on {self.ops}, batch {self.batch}"


def cells(c: Config) -> list[Cell]:
  """What is left comes first: shares are taken of it."""
  return [
    cell
    for B in c.batches
    for cell in (
      Cell(B, REST, BARE),
      Cell(B, REST, PROJECTED),
      *(Cell(B, scheme, ops) for ops in c.ops for scheme in c.schemes),
    )
  ]


class Bench(NamedTuple):
  """The model, and what each cell makes of it."""

  c: Config
  params: Params
  config: shape.Config

  def memory(self, cell: Cell) -> ModelMemory:
    scheme, ops = PLAIN if cell.scheme == REST else cell[1:]
    dtypes = Dtypes(raw=self.params.embed.dtype)
    spec = Spec(self.config.key_heads, self.c.window, OPS[ops], dtypes=dtypes, topology="chain")
    return model_memory(self.config, SCHEMES[scheme].make(spec), OPS[ops])

  def fresh(self, cell: Cell) -> Any:
    memory, dtype = self.memory(cell), self.params.embed.dtype
    return jax.jit(lambda: memory.whole.init(empty(self.config, cell.batch, dtype)))()

  def compiled(self, cell: Cell) -> Step:
    windows = steps.windows(cell.batch, self.c.window, self.c.accepted)
    memory = self.memory(cell)
    if cell.scheme == REST:
      projected = cell.ops == PROJECTED
      step = steps.rest_step(self.config, memory.rows, windows, projected=projected)
    else:
      step = steps.scheme_step(self.config, memory, windows)
    carry = jax.eval_shape(lambda: self.fresh(cell))
    return step.lower(self.params, carry, jnp.int32(0)).compile()

  def logits(self, cell: Cell, step: Step, params: Params) -> jax.Array:
    return steps.run(step, params, self.fresh(cell), range(3), self.c.accepted)[1]


def bench(c: Config) -> Bench:
  """A checkpoint, or random weights made where they will be used."""
  dtype = DTYPES[c.dtype]
  if c.model is not None:
    params, config, *_ = target(c.model, context=c.context, dtype=dtype)
    return Bench(c, hybrid.cast(params, dtype), config)
  config = dataclasses.replace(SHAPES[c.shape], window=c.context)
  init = jax.jit(functools.partial(hybrid.init, config, dtype=dtype))
  return Bench(c, init(jax.random.key(0)), config)


def run(c: Config, record: Record) -> None:
  """One row is one step; shares are of that step's median time."""
  record.say("making the model")
  b = bench(c)
  smallest = min(c.batches)
  plain = Cell(smallest, *PLAIN)
  wanted = [cell for cell in cells(c) if str(cell) not in record.finished]
  checks = [Cell(smallest, *cell[1:]) for cell in wanted if cell.scheme != REST]
  record.say("compiling")
  with ThreadPoolExecutor(os.cpu_count()) as pool:  # nothing is timed before all are compiled
    every = list(dict.fromkeys([plain, *wanted, *checks]))
    step_of = dict(zip(every, pool.map(b.compiled, every), strict=True))

  @functools.cache
  def reference() -> tuple[jax.Array, float]:
    """Logits of the plain step, and how far from them another's may be."""
    want = b.logits(plain, step_of[plain], b.params)
    moved = b.logits(plain, step_of[plain], steps.nudged(b.params))
    return want, SLACK * steps.difference(moved, want)

  @functools.cache
  def error_of(cell: Cell) -> float:
    return steps.difference(b.logits(cell, step_of[cell], b.params), reference()[0])

  without: dict[tuple[int, str], float] = {
    (row["batch"], row["ops"]): row["step_us"] for row in record.rows if row["scheme"] == REST
  }
  for cell in record.parts(cells(c)):
    error = None if cell.scheme == REST else error_of(cell._replace(batch=smallest))
    if error is not None and not error <= (limit := reference()[1]):
      record.console.print(f"{cell}: logits differ by {error:.1e}, allowed {limit:.1e}: not timed")
      continue
    timing = steps.timed(step_of[cell], b.params, b.fresh(cell), c.accepted, c.inner, c.runs)
    if cell.scheme == REST:
      without[cell.batch, cell.ops] = round(timing.median, 1)
    share = lambda part, B=cell.batch, timing=timing: round(1 - without[B, part] / timing.median, 4)
    record(
      scheme=cell.scheme,
      ops=cell.ops,
      batch=cell.batch,
      window=c.window,
      accepted=c.accepted,
      context=c.context,
      step_us=round(timing.median, 1),
      low_us=round(timing.low, 1),
      high_us=round(timing.high, 1),
      recurrent_share=None if cell.scheme == REST else share(BARE),
      state_share=None if cell.scheme == REST else share(PROJECTED),
      logit_error=error,
      parameters=sum(x.size for x in jax.tree.leaves(b.params)),
      model=c.shape if c.model is None else c.model.name,
      device=jax.devices()[0].device_kind,
    )


def figure(rows: list[Row]) -> Figure:
  """Left, a step against the batch; right, the share of its recurrent layers."""
  fig = Figure(figsize=(7.2, 2.8))
  left, right = fig.subplots(1, 2)
  lines: dict[tuple[str, str], list[Row]] = {}
  for row in rows:
    lines.setdefault((row["scheme"], row["ops"]), []).append(row)
  for (scheme, ops), of in lines.items():
    batch = [row["batch"] for row in of]
    if scheme == REST:
      left.plot(batch, [row["step_us"] / 1e3 for row in of], ":", color="#999999", label=ops)
      continue
    label = f"{scheme}, {ops}"
    left.plot(batch, [row["step_us"] / 1e3 for row in of], label=label, **scheme_look(scheme))
    right.plot(batch, [100 * row["recurrent_share"] for row in of], **scheme_look(scheme))
  left.set(ylabel="milliseconds a step", title="whole step")
  right.set(ylabel="%", title="share of the recurrent layers", ylim=(0, 100))
  for axes in (left, right):
    axes.set_xscale("log", base=2)
    axes.set_xlabel("decode slots")
  left.legend()
  return fig
