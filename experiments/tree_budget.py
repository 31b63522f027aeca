"""Accepted length, bytes in flight and step time against nodes: chain, top-k and best-first trees.

A step is the whole decode step of all slots: draft, verify, accept, commit. Its time is the host's,
from the call to the finished result, the median over a decode whose text was plain decoding's.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from commit_schemes import SCHEMES
from commit_schemes.footprint import model_footprint
from experiments import speculative
from experiments.figures import look, scheme_look
from experiments.models import shape_of as layers_of
from experiments.record import Record, Row
from experiments.speculative import (
  block_drafts,
  compared,
  compiled,
  drafted,
  heldout_prompts,
  logit_noise,
  plain,
  shape_of,
  speak,
)

CLOCK = "host clock around one step, result awaited; median over the steps of a decode"


@dataclass(frozen=True, kw_only=True)
class Config:
  """Every scheme of `schemes` with every window; `windows` are (topology, nodes)."""

  schemes: tuple[str, ...] = ("snapshot", "replay_0", "ring_exact", "tree_wy")
  windows: tuple[tuple[str, int], ...] = (
    ("chain", 8),
    ("chain", 16),
    ("top_2_2_2", 15),
    ("top_2_2_2_2", 31),
    ("best_first", 16),
    ("best_first", 32),
    ("best_first", 64),
  )
  slots: int = 32
  prompt_tokens: int = 512
  tokens: int = 128
  compilers: int = 8
  model: Path | None = None  # None is the bundled model
  drafter: Path | None = None  # of that model; None is the bundled one's

  def __post_init__(self):
    """ValueError: a field out of range, with what is allowed."""
    for name in ("slots", "prompt_tokens", "tokens", "compilers"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: at least 1")
    if not self.schemes or set(self.schemes) - set(SCHEMES):
      raise ValueError(f"schemes = {self.schemes}, allowed: some of {', '.join(SCHEMES)}")
    if not self.windows:
      raise ValueError("windows = (), allowed: at least one")
    if self.tokens <= (largest := max(nodes for _, nodes in self.windows)):
      raise ValueError(
        f"tokens = {self.tokens}, allowed: more than the largest window of {largest}, or a text "
        "may end with the first step, which is not timed"
      )
    for topology, nodes in self.windows:
      shape_of(topology, nodes, 1 if topology == "best_first" else nodes)


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(compilers=14),
    "smoke": Config(
      schemes=("snapshot", "tree_wy"), windows=(("chain", 4), ("best_first", 6), ("top_2_1", 5)),
      slots=2, prompt_tokens=64, tokens=12, compilers=1,
    ),
  }
)  # fmt: skip


class Way(NamedTuple):
  scheme: str
  topology: str
  nodes: int

  def __str__(self) -> str:
    return f"{self.scheme}, {self.topology} of {self.nodes}"


def run(config: Config, record: Record) -> None:
  """One row is one window under one scheme; no row of a text that is not plain decoding's."""
  context = config.prompt_tokens + config.tokens + max(n for _, n in config.windows)
  models = speculative.models(config.model, config.drafter, context)
  prompts = heldout_prompts(models, config.slots, config.prompt_tokens)
  shapes = {w: shape_of(*w, models.drafter.block - 1) for w in config.windows}
  for shape in shapes.values():  # before anything is measured
    block_drafts(models, shape)
  record.say("plain decoding")
  base = plain(models, prompts, config.tokens)
  noise = logit_noise(models, prompts, base)
  ways = [Way(s, *w) for w in config.windows for s in config.schemes]

  def prepared(way: Way) -> Any:
    """The run and its step: compiled ahead of its turn, beside others."""
    shape = shapes[way.topology, way.nodes]
    one = drafted(models, SCHEMES[way.scheme], shape, prompts, config.tokens)
    return one, compiled(one)

  with ThreadPoolExecutor(config.compilers) as pool:
    soon = {str(w): pool.submit(prepared, w) for w in ways if str(w) not in record.finished}
    wait(soon.values())  # nothing compiles while a step is timed
    for way in record.parts(ways):
      one, step = soon.pop(str(way)).result()
      spoken = speak(one, step, record.advance)
      texts = compared(spoken, base, noise, SCHEMES[way.scheme])
      if wrong := [x for x in texts if not x["equal"]]:
        raise ArithmeticError(f"{way}: {len(wrong)} of {config.slots} texts differ, {wrong[0]}")
      held = model_footprint(SCHEMES[way.scheme].make, layers_of(models.config), way.nodes)
      low, median, high = np.percentile(1e3 * np.asarray(spoken.step_seconds[1:]), (25, 50, 75))
      emitted = np.concatenate(spoken.emitted)
      record(
        scheme=way.scheme,
        topology=way.topology,
        nodes=way.nodes,
        slots=config.slots,
        accept_length=round(float(emitted.mean()), 4),
        carry_bytes=held.state.carry + held.conv.carry,
        flight_bytes=held.state.flight + held.conv.flight,
        step_ms=round(median, 4),
        low_ms=round(low, 4),
        high_ms=round(high, 4),
        steps=len(spoken.step_seconds),
        device=jax.devices()[0].device_kind,
      )


def kind(topology: str) -> str:
  return "top-k" if topology.startswith("top") else topology.replace("_", "-")


def by_kind(rows: list[Row], scheme: str) -> dict[str, list[Row]]:
  out: dict[str, list[Row]] = {}
  for row in sorted(rows, key=lambda r: r["nodes"]):
    if row["scheme"] == scheme:
      out.setdefault(kind(row["topology"]), []).append(row)
  return out


def table(rows: list[Row]) -> Table:
  """Every window under every scheme; tokens a second are those of all slots in whole steps."""
  out = Table(
    "window", "nodes", "scheme", "accept length", "MiB in flight a slot", "step ms", "tokens/ms"
  )
  for r in rows:
    rate = r["accept_length"] * r["slots"] / r["step_ms"]
    out.add_row(
      kind(r["topology"]),
      str(r["nodes"]),
      r["scheme"],
      f"{r['accept_length']:.2f}",
      f"{r['flight_bytes'] / 2**20:.2f}",
      f"{r['step_ms']:.2f}",
      f"{rate:.2f}",
    )
  return out


def figure(rows: list[Row]) -> Figure:
  """Accept length, bytes and time against nodes; a line style for each kind of window."""
  fig = Figure(figsize=(7.0, 2.9))
  length, held, time = fig.subplots(1, 3)
  schemes = list(dict.fromkeys(r["scheme"] for r in rows))
  for i, (name, some) in enumerate(by_kind(rows, schemes[0]).items()):
    nodes = [r["nodes"] for r in some]
    length.plot(nodes, [r["accept_length"] for r in some], label=name, **look(i))
  for scheme in schemes:
    for i, some in enumerate(by_kind(rows, scheme).values()):
      style = scheme_look(scheme) | {"linestyle": look(i)["linestyle"]}
      label = scheme if i == 0 else None
      nodes = [r["nodes"] for r in some]
      held.plot(nodes, [r["flight_bytes"] / 2**20 for r in some], label=label, **style)
      time.plot(nodes, [r["step_ms"] for r in some], label=label, **style)
  length.set(ylabel="accept length, tokens a step", ylim=(1, None))
  held.set(ylabel="MiB in flight a slot", yscale="log")
  time.set(ylabel="step, ms", ylim=(0, None))
  for axes in (length, held, time):
    axes.set_xlabel("nodes, with the anchor")
    axes.set_xscale("log", base=2)
  length.legend()
  held.legend()
  length.set_title("all schemes: one text")
  held.set_title("states and tails")
  time.set_title(f"{rows[0]['slots']} slots, {rows[0]['device']}")
  return fig
