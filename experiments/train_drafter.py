"""Trains the block drafter of the bundled model: `gdn.drafter`, after DFlash.

    python -m experiments.train_drafter full

The target is frozen and read in bfloat16. As published, it is trained on what the target itself
writes: prefixes of the training text, continued greedily (`experiments.greedy_text`), then random
anchors in them, many blocks a sequence, all filled in one pass, and a cross entropy whose weight
falls with the distance to the anchor as exp(-(i - 1) / gamma). Continuations are short: after 200
bytes of its own, most of this target's text repeats itself, and a repetition teaches little.

The rate rises by steps, and falls to nothing when steps or minutes end, whichever is first: a run
that compiles for long still warms up. Minutes are those of all sittings together.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from experiments import corpus, training
from experiments.block_loss import Read, accept_length, evaluate, loss, read
from experiments.greedy_text import continued
from experiments.record import writable, write
from experiments.score import BUNDLED
from experiments.train import TINY
from experiments.training import OPS, Job, Plan, State, optimiser
from gdn import checkpoint, drafter, hybrid
from gdn.drafter import DrafterConfig, DrafterParams
from gdn.hybrid import Params


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Plan):
  """A sequence is `prefix` bytes of text and `greedy` ones of the target's.

  rounds x round_batch sequences are written first, in at most `writing_minutes`; a step then takes
  `batch` of them with `anchors` blocks each, which have at least `context` bytes before them.
  `minutes` is for the training alone, compilation included.
  """

  drafter: DrafterConfig = field(default_factory=DrafterConfig)
  target: Path = BUNDLED
  prefix: int = 512
  greedy: int = 256
  rounds: int = 40
  round_batch: int = 2048
  writing_minutes: float = 1.5
  batch: int = 64
  context: int = 256
  anchors: int = 128
  gamma: float = 7.0
  steps: int = 4000
  cooldown: float = 0.7
  log_every: int = 100
  save_every: int = 250
  heldout_rows: int = 128
  minutes: float = 6.0

  def __post_init__(self):
    """ValueError: a field out of range, with what is allowed."""
    super().__post_init__()
    self.at_least_one("rounds", "round_batch", "anchors")
    window = self.drafter.target.window
    for name, good, allowed in (
      ("heldout_rows", self.heldout_rows <= self.round_batch, f"at most {self.round_batch}"),
      ("heldout_rows", self.heldout_rows % self.batch == 0, f"a multiple of batch = {self.batch}"),
      ("greedy", self.greedy >= self.drafter.block, f"at least a block, {self.drafter.block}"),
      ("context", 0 <= self.context < self.prefix, f"at least 0, below prefix = {self.prefix}"),
      ("prefix", 2 <= self.prefix <= window - self.greedy, f"at least 2 and, with greedy = "
       f"{self.greedy}, at most {window - self.greedy}, for the model's window is {window}"),
    ):  # fmt: skip
      if not good:
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: {allowed}")


FULL = TrainConfig()
TINY_DRAFTER = TrainConfig(
  drafter=DrafterConfig(TINY.model, block=4, taps=(0, 1), layers=2, inner=32, window=16),
  prefix=24, greedy=24, rounds=2, round_batch=16, batch=8, context=4, anchors=8, gamma=4.0,
  steps=12, log_every=4, save_every=4, heldout_rows=8, files=40,
)  # fmt: skip


@partial(jax.jit, static_argnames=("config", "gamma", "tx"), donate_argnames="state")
def train_step(
  state: State, embed: Array, rows: Read, anchors: Array, rate: Array, config: DrafterConfig,
  gamma: float, tx: optax.GradientTransformation,
) -> tuple[State, Array]:  # fmt: skip
  """One update, and the loss before it."""
  value = jax.value_and_grad(loss, has_aux=True)
  (nats, _), gradient = value(state.params, config, gamma, embed, rows, anchors)
  return training.updated(state, gradient, rate, tx), nats


def new_params(config: TrainConfig, target: Params) -> DrafterParams:
  """Random weights, but for the last norm: its scale is the one that the shared head is used to."""
  params = drafter.init(config.drafter, jax.random.key(config.seed))
  return params._replace(norm=target.norm + 0)  # a buffer of its own: the state is donated


def continuation(config: TrainConfig, target: Params, prefix: np.ndarray) -> np.ndarray:
  """uint8 [n, prefix + greedy]: what the target writes after each prefix."""
  model, n = config.drafter.target, config.greedy
  return np.asarray(continued(target, model, prefix, tokens=n, ops=OPS))


def written(
  config: TrainConfig, target: Params, text: np.ndarray, folder: Path, seconds: float,
  progress: Callable[[int], None],
) -> np.ndarray:  # fmt: skip
  """Sequences uint8 [n, prefix + greedy]: rounds in `folder`, and what `seconds` add to them."""
  rounds: list[np.ndarray] = []
  began = time.monotonic()
  for i in range(config.rounds):
    path = folder / f"{i:03}.uint8"
    if not path.exists():
      if rounds and time.monotonic() - began >= seconds:
        break
      random = np.random.default_rng([config.seed, i])
      at = random.integers(len(text) - config.prefix, size=config.round_batch)
      prefix = text[at[:, None] + np.arange(config.prefix)]
      write(path, continuation(config, target, prefix).tobytes())
    rounds.append(np.fromfile(path, np.uint8).reshape(-1, config.prefix + config.greedy))
    progress(i + 1)
  return np.concatenate(rounds)


def batches(
  config: TrainConfig, pool: np.ndarray, start: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """(sequences, anchors) for step start, start + 1, ...: a function of the step alone.

  One random anchor in each of `anchors` equal pieces, so that blocks cover what follows `context`.
  """
  per_epoch, n = max(len(pool) // config.batch, 1), config.anchors
  places = pool.shape[1] - 1 - config.context
  step = start
  while True:
    order = np.random.default_rng([config.seed, 1, step // per_epoch]).permutation(len(pool))
    for i in range(step % per_epoch, per_epoch):
      rows = order[i * config.batch : (i + 1) * config.batch]
      u = np.random.default_rng([config.seed, 2, step]).random((len(rows), n))
      at = config.context + (np.arange(n) + u) * places / n
      yield pool[rows], at.astype(np.int32)
      step += 1


def heldout(config: TrainConfig, target: Params) -> tuple[list[Read], np.ndarray]:
  """Held-out text and its continuations, in batches, and a block at every place of these.

  Every prefix is from another place, evenly over the stream.
  """
  text, n = corpus.heldout(), config.heldout_rows
  at = np.linspace(0, len(text) - config.prefix, n, dtype=np.int64)
  at = np.resize(at, config.round_batch)  # repeated up to the shape that is compiled already
  rows = continuation(config, target, text[at[:, None] + np.arange(config.prefix)])[:n]
  anchors = np.arange(config.prefix - 1, rows.shape[1] - config.drafter.block + 1, dtype=np.int32)
  pieces = [
    read(target, rows[i : i + config.batch], config.drafter) for i in range(0, n, config.batch)
  ]
  return pieces, np.broadcast_to(anchors, (config.batch, len(anchors)))


def measure(
  config: TrainConfig, state: State, nats: Array, pace: float, embed: Array,
  held: tuple[list[Read], np.ndarray],
) -> dict[str, Any]:  # fmt: skip
  """Columns of the log: the loss, and how decoding held-out text would go."""
  pieces, anchors = held
  c, gamma = config.drafter, config.gamma
  found = [evaluate(state.params, c, gamma, embed, rows, anchors) for rows in pieces]
  hits = np.concatenate([np.asarray(h) for _, h in found])
  blocks = config.batch * config.anchors
  return {
    "blocks": int(state.step) * blocks,
    "blocks_per_second": f"{pace * blocks:.0f}",
    "loss_nats": f"{nats:.5f}",
    "heldout_loss_nats": f"{np.mean([float(x) for x, _ in found]):.5f}",
    **{
      f"heldout_accept_length_{window}": f"{accept_length(hits, window):.4f}"
      for window in (c.block // 2, c.block)
    },
  }


def rate(config: TrainConfig, step: int, seconds: float) -> float:
  """Linear up, flat, linear down to nothing, after `step` steps and `seconds` of training."""
  up = (step + 1) / (config.warmup * config.steps + 1)
  left = 1 - max(step / config.steps, seconds / (60 * config.minutes))
  return config.rate * max(0.0, min(1.0, up, left / config.cooldown if config.cooldown else 1.0))


def run(config: TrainConfig, out_dir: str | Path) -> State:
  """Trains until the steps or the minutes are over; returns the last state.

  Writes to `out_dir`: drafter.safetensors (bfloat16), log.csv, training_files.sha256, meta.json,
  state.msgpack and greedy/. Unwritable: it cannot be written. ValueError: the target is not of the
  config's sizes. FloatingPointError: the loss is not finite.
  """
  folder = Path(out_dir)
  writable(folder)
  target, model = checkpoint.load(config.target)
  if model != config.drafter.target:
    raise ValueError(f"{config.target} is a {model}, the drafter is for a {config.drafter.target}")
  target, files = hybrid.cast(target, jnp.bfloat16), config.text
  write(folder / "training_files.sha256", corpus.manifest(files).encode())
  now = training.resume(folder, training.started(new_params(config, target), config))

  tx = optimiser(config.weight_decay, config.adam_ratio)

  def update(state: State, batch: tuple[np.ndarray, np.ndarray], rate: Array):
    text, anchors = batch
    rows, c = read(target, text, config.drafter), config.drafter
    return train_step(state, target.embed, rows, anchors, rate, c, config.gamma, tx)

  with training.bar() as progress:
    writing = progress.add_task("writing", total=config.rounds, says="")
    tick = lambda done: progress.update(writing, completed=done)
    # steps depend on the sequences, so a run that has begun takes those that are there
    seconds = 0.0 if int(now.state.step) else 60 * config.writing_minutes
    pool = written(config, target, corpus.stream(files), folder / "greedy", seconds, tick)
    progress.update(writing, total=len(pool), completed=len(pool), says="sequences")
    held = heldout(config, target)
    job = Job(
      weights="drafter.safetensors",
      batches=batches(config, pool, int(now.state.step)),
      update=update,
      rate=partial(rate, config),
      measure=lambda state, nats, pace: measure(config, state, nats, pace, target.embed, held),
      export=lambda path, params: checkpoint.save_drafter(
        path, hybrid.cast(params, jnp.bfloat16), config.drafter, target
      ),
    )
    until = 60 * config.minutes
    state = training.train(config, job, now, folder, until=until, progress=progress)
  named = replace(config, target=Path(config.target.name))
  write(folder / "meta.json", training.meta(named, files, state, sequences=len(pool)))
  return state


if __name__ == "__main__":
  training.command_line(run, {"full": FULL, "tiny": TINY_DRAFTER}, "drafter_{}")
