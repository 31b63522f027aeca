"""Throughput against concurrency under a memory budget, for every scheme, at true model dimensions.

A step of n admitted requests is (recurrent layers) x (one layer's verify and commit under the
scheme, measured) + (groups of layers) x (one group of three recurrent layers and one of attention
without the recurrence, measured: projections, convolutions, attention, MLPs) + the output
projection, measured. So one layer and one group are on the device at a time and the rest is
multiplication. Weights are random. A mixture of experts is a dense MLP of the active size. The
drafter, sampling and communication between tensor-parallel ranks are left out: they are the same
for every scheme.

The budget says how many requests run at once, in SGLang's way: five state slots a request for its
prefix cache and scratch rows for the admitted and one more. Whoever does not fit waits, so
throughput is that of the admitted. Accept lengths are replayed from a measured distribution.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes import SCHEMES
from commit_schemes.conv_window import conv_window
from commit_schemes.decoding.schedule import slots_within
from commit_schemes.footprint import LayerShape, ModelShape, model_footprint
from commit_schemes.kv_rows import kv_rows
from experiments import concurrency_report
from experiments.clock import mean_time
from experiments.layer_step import NAMES, LayerStep, accept_lengths
from experiments.models import MODELS
from experiments.record import BadInput, Record
from gdn import hybrid
from gdn.config import Config as ModelConfig
from gdn.hybrid import Mixers, hidden_states
from gdn.layer import GDNMemory
from gdn.ops import XLA, Ops
from gdn.streaming import empty
from gdn.typing import Accepted
from gdn.window import chain
from pallas_kernels import MOSAIC_GPU

CLOCK = "CUPTI: device time of a call's kernels, mean over calls in turn; by the wall without a GPU"
OPS: Mapping[str, Ops] = MappingProxyType({"mosaic": MOSAIC_GPU, "xla": XLA})
GIB = 2**30


class Around(NamedTuple):
  """What surrounds the recurrence. Sources: the models' config.json; `inner` is active."""

  width: int
  inner: int
  query_heads: int
  kv_heads: int
  head_dim: int
  vocab: int
  mlp: str


AROUND: Mapping[str, Around] = MappingProxyType(
  {
    "Qwen3.5-27B": Around(5120, 17408, 24, 4, 256, 248_320, "dense"),
    "Qwen3.5-35B-A3B": Around(
      2048, 9 * 512, 16, 2, 256, 248_320, "dense MLP of the active size: 8 of 256 experts and 1"
    ),
    "bundled": Around(256, 512, 4, 2, 64, 256, "dense"),
  }
)


class Budget(NamedTuple):
  """GiB of states and scratch on one rank, and the schemes whose published slots imply it."""

  gib: float
  schemes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Config:
  """`degree` is the tensor-parallel degree of each model; `batches` are measured, what lies between
  is interpolated. `context` tokens of keys and values stand in every slot."""

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

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    for name, good, allowed in (
      ("models", set(self.models) <= set(AROUND), ", ".join(AROUND)),
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
      MODELS[model].layer.shard(degree)


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "smoke": Config(
      models=("bundled",), degrees=(1,), schemes=("snapshot", "replay_0"), batches=(1, 2),
      concurrency=(1, 2), window=4, context=16, common_gib=0.06, ops="xla", calls=8,
    ),
  }
)  # fmt: skip


def around(model: str, degree: int, context: int) -> ModelConfig:
  """One group of layers as one rank holds it; the vocabulary is measured by itself."""
  a, layer = AROUND[model], MODELS[model].layer.shard(degree)
  return ModelConfig(
    vocab=256, width=a.width, inner=a.inner // degree, layers=4, attention_every=4,
    key_heads=layer.key_heads, value_heads=layer.value_heads, key_dim=layer.key_dim,
    value_dim=layer.value_dim, query_heads=a.query_heads // degree,
    kv_heads=max(1, a.kv_heads // degree), head_dim=a.head_dim, rotary=a.head_dim // 4,
    window=context,
  )  # fmt: skip


@cache
def group_time(c: Config, model: str, degree: int, B: int) -> float:
  """Microseconds of a group of layers without its recurrences, verify and commit."""
  config, T, ops = around(model, degree, c.context), c.window, OPS[c.ops]
  params = jax.jit(lambda: hybrid.init(config, jax.random.key(0), jnp.bfloat16))()
  conv, rows = conv_window(ops), kv_rows()
  slots, nodes = jnp.arange(B, dtype=jnp.int32), jnp.full(B, T, jnp.int32)
  parents = jnp.broadcast_to(chain(T)[None], (B, T))

  def carries():
    kinds = empty(config, B, jnp.bfloat16)
    full = lambda m: m._replace(length=jnp.full(B, c.context, jnp.int32))
    return tuple(
      rows.init(full(m)) if config.is_attention(i) else conv.init(m.conv)
      for i, m in enumerate(kinds)
    )

  def step(carry, params, ids, positions, accepted):
    mixers = Mixers(
      conv=lambda m, x, taps: conv.verify(m, x, taps, parents, nodes, slots),
      recurrent=lambda m, raw, gates: (raw.v, raw),  # `raw` stays an output, so nothing is left out
      attend=lambda m, q, k, v: rows.verify(m, q, k, v, parents, nodes, slots),
    )
    memories = tuple(
      m if config.is_attention(i) else GDNMemory(m, None) for i, m in enumerate(carry)
    )
    hidden, flights = hidden_states(params, config, ids, positions, mixers, memories)
    new = tuple(
      rows.commit(f, accepted) if config.is_attention(i) else conv.commit(f.conv, accepted)
      for i, f in enumerate(flights)
    )
    raws = [f.recurrent for i, f in enumerate(flights) if not config.is_attention(i)]
    return new, hidden[-1], raws

  one = jax.jit(step, donate_argnums=0)
  rng = np.random.default_rng(0)
  mean = max(1, round(mean_accept(c)))
  path = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
  accepted = Accepted(path, jnp.full(B, mean, jnp.int32))
  inputs = [
    (None, params, jnp.asarray(rng.integers(0, 256, (B, T)), jnp.int32),
     jnp.broadcast_to(c.context + jnp.arange(T, dtype=jnp.int32)[None], (B, T)), accepted)
    for _ in range(4)
  ]  # fmt: skip
  inputs = [(jax.jit(carries)(), *rest) for _, *rest in inputs[:1]] + inputs[1:]
  device, _ = mean_time(
    one, inputs, calls=max(8, c.calls // 4), carry=lambda args, out: (out[0], *args[1:])
  )
  return device


@cache
def head_time(c: Config, model: str, degree: int, B: int) -> float:
  """Microseconds of the output projection of B windows on one rank."""
  a = AROUND[model]
  table = jax.random.normal(jax.random.key(0), (a.width, a.vocab // degree), jnp.bfloat16)
  x = [jax.random.normal(jax.random.key(i), (B * c.window, a.width), jnp.bfloat16) for i in (1, 2)]
  dot = jax.jit(lambda x, w: jnp.argmax(jnp.matmul(x, w, preferred_element_type=jnp.float32), -1))
  return mean_time(dot, [(y, table) for y in x], calls=max(8, c.calls // 4))[0]


def mean_accept(c: Config) -> float:
  counts = accept_lengths(c.accepts)
  return sum(min(n, c.window) * k for n, k in counts.items()) / sum(counts.values())


Times = dict[int, tuple[float, float]]  # microseconds on the device and by the wall, by batch


def layer_times(c: Config, scheme: str, shape: LayerShape) -> tuple[Times, float]:
  """(device, wall) microseconds of a layer's step by batch, and the error over its budget.

  AssertionError: the states are wrong, and nothing is timed.
  """
  pool = max(c.batches)
  layer = LayerStep(scheme, shape, c.window, OPS[c.ops], accept_lengths(c.accepts), pool=pool)
  error, carry, times = layer.check(), layer.used(), {}
  for B in sorted(c.batches, reverse=True):
    times[B], carry = timed(layer, carry, B, c.calls)
  return times, error


def timed(layer: LayerStep, carry: Any, B: int, calls: int) -> tuple[tuple[float, float], Any]:
  """(device, wall) microseconds of a step of B slots, and the carry that has been through it."""
  last = carry

  def step(carry, *rest):
    nonlocal last
    last, o = layer.step(carry, *rest)
    return last, o

  first, *rest = [(w, layer.gates, a) for w, a in layer.inputs(B, calls)]
  inputs: list[tuple[Any, ...]] = [(carry, *first), *((None, *x) for x in rest)]
  return mean_time(step, inputs, calls=calls, carry=lambda args, out: (out[0], *args[1:])), last


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


def runs_here(name: str, ops: Ops) -> None:
  """BadInput: `name` are Mosaic kernels, and there is no GPU."""
  if ops is MOSAIC_GPU and jax.default_backend() != "gpu":
    raise BadInput(f"{name} needs a GPU, jax runs on {jax.default_backend()}")


def run(c: Config, record: Record) -> None:
  """BadInput: Mosaic kernels without a GPU."""
  runs_here(f"ops = {c.ops}", OPS[c.ops])
  pairs = [(m, d, s) for m, d in zip(c.models, c.degrees, strict=True) for s in c.schemes]
  for model, degree, scheme in record.parts(pairs, name=lambda p: f"{p[0]} {p[2]}"):
    whole = MODELS[model]
    shape = whole.layer.shard(degree)
    times, error = layer_times(c, scheme, shape)
    groups = {B: group_time(c, model, degree, B) for B in c.batches}
    heads = {B: head_time(c, model, degree, B) for B in c.batches}
    account = model_footprint(
      SCHEMES[scheme].make, ModelShape(whole.layers, whole.layer), c.window, degree=degree
    )
    carry = account.state.carry + account.conv.carry
    flight = account.state.flight + account.conv.flight
    for name, gib in budgets(c, scheme, model).items():
      try:
        cap = slots_within(
          int(gib * GIB), carry, flight, per_request=c.per_request, spare_rows=c.spare_rows
        )
      except ValueError as e:
        record.console.print(f"{model} {scheme}: {e}")
        cap = 0
      for C in c.concurrency:
        n = min(C, cap)
        record(
          model=model, scheme=scheme, keep=kept(scheme, c.window), concurrency=C,
          **costs(c, whole.layers, n, times, groups, heads), admitted=n,
          device=jax.devices()[0].device_kind, budget=name, budget_gib=gib, cap=cap,
          slot_mib=round(carry / 2**20, 3), scratch_mib=round(flight / 2**20, 3),
          batch_measured=n in c.batches, accept_length=round(mean_accept(c), 3),
          accepts=c.accepts, error_over_budget=round(error, 4), degree=degree, window=c.window,
          mlp=AROUND[model].mlp, ops=c.ops,
        )  # fmt: skip


def costs(
  c: Config, layers: int, n: int, times: Times, groups: dict[int, float], heads: dict[int, float]
) -> dict[str, float | None]:
  """Columns of a step of n requests; nothing where none is admitted."""
  names = ("step_ms", "recurrent_ms", "layer_us", "layer_wall_us")
  if n == 0:
    return {"tokens_per_s": 0.0, **dict.fromkeys(names)}
  layer, wall = (between({B: t[i] for B, t in times.items()}, n) for i in (0, 1))
  step = layers * layer + layers // 3 * between(groups, n) + between(heads, n)
  values = (step / 1e3, layers * layer / 1e3, layer, wall)
  return {
    "tokens_per_s": round(1e6 * n * mean_accept(c) / step, 2),
    **{name: round(x, 4) for name, x in zip(names, values, strict=True)},
  }


figure, table = concurrency_report.figure, concurrency_report.table
