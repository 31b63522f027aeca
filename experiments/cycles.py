"""State drift over hundreds of verify cycles on synthetic keys, as published numbers had it.

Keys sqrt(rho) common + sqrt(1 - rho) own, normalised; beta and log decay constant; windows of five
of which a geometric number is kept, about three. Records, checkpoint and dots are lowered one at a
time, and a bf16 checkpoint is rounded at every m-th commit. Against float64, several draws.

q, k and v are bfloat16 from the start, as in the published study, so stored keys lose nothing. The
study has one draw and lowers the products of the solve as well, which here stay float32.

A state is compared as `materialize` gives it, in the checkpoint's dtype; `unrounded_error` is
without that last rounding. Of a bf16 checkpoint that forgets fast little else is left: 1.7e-3.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments import cycles_report, deferred, truth
from experiments.deferred import Setting
from experiments.fold_ablation import BITS, bf16, short
from experiments.forced import Schedule
from experiments.record import Record, Row
from gdn.typing import Tokens


class Inputs(NamedTuple):
  """Correlation of the keys, log decay and beta of every token."""

  rho: float
  decay: float
  beta: float


class Line(NamedTuple):
  """What is lowered; `name` is the row's."""

  name: str
  fold: str = "open_loop"
  records: str = "fp32"
  checkpoint: str = "fp32"
  dots: str = "fp32"
  fold_dots: str = "fp32"


SETTINGS: Mapping[str, Inputs] = MappingProxyType(
  {"a": Inputs(0.0, -0.001, 0.5), "b": Inputs(0.9, -0.001, 0.9), "c": Inputs(0.9, -0.05, 0.9)}
)
LINES: tuple[Line, ...] = (
  Line("one-token steps", fold="exact"),
  Line("window solve and fold"),
  Line("all dots bf16x3", dots="hi+lo", fold_dots="hi+lo"),
  Line("all dots tf32", dots="tf32", fold_dots="tf32"),
  Line("all dots bf16", dots="bf16", fold_dots="bf16"),
  Line("fold dots bf16", fold_dots="bf16"),
  Line("records bf16", records="bf16"),
  Line("checkpoint bf16", checkpoint="bf16"),
)


@dataclass(frozen=True, kw_only=True)
class Config:
  """`every` m are tried with a bf16 checkpoint, the other lines fold at every commit.

  keep    probability that a drafted token is accepted, its predecessors being so
  draws   streams of their own; errors are over all of them
  """

  inputs: tuple[str, ...] = tuple(SETTINGS)
  every: tuple[int, ...] = (1, 2, 4, 8, 16)
  cycles: int = 600
  probes: int = 30
  window: int = 5
  keep: float = 0.75
  dim: int = 128
  draws: int = 4
  seed: int = 0

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    checks = (
      ("inputs", bool(self.inputs) and set(self.inputs) <= set(SETTINGS), ", ".join(SETTINGS)),
      ("every", bool(self.every) and all(1 <= m <= 64 for m in self.every), "each 1 to 64"),
      ("cycles", 2 <= self.cycles <= 100_000, "2 to 100000"),
      ("probes", 1 <= self.probes <= self.cycles, f"1 to {self.cycles}"),
      ("window", 2 <= self.window <= 64, "2 to 64"),
      ("keep", 0 <= self.keep <= 1, "0 to 1"),
      ("dim", 2 <= self.dim <= 256, "2 to 256"),
      ("draws", 1 <= self.draws <= 64, "1 to 64"),
    )
    for name, good, allowed in checks:
      if not good:
        raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; allowed: {allowed}")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "smoke": Config(inputs=("b",), every=(1, 4), cycles=12, probes=3, dim=16, draws=2),
  }
)


def plan(c: Config) -> Schedule:
  """Full windows; the anchor and a geometric number of drafts behind it are kept."""
  rng = np.random.default_rng([c.seed, 1])
  drafts = rng.random((c.cycles, c.window - 1)) < c.keep
  accepted = (1 + np.cumprod(drafts, axis=1).sum(1)).astype(np.int32)
  start = np.concatenate([[0], np.cumsum(accepted)[:-1]]).astype(np.int32)
  last = np.unique(np.linspace(c.cycles / c.probes, c.cycles, c.probes).round().astype(int))
  return Schedule(start, np.full(c.cycles, c.window, np.int32), accepted, last)


def streams(c: Config, inputs: Inputs, tokens: int) -> list[np.ndarray]:
  """q, k, v, beta, g [tokens, draws, ...], all but the last two as bfloat16 has them."""
  rng, shape = np.random.default_rng([c.seed, 2]), (tokens, c.draws, c.dim)
  normal = lambda *s: rng.standard_normal(s)
  unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
  common = np.sqrt(inputs.rho) * normal(1, *shape[1:])
  k = unit(common + np.sqrt(1 - inputs.rho) * normal(*shape))
  q, v = unit(normal(*shape)) * c.dim**-0.5, normal(*shape)
  flat = lambda value, *s: np.full((tokens, c.draws, *s), np.float32(value), np.float64)
  as_bf16 = lambda x: bf16(x).astype(np.float64)
  return [*map(as_bf16, (q, k, v)), flat(inputs.beta), flat(inputs.decay, 1)]


def settings(lines: list[tuple[Line, int]]) -> Setting:
  bits = lambda name: np.array([BITS[getattr(x, name)] for x, _ in lines], np.int32)
  every = np.array([m for _, m in lines], np.int32)
  phantom = np.zeros(len(lines), np.bool_)
  records, checkpoint, dots, fold = map(bits, ("records", "checkpoint", "dots", "fold_dots"))
  return Setting(records, checkpoint, dots, every, phantom, fold)


def grid(c: Config) -> list[tuple[Line, int]]:
  """Lines and how many commits lie from fold to fold."""
  deferrals = [(x, m) for x in LINES if x.checkpoint == "bf16" for m in c.every]
  return [(x, 1) for x in LINES if x.checkpoint != "bf16"] + deferrals


def rows(c: Config, name: str, record: Record) -> Iterator[Row]:
  """Of one kind of inputs, every line."""
  inputs, when = SETTINGS[name], plan(c)
  x = streams(c, inputs, int(when.accepted.sum()) + c.window)
  probes = (when.start + when.accepted)[when.last - 1].tolist()
  want = truth.walk(x, probes, lambda: None)
  tokens = Tokens(*(jnp.asarray(np.moveaxis(y, 1, 0), jnp.float32) for y in x))
  apart = lambda got, want: np.linalg.norm(got - want) / np.linalg.norm(want)
  for kind in ("exact", "open_loop"):
    lines = [x for x in grid(c) if x[0].fold == kind]
    found = deferred.run(
      settings(lines), tokens, when, c.window, replay=kind == "exact", progress=record.advance
    )
    for i, probe in enumerate(found):
      for (line, m), state, output in zip(lines, probe.states, probe.outputs, strict=True):
        same = bf16(output) == bf16(want.outputs[i])
        kept = bf16(state) if line.checkpoint == "bf16" else state
        yield {
          "inputs": name, **inputs._asdict(), "line": line.name, "every": m,
          "cycle": int(when.last[i]), "token": probe.token,
          "state_error": short(apart(kept.astype(np.float64), want.states[i])),
          "unrounded_error": short(apart(state.astype(np.float64), want.states[i])),
          "output_error": short(apart(output.astype(np.float64), want.outputs[i])),
          "bf16_equal": short(same.mean()), "accept_length": short(when.accepted.mean()),
        }  # fmt: skip


def run(c: Config, record: Record) -> None:
  for name in record.parts(c.inputs, name=lambda x: f"inputs {x}"):
    for row in rows(c, name, record):
      record(**row)


figure, table = cycles_report.figure, cycles_report.table
