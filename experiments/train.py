"""Trains the byte-level hybrid on Python's standard library.

    python -m experiments.train full

What is interrupted goes on by the same command and ends with the same weights. The bundled weights
are those of step 819 of `full`, where the minutes of its one sitting ended.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import corpus, training
from experiments.record import writable, write
from experiments.score import fresh, piece_bits
from experiments.training import OPS, Job, Plan, State, optimiser
from gdn import checkpoint, hybrid
from gdn.config import Config
from gdn.hybrid import Params


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Plan):
  """A batch is `batch` texts of `context` bytes; `minutes` is for one sitting."""

  model: Config = field(default_factory=Config)
  context: int = 16_384
  batch: int = 8
  steps: int = 937
  log_every: int = 25
  save_every: int = 500
  heldout_rows: int = 16
  minutes: float = 9.0

  def __post_init__(self):
    """ValueError: a field out of range, with what is allowed."""
    super().__post_init__()
    self.at_least_one("context")


FULL = TrainConfig()
TINY = TrainConfig(
  model=Config(
    width=32, inner=48, layers=2, attention_every=2, key_heads=1, value_heads=2, key_dim=16,
    value_dim=16, query_heads=2, kv_heads=1, head_dim=16, rotary=8, window=48,
  ),
  context=128, batch=4, steps=12, log_every=4, save_every=4, heldout_rows=4, files=40,
)  # fmt: skip


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
  """One update, and the loss before it."""
  bits, gradient = jax.value_and_grad(loss)(state.params, model, text)
  return training.updated(state, gradient, rate, tx), bits


evaluate = jax.jit(loss, static_argnames="config")


def heldout_batch(config: TrainConfig) -> np.ndarray:
  """The first rows of the held-out stream, uint8 [rows, context + 1]."""
  text, n = corpus.heldout(), config.context
  rows = min(config.heldout_rows, (len(text) - 1) // n)
  return np.stack([text[i * n : (i + 1) * n + 1] for i in range(rows)])


def measure(
  config: TrainConfig, state: State, bits: jax.Array, heldout: np.ndarray
) -> dict[str, Any]:
  """Columns of the log."""
  return {
    "tokens": int(state.step) * config.batch * config.context,
    "loss_bits_per_byte": f"{bits:.5f}",
    "heldout_bits_per_byte": f"{evaluate(state.params, config.model, heldout):.5f}",
  }


def run(config: TrainConfig, out_dir: str | Path) -> State:
  """Trains until the steps or the minutes are over; returns the last state.

  Writes to `out_dir`: model.safetensors (bfloat16), log.csv, training_files.sha256, meta.json and
  state.msgpack. Unwritable: it cannot be written. FloatingPointError: the loss is not finite.
  """
  folder = Path(out_dir)
  writable(folder)
  files = config.text
  write(folder / "training_files.sha256", corpus.manifest(files).encode())
  new = training.started(hybrid.init(config.model, jax.random.key(config.seed)), config)
  now = training.resume(folder, new)
  tx, heldout = optimiser(config.weight_decay, config.adam_ratio), heldout_batch(config)
  job = Job(
    weights="model.safetensors",
    batches=corpus.batches(
      files, config.context, config.batch, seed=config.seed, start=int(now.state.step)
    ),
    update=lambda state, text, rate: train_step(state, text, rate, config.model, tx),
    rate=lambda step, seconds: rate(config, step),
    measure=lambda state, bits, pace: measure(config, state, bits, heldout),
    export=lambda path, params: checkpoint.save(
      path, hybrid.cast(params, jnp.bfloat16), config.model
    ),
  )
  until = now.seconds + 60 * config.minutes
  with training.bar() as progress:
    state = training.train(config, job, now, folder, until=until, progress=progress)
  write(folder / "meta.json", training.meta(config, files, state))
  return state


if __name__ == "__main__":
  training.command_line(run, {"full": FULL, "tiny": TINY}, "{}")
