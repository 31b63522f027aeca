"""A model decoding held-out prompts with its block drafter, all in one batch, greedy: the bundled
one, or a checkpoint with a drafter in DFlash's published layout.

Arithmetic is float32, so that texts can be compared by the margin rule of `experiments.free`.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes import SCHEMES, Dtypes, Scheme, Spec
from commit_schemes.decoding import trees
from commit_schemes.decoding.block import block_drafter
from commit_schemes.decoding.drafts import Drafter, nothing
from commit_schemes.decoding.loop import Decoding, Report, every, prefilled, step
from commit_schemes.model import ModelMemory, Pair, model_memory
from experiments import corpus
from experiments.free import Text, compare, within_margin
from experiments.record import BadInput
from experiments.score import BUNDLED
from experiments.target import target as at_path
from experiments.target import within
from gdn import huggingface
from gdn.checkpoint import load_drafter
from gdn.config import Config
from gdn.drafter import DrafterConfig
from gdn.hybrid import cast, forward
from gdn.ops import XLA
from gdn.streaming import empty, streaming

DRAFTER = BUNDLED.parent / "drafter" / "drafter.safetensors"


class Models(NamedTuple):
  """Target and drafter in float32, their sizes, and the held-out text in their tokens."""

  params: Pair
  config: Config
  drafter: DrafterConfig
  text: list[int]


def models(target: Path | None, drafter: Path | None, context: int) -> Models:
  """For texts of up to `context` tokens; None is what is bundled.

  BadInput: a file is missing or not what it should be, the drafter is of another target, or the
  longest context of either is shorter.
  """
  if target is not None and drafter is None:
    raise BadInput(f"model {target} is not the bundled drafter's, allowed: with a --drafter")
  return loaded(target or BUNDLED, drafter or DRAFTER, context)


@functools.cache
def loaded(target: Path, drafter: Path, context: int) -> Models:
  params, config, read, _ = at_path(target, context=context)
  try:
    if drafter.is_dir():
      own, sizes = huggingface.load_drafter(drafter, params, config)
      within(context, sizes.window, drafter)
      sizes = dataclasses.replace(sizes, window=context)
    else:
      own, sizes = load_drafter(drafter, params)
  except (OSError, ValueError) as e:
    raise BadInput(e) from e
  pair = Pair(cast(params, jnp.float32), cast(own, jnp.float32))
  return Models(pair, config, sizes, read(corpus.heldout().tobytes()).ids.tolist())


def heldout_prompts(models: Models, n: int, size: int) -> list[list[int]]:
  """`n` pieces of `size` tokens, evenly over the held-out stream. BadInput: it is too short."""
  text = models.text
  if not 0 < size or not 0 < n * size <= len(text):
    raise BadInput(f"{n} prompts of {size} tokens, allowed: at most {len(text)} in all")
  at = np.linspace(0, len(text) - size, n, dtype=np.int64)
  return [text[i : i + size] for i in at]


def shape_of(topology: str, nodes: int, depth: int) -> trees.Shape:
  """The window that a row names. ValueError: an unknown topology, or no such tree."""
  match topology.split("_"):
    case ["chain"]:
      return trees.chain(nodes)
    case ["best", "first"]:
      return trees.best_first(nodes, depth)
    case ["top", *widths] if widths:
      shape = trees.top_k(*map(int, widths))
      if shape.nodes == nodes:
        return shape
      raise ValueError(f"nodes = {nodes}, allowed: the {shape.nodes} of {topology}")
  raise ValueError(f"topology = {topology!r}, allowed: chain, best_first, top_WIDTH_WIDTH...")


class Run(NamedTuple):
  """One way to decode: a scheme, a drafter, and the window that both are built for."""

  models: Models
  memory: ModelMemory
  drafter: Drafter
  prompts: list[list[int]]
  tokens: int
  window: int

  def start(self) -> Decoding:
    """Slots that have read their prompts."""
    capacity = max(map(len, self.prompts)) + self.tokens + self.window
    params, config, *_ = self.models
    return prefilled(params, config, self.memory, self.prompts, capacity=capacity)

  def step(self, params: Pair, state: Decoding) -> tuple[Decoding, Report]:
    """One window of every slot that is not done."""
    until = jnp.asarray([len(p) + self.tokens for p in self.prompts], jnp.int32)
    config = self.models.config
    batch = every(state.length < until, state.text.shape[1])
    return step(params, config, self.memory, self.drafter, state, batch)


def with_scheme(
  models: Models,
  scheme: Scheme,
  drafter: Drafter,
  prompts: list[list[int]],
  tokens: int,
  window: int,
) -> Run:
  """Float32 records throughout: what the comparison with plain decoding is about."""
  dtypes = Dtypes(raw=jnp.float32)
  spec = Spec(models.config.key_heads, window, channels=models.config.decay_channels, dtypes=dtypes)
  memory = model_memory(models.config, scheme.make(spec), drafter=models.drafter)
  return Run(models, memory, drafter, prompts, tokens, window)


def compiled(run: Run) -> Callable[..., tuple[Decoding, Report]]:
  """The step as one program, compiled now; its state is donated."""
  start = jax.eval_shape(run.start)
  return jax.jit(run.step, donate_argnums=1).lower(run.models.params, start).compile()


class Spoken(NamedTuple):
  """Each prompt's text, how many tokens each of its steps gave, and what a step took."""

  texts: list[Text]
  emitted: list[np.ndarray]
  step_seconds: list[float]


def speak(
  run: Run, one: Callable[..., tuple[Decoding, Report]],
  progress: Callable[[float], None] = lambda fraction: None,
) -> Spoken:  # fmt: skip
  """Decodes every prompt to its end. Seconds are the host's, from call to finished result."""
  state, reports, seconds = run.start(), [], []
  first = np.asarray(state.length)
  while (made := int((np.asarray(state.length) - first).min())) < run.tokens:
    progress(made / run.tokens)
    began = time.perf_counter()
    state, report = jax.block_until_ready(one(run.models.params, state))
    seconds.append(time.perf_counter() - began)
    reports.append(report)
  emitted = np.stack([np.asarray(r.emitted) for r in reports], axis=1)  # [slots, steps]
  top = [np.asarray(r.top) for r in reports]
  texts = []
  for b, n in enumerate(first):
    logits = np.concatenate([t[b, :e] for t, e in zip(top, emitted[b], strict=True)])
    tokens = np.asarray(state.text[b, n : n + run.tokens])
    texts.append(Text(tokens, logits[: run.tokens], float(emitted[b][emitted[b] > 0].mean())))
  return Spoken(texts, [e[e > 0] for e in emitted], seconds)


def plain(models: Models, prompts: list[list[int]], tokens: int) -> Spoken:
  """One token a step, no draft: what every other way has to say as well."""
  run = with_scheme(models, SCHEMES["snapshot"], nothing, prompts, tokens, 1)
  return speak(run, compiled(run))


def block_drafts(models: Models, shape: trees.Shape) -> Drafter:
  """The block drafter in windows of `shape`. BadInput: they are deeper than its block."""
  try:
    return block_drafter(models.drafter, shape)
  except ValueError as e:
    raise BadInput(e) from e


def drafted(models: Models, scheme: Scheme, shape: trees.Shape, prompts, tokens: int) -> Run:
  """Decoding by the block drafter in windows of `shape`."""
  drafter = block_drafts(models, shape)
  return with_scheme(models, scheme, drafter, prompts, tokens, shape.nodes)


def logit_noise(models: Models, prompts: list[list[int]], base: Spoken) -> float:
  """How far two right ways are apart: plain decoding, and one forward pass over the same text.

  The largest difference of one of the two best logits. ValueError: prompts of several lengths.
  """
  if len({len(p) for p in prompts}) != 1:
    raise ValueError(
      f"prompts have {sorted({len(p) for p in prompts})} tokens, allowed: one length"
    )
  target, config = models.params.target, models.config
  texts = [p + x.tokens.tolist() for p, x in zip(prompts, base.texts, strict=True)]
  ids = jnp.asarray(texts, jnp.int32)[:, :-1]
  at = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
  memories = empty(config, len(prompts), jnp.float32)
  run = lambda params: forward(params, config, ids, at, streaming(XLA), memories)[0]
  logits = jax.jit(run)(target)[:, len(prompts[0]) - 1 :]
  best = jax.lax.top_k(logits, 2)[0]
  return float(np.abs(best - np.stack([x.top for x in base.texts])).max())


SLACK = 16.0  # times the noise that logits of a right way may be off


def compared(spoken: Spoken, base: Spoken, noise: float, scheme: Scheme) -> list[dict[str, Any]]:
  """Columns of each prompt, as far as the shorter text goes: `experiments.free.compare`, and

  equal  the margin rule, with the logits before a difference no further off than SLACK noise: an
         error that a fault made must not excuse the difference that it made
  why    in words
  """
  cut = lambda text, n: text._replace(tokens=text.tokens[:n], top=text.top[:n])
  out = []
  for text, plain_text in zip(spoken.texts, base.texts, strict=True):
    found = compare(text, cut(plain_text, len(text.tokens)))
    off = found["logit_error"] > SLACK * noise
    reason = "identical" if found["first_difference"] is None else "a tie within the logit error"
    if off or not within_margin(found):
      reason = "the scheme rounds what it keeps" if not scheme.lossless else "unexplained: wrong"
    equal = within_margin(found) and not (off and scheme.lossless)
    out.append({"equal": equal, "why": reason, **found, "logit_noise": noise})
  return out


@contextlib.contextmanager
def op_by_op(eager: bool) -> Iterator[None]:
  """Without any compilation of whole steps, if asked for: each operation by itself."""
  with jax.disable_jit() if eager else contextlib.nullcontext():
    yield
