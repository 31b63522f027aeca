"""Open-loop, compensated and exact folds: what is stored, multiplied and rounded, and how often.

Two parts. `forced`: captured streams of the trained model under a grid of record dtype, checkpoint
dtype, dot precision and flush interval, state and output error against float64 over the length of
the text. `text`: free-running text while states are rounded to fewer and fewer bits, and under
rings as they were published; first divergence, bits per byte by the exact model, repetition.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from commit_schemes import CommitScheme, Dtypes, Spec
from commit_schemes.ring import ring
from experiments import corpus, deferred, fold_ablation_report, forced
from experiments.ablation import lowered
from experiments.deferred import Setting
from experiments.free import repeats
from experiments.noisy_text import rounding, text_bits, write
from experiments.record import BadInput, Record, Row
from experiments.streams import capture
from experiments.target import Target, target
from experiments.truth import Truth, truth
from experiments.truth import tokens as float64_tokens
from gdn import ops
from gdn.hybrid import cast
from gdn.typing import Tokens

# Mantissa bits; hi + lo are two bfloat16, which together hold about 16.
BITS: Mapping[str, int] = MappingProxyType({"fp32": 23, "hi+lo": 16, "tf32": 10, "bf16": 7})
BF16, F32 = jnp.bfloat16, jnp.float32


# Rings as they were published: dtypes of records and checkpoint, precision of the dots, the fold.
PUBLISHED: Mapping[str, tuple[Dtypes, str | None, str]] = MappingProxyType(
  {
    "open_loop, bf16 records, tf32 dots": (Dtypes(rows=(BF16,)), "tf32", "open_loop"),
    "open_loop, bf16 records and checkpoint, bf16 dots": (
      Dtypes(checkpoint=BF16, rows=(BF16,)), "bf16", "open_loop",
    ),
    "compensated, bf16 checkpoint": (Dtypes(checkpoint=BF16), None, "compensated"),
    "exact": (Dtypes(rows=(BF16,), raw=F32), "tf32", "exact"),
  }
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ring:
  """The ring of the free-running text: its slots and when it flushes."""

  slots: int = 16
  flush: str = "full"

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    if not 1 <= self.slots <= 256:
      raise ValueError(f"ring.slots={self.slots} is not allowed; allowed: 1 to 256")
    if self.flush not in ("full", "early"):
      raise ValueError(f"ring.flush={self.flush!r} is not allowed; allowed: full, early")
    if self.flush == "early" and self.slots < 2:
      raise ValueError(f"ring.slots={self.slots} is not allowed; allowed with early: 2 to 256")


@dataclass(frozen=True, kw_only=True)
class Config:
  """Forced: `tokens` of held-out source in windows of `window`. Text: `text_tokens` a prompt."""

  tokens: int = 262_144
  probes: int = 64
  window: int = 4
  layers: tuple[int, ...] = (0, 6)
  records: tuple[str, ...] = ("fp32", "hi+lo", "bf16")
  checkpoints: tuple[str, ...] = ("fp32", "bf16")
  dots: tuple[str, ...] = ("fp32", "hi+lo", "tf32", "bf16")
  every: tuple[int, ...] = (1, 2, 4, 8, 16)
  text_tokens: int = 16_384
  prompts: int = 4
  prompt: int = 512
  levels: tuple[int, ...] = (23, 18, 16, 14, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3)
  temperatures: tuple[float, ...] = (0.0, 1.0)
  rings: tuple[str, ...] = tuple(PUBLISHED)
  ring: Ring = field(default_factory=Ring)
  seed: int = 0
  model: Path | None = None  # None is the bundled model; lengths are in its tokens

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    names: dict[str, Mapping] = {"records": BITS, "checkpoints": BITS, "dots": BITS}
    for name, known in names.items():
      if not getattr(self, name) or set(getattr(self, name)) - set(known):
        raise ValueError(f"{name}={getattr(self, name)!r}, allowed: some of {', '.join(known)}")
    within = lambda xs, low, high: all(low <= x <= high for x in xs)
    most = 600_000
    checks = (
      ("tokens", self.window < self.tokens <= most, f"{self.window + 1} to {most}"),
      ("probes", 2 <= self.probes <= 1024, "2 to 1024"),
      ("window", 2 <= self.window <= 64, "2 to 64"),
      ("every", bool(self.every) and within(self.every, 1, 64), "each 1 to 64"),
      ("text_tokens", 0 <= self.text_tokens <= most, f"0 to {most}"),
      ("prompts", 1 <= self.prompts <= 64, "1 to 64"),
      ("prompt", 1 <= self.prompt <= 65_536, "1 to 65536"),
      ("levels", self.levels[:1] == (23,) and within(self.levels, 0, 23), "23, then 0 to 23"),
      ("rings", set(self.rings) <= set(PUBLISHED), "; ".join(PUBLISHED)),
      ("temperatures", within(self.temperatures, 0, 4), "each 0 to 4"),
    )
    for name, good, allowed in checks:
      if not good:
        raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; allowed: {allowed}")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "cpu": Config(
      probes=32, layers=(6,), every=(1, 4, 16), dots=("fp32", "tf32", "bf16"), text_tokens=256,
      prompts=2,
    ),
    "full": Config(),
    "smoke": Config(
      tokens=64, probes=4, layers=(0,), records=("bf16",), checkpoints=("fp32",), dots=("fp32",),
      every=(1, 2), text_tokens=8, prompts=1, prompt=16, levels=(23, 4), temperatures=(0.0,),
      rings=(),
    ),
  }
)  # fmt: skip
COLUMNS = (
  "part", "fold", "records", "checkpoint", "dots", "every", "phantom", "token", "accept_length",
  "state_error", "output_error", "bf16_equal",
  "temperature", "prompt", "bits", "distance", "first_difference", "bits_per_byte", "repeats",
)  # fmt: skip


class Line(NamedTuple):
  """One setting by the names of its dtypes."""

  fold: str
  records: str
  checkpoint: str
  dots: str
  every: int
  phantom: bool = False


def lines(c: Config) -> list[Line]:
  """Open-loop folds over the whole grid, exact folds over what concerns them, the cursor fault."""
  grid = itertools.product(c.records, c.checkpoints, c.dots, c.every)
  open_loop = [Line("open_loop", *x) for x in grid]
  replay = [
    Line("exact", "fp32", ckpt, dots, m)
    for ckpt, dots, m in itertools.product(c.checkpoints, c.dots[:1], c.every)
  ]
  faulty = [Line("open_loop", c.records[-1], c.checkpoints[0], c.dots[0], m, True) for m in c.every]
  return [*open_loop, *replay, *faulty]


def setting(some: list[Line]) -> Setting:
  bits = lambda name: np.array([BITS[getattr(x, name)] for x in some], np.int32)
  flag = lambda name, kind: np.array([getattr(x, name) for x in some], kind)
  cursors = flag("every", np.int32), flag("phantom", np.bool_)
  return Setting(bits("records"), bits("checkpoint"), bits("dots"), *cursors)


def row(**values: Any) -> Row:
  return {name: values.get(name) for name in COLUMNS}


def errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
  """[C] relative Frobenius error over all heads."""
  flat = lambda x: np.linalg.norm(x.reshape(len(got), -1), axis=1)
  return flat(got.astype(np.float64) - want) / np.linalg.norm(want)


def short(x: float) -> float:
  """Six digits: more are noise, and rows are committed."""
  return float(f"{x:.6g}")


def bf16(x: np.ndarray) -> np.ndarray:
  return x.astype(BF16)


def forced_rows(
  c: Config, some: list[Line], tokens: Tokens, want: Truth, plan: forced.Schedule, record: Record
) -> Iterator[Row]:
  """All lines of one kind of fold, in one program."""
  probes = deferred.run(
    setting(some), tokens, plan, c.window, replay=some[0].fold == "exact", progress=record.advance
  )
  kept = float(np.mean(plan.accepted))
  for i, p in enumerate(probes):
    columns = errors(p.states, want.states[i]), errors(p.outputs, want.outputs[i])
    same = (bf16(p.outputs) == bf16(want.outputs[i])).reshape(len(some), -1).mean(1)
    for line, state, output, equal in zip(some, *columns, same, strict=True):
      yield row(
        part="forced", **line._asdict(), token=p.token, accept_length=kept,
        state_error=short(state), output_error=short(output), bf16_equal=short(equal),
      )  # fmt: skip


def published(c: Config, key_heads: int, channels: int, name: str) -> CommitScheme:
  dtypes, dots, how = PUBLISHED[name]
  arithmetic = ops.xla(dots=lowered(dots, ("state", "gram", "fold"))) if dots else ops.xla()
  spec = Spec(key_heads, 1, arithmetic, channels, dtypes)
  fold: Any = how
  flush: Any = c.ring.flush
  return ring(spec, slots=c.ring.slots, fold=fold, flush=flush)


WRITING = 0.9  # share of the time that texts take; the rest is their bits per byte


def text_rows(
  c: Config, goal: Target, ids: np.ndarray, temperature: float, progress: Callable[[float], None]
) -> Iterator[Row]:
  """States rounded to each level beside exact ones, then published rings, on the same prompts."""
  params, model = cast(goal.params, F32), goal.config
  starts = np.linspace(0, len(ids) - c.prompt, c.prompts + 2).astype(int)[1:-1]
  prompts = [ids[at : at + c.prompt].tolist() for at in starts]
  spec = Spec(model.key_heads, 1, channels=model.decay_channels)
  go = partial(write, params, model, tokens=c.text_tokens, temperature=temperature, seed=c.seed)
  n = len(c.levels)
  each = [p for p in prompts for _ in c.levels]
  bits = np.array([*c.levels] * c.prompts)
  done, whole = 0, len(each) + len(c.rings) * len(prompts)  # texts
  tell = lambda some: lambda fraction: progress(WRITING * (done + some * fraction) / whole)
  levels = go(rounding(spec, bits), each, watch=n, progress=tell(len(each)))
  done = len(each)
  plain = levels.tokens[::n]
  groups: list[tuple[str, list[list[int]], np.ndarray, Any, Any]] = [
    ("rounded", each, levels.tokens, levels.distance, bits)
  ]
  for name in c.rings:
    scheme = published(c, model.key_heads, model.decay_channels, name)
    text = go(scheme, prompts, progress=tell(len(prompts))).tokens
    groups.append((name, prompts, text, None, None))
    done += len(prompts)
  for scored, (name, group, text, distance, level) in enumerate(groups):
    progress(WRITING + (1 - WRITING) * scored / len(groups))
    spent = text_bits(params, model, group, text) / [goal.bytes(tokens) for tokens in text]
    for i, tokens in enumerate(text):
      prompt = i // (len(text) // c.prompts)
      differs = np.flatnonzero(tokens != plain[prompt])
      first = int(differs[0]) if len(differs) else None
      apart = None
      if distance is not None:  # up to the first token that differs: later texts are not the same
        apart = short(distance[i, : None if first is None else first + 1].max())
      yield row(
        part="text", fold=name, token=c.text_tokens, temperature=temperature, prompt=prompt,
        bits=None if level is None else int(level[i]), distance=apart, first_difference=first,
        bits_per_byte=short(spent[i]), repeats=repeats(tokens),
      )  # fmt: skip


def run(c: Config, record: Record) -> None:
  kinds: dict[str, list[Line]] = {}
  for line in lines(c):
    kinds.setdefault(f"{line.fold} folds, {c.tokens} tokens", []).append(line)
  texts = {f"text at temperature {t:g}": t for t in c.temperatures if c.text_tokens}
  goal = target(c.model, context=max(c.tokens, c.prompt + c.text_tokens))
  ids = goal.read(corpus.heldout().tobytes()).ids
  if (least := max(c.tokens, c.prompt * (c.prompts + 1))) > len(ids):
    raise BadInput(f"{least} tokens of held-out text are wanted, there are {len(ids)}")
  recurrent = tuple(i for i in range(goal.config.layers) if not goal.config.is_attention(i))
  if not set(c.layers) <= set(recurrent):
    raise BadInput(f"layers={c.layers} is not allowed; allowed: some of {recurrent}")
  if not set(kinds) <= record.finished:
    text = ids[: c.tokens]
    tell = lambda what: lambda fraction: record.say(f"{what} {min(fraction, 1):4.0%}")
    streams = capture(*goal[:2], text, layers=c.layers, progress=tell("capturing streams"))
    probes = np.unique(np.geomspace(c.window, c.tokens, c.probes).astype(int)).tolist()
    want = truth(streams, probes, progress=tell("float64 reference"), threads=16)
    plan = forced.schedule(text, c.window, probes)
    x = float64_tokens(streams.raw, streams.gates)
    tokens = Tokens(*(jnp.asarray(np.moveaxis(y, 1, 0), F32) for y in x))
  for part in record.parts([*kinds, *texts]):
    rows = (
      forced_rows(c, kinds[part], tokens, want, plan, record)
      if part in kinds
      else text_rows(c, goal, ids, texts[part], record.advance)
    )
    for r in rows:
      record(**r)


figure, table = fold_ablation_report.figure, fold_ablation_report.table
