"""Greedy text under every scheme and number of kept states, chain and tree, beside plain decoding.

Equal by the margin rule: the same text, or a first difference at which plain decoding's two best
logits are closer than the logit error measured before it; and that error is no larger than what
two right ways differ by, with slack (`experiments.speculative.compared`).

An accept length stands only beside a text that is right: the published accept lengths for 1, 4 and
8 kept states fell to a wrong text (SGLang PR 28010: 3.47 to 3.71 in place of 3.82).
"""

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from commit_schemes import SCHEMES, Scheme, partial_cache
from experiments import speculative
from experiments.figures import look
from experiments.record import Record, Row
from experiments.speculative import (
  block_drafts,
  compared,
  compiled,
  drafted,
  heldout_prompts,
  logit_noise,
  op_by_op,
  plain,
  shape_of,
  speak,
)

# Every scheme, and the numbers of kept states that SCHEMES has no name for.
EVERY: Mapping[str, Scheme] = MappingProxyType({**SCHEMES, "replay_16": partial_cache(16)})
TOPOLOGIES = ("chain", "best_first")
MODES = ("jit", "eager")


@dataclass(frozen=True, kw_only=True)
class Config:
  """Windows of `nodes`; `tokens` after each prompt, `eager_tokens` where nothing is compiled."""

  schemes: tuple[str, ...] = tuple(EVERY)
  topologies: tuple[str, ...] = TOPOLOGIES
  modes: tuple[str, ...] = MODES
  prompts: int = 4
  prompt_tokens: int = 512
  tokens: int = 256
  eager_tokens: int = 8
  nodes: int = 16
  compilers: int = 8
  model: Path | None = None  # None is the bundled model
  drafter: Path | None = None  # of that model; None is the bundled one's

  def __post_init__(self):
    """ValueError: a field out of range, with what is allowed."""
    for name in ("prompts", "prompt_tokens", "tokens", "eager_tokens", "compilers"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: at least 1")
    if self.nodes < 2:
      raise ValueError(f"nodes = {self.nodes}, allowed: at least 2")
    for name, known in (("schemes", EVERY), ("topologies", TOPOLOGIES), ("modes", MODES)):
      if not (has := getattr(self, name)) or set(has) - set(known):
        raise ValueError(f"{name} = {has}, allowed: some of {', '.join(known)}")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "smoke": Config(
      schemes=("replay_1", "ring_exact"), prompts=2, prompt_tokens=64, tokens=16, eager_tokens=4,
      nodes=4, compilers=1,
    ),
  }
)  # fmt: skip


class Way(NamedTuple):
  mode: str
  scheme: str
  topology: str

  def __str__(self) -> str:
    return f"{self.scheme}, {self.topology}, {self.mode}"


def kept(scheme: str) -> int | None:
  """How many states a verify keeps for the commit, where the scheme's name says so."""
  found = re.match(r"replay_(\d+)", scheme)
  return int(found[1]) if found else None


def run(config: Config, record: Record) -> None:
  """One row is one prompt under one scheme, topology and way of running."""
  context = config.prompt_tokens + config.tokens + config.nodes
  models = speculative.models(config.model, config.drafter, context)
  prompts = heldout_prompts(models, config.prompts, config.prompt_tokens)
  windows = {t: shape_of(t, config.nodes, models.drafter.block - 1) for t in config.topologies}
  for window in windows.values():  # before anything is measured
    block_drafts(models, window)
  record.say("plain decoding")
  base = plain(models, prompts, config.tokens)
  noise = logit_noise(models, prompts, base)
  ways = [
    Way(m, s, t)
    for m in config.modes
    for s in config.schemes
    for t in config.topologies
    if ("chain" if t == "chain" else "tree") in EVERY[s].topologies
  ]

  def prepared(way: Way) -> Any:
    """The run and its step: compiled ahead of its turn, beside others."""
    tokens = config.eager_tokens if way.mode == "eager" else config.tokens
    one = drafted(models, EVERY[way.scheme], windows[way.topology], prompts, tokens)
    return one, one.step if way.mode == "eager" else compiled(one)

  with ThreadPoolExecutor(config.compilers) as pool:
    soon = {str(w): pool.submit(prepared, w) for w in ways if str(w) not in record.finished}
    for way in record.parts(ways):
      one, step = soon.pop(str(way)).result()
      with op_by_op(way.mode == "eager"):
        spoken = speak(one, step, record.advance)
      for prompt, same in enumerate(compared(spoken, base, noise, EVERY[way.scheme])):
        record(
          scheme=way.scheme,
          keep=kept(way.scheme),
          topology=way.topology,
          mode=way.mode,
          nodes=config.nodes,
          prompt=prompt,
          tokens=one.tokens,
          **same,
          accept_length=round(spoken.texts[prompt].accept_length, 4) if same["equal"] else None,
        )


def groups(rows: list[Row]) -> dict[tuple[str, str, str], list[Row]]:
  out: dict[tuple[str, str, str], list[Row]] = {}
  for row in rows:
    out.setdefault((row["scheme"], row["topology"], row["mode"]), []).append(row)
  return out


def table(rows: list[Row]) -> Table:
  """One line a scheme, topology and mode: how many prompts are equal, and the accept length."""
  out = Table("scheme", "topology", "mode", "equal", "identical", "accept length", "why not")
  for (scheme, topology, mode), some in groups(rows).items():
    equal = sum(r["equal"] for r in some)
    same = sum(r["first_difference"] is None for r in some)
    length = f"{np.mean([r['accept_length'] for r in some]):.2f}" if equal == len(some) else "-"
    reasons = "; ".join(sorted({r["why"] for r in some} - {"identical"}))
    n = len(some)
    out.add_row(scheme, topology, mode, f"{equal} of {n}", f"{same} of {n}", length, reasons)
  return out


def figure(rows: list[Row]) -> Figure:
  """Mean accept length of each scheme where every text is right; a cross where one is not."""
  schemes = list(dict.fromkeys(r["scheme"] for r in rows))
  fig = Figure(figsize=(7.0, 3.1))
  axes = fig.subplots()
  axes.margins(y=0.1)
  drawn: set[int] = set()
  for i, (topology, mode) in enumerate(dict.fromkeys((r["topology"], r["mode"]) for r in rows)):
    for x, scheme in enumerate(schemes):
      some = groups(rows).get((scheme, topology, mode), [])
      if not some:
        continue
      right = all(r["equal"] for r in some)
      y = float(np.mean([r["accept_length"] for r in some])) if right else 0.0
      style = look(i) | {"linestyle": "none"} | ({} if right else {"marker": "x"})
      named = f"{topology.replace('_', '-')}, {mode}, {some[0]['tokens']} tokens"
      label = None if i in drawn else named
      axes.plot(x + 0.12 * (i - 1.5), y, label=label, **style)
      drawn.add(i)
  axes.set_xticks(range(len(schemes)), schemes, rotation=35, ha="right")
  axes.set(ylabel="accept length, tokens a step", ylim=(-0.2, None))
  axes.set_title("greedy text equal to plain decoding's (cross: it is not)")
  axes.legend(ncols=2)
  return fig
