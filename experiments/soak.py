"""Thousands of random steps of continuous batching under every scheme, each state replayed.

Requests are admitted, forked, retracted, resumed and evicted at random, with draft lengths from 0
to the window's, chains and trees, drafts that are right by chance and prefixes that a cache knows.
Every `every` steps each slot's recurrent states are compared with an independent replay of its own
stream: bit for bit where the scheme is exact, else within the budget of `experiments.witness`. So
are memories that enter the prefix cache. Texts are compared with plain decoding's by the margin
rule. A row is written only if all of it held; the first state or token that is wrong is an error.

`--config layer` leaves the engine out: 100,000 steps of one layer on the device, checked every
1,000 (experiments/soak_layer.py). `--config tokens` does so with windows of one token and as many
slots as the kernel for them wants.
"""

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import active_children
from types import MappingProxyType

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from commit_schemes import SCHEMES
from experiments import figures
from experiments.layer_step import runs_here
from experiments.models import named
from experiments.mps import shared_gpu
from experiments.processes import workers
from experiments.record import Record, Row
from experiments.soak_layer import LAYERS, Layer, LayerSoak
from experiments.soak_world import MODELS, World
from experiments.watched import Watched, Wrong


@dataclass(frozen=True, kw_only=True)
class Config:
  """`steps` under each scheme; `block` is the prefix cache's, which keeps `entries` prefixes.

  `model` is a name, of random weights, or the path of a checkpoint.
  """

  schemes: tuple[str, ...] = tuple(SCHEMES)
  model: str = "128-wide heads, bfloat16, Mosaic kernels"
  steps: int = 20_000
  every: int = 100
  window: int = 12
  slots: int = 8
  capacity: int = 256
  block: int = 64
  entries: int = 24
  prompts: int = 8
  seconds: float = 1e6  # after these no further scheme is begun; the same command goes on
  limit: float = 1e6  # seconds after which a scheme ends with its next check; its row says where
  workers: int = 1  # processes that share the device, a scheme each: most of a step is the host's
  seed: int = 0

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    least = 1 if self.model in LAYERS else 2  # an engine drafts
    for name, good, allowed in (
      ("schemes", set(self.schemes) <= set(SCHEMES), ", ".join(SCHEMES)),
      (
        "model",
        named(self.model, (*MODELS, *LAYERS)),
        f"{', '.join((*MODELS, *LAYERS))}, or the path of a checkpoint",
      ),
      ("steps", self.steps >= 1, "at least 1"),
      ("workers", self.workers >= 1, "at least 1"),
      ("limit", self.limit >= 0, "at least 0"),
      ("every", self.every >= 1, "at least 1"),
      ("window", least <= self.window <= 16, f"{least} to 16"),
      ("slots", self.slots >= 2, "at least 2"),
      ("capacity", self.capacity >= 8 * self.window, f"at least {8 * self.window}"),
      ("block", 1 <= self.block <= self.capacity, f"1 to {self.capacity}"),
      ("entries", self.entries >= 0, "at least 0"),
      ("prompts", 1 <= self.prompts <= 256, "1 to 256"),
    ):
      if not good:
        raise ValueError(f"{name} = {getattr(self, name)!r}, allowed: {allowed}")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "smoke": Config(
      model="tiny float32",
      steps=500,
      window=10,
      slots=4,
      capacity=96,
      block=8,
      prompts=5,
    ),
    "layer": Config(
      model="one layer, Mosaic kernels", steps=100_000, every=1_000, window=16, capacity=128
    ),
    "tokens": Config(
      model="a layer of 16 key heads, Mosaic kernels", steps=20_000, every=500, window=1, slots=64
    ),
  }
)


class Soak(Watched):
  """Random requests, and what happens to them."""

  def __init__(self, world: World, name: str):
    super().__init__(world, name)
    self.rng = np.random.default_rng(world.c.seed + 1)

  def submit(self) -> None:
    """A prompt, or one with the beginning of its known answer: a second turn."""
    rng, c = self.rng, self.world.c
    prompt = self.world.prompts[rng.integers(c.prompts)]
    turn = int(rng.integers(0, c.capacity // 3)) if rng.random() < 0.5 else 0
    prompt = tuple(self.world.plain[prompt].known[: len(prompt) + turn])
    tokens = int(rng.integers(1, c.capacity - len(prompt) + 1))
    self.engine.submit(
      self.seen["requests"], prompt, tokens=tokens, draft=int(rng.integers(0, c.window))
    )
    self.seen["requests"] += 1

  def disturb(self) -> None:
    """One of the things that happen to requests."""
    rng, engine, seen = self.rng, self.engine, self.seen
    running = [r for r in engine.schedule.running if r is not None]
    what = rng.random()
    if running and what < 0.05:
      victim = running[rng.integers(len(running))]
      engine.retract(victim.name)
      seen["retracted"] += 1
    elif running and what < 0.10 and len(engine.schedule.waiting) < 3:
      source = running[rng.integers(len(running))]
      done, room = len(engine.texts[source.name].tokens), self.world.c.capacity
      tokens = int(rng.integers(done + 1, room - len(source.prompt) + 1))
      new = seen["requests"]
      draft = int(rng.integers(0, self.world.c.window))
      engine.fork(source.name, new, tokens=tokens, draft=draft)
      self.replicas[new] = {i: r.copy() for i, r in self.replicas[source.name].items()}
      seen["requests"] += 1
      seen["forks"] += 1
    elif engine.schedule.parked and what < 0.25:
      engine.resume(engine.schedule.parked[0].name)
      seen["resumed"] += 1
    elif running and what < 0.27:
      name = running[rng.integers(len(running))].name
      engine.evict(name)
      self.forget(name)
      seen["evicted"] += 1

  def step(self) -> None:
    while len(self.engine.schedule.waiting) < 2:
      self.submit()
    self.disturb()
    for name in self.engine.step():
      self.check_text(name)
      self.forget(name)
    self.seen["steps"] += 1
    if self.seen["steps"] % self.world.c.every == 0:
      self.check_states()
      self.check_cache()


def beginner(c: Config) -> Callable[[str], Soak | LayerSoak]:
  """Begins the soak of a scheme. BadInput: a checkpoint that cannot be read."""
  return partial(LayerSoak, Layer(c)) if c.model in LAYERS else partial(Soak, World(c))


def soaked(
  begin: Callable[[str], Soak | LayerSoak], c: Config, name: str,
  advance: Callable[[float], None] = lambda _: None,
) -> Row:  # fmt: skip
  """The row of a scheme after all its steps, or those that its time was enough for."""
  soak, first = begin(name), time.monotonic()
  while soak.seen["steps"] < c.steps:
    checked = soak.seen["steps"] and soak.seen["steps"] % c.every == 0
    if checked and time.monotonic() - first > c.limit:
      break
    soak.step()
    advance(soak.seen["steps"] / c.steps)
  return {"scheme": name, **soak.row()}


def outcome(work: Callable[[], Row]) -> Row | Wrong:
  try:
    return work()
  except Wrong as e:
    return e


def right(each: Iterable[tuple[str, Row | Wrong]]) -> Iterator[tuple[str, Row]]:
  """The rows of the schemes that were not wrong. Wrong: the others, when all are done."""
  wrong = []
  for name, row in each:
    if isinstance(row, Wrong):
      wrong.append(f"{name}: {row}")
    else:
      yield name, row
  if wrong:
    raise Wrong("; ".join(wrong))


def one_by_one(
  c: Config, names: list[str], say: Callable[[str], None]
) -> Generator[tuple[str, Row | Wrong]]:
  """`beside`, in this process."""
  say("plain decoding")
  begin, first = beginner(c), time.monotonic()
  for i, name in enumerate(names):
    if i and time.monotonic() - first > c.seconds:
      break
    tell = lambda part: say(f"{name} {part:4.0%}")  # noqa: B023
    yield name, outcome(partial(soaked, begin, c, name, tell))


def alone(c: Config, name: str) -> Row:
  """`soaked` in a process that does nothing else."""
  return soaked(beginner(c), c, name)


def beside(
  c: Config, names: list[str], work: Callable[[Config, str], Row] = alone
) -> Generator[tuple[str, Row | Wrong]]:
  """What came of each scheme as soon as it is there, and none is begun after c.seconds. The others
  are ended if one fails in another way than to be wrong."""
  with shared_gpu() as env:
    yield from pooled(c, names, work, env)


def pooled(
  c: Config, names: list[str], work: Callable[[Config, str], Row], env: Mapping[str, str]
) -> Generator[tuple[str, Row | Wrong]]:
  first, ours = time.monotonic(), set(active_children())
  waiting, running = iter(names), dict[Future[Row], str]()
  pool = workers(c.workers, env)
  begin = lambda n: {pool.submit(work, c, name): name for name in islice(waiting, n)}
  try:
    running |= begin(c.workers)
    while running:
      done, _ = wait(running, return_when=FIRST_COMPLETED)
      if time.monotonic() - first <= c.seconds:
        running |= begin(len(done))
      for soon in done:
        yield running.pop(soon), outcome(soon.result)
  except BaseException:
    for process in set(active_children()) - ours:
      process.terminate()
    raise
  finally:
    pool.shutdown(cancel_futures=True)


def run(c: Config, record: Record) -> None:
  """BadInput: a model for Mosaic kernels without a GPU, or a checkpoint that cannot be read."""
  if c.workers > 1:  # before jax has taken the memory that the others need
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  if c.model in LAYERS:
    runs_here(f"model = {c.model}", LAYERS[c.model][1])
  elif c.model in MODELS:
    runs_here(f"model = {c.model}", MODELS[c.model][2])
  rows: dict[str, Row] = {}

  def finished(names: list[str]) -> Iterator[str]:
    each = beside(c, names) if c.workers > 1 else one_by_one(c, names, record.say)
    for name, rows[name] in right(each):
      yield name

  for name in record.parts(c.schemes, arrange=finished):
    record(**rows[name])
  record.rows.sort(key=lambda row: c.schemes.index(row["scheme"]))


TEXTS = ("texts_compared", "texts_differing")
COUNTED = ("states_compared", "marks", *TEXTS, "prefix_hits", "forks", "resumed")


def named_in(row: Row) -> str:
  return row["scheme"] + ", a layer" * (row["model"] in LAYERS)


def table(rows: list[Row]) -> Table:
  """What happened and was compared under each scheme; no state was wrong, and texts that differ do
  so where two tokens were close."""
  out = Table("scheme", "steps", "states", "error", "texts, differ", "hits", "forks, resumed")
  for row in rows:
    error = "bitwise" if row["compared"] == "bitwise" else f"{row['error_over_budget']:.2f}"
    said = lambda *names: ["" if row[x] is None else f"{row[x]:,}" for x in names]  # noqa: B023
    pair = lambda *names: ", ".join(filter(None, said(*names)))  # noqa: B023
    steps, states, hits = said("steps", "states_compared", "prefix_hits")
    forks = pair("forks", "resumed")
    out.add_row(named_in(row), steps, states, error, pair(*TEXTS), hits, forks)
  return out


def figure(rows: list[Row]) -> Figure:
  """How often each thing has happened and been compared, and errors relative to their budgets."""
  fig = Figure(figsize=(9.0, 1.2 + 0.22 * len(rows)))
  counts, errors = fig.subplots(1, 2, sharey=True, width_ratios=(3, 2))
  names = [named_in(row) for row in rows]
  for i, what in enumerate(COUNTED):
    if there := [(row[what], name) for row, name in zip(rows, names, strict=True) if row[what]]:
      counts.plot(*zip(*there, strict=True), label=what.replace("_", " "),
                  **figures.look(i) | {"linestyle": "none"})  # fmt: skip
  counts.set_xscale("symlog")
  among = {
    "an engine": [row for row in rows if row["model"] not in LAYERS],
    "a layer": [row for row in rows if row["model"] in LAYERS],
  }
  told = {row["scheme"] for row in among["an engine"]}
  gone = [name for name in SCHEMES if told and name not in told]
  least = (
    f"{min(row['steps'] for row in some):,} steps of {what}" for what, some in among.items() if some
  )
  title = f"counts in at least {', '.join(least)};\nno state was wrong"
  counts.set_title(title + f"\nof an engine, no row of {', '.join(gone)}" * bool(gone))
  counts.legend()
  errors.barh(names, [row["error_over_budget"] for row in rows], color="0.6")
  errors.set(xlim=(0, 1), xlabel="rms error / budget", title="largest state error; none: bitwise")
  counts.set_xlabel("times")
  counts.invert_yaxis()
  return fig
