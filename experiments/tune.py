"""The fastest configuration of every kernel for a shape, written to where the kernels look for it.

Every field of a kernel's configuration is tried by itself, then the best of all together. What is
timed is checked as in `step_time`. pallas_kernels/configs gets a file for the kind of device, with
an entry a shape: the fastest, unless the default is within one per cent of it. Entries of shapes
that this run has not come to stay. `--seconds` and `--limit` are those of `step_time`.
"""

import dataclasses
import datetime
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from matplotlib.figure import Figure

from commit_schemes.footprint import LayerShape
from experiments import provenance, step_cases
from experiments.clock import Timing
from experiments.figures import look
from experiments.layer_step import runs_here
from experiments.models import sizes
from experiments.record import Record, Row
from experiments.step_args import Case
from experiments.step_bench import Bench
from experiments.step_time import DECAYS, KERNELS, OPS, STATES
from pallas_kernels import tuning

CLOCK = "CUPTI: device time of a call's kernels, median over calls on inputs that no cache holds"
# What is tried of a field; a configuration that has no such field does without.
TRIED: Mapping[str, tuple[int, ...]] = MappingProxyType(
  {
    "ctas_per_sm": (1, 2, 3, 4),
    "pair": (1, 2),
    "chunks": (2, 3, 4, 6, 8),
    "groups": (2, 3),
    "handed": (0, 1, 2, 3, 4),
    "split": (1, 2),
  }
)
NOISE = 0.01


@dataclass(frozen=True, kw_only=True)
class Config:
  """Shapes that get an entry; `to` is the file, by default the device's own."""

  kernels: tuple[str, ...] = ("verify", "step", "step_ring", "fold", "decode", "snapshot")
  batches: tuple[int, ...] = (1, 4, 16, 64, 256)
  windows: tuple[int, ...] = (4, 8, 16)
  state_dtypes: tuple[str, ...] = STATES
  decays: tuple[str, ...] = ("gdn",)
  calls: int = 20
  seconds: float = 1e6
  limit: float = 120.0
  seed: int = 0
  ops: str = "mosaic_gpu"
  to: Path | None = None
  model: Path | None = None  # its heads and dims; None is 16 key and 32 value heads of 128

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    for name, known in (("kernels", KERNELS), ("state_dtypes", STATES), ("decays", DECAYS)):
      if not set(getattr(self, name)) <= set(known):
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: some of {', '.join(known)}")
    if self.ops not in OPS:
      raise ValueError(f"ops = {self.ops}, allowed: {', '.join(OPS)}")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {"full": Config(), "verify": Config(kernels=("verify",), batches=(1, 64, 256))}
)


class Tried(NamedTuple):
  """A configuration of a kernel at a shape, and its time."""

  asked: tuning.Asked
  fields: dict[str, Any]
  timing: Timing


def attempt(bench: Bench, case: Case, fields: dict[str, Any]) -> Tried:
  """Off: it is wrong. ValueError: no such configuration. RuntimeError: it does not fit."""
  with tuning.trial(fields) as asked:
    programs = bench.compiled(case, wide=False)
  if not asked:
    raise NotImplementedError("it has no configuration")
  return Tried(asked[-1], fields, bench.time(case, programs))


def attempts(bench: Bench, case: Case, record: Record) -> Iterator[Tried]:
  """The default, each field by itself, the best of each together."""
  first = attempt(bench, case, {})
  yield first
  has = {
    f.name: getattr(first.asked.default, f.name) for f in dataclasses.fields(first.asked.default)
  }
  best: dict[str, tuple[float, Any]] = {}

  def tried(fields: dict[str, Any]) -> Iterator[Tried]:
    try:
      yield attempt(bench, case, fields)
    except Exception as e:  # whatever a compiler says of it
      record.console.print(f"{case}, {fields}: {type(e).__name__}: {str(e)[:200]}", markup=False)

  for name in TRIED:
    best[name] = (first.timing.median, has.get(name))
    for value in TRIED[name] if name in has else ():
      if value != has[name]:
        for t in tried({name: value}):
          yield t
          best[name] = min(best[name], (t.timing.median, value))
  together = {
    name: value for name, (_, value) in best.items() if name in has and value != has[name]
  }
  if len(together) > 1:
    yield from tried(together)


def rows_of(bench: Bench, case: Case, record: Record) -> None:
  for t in attempts(bench, case, record):
    record(
      case=case.kernel, kernel=t.asked.kernel, **t.asked.shape._asdict(), batch=case.batch,
      config=json.dumps(t.fields, sort_keys=True), time_us=round(t.timing.median, 2),
      low_us=round(t.timing.low, 2), high_us=round(t.timing.high, 2),
      device=jax.devices()[0].device_kind,
    )  # fmt: skip


def fastest(rows: list[Row]) -> list[dict[str, Any]]:
  """Entries of a configuration file: of each kernel and shape the fastest, or the default."""
  found = []
  key = lambda r: (r["kernel"], tuning.Shape(*(r[k] for k in tuning.Shape._fields)))
  for (kernel, shape), group in itertools.groupby(sorted(rows, key=key), key):
    some = list(group)
    default = next(r for r in some if r["config"] == "{}")
    best = min(some, key=lambda r: r["time_us"])
    if best["time_us"] > (1 - NOISE) * default["time_us"]:
      best = default
    found.append(
      {"kernel": kernel, "case": best["case"], "shape": shape._asdict(),
       "config": json.loads(best["config"]), "time_us": best["time_us"],
       "default_us": default["time_us"]}
    )  # fmt: skip
  return found


def save(path: Path, rows: list[Row]) -> None:
  """The file with these entries, and its earlier ones of other shapes."""
  new = fastest(rows)
  same = lambda e: (e["kernel"], *e["shape"].values())
  old = json.loads(path.read_text())["entries"] if path.exists() else []
  kept = [e for e in old if same(e) not in set(map(same, new))]
  facts = provenance.commit() | {
    "date": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds")
  }
  data = {**facts, **provenance.setting(), "clock": CLOCK, "entries": sorted(kept + new, key=same)}
  path.parent.mkdir(parents=True, exist_ok=True)
  part = path.with_suffix(".part")
  part.write_text(json.dumps(data, indent=1) + "\n")
  os.replace(part, path)


def run(c: Config, record: Record) -> None:
  """BadInput: Mosaic kernels without a GPU, or a model that cannot be read."""
  layer = LayerShape(16, 32) if c.model is None else sizes(str(c.model)).recurrent.layer
  runs_here(f"ops = {c.ops}", OPS[c.ops])
  kinds = step_cases.kinds(OPS[c.ops])
  cases = step_cases.cases(kinds, c.kernels, c.batches, c.windows, c.state_dtypes, c.decays)
  cases.sort(key=lambda x: step_cases.late(kinds[x.kernel], x))
  slots = max(c.batches) + 32
  bench = Bench(kinds, layer, slots, c.calls, c.seed, mosaic=c.ops == "mosaic_gpu")
  for case in record.parts(cases, seconds=c.seconds, limit=c.limit):
    try:
      rows_of(bench, case, record)
    except Exception as e:  # the others are tuned all the same
      record.console.print(f"{case}: {type(e).__name__}: {str(e)[:200]}", markup=False)
  save(c.to or tuning.file(jax.devices()[0].device_kind), record.rows)


def figure(rows: list[Row]) -> Figure:
  """The fastest time of every kernel and shape over its default's."""
  entries = fastest(rows)
  fig = Figure(figsize=(7.2, 0.16 * len(entries) + 1.0))
  ax = fig.subplots()
  for i, e in enumerate(entries):
    ax.plot(e["time_us"] / e["default_us"], i, **look(0) | {"linestyle": "none"})
  said = [
    f"{e['kernel']} {' '.join(map(str, e['shape'].values()))} {e['config'] or ''}" for e in entries
  ]
  ax.set_yticks(range(len(entries)), said, fontsize=5)
  ax.set(xlabel="time over the default's", ylim=(len(entries), -1))
  return fig
