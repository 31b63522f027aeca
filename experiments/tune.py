"""The fastest configuration of every kernel for a shape, written to where the kernels look for it.

Every field of a kernel's configuration is tried by itself, then the best of all together. The
default is a row, and what is faster than all before it, checked as in `step_time` (the default on
hostile rows too). pallas_kernels/configs gets a file for the kind of device, with an entry a shape:
the fastest, unless the default is within one per cent of it. Entries of shapes that this run has
not come to stay. Other processes compile what is tried of the shapes to come. `--seconds` and
`--limit` are those of `step_time`.
"""

import dataclasses
import datetime
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
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
from experiments.step_programs import Programs
from experiments.step_time import OPS, STATES, beside, common, refuse
from pallas_kernels import tuning

CLOCK = "CUPTI: device time of a call's kernels, median over calls on inputs that no cache holds"
# What is tried of a field; a configuration that has no such field does without.
TRIED: Mapping[str, tuple[int, ...]] = MappingProxyType(
  {
    "ctas_per_sm": (1, 2, 3, 4),
    "pair": (1, 2),
    "chunks": (2, 3, 4, 6, 8),
    "groups": (2, 3, 5),
    "handed": (0, 1, 2, 3, 4),
    "split": (1, 2),
    "leaving": (1, 2, 4),
  }
)
NOISE = 0.01
AHEAD = 2  # cases whose configurations are compiled while those of another are timed


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
    refuse(self, common(self))


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {"full": Config(), "verify": Config(kernels=("verify",), batches=(1, 64, 256))}
)


Fields = tuple[tuple[str, Any], ...]


class Tried(NamedTuple):
  """A configuration of a kernel at a shape, right and faster than those before, and its time."""

  asked: tuning.Asked
  fields: Fields
  timing: Timing


def one_by_one(default: Any) -> list[Fields]:
  """Configurations that differ from the default in one field. A block of three warpgroups and more
  is tried with a multiprocessor to itself, one of two beside another; chunks that leave together,
  with room for as many again and more."""
  has = {f.name: getattr(default, f.name) for f in dataclasses.fields(default)}
  found = []
  for name, value in ((x, value) for x in TRIED if x in has for value in TRIED[x]):
    fields = {name: value}
    if name == "groups":
      fields["ctas_per_sm"] = 2 if value == 2 else 1
    if name == "leaving":
      fields["chunks"] = {2: 6, 4: 7}.get(value, has["chunks"])
    if value != has[name]:
      found.append(tuple((k, v) for k, v in sorted(fields.items()) if v != has[k]))
  return list(dict.fromkeys(found))


class Coming:
  """Configurations of cases, compiled on the bench's threads or by its processes."""

  def __init__(self, bench: Bench):
    self.bench = bench
    self.asked: dict[Case, Future[tuning.Asked]] = {}
    self.programs: dict[tuple[Case, Fields], Future[Programs]] = {}

  def program(self, case: Case, fields: Fields) -> Future[Programs]:
    if (case, fields) not in self.programs:
      wanted = self.bench.wanted(case, fields=fields)
      self.programs[case, fields] = self.bench.threads.submit(self.bench.compiled, wanted)
    return self.programs[case, fields]

  def ask(self, case: Case) -> tuning.Asked:
    """What the case has, all of which is begun to be compiled."""
    found = self.bench.asked(case)
    for fields in ((), *one_by_one(found.default)):
      self.program(case, fields)
    return found

  def prefetch(self, cases: list[Case]) -> None:
    for case in cases:
      if case not in self.asked:
        self.bench.program(self.bench.stand_in(case), wide=True)
        self.asked[case] = self.bench.threads.submit(self.ask, case)

  def done(self, case: Case) -> None:
    self.programs = {key: soon for key, soon in self.programs.items() if key[0] != case}


def attempts(bench: Bench, case: Case, coming: Coming, record: Record) -> Iterator[Tried]:
  """The default, each field by itself, the best of each together. Off: the default is wrong."""
  asked = coming.asked[case].result()
  programs = coming.program(case, ()).result()
  bench.error(case)
  bench.check(case, programs)
  first = bench.clock(case, programs)
  yield Tried(asked, (), first)
  best: dict[str, tuple[float, Any]] = {}  # of a field the least time so far, and the value
  least = first.median

  def tried(fields: Fields) -> Iterator[Tried]:
    nonlocal least
    try:
      programs = coming.program(case, fields).result()
      timing = bench.clock(case, programs)
      if faster := timing.median < least:
        bench.check(case, programs)
        least = timing.median
      for name, value in fields:
        if timing.median < best.get(name, (first.median,))[0]:
          best[name] = timing.median, value
      if faster:
        yield Tried(asked, fields, timing)
    except Exception as e:  # whatever a compiler says of it
      said = f"{case}, {dict(fields)}: {type(e).__name__}: {str(e)[:200]}"
      record.console.print(said, markup=False)

  for fields in one_by_one(asked.default):
    yield from tried(fields)
  together = tuple((name, value) for name, (_, value) in best.items())
  if len(together) > 1:
    yield from tried(together)


def rows_of(bench: Bench, case: Case, coming: Coming, record: Record) -> None:
  for t in attempts(bench, case, coming, record):
    record(
      case=case.kernel, kernel=t.asked.kernel, **t.asked.shape._asdict(), batch=case.batch,
      config=json.dumps(dict(t.fields), sort_keys=True), time_us=round(t.timing.median, 2),
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
  bench = Bench(
    kinds, layer, max(c.batches) + 32, c.calls, c.seed, mosaic=c.ops == "mosaic_gpu",
    processes=beside(c.ops),
  )  # fmt: skip
  coming = Coming(bench)
  left = [case for case in cases if str(case) not in record.finished]
  try:
    for case in record.parts(cases, seconds=c.seconds, limit=c.limit):
      left = [x for x in left if x != case]
      coming.prefetch([case, *left[:AHEAD]])
      try:
        rows_of(bench, case, coming, record)
      except Exception as e:  # the others are tuned all the same
        record.console.print(f"{case}: {type(e).__name__}: {str(e)[:200]}", markup=False)
      coming.done(case)
  finally:
    bench.close()
  if record.rows:
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
