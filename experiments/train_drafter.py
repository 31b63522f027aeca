"""Trains the block drafter of the bundled model: `gdn.drafter`, after DFlash.

    python -m experiments.train_drafter full

The target is frozen and read in bfloat16. As published, it is trained on what the target itself
writes: prefixes of the training text, continued greedily (`experiments.greedy_text`), then random
anchors in them, many blocks a sequence, all filled in one pass, and a cross entropy whose weight
falls with the distance to the anchor as exp(-(i - 1) / gamma).

The label of every place is the target's own argmax, not the text: greedy verification accepts
nothing else. It is right only while the text before it is what the target would have written, so a
block counts up to and including the first byte where text and target part; in a continuation that
is the whole block, in the prefix, real text, a part. One forward pass of the target gives the
features and the labels of a whole sequence.

The state is saved every `save_every` steps, on an interrupt and when the minutes are up; the same
command goes on from there. The rate falls to nothing when steps or minutes end, whichever is first.
"""

import csv
import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import serialization
from jaxtyping import Array, Bool, Float, Int
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments import corpus
from experiments.greedy_text import continued
from experiments.record import rows_csv, writable, write
from experiments.score import BUNDLED
from experiments.train import OPS, TINY, optimiser
from gdn import checkpoint, drafter, hybrid
from gdn.drafter import DrafterConfig, DrafterParams
from gdn.hybrid import Params
from gdn.streaming import empty, streaming

COLUMNS = ("step", "blocks", "loss_nats", "heldout_loss_nats", "heldout_accept_length", "seconds")


@dataclass(frozen=True)
class TrainConfig:
  """One training run. A sequence is `prefix` bytes of text and `greedy` ones of the target's.

  rounds x round_batch sequences are written first, in at most `writing_minutes`; a step then takes
  `batch` of them with `anchors` blocks each. `minutes` is for the training alone.
  """

  drafter: DrafterConfig = field(default_factory=DrafterConfig)
  target: Path = BUNDLED
  prefix: int = 512
  greedy: int = 512
  rounds: int = 24
  round_batch: int = 2048
  writing_minutes: float = 1.75
  batch: int = 64
  anchors: int = 128
  gamma: float = 7.0
  steps: int = 2400
  rate: float = 0.02
  adam_ratio: float = 0.2
  warmup: float = 0.02
  cooldown: float = 0.7
  weight_decay: float = 0.05
  seed: int = 0
  log_every: int = 100
  save_every: int = 1000
  heldout_rows: int = 256
  minutes: float = 4.25
  stdlib: Path | None = None
  files: int | None = None

  def __post_init__(self):
    """ValueError: a field out of range, with what is allowed."""
    least = ("rounds", "round_batch", "batch", "anchors", "steps", "log_every", "save_every")
    for name in (*least, "greedy", "heldout_rows"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: at least 1")
    if self.heldout_rows > self.round_batch:
      raise ValueError(
        f"heldout_rows = {self.heldout_rows}, allowed: at most round_batch = {self.round_batch}"
      )
    for name in ("warmup", "cooldown"):
      if not 0 <= getattr(self, name) <= 1:
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: a fraction of the run, 0 to 1")
    window, n = self.drafter.target.window, self.prefix + self.greedy
    if self.prefix < 2 or n > window:
      raise ValueError(
        f"prefix = {self.prefix}, allowed: at least 2 and, with greedy = {self.greedy}, "
        f"at most the model's window of {window}"
      )


FULL = TrainConfig()
TINY_DRAFTER = TrainConfig(
  drafter=DrafterConfig(TINY.model, block=4, taps=(0, 1), layers=2, inner=32, window=16),
  prefix=24,
  greedy=24,
  rounds=2,
  round_batch=16,
  batch=8,
  anchors=8,
  gamma=4.0,
  steps=12,
  log_every=4,
  save_every=4,
  heldout_rows=8,
  files=40,
)
PRESETS = {"full": FULL, "tiny": TINY_DRAFTER}


class State(NamedTuple):
  """All that a run needs to go on, beside the sequences. Weights are float32."""

  params: DrafterParams
  optimiser: Any
  step: Array


class Labels(NamedTuple):
  """What each place of each block should say, and how much it counts."""

  tokens: Int[Array, "B A next"]
  valid: Bool[Array, "B A next"]


def labels(text: Int[Array, "B S"], best: Int[Array, "B S"], anchors: Array, n: int) -> Labels:
  """The target's `n` tokens after each anchor. `best` [b, t] is its argmax after text[b, :t + 1].

  The i-th counts if it exists and the text agrees with the target on the i - 1 before it.
  """
  S = text.shape[1]
  agrees = jnp.concatenate([jnp.zeros_like(text[:, :1], bool), text[:, 1:] == best[:, :-1]], axis=1)
  at = anchors[:, :, None] + jnp.arange(n, dtype=jnp.int32)[None, None]  # whose argmax it is
  pick = lambda x: jax.vmap(lambda row, at: row[at])(x, jnp.minimum(at, S - 1))
  before = pick(agrees).at[:, :, 0].set(True)
  return Labels(pick(best), (at < S) & jnp.cumprod(before, axis=2).astype(bool))


def loss(
  params: DrafterParams,
  config: TrainConfig,
  embed: Array,
  features: Array,
  text: Int[Array, "B S"],
  anchors: Int[Array, "B A"],
  wanted: Labels,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
  """Weighted cross entropy in nats, and the mean accept length of blocks that count to their end.

  Activations are bfloat16; the weights that it differentiates are float32.
  """
  low, c = hybrid.cast(params, jnp.bfloat16), config.drafter
  S = text.shape[1]
  at = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[None], text.shape)
  rows = drafter.context_rows(low, c, features, at)
  back = anchors[:, :, None] - at[:, None]
  see = (back > 0) & (back <= c.window)
  first = jnp.take_along_axis(text, anchors, axis=1)
  logits = drafter.marginals(low, c, embed, first, anchors, rows, see)
  nats = optax.softmax_cross_entropy_with_integer_labels(logits, wanted.tokens)
  i = jnp.arange(c.block - 1, dtype=jnp.float32)
  weight = jnp.where(wanted.valid, jnp.exp(-i / config.gamma)[None, None], 0.0)
  whole = wanted.valid[:, :, -1]
  hits = jnp.cumprod(jnp.argmax(logits, axis=-1) == wanted.tokens, axis=2).sum(2)
  length = 1.0 + jnp.sum(jnp.where(whole, hits, 0)) / jnp.maximum(jnp.sum(whole), 1)
  return jnp.sum(nats * weight) / jnp.sum(weight), length


def read(
  target: Params, config: TrainConfig, text: Int[Array, "B S"], anchors: Int[Array, "B A"]
) -> tuple[Array, Labels]:
  """Features and labels by one forward pass of the target."""
  c = config.drafter
  at = jnp.broadcast_to(jnp.arange(text.shape[1], dtype=jnp.int32)[None], text.shape)
  memories = empty(c.target, text.shape[0], target.embed.dtype)
  logits, features, _ = hybrid.featured(
    target, c.target, text, at, streaming(OPS), memories, c.taps
  )
  best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  return features, labels(text, best, anchors, c.block - 1)


def settled(config: TrainConfig) -> TrainConfig:
  """The config without paths: what a compiled step depends on."""
  return replace(config, target=Path(), stdlib=None)


@partial(jax.jit, static_argnames="config", donate_argnames="state")
def train_step(
  state: State, target: Params, text: Array, anchors: Array, rate: Array, config: TrainConfig
) -> tuple[State, Array]:
  """One update, and the loss before it. The rate is data: a run compiles once."""
  text = text.astype(jnp.int32)
  features, wanted = read(target, config, text, anchors)
  value = jax.value_and_grad(loss, has_aux=True)
  (nats, _), gradient = value(state.params, config, target.embed, features, text, anchors, wanted)
  tx = optimiser(config.weight_decay, config.adam_ratio)
  updates, new = tx.update(gradient, state.optimiser, state.params)
  params = jax.tree.map(lambda p, u: p + rate * u, state.params, updates)
  return State(params, new, state.step + 1), nats


@partial(jax.jit, static_argnames="config")
def evaluate(
  params: DrafterParams, target: Params, text: Array, anchors: Array, config: TrainConfig
) -> tuple[Array, Array]:
  """Loss and accept length on held-out sequences."""
  text = text.astype(jnp.int32)
  features, wanted = read(target, config, text, anchors)
  return loss(params, config, target.embed, features, text, anchors, wanted)


def start(config: TrainConfig, target: Params) -> State:
  """Random weights, but for the last norm: its scale is the one that the shared head is used to."""
  params = drafter.init(config.drafter, jax.random.key(config.seed))
  params = params._replace(norm=target.norm + 0)  # a buffer of its own: the state is donated
  tx = optimiser(config.weight_decay, config.adam_ratio)
  return State(params, tx.init(params), jnp.int32(0))


def prefixes(text: np.ndarray, config: TrainConfig, n: int, seed: list[int]) -> np.ndarray:
  """uint8 [n, prefix]: windows of the stream at random places."""
  at = np.random.default_rng(seed).integers(len(text) - config.prefix, size=n)
  return text[at[:, None] + np.arange(config.prefix)]


def continuation(config: TrainConfig, target: Params, prefix: np.ndarray) -> np.ndarray:
  """uint8 [n, prefix + greedy]: what the target writes after each prefix."""
  model, n = config.drafter.target, config.greedy
  return np.asarray(continued(target, model, prefix, tokens=n, ops=OPS))


def written(
  config: TrainConfig, target: Params, text: np.ndarray, folder: Path,
  progress: Callable[[int], None],
) -> np.ndarray:  # fmt: skip
  """Sequences uint8 [n, prefix + greedy], from `folder` if they are there already."""
  path = folder / "greedy.npy"
  if path.exists():
    return np.load(path)
  rounds, began = [], time.monotonic()
  for i in range(config.rounds):
    prefix = prefixes(text, config, config.round_batch, [config.seed, i])
    rounds.append(continuation(config, target, prefix))
    progress(i + 1)
    if time.monotonic() - began > 60 * config.writing_minutes:
      break
  file = io.BytesIO()
  np.save(file, np.concatenate(rounds))
  write(path, file.getvalue())
  return np.concatenate(rounds)


def heldout(config: TrainConfig, target: Params) -> np.ndarray:
  """The same of held-out text: every prefix from another place, evenly over the stream."""
  text, n = corpus.heldout(), config.heldout_rows
  at = np.linspace(0, len(text) - config.prefix, n, dtype=np.int64)
  at = np.resize(at, config.round_batch)  # repeated up to the shape that is compiled already
  return continuation(config, target, text[at[:, None] + np.arange(config.prefix)])[:n]


def batches(
  config: TrainConfig, pool: np.ndarray, start: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """(sequences, anchors) for step start, start + 1, ...: a function of the step alone.

  One random anchor in each of `anchors` equal pieces, so that blocks cover the whole sequence.
  """
  per_epoch, S = max(len(pool) // config.batch, 1), pool.shape[1]
  step = start
  while True:
    order = np.random.default_rng([config.seed, 1, step // per_epoch]).permutation(len(pool))
    for i in range(step % per_epoch, per_epoch):
      rows = order[i * config.batch : (i + 1) * config.batch]
      yield pool[rows], anchors(len(rows), config.anchors, S, [config.seed, 2, step])
      step += 1


def anchors(rows: int, n: int, S: int, seed: list[int]) -> np.ndarray:
  """int32 [rows, n], rising: one at random in each n-th of the first S - 1 places."""
  u = np.random.default_rng(seed).random((rows, n))
  return ((np.arange(n) + u) * (S - 1) / n).astype(np.int32)


def save(folder: Path, state: State, rows: list[dict[str, Any]]) -> None:
  """State and log in one file, so that they can never be of different steps."""
  log = rows_csv(rows)
  data = {"state": serialization.to_state_dict(jax.device_get(state)), "log": log}
  write(folder / "state.msgpack", serialization.msgpack_serialize(data))
  write(folder / "log.csv", log)


def resume(folder: Path, state: State) -> tuple[State, list[dict[str, Any]]]:
  """What `save` wrote, or the new run's `state`."""
  path = folder / "state.msgpack"
  if not path.exists():
    return state, []
  data = serialization.msgpack_restore(path.read_bytes())
  state = jax.tree.map(jnp.asarray, serialization.from_state_dict(state, data["state"]))
  return state, list(csv.DictReader(io.StringIO(data["log"].decode())))


def rate(config: TrainConfig, done: float) -> float:
  """Linear up, flat, linear down to nothing, at `done` in 0 to 1 of the run."""
  up = done / config.warmup if config.warmup else 1.0
  down = (1 - done) / config.cooldown if config.cooldown else 1.0
  return config.rate * max(0.0, min(1.0, up, down))


def run(config: TrainConfig, out_dir: str | Path) -> State:
  """Trains until the steps or the minutes are over; returns the last state.

  Writes to `out_dir`: drafter.safetensors (bfloat16), log.csv, training_files.sha256, meta.json,
  state.msgpack and greedy.npy. Unwritable: it cannot be written. ValueError: the target is not of
  the config's sizes. FloatingPointError: the loss is not finite.
  """
  folder = Path(out_dir)
  writable(folder)
  target, model = checkpoint.load(config.target)
  if model != config.drafter.target:
    raise ValueError(f"{config.target} is a {model}, the drafter is for a {config.drafter.target}")
  target, step_config = hybrid.cast(target, jnp.bfloat16), settled(config)
  files = corpus.training_files(config.stdlib)[: config.files]
  write(folder / "training_files.sha256", corpus.manifest(files).encode())
  state, rows = resume(folder, start(config, target))
  first, before = int(state.step), float(rows[-1]["seconds"]) if rows else 0.0
  columns = (
    TextColumn("{task.description}"),
    *Progress.get_default_columns()[1:2],
    MofNCompleteColumn(),
    TimeRemainingColumn(),
    TextColumn("{task.fields[says]}"),
  )
  with Progress(*columns) as progress:
    writing = progress.add_task("writing", total=config.rounds, says="")
    tick = lambda done: progress.update(writing, completed=done)
    pool = written(config, target, corpus.stream(files), folder, tick)
    progress.update(writing, total=len(pool), completed=len(pool), says="sequences")
    text = heldout(config, target)
    held = text, anchors(len(text), config.anchors, text.shape[1], [config.seed, 3])
    data = batches(config, pool, first)
    task = progress.add_task("training", total=config.steps, completed=first, says="")
    began, nats = time.monotonic(), jnp.float32(0)
    seconds = lambda: before + time.monotonic() - began
    try:
      for step in range(first + 1, config.steps + 1):
        # a step's place in the run: by count, or by the clock where that is further
        done = max((step - 0.5) / config.steps, seconds() / (60 * config.minutes))
        text, at = next(data)
        now = jnp.float32(rate(config, done))
        jax.block_until_ready(nats)  # one step ahead of the device, so that the clock is right
        state, nats = train_step(state, target, text, at, now, step_config)
        over = done >= 1
        progress.update(task, completed=step)
        if step % config.log_every == 0 or step == config.steps or over:
          rows.append(measure(config, state, nats, target, held, seconds()))
          says = "loss {loss_nats} nats, held-out accept length {heldout_accept_length}"
          progress.update(task, says=says.format(**rows[-1]))
        if step % config.save_every == 0:
          save(folder, state, rows)
        if over:
          break
    finally:
      # an interrupt inside a step finds the state already given away; then the last save stands
      if not state.step.is_deleted():
        save(folder, state, rows)
  low = hybrid.cast(state.params, jnp.bfloat16)
  checkpoint.save_drafter(folder / "drafter.safetensors", low, config.drafter, target)
  facts = meta(config, files, state, len(pool))
  write(folder / "meta.json", json.dumps(facts, indent=2, default=str).encode())
  return state


def measure(
  config: TrainConfig, state: State, nats: Array, target: Params,
  held: tuple[np.ndarray, np.ndarray], seconds: float,
) -> dict[str, Any]:  # fmt: skip
  """One row of the log."""
  if not jnp.isfinite(nats):
    raise FloatingPointError(f"loss is {nats} at step {state.step}")
  step_config = settled(config)
  pieces = [
    evaluate(state.params, target, *(x[i : i + config.batch] for x in held), step_config)
    for i in range(0, len(held[0]), config.batch)
  ]
  heldout_nats, length = np.mean(np.asarray(pieces, np.float32), axis=0)
  values = (
    int(state.step),
    int(state.step) * config.batch * config.anchors,
    f"{nats:.5f}",
    f"{heldout_nats:.5f}",
    f"{length:.4f}",
    f"{seconds:.1f}",
  )
  return dict(zip(COLUMNS, values, strict=True))


def meta(config: TrainConfig, files: list[corpus.File], state: State, n: int) -> dict[str, Any]:
  [device, *_] = jax.devices()
  return {
    "config": asdict(replace(config, target=Path(config.target.name), stdlib=None)),
    "steps_done": int(state.step),
    "training_files": len(files),
    "training_bytes": sum(len(f.text) for f in files),
    "sequences": n,
    "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
    "jax": jax.__version__,
    "device": device.device_kind,
  }


def main() -> None:
  import tyro  # only the command line needs it

  presets = {name: (f"the {name} run", config) for name, config in PRESETS.items()}
  config = tyro.extras.overridable_config_cli(presets)
  tiny = config.drafter == TINY_DRAFTER.drafter
  run(config, Path("experiments/checkpoints") / ("drafter_tiny" if tiny else "drafter"))


if __name__ == "__main__":
  main()
