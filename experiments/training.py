"""The training loop: Muon and Adam, a log with held-out text, a state that outlives the process.

State, log and seconds of a run are one file, saved every `save_every` steps, when it is interrupted
or told to terminate, and at its end; the same command goes on from there. Weights for users lie in
partial/ after every save, and beside the log only when the run has ended.
"""

import contextlib
import csv
import io
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import serialization
from jaxtyping import Array
from optax.contrib import MuonDimensionNumbers, muon
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import corpus
from experiments.record import rows_csv, write
from gdn.block_inverse import block_substitute
from gdn.dots import Dots
from gdn.ops import xla

MATRICES = ("qkv", "z", "out", "q", "k", "v", "gate", "up", "down", "fuse")  # what Muon turns

# tf32 products on a GPU, where float32 ones would be most of a step. Only here: the weights are
# used with exact products.
LOW = Dots(jnp.matmul, jnp.matmul, jnp.matmul, jnp.matmul)
OPS = xla(dots=LOW, inverse=block_substitute)


@dataclass(frozen=True, kw_only=True)
class Plan:
  """What every training run says. `rate` is Muon's; other weights get Adam at `adam_ratio` times as
  much. Warm-up and cool-down are fractions of the run; `stdlib` and `files` choose the text."""

  batch: int
  steps: int
  log_every: int
  save_every: int
  heldout_rows: int
  minutes: float
  rate: float = 0.02
  adam_ratio: float = 0.2
  warmup: float = 0.02
  cooldown: float = 0.6
  weight_decay: float = 0.05
  seed: int = 0
  stdlib: Path | None = None
  files: int | None = None

  def __post_init__(self):
    """ValueError: a field out of range, with what is allowed."""
    self.at_least_one("batch", "steps", "log_every", "save_every", "heldout_rows")
    for name in ("warmup", "cooldown"):
      if not 0 <= getattr(self, name) <= 1:
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: a fraction of the run, 0 to 1")

  def at_least_one(self, *names: str) -> None:
    for name in names:
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: at least 1")

  @property
  def text(self) -> list[corpus.File]:
    return corpus.training_files(self.stdlib)[: self.files]


class State(NamedTuple):
  """What an update changes. Weights are float32."""

  params: Any
  optimiser: Any
  step: Array


class Run(NamedTuple):
  """A run as it stands: its state, the rows of its log and the seconds that it has taken."""

  state: State
  rows: list[dict[str, Any]]
  seconds: float


class Job(NamedTuple):
  """What is trained, as the loop sees it.

  weights  name of the file of weights
  batches  what step first + 1, first + 2, ... takes
  update   (state, batch, rate) -> (state, loss before the update); the state is donated
  rate     (steps done, seconds so far) -> rate of the next step
  measure  (state, loss, steps a second) -> columns of the log
  export   (path, params) writes the weights
  """

  weights: str
  batches: Iterator[Any]
  update: Callable[[State, Any, Array], tuple[State, Array]]
  rate: Callable[[int, float], float]
  measure: Callable[[State, Array, float], dict[str, Any]]
  export: Callable[[Path, Any], None]


@cache
def optimiser(weight_decay: float, adam_ratio: float) -> optax.GradientTransformation:
  """Muon for the matrices inside layers, Adam for the rest, both at a base rate of one."""

  def dims(params: Any) -> Any:
    inside = lambda path: path[-1].name in MATRICES
    return jax.tree_util.tree_map_with_path(
      lambda path, x: MuonDimensionNumbers() if inside(path) else None, params
    )

  return muon(
    1.0,
    weight_decay=weight_decay,
    adam_b2=0.99,
    adam_learning_rate=adam_ratio,
    muon_weight_dimension_numbers=dims,
  )


def started(params: Any, plan: Plan) -> State:
  """A new run's state. Its leaves are given away by the first update."""
  tx = optimiser(plan.weight_decay, plan.adam_ratio)
  return State(params, tx.init(params), jnp.int32(0))


def updated(state: State, gradient: Any, rate: Array, tx: optax.GradientTransformation) -> State:
  """The state after one update. The rate is data: a run compiles once."""
  updates, new = tx.update(gradient, state.optimiser, state.params)
  params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
  return State(params, new, state.step + 1)


def save(folder: Path, run: Run, job: Job) -> None:
  """State and log in one file, so that they can never be of different steps; then the weights."""
  state, log = jax.device_get(run.state), rows_csv(run.rows)
  data = {"state": serialization.to_state_dict(state), "log": log, "seconds": run.seconds}
  write(folder / "state.msgpack", serialization.msgpack_serialize(data))
  write(folder / "log.csv", log)
  job.export(folder / "partial" / job.weights, run.state.params)


def resume(folder: Path, state: State) -> Run:
  """What `save` wrote, or the new run of `state`."""
  path = folder / "state.msgpack"
  if not path.exists():
    return Run(state, [], 0.0)
  data = serialization.msgpack_restore(path.read_bytes())
  state = jax.tree.map(jnp.asarray, serialization.from_state_dict(state, data["state"]))
  rows = list(csv.DictReader(io.StringIO(data["log"].decode())))
  return Run(state, rows, data["seconds"])


@contextlib.contextmanager
def termination_interrupts() -> Iterator[None]:
  """SIGTERM is a KeyboardInterrupt, so that a run which is preempted is saved as well."""

  def interrupt(*_: object) -> None:
    raise KeyboardInterrupt

  if threading.current_thread() is not threading.main_thread():
    yield  # only the main one may say what a signal does
    return
  before = signal.signal(signal.SIGTERM, interrupt)
  try:
    yield
  finally:
    signal.signal(signal.SIGTERM, before)


def bar() -> Progress:
  return Progress(
    TextColumn("{task.description}"),
    *Progress.get_default_columns()[1:2],
    MofNCompleteColumn(),
    TimeRemainingColumn(),
    TextColumn("{task.fields[says]}"),
  )


def train(
  plan: Plan, job: Job, run: Run, folder: Path, *, until: float, progress: Progress
) -> State:
  """Steps until they or the run's seconds are over, and then the weights; returns the last state.

  FloatingPointError: the loss is not finite; the last save stands.
  """
  state, rows, began = run.state, run.rows, time.monotonic() - run.seconds
  seconds = lambda: time.monotonic() - began
  loss, first = jnp.float32(0), int(state.step)
  task = progress.add_task("training", total=plan.steps, completed=first, says="")
  mark = first, seconds()
  try:
    with termination_interrupts():
      for step in range(first + 1, plan.steps + 1):
        batch, now = next(job.batches), jnp.float32(job.rate(step - 1, seconds()))
        jax.block_until_ready(loss)  # one step ahead of the device, so that the clock is right
        state, loss = job.update(state, batch, now)
        progress.update(task, completed=step)
        over = step == plan.steps or seconds() >= until
        if over or step % plan.log_every == 0:
          if not jnp.isfinite(loss):
            raise FloatingPointError(f"loss is {loss} at step {step}")
          pace = (step - mark[0]) / (seconds() - mark[1])
          columns = job.measure(state, loss, pace)
          rows.append({"step": step, **columns, "seconds": f"{seconds():.1f}"})
          progress.update(task, says=", ".join(f"{k} {v}" for k, v in columns.items()))
          mark = step, seconds()
        if over or step % plan.save_every == 0:
          save(folder, Run(state, rows, seconds()), job)
        if over:
          break
  except KeyboardInterrupt:
    # one inside a step finds the state already given away; then the last save stands
    if not state.step.is_deleted():
      save(folder, Run(state, rows, seconds()), job)
    raise
  job.export(folder / job.weights, state.params)
  (folder / "partial" / job.weights).unlink(missing_ok=True)
  return state


def meta(plan: Plan, files: list[corpus.File], state: State, **more: Any) -> bytes:
  """meta.json: what was asked for, and what was done on which device."""
  [device, *_] = jax.devices()
  facts = {
    "config": asdict(replace(plan, stdlib=None)),
    "steps_done": int(state.step),
    "training_files": len(files),
    "training_bytes": sum(len(f.text) for f in files),
    **more,
    "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
    "jax": jax.__version__,
    "device": device.device_kind,
  }
  return json.dumps(facts, indent=2, default=str).encode()


def command_line(run: Callable[[Any, Path], Any], presets: dict[str, Any], folder: str) -> None:
  """A preset by its name, and any of its fields. `folder` has {} where the preset's name goes."""
  import tyro  # only the command line needs it

  choices = {name: (f"the {name} run", config) for name, config in presets.items()}
  config = tyro.extras.overridable_config_cli(choices)
  run(config, Path("experiments/checkpoints") / folder.format(sys.argv[1]))
