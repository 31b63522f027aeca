"""Trains the byte-level hybrid on Python's standard library.

    python -m experiments.train full

The state of a run is saved whole every `save_every` steps, when it is interrupted, and when its
minutes are up; the same command goes on from there and ends with the same weights. The bundled
weights are those of step 819 of `full`, where the minutes of its one sitting ended.
"""

import csv
import io
import json
import time
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from optax.contrib import MuonDimensionNumbers, muon
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import corpus
from experiments.record import rows_csv, writable, write
from experiments.score import fresh, piece_bits
from gdn import checkpoint, hybrid
from gdn.block_inverse import block_substitute
from gdn.config import Config
from gdn.dots import Dots
from gdn.hybrid import Params
from gdn.ops import xla

COLUMNS = ("step", "tokens", "loss_bits_per_byte", "heldout_bits_per_byte", "seconds")
MATRICES = ("qkv", "z", "out", "q", "k", "v", "gate", "up", "down", "fuse")  # what Muon turns

# tf32 products on a GPU, where float32 ones would be most of a step. Only here: the weights are
# used with exact products.
LOW = Dots(jnp.matmul, jnp.matmul, jnp.matmul, jnp.matmul)
OPS = xla(dots=LOW, inverse=block_substitute)


@dataclass(frozen=True)
class TrainConfig:
  """One training run. Lengths in bytes; `rate` is Muon's; other weights get Adam at
  `adam_ratio` times as much. Warm-up and cool-down are fractions of the steps."""

  model: Config = field(default_factory=Config)
  context: int = 16_384
  batch: int = 8
  steps: int = 937
  rate: float = 0.02
  adam_ratio: float = 0.2
  warmup: float = 0.02
  cooldown: float = 0.6
  weight_decay: float = 0.05
  seed: int = 0
  log_every: int = 25
  save_every: int = 500
  heldout_rows: int = 16
  minutes: float = 9.0
  stdlib: Path | None = None
  files: int | None = None

  def __post_init__(self):
    """ValueError: a field out of range, with what is allowed."""
    for name in ("context", "batch", "steps", "log_every", "save_every", "heldout_rows"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: at least 1")
    for name in ("warmup", "cooldown"):
      if not 0 <= getattr(self, name) <= 1:
        raise ValueError(
          f"{name} = {getattr(self, name)}, allowed: a fraction of the steps, 0 to 1"
        )


FULL = TrainConfig()
TINY = TrainConfig(
  model=Config(
    width=32,
    inner=48,
    layers=2,
    attention_every=2,
    key_heads=1,
    value_heads=2,
    key_dim=16,
    value_dim=16,
    query_heads=2,
    kv_heads=1,
    head_dim=16,
    rotary=8,
    window=48,
  ),
  context=128,
  batch=4,
  steps=12,
  log_every=4,
  save_every=4,
  heldout_rows=4,
  files=40,
)
PRESETS = {"full": FULL, "tiny": TINY}


class State(NamedTuple):
  """All that a run needs to go on. Weights are float32."""

  params: Params
  optimiser: Any
  step: jax.Array


@cache
def optimiser(weight_decay: float, adam_ratio: float) -> optax.GradientTransformation:
  """Muon for the matrices inside layers, Adam for the rest, both at a base rate of one."""

  def dims(params: Params) -> Any:
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


def rate(config: TrainConfig, step: int) -> float:
  """Linear up, flat, linear down: the rate of step 0, 1, ... up to steps - 1."""
  up = (step + 1) / (config.warmup * config.steps + 1)
  down = (config.steps - step) / (config.cooldown * config.steps + 1)
  return config.rate * min(1.0, up, down)


def loss(params: Params, config: Config, text: jax.Array) -> jax.Array:
  """Mean bits per byte in bfloat16 activations; the weights that it differentiates are float32."""
  low = hybrid.cast(params, jnp.bfloat16)
  memories = fresh(low, config, text.shape[0])
  bits, _ = piece_bits(low, config, text, memories, jnp.int32(0), OPS)
  return jnp.mean(bits)


@partial(jax.jit, static_argnames=("model", "tx"), donate_argnames="state")
def train_step(
  state: State, text: jax.Array, rate: jax.Array, model: Config, tx: optax.GradientTransformation
) -> tuple[State, jax.Array]:
  """One update, and the loss before it. The rate is data: a run compiles once."""
  bits, gradient = jax.value_and_grad(loss)(state.params, model, text)
  updates, new = tx.update(gradient, state.optimiser, state.params)
  params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
  return State(params, new, state.step + 1), bits


evaluate = jax.jit(loss, static_argnames="config")


def start(config: TrainConfig) -> State:
  params = hybrid.init(config.model, jax.random.key(config.seed))
  tx = optimiser(config.weight_decay, config.adam_ratio)
  return State(params, tx.init(params), jnp.int32(0))


def heldout_batch(config: TrainConfig) -> np.ndarray:
  """The first rows of the held-out stream, uint8 [rows, context + 1]."""
  text, n = corpus.heldout(), config.context
  rows = min(config.heldout_rows, (len(text) - 1) // n)
  return np.stack([text[i * n : (i + 1) * n + 1] for i in range(rows)])


def save(folder: Path, state: State, rows: list[dict[str, Any]]) -> None:
  """State and log in one file, so that they can never be of different steps."""
  log = rows_csv(rows)
  data = {"state": serialization.to_state_dict(jax.device_get(state)), "log": log}
  write(folder / "state.msgpack", serialization.msgpack_serialize(data))
  write(folder / "log.csv", log)


def resume(folder: Path, config: TrainConfig) -> tuple[State, list[dict[str, Any]]]:
  """What `save` wrote, or a new run."""
  state = start(config)
  path = folder / "state.msgpack"
  if not path.exists():
    return state, []
  data = serialization.msgpack_restore(path.read_bytes())
  state = jax.tree.map(jnp.asarray, serialization.from_state_dict(state, data["state"]))
  return state, list(csv.DictReader(io.StringIO(data["log"].decode())))


def run(config: TrainConfig, out_dir: str | Path) -> State:
  """Trains until the steps or the minutes are over; returns the last state.

  Writes to `out_dir`: model.safetensors (bfloat16), log.csv, training_files.sha256, meta.json and
  state.msgpack. Unwritable: it cannot be written. FloatingPointError: the loss is not finite.
  """
  folder = Path(out_dir)
  writable(folder)
  files = corpus.training_files(config.stdlib)[: config.files]
  write(folder / "training_files.sha256", corpus.manifest(files).encode())
  state, rows = resume(folder, config)
  first, began = int(state.step), time.monotonic()
  before = float(rows[-1]["seconds"]) if rows else 0.0
  heldout = heldout_batch(config)
  tx = optimiser(config.weight_decay, config.adam_ratio)
  text = corpus.batches(files, config.context, config.batch, seed=config.seed, start=first)
  columns = (
    TextColumn("training"),
    *Progress.get_default_columns()[1:2],
    MofNCompleteColumn(),
    TimeRemainingColumn(),
    TextColumn("{task.fields[bits]}"),
  )
  with Progress(*columns) as progress:
    task = progress.add_task("", total=config.steps, completed=first, bits="")
    try:
      for step in range(first + 1, config.steps + 1):
        now = jnp.float32(rate(config, step - 1))
        state, bits = train_step(state, next(text), now, config.model, tx)
        progress.update(task, completed=step)
        if step % config.log_every == 0 or step == config.steps:
          rows.append(measure(config, state, bits, heldout, before + time.monotonic() - began))
          progress.update(task, bits=f"{rows[-1]['loss_bits_per_byte']} bits per byte")
        if step % config.save_every == 0:
          save(folder, state, rows)
        if time.monotonic() - began > 60 * config.minutes:
          break
    finally:
      # an interrupt inside a step finds the state already given away; then the last save stands
      if not state.step.is_deleted():
        save(folder, state, rows)
  checkpoint.save(
    folder / "model.safetensors", hybrid.cast(state.params, jnp.bfloat16), config.model
  )
  write(folder / "meta.json", json.dumps(meta(config, files, state), indent=2).encode())
  return state


def measure(
  config: TrainConfig, state: State, bits: jax.Array, heldout: np.ndarray, seconds: float
) -> dict[str, Any]:
  """One row of the log."""
  if not jnp.isfinite(bits):
    raise FloatingPointError(f"loss is {bits} at step {state.step}")
  values = (
    int(state.step),
    int(state.step) * config.batch * config.context,
    f"{bits:.5f}",
    f"{evaluate(state.params, config.model, heldout):.5f}",
    f"{seconds:.1f}",
  )
  return dict(zip(COLUMNS, values, strict=True))


def meta(config: TrainConfig, files: list[corpus.File], state: State) -> dict[str, Any]:
  [device, *_] = jax.devices()
  return {
    "config": asdict(replace(config, stdlib=None)),
    "steps_done": int(state.step),
    "training_files": len(files),
    "training_bytes": sum(len(f.text) for f in files),
    "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
    "jax": jax.__version__,
    "device": device.device_kind,
  }


def main() -> None:
  import tyro  # only the command line needs it

  out = Path("experiments/checkpoints")
  presets = {name: (f"the {name} run", config) for name, config in PRESETS.items()}
  config = tyro.extras.overridable_config_cli(presets)
  run(config, out / ("tiny" if config.model == TINY.model else "full"))


if __name__ == "__main__":
  main()
