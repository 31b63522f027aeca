"""Accept lengths of the block drafter and of prompt lookup on the same held-out prompts, greedy.

A row is how many steps of one prompt gave so many tokens, the bonus among them; so the rows are the
whole distribution, and a mean is that of tokens a step. Tokens of the bundled model are bytes: the
published 4.2 of a 27B target counts subword tokens of several bytes, and does not compare.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table

from commit_schemes import SCHEMES
from commit_schemes.decoding import trees
from commit_schemes.decoding.drafts import Drafter, prompt_lookup
from experiments import speculative
from experiments.figures import look
from experiments.record import Record, Row
from experiments.speculative import (
  block_drafts,
  compared,
  compiled,
  heldout_prompts,
  logit_noise,
  plain,
  speak,
  with_scheme,
)


@dataclass(frozen=True, kw_only=True)
class Config:
  """`prompts` pieces of `prompt_tokens` held-out ones, `tokens` after each; windows of `blocks`."""

  prompts: int = 32
  prompt_tokens: int = 512
  tokens: int = 256
  blocks: tuple[int, ...] = (8, 16)
  scheme: str = "tree_wy"
  model: Path | None = None  # None is the bundled model
  drafter: Path | None = None  # of that model; None is the bundled one's

  def __post_init__(self):
    """ValueError: a field out of range, with what is allowed."""
    for name in ("prompts", "prompt_tokens", "tokens"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: at least 1")
    if not self.blocks or min(self.blocks) < 2:
      raise ValueError(f"blocks = {self.blocks}, allowed: windows of at least 2")
    if self.scheme not in SCHEMES:
      raise ValueError(f"scheme = {self.scheme!r}, allowed: {', '.join(SCHEMES)}")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "smoke": Config(prompts=2, prompt_tokens=128, tokens=24, blocks=(4,)),
  }
)
DRAFTERS = ("block", "prompt_lookup")


def run(config: Config, record: Record) -> None:
  """Every drafter and window; nothing is recorded of a text that is not plain decoding's."""
  context = config.prompt_tokens + config.tokens + max(config.blocks)
  models = speculative.models(config.model, config.drafter, context)
  prompts = heldout_prompts(models, config.prompts, config.prompt_tokens)
  drafters: dict[str, Callable[[int], Drafter]] = {
    "block": lambda block: block_drafts(models, trees.chain(block)),
    "prompt_lookup": prompt_lookup,
  }
  made = {(name, block): drafters[name](block) for block in config.blocks for name in DRAFTERS}
  record.say("plain decoding")
  base = plain(models, prompts, config.tokens)
  noise = logit_noise(models, prompts, base)
  scheme = SCHEMES[config.scheme]
  for name, block in record.parts(made):
    way = with_scheme(models, scheme, made[name, block], prompts, config.tokens, block)
    spoken = speak(way, compiled(way), record.advance)
    texts = compared(spoken, base, noise, scheme)
    for prompt, (same, emitted) in enumerate(zip(texts, spoken.emitted, strict=True)):
      if not same["equal"]:
        raise ArithmeticError(f"{name}, block {block}, prompt {prompt}: another text, {same}")
      for length, steps in zip(*np.unique(emitted, return_counts=True), strict=True):
        record(drafter=name, block=block, prompt=prompt, tokens=length, steps=steps)


def mean(rows: list[Row]) -> float:
  """Tokens a step."""
  return sum(r["tokens"] * r["steps"] for r in rows) / sum(r["steps"] for r in rows)


def chosen(rows: list[Row], **columns: object) -> list[Row]:
  return [r for r in rows if all(r[k] == v for k, v in columns.items())]


def ways(rows: list[Row]) -> list[tuple[str, int]]:
  return list(dict.fromkeys((r["drafter"], r["block"]) for r in rows))


def table(rows: list[Row]) -> Table:
  """Mean accept lengths."""
  out = Table("drafter", "block", "accept length, tokens a step", "steps", "worst prompt")
  for name, block in ways(rows):
    some = chosen(rows, drafter=name, block=block)
    worst = min(mean(chosen(some, prompt=p)) for p in {r["prompt"] for r in some})
    steps = sum(r["steps"] for r in some)
    out.add_row(name, str(block), f"{mean(some):.2f}", str(steps), f"{worst:.2f}")
  return out


def figure(rows: list[Row]) -> Figure:
  """Left, the share of steps that give at least so many tokens; right, the mean of each prompt."""
  fig = Figure(figsize=(7.0, 2.8))
  left, right = fig.subplots(1, 2)
  for i, (name, block) in enumerate(ways(rows)):
    some = chosen(rows, drafter=name, block=block)
    total = sum(r["steps"] for r in some)
    at = np.arange(1, block + 1)
    share = [sum(r["steps"] for r in some if r["tokens"] >= n) / total for n in at]
    left.plot(at, share, label=f"{name.replace('_', ' ')}, D = {block}", **look(i))
    means = sorted(mean(chosen(some, prompt=p)) for p in {r["prompt"] for r in some})
    right.plot(means, **look(i))
  left.set(xlabel="tokens", ylabel="share of steps that give as many", ylim=(0, 1.03))
  right.set(xlabel="prompt, by its own mean", ylabel="accept length, tokens a step", ylim=(0, None))
  left.set_title("distribution of the accept length")
  right.set_title("mean of each prompt")
  left.xaxis.set_major_locator(MaxNLocator(integer=True))
  right.xaxis.set_major_locator(MaxNLocator(integer=True))
  left.legend()
  return fig
