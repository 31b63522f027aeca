"""Throughput against concurrency under a memory budget, for every scheme, at true model dimensions.

A step of n admitted requests is (recurrent layers) x (one layer's verify and commit under the
scheme, measured) + (groups of layers) x (one group of recurrent layers and one of attention
without the recurrence, measured: projections, convolutions, attention, MLPs) + the output
projection, measured. So one layer and one group are on the device at a time and the rest is
multiplication. Weights are random. A mixture of experts is a dense MLP of the active size. The
drafter, sampling and communication between tensor-parallel ranks are left out: they are the same
for every scheme.

The budget says how many requests run at once, in SGLang's way: five state slots a request for its
prefix cache and scratch rows for the admitted and one more. Whoever does not fit waits, so
throughput is that of the admitted. Accept lengths are replayed from a measured distribution.
"""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np

from commit_schemes import SCHEMES
from commit_schemes.decoding.schedule import slots_within
from commit_schemes.footprint import model_footprint
from experiments import concurrency_report
from experiments.layer_step import NAMES, OPS, LayerStep, once, runs_here
from experiments.models import AROUND, MODELS, layer_of, sizes
from experiments.rank_time import (
  Group,
  Head,
  Load,
  Times,
  compiled_layer,
  group_config,
  layer_times,
  surrounds,
)
from experiments.record import BadInput, Record

CLOCK = "CUPTI: device time of a call's kernels, mean over calls in turn; by the wall without a GPU"
GIB = 2**30
READS = ("accept_length",)  # with accepts = block


@dataclass(frozen=True, kw_only=True)
class Config:
  """`degrees` are the tensor-parallel degree of each model; `batches` are measured, what lies
  between is interpolated. `context` tokens of keys and values stand in every slot."""

  models: tuple[str, ...] = ("Qwen3.5-27B", "Qwen3.5-35B-A3B")
  degrees: tuple[int, ...] = (2, 1)
  schemes: tuple[str, ...] = tuple(SCHEMES)
  batches: tuple[int, ...] = (1, 4, 16, 64)
  concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
  window: int = 16
  context: int = 1024
  per_request: int = 5
  spare_rows: int = 1
  common_gib: float = 15.0
  accepts: str = "prompt_lookup"
  ops: str = "mosaic"
  calls: int = 64
  model: Path | None = None  # a checkpoint's sizes, in place of `models`, under degrees[0]

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    for name, good, allowed in (
      (
        "models",
        self.models and set(self.models) <= set(AROUND) and once(self.models),
        f"{', '.join(AROUND)}, each at most once",
      ),
      ("degrees", len(self.degrees) == len(self.models), "one for each model"),
      ("schemes", self.schemes and set(self.schemes) <= set(SCHEMES), ", ".join(SCHEMES)),
      ("batches", self.batches and min(self.batches) == 1, "1 and larger ones"),
      ("concurrency", self.concurrency and min(self.concurrency) >= 1, "each at least 1"),
      (
        "concurrency",
        max(self.concurrency, default=0) <= max(self.batches, default=0),
        "no more than the largest batch",
      ),
      ("window", 1 <= self.window <= 16, "1 to 16"),
      ("context", self.context >= 1, "at least 1"),
      ("per_request", self.per_request >= 1, "at least 1"),
      ("spare_rows", self.spare_rows >= 0, "at least 0"),
      ("common_gib", self.common_gib > 0, "above 0"),
      ("accepts", self.accepts in NAMES, ", ".join(NAMES)),
      ("ops", self.ops in OPS, ", ".join(OPS)),
      ("calls", self.calls >= 8, "at least 8"),
    ):
      if not good:
        raise ValueError(f"{name} = {getattr(self, name)!r}, allowed: {allowed}")
    for model, degree in zip(self.models, self.degrees, strict=True):
      if self.model is None:
        MODELS[model].layer.shard(degree)


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(accepts="block"),
    "smoke": Config(
      models=("bundled",), degrees=(1,), schemes=("snapshot", "replay_0"), batches=(1, 2),
      concurrency=(1, 2), window=4, context=16, common_gib=0.06, ops="xla", calls=8,
    ),
  }
)  # fmt: skip


def between(times: Mapping[int, float], n: int) -> float:
  """Linear between the measured batches."""
  batches = sorted(times)
  return float(np.interp(n, batches, [times[B] for B in batches]))


def budgets(c: Config, scheme: str, model: str) -> dict[str, float]:
  """GiB by name: the common one, and what the published slots of this scheme imply (27B, TP 2)."""
  published = {"snapshot": 15.0, "replay_1": 13.1, "replay_0": 14.1}
  own = {"published": published[scheme]} if scheme in published and model == "Qwen3.5-27B" else {}
  return {"common": c.common_gib} | own


def kept(scheme: str, window: int) -> int | None:
  """States of a window that the scheme keeps; None where that is not the word for what it does."""
  every = {"snapshot": window}
  keep = (every | concurrency_report.KEEP).get(scheme)
  return None if keep is None else min(keep, window)


class Parts(NamedTuple):
  """Times of a step's parts by batch, and how many layers there are, recurrent and of attention."""

  layers: int
  attention: int
  layer: Times
  group: dict[int, float]
  head: dict[int, float]


def costs(parts: Parts, n: int, accept: float) -> dict[str, float | None]:
  """Columns of a step of n requests; nothing where none is admitted."""
  names = ("step_ms", "recurrent_ms", "layer_us", "layer_wall_us")
  if n == 0:
    return {"tokens_per_s": 0.0, **dict.fromkeys(names)}
  layer, wall = (between({B: t[i] for B, t in parts.layer.items()}, n) for i in (0, 1))
  recurrent = parts.layers * layer
  step = recurrent + parts.attention * between(parts.group, n) + between(parts.head, n)
  values = (step / 1e3, recurrent / 1e3, layer, wall)
  return {
    "tokens_per_s": round(1e6 * n * accept / step, 2),
    **{name: round(x, 4) for name, x in zip(names, values, strict=True)},
  }


def account(scheme: str, model: str, window: int, degree: int) -> tuple[int, int]:
  """Bytes of one slot and of its scratch on one rank: states and conv windows of every layer."""
  shape = sizes(model).recurrent
  state, conv = model_footprint(SCHEMES[scheme].make, shape, window, degree=degree)
  return state.carry + conv.carry, state.flight + conv.flight


class Programs(NamedTuple):
  """What is timed for one model: a layer under each scheme, a group and the head at each batch."""

  layers: dict[str, LayerStep]
  groups: dict[int, Group]
  heads: dict[int, Head]


def compiled(c: Config, load: Load, model: str, degree: int, schemes: Iterable[str]) -> Programs:
  """All of them, each compiled in a thread: while a part is timed, nothing else runs."""
  layer = layer_of(model, degree)
  config = group_config(model, degree, load.context)
  groups = {B: Group(load, config, B) for B in c.batches}
  heads = {B: Head(load, model, degree, B) for B in c.batches}
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    layers = {s: pool.submit(compiled_layer, load, s, layer) for s in schemes}
    others = [pool.submit(getattr, x, "compiled") for x in (*groups.values(), *heads.values())]
    for other in others:
      other.result()
    return Programs({s: soon.result() for s, soon in layers.items()}, groups, heads)


def run(c: Config, record: Record) -> None:
  """BadInput: Mosaic kernels without a GPU, a checkpoint that cannot be read or divided."""
  runs_here(f"ops = {c.ops}", OPS[c.ops])
  load = Load(c.window, c.context, c.accepts, c.ops, c.batches, c.calls)
  models = dict(zip(c.models, c.degrees, strict=True))
  if c.model is not None:
    models = {str(c.model): c.degrees[0]}
    try:  # before anything is measured
      group_config(str(c.model), c.degrees[0], c.context)
    except ValueError as e:
      raise BadInput(f"model {c.model} on {c.degrees[0]} devices: {e}") from e
  accept = load.mean_accept  # read once: its rows may be a file
  named = lambda p: f"{p[0]} {p[2]}"
  pairs = [(m, d, s) for m, d in models.items() for s in c.schemes]
  wanted = [p for p in pairs if named(p) not in record.finished]

  @cache
  def programs(model: str) -> Programs:
    record.say(f"{model}: compiling")
    schemes = [s for m, _, s in wanted if m == model]
    return compiled(c, load, model, models[model], schemes)

  @cache
  def around(model: str) -> tuple[dict[int, float], dict[int, float]]:
    """Microseconds of a group of layers and of the head, by batch."""
    _, groups, heads = programs(model)
    return {B: x.time() for B, x in groups.items()}, {B: x.time() for B, x in heads.items()}

  for model, degree, scheme in record.parts(pairs, name=named):
    (called, whole, _, _), (a, _) = sizes(model), surrounds(model)
    layer, error = layer_times(load, programs(model).layers[scheme])
    parts = Parts(whole.layers, a.attention, layer, *around(model))
    slot, scratch = account(scheme, model, c.window, degree)
    for name, gib in budgets(c, scheme, model).items():
      each = {"per_request": c.per_request, "spare_rows": c.spare_rows}
      try:
        cap = slots_within(int(gib * GIB), slot, scratch, **each)
      except ValueError as e:
        record.console.print(f"{model} {scheme}: {e}")
        cap = 0
      for C in c.concurrency:
        n = min(C, cap)
        record(
          model=called, scheme=scheme, keep=kept(scheme, c.window), concurrency=C,
          **costs(parts, n, accept), admitted=n,
          device=jax.devices()[0].device_kind, budget=name, budget_gib=gib, cap=cap,
          slot_mib=round(slot / 2**20, 3), scratch_mib=round(scratch / 2**20, 3),
          batch_measured=n in c.batches, accept_length=round(accept, 3),
          accepts=c.accepts, error_over_budget=round(error, 4), degree=degree, window=c.window,
          mlp=a.mlp, ops=c.ops,
        )  # fmt: skip


figure, table = concurrency_report.figure, concurrency_report.table
