"""A whole model decodes end to end: time of a step by scheme, and the share of recurrent layers.

The model has Qwen3.5-4B's shape and random weights, or is a checkpoint. Every slot reads a prompt;
plain decoding, one token a step on XLA, then writes `tokens` tokens. Each scheme writes them again
in windows of drafts, of which one token in `accepted` is wrong (experiments/steps.py), and a row is
recorded only if it wrote the same text and its logits are no further off than those of a right way.
Shares are differences: the same decoding is timed without its recurrent layers, and with their
projections but no convolution and no state.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.decoding.loop import Decoding
from commit_schemes.model import ModelMemory, model_memory, prefill
from experiments import corpus, steps
from experiments.models import QWEN3_5_4B
from experiments.record import BadInput, Record, Row
from experiments.steps import Decoded, Step
from experiments.target import target
from gdn import config as shape
from gdn import hybrid
from gdn.hybrid import Memories, Params
from gdn.ops import XLA, Ops
from gdn.streaming import empty
from pallas_kernels import MOSAIC_GPU

CLOCK = (
  "wall clock of `inner` decode steps in a row, waited for once; median over the runs in which all "
  "slots were decoding, without the first"
)
OPS: Mapping[str, Ops] = MappingProxyType({"xla": XLA, "mosaic_gpu": MOSAIC_GPU})
DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}
REST, BARE, PROJECTED = "none", "no recurrent layers", "no states, projections only"
PLAIN = "plain"  # decoding without drafts
TIE = 2.0  # logit errors that a margin may be: it is between two logits
SLACK = 4.0  # times the logit error of a right way that another may have
NUDGED = 16.0  # times what weights one rounding away do to logits: more is not rounding
TINY = shape.Config(
  vocab=64, width=32, inner=32, layers=2, attention_every=2, key_heads=1, value_heads=2, key_dim=16,
  value_dim=16, query_heads=2, kv_heads=1, head_dim=16, rotary=8, window=64,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config:
  """What is decoded: `tokens` a slot behind a prompt of `prompt`, in windows of `window` nodes."""

  shape: str = "Qwen3.5-4B"
  model: Path | None = None  # a checkpoint in place of random weights of that shape
  dtype: str = "bfloat16"
  batches: tuple[int, ...] = (32, 1)
  window: int = 16
  accepted: int = 5
  prompt: int = 512
  tokens: int = 384
  context: int = 2048
  schemes: tuple[str, ...] = tuple(SCHEMES)
  ops: tuple[str, ...] = ("mosaic_gpu",)
  inner: int = 8
  runs: int = 9  # of what is left without states: its text ends nowhere

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    whole, least = self.prompt + self.tokens, 6 * self.inner * self.accepted
    checks = (
      ("shape", self.shape in SHAPES, ", ".join(SHAPES)),
      ("dtype", self.dtype in DTYPES, ", ".join(DTYPES)),
      ("batches", bool(self.batches) and min(self.batches) >= 1, "each at least 1"),
      ("window", 1 <= self.window <= 64, "1 to 64"),
      ("accepted", 1 <= self.accepted <= self.window, f"1 to window = {self.window}"),
      ("prompt", self.prompt >= 2, "at least 2"),
      ("tokens", self.tokens >= least, f"at least 6 inner accepted = {least}"),
      ("context", self.context >= whole, f"at least prompt + tokens = {whole}"),
      ("schemes", bool(self.schemes) and set(self.schemes) <= set(SCHEMES), ", ".join(SCHEMES)),
      ("ops", bool(self.ops) and set(self.ops) <= set(OPS), ", ".join(OPS)),
      ("inner", self.inner >= 1, "at least 1"),
      ("runs", self.runs >= 4, "at least 4"),
    )
    for name, good, allowed in checks:
      if not good:
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: {allowed}")


SHAPES: Mapping[str, shape.Config] = MappingProxyType({"Qwen3.5-4B": QWEN3_5_4B, "tiny": TINY})
CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(batches=(32,)),
    "single": Config(batches=(1,)),
    "xla": Config(ops=("xla",), schemes=("replay_0", "ring_exact")),
    "smoke": Config(
      shape="tiny", dtype="float32", batches=(2,), window=4, accepted=3, prompt=12, tokens=48,
      context=64, schemes=("replay_0", "ring_exact"), ops=("xla",), inner=2, runs=4,
    ),
  }
)  # fmt: skip


class Cell(NamedTuple):
  """One row: a scheme with its arithmetic, or what is left without (scheme REST)."""

  batch: int
  scheme: str
  ops: str

  def __str__(self) -> str:
    return f"{self.scheme} on {self.ops}, batch {self.batch}"


def cells(c: Config) -> list[Cell]:
  """What is left comes first: shares are taken of it."""
  return [
    cell
    for B in c.batches
    for cell in (
      Cell(B, REST, BARE),
      Cell(B, REST, PROJECTED),
      *(Cell(B, scheme, ops) for ops in c.ops for scheme in c.schemes),
    )
  ]


class Programs(NamedTuple):
  """Of a cell: (memories, prompts) -> its slots, and their step."""

  start: Callable[..., Decoding]
  step: Step


class Bench(NamedTuple):
  """The model, a prompt for each slot of the largest batch, and what each cell makes of them."""

  c: Config
  params: Params
  config: shape.Config
  prompts: jax.Array

  @property
  def until(self) -> int:
    return self.c.prompt + self.c.tokens

  def memory(self, cell: Cell) -> ModelMemory:
    if cell.scheme == REST:
      return steps.without_states(self.config)
    scheme, ops = SCHEMES["snapshot" if cell.scheme == PLAIN else cell.scheme], OPS[cell.ops]
    dtypes, window = Dtypes(raw=self.params.embed.dtype), self.window(cell)
    spec = Spec(self.config.key_heads, window, ops, dtypes=dtypes, topology="chain")
    return model_memory(self.config, scheme.make(spec), ops)

  def window(self, cell: Cell) -> int:
    return 1 if cell.scheme == PLAIN else self.c.window

  def weights(self, cell: Cell) -> Params:
    return steps.without_mixers(self.params) if cell[1:] == (REST, BARE) else self.params

  def read(self) -> Memories:
    """Memories of every slot after its prompt, all but the last token of it."""
    ids, ops = self.prompts[:, :-1], OPS[self.c.ops[0]]
    start = jnp.zeros(len(ids), jnp.int32)
    fresh = empty(self.config, len(ids), self.params.embed.dtype)
    memory = self.memory(Cell(len(ids), PLAIN, "xla"))
    read = jax.jit(
      lambda params, fresh, ids, start, nodes: prefill(
        params, self.config, memory, fresh, ids, start, nodes, ops
      )
    )
    return read(self.params, fresh, ids, start, start + ids.shape[1])

  def start(self, cell: Cell) -> Any:
    """Jitted: memories of all slots, prompts -> the first slots under a scheme.

    Each leaf is a buffer of its own: a step takes them over.
    """
    B, memory = cell.batch, self.memory(cell)

    def seat(memories, prompts):
      text = jnp.pad(prompts[:B], ((0, 0), (0, self.c.tokens)))
      length = jnp.full(B, self.c.prompt, jnp.int32)
      carry = memory.whole.init(jax.tree.map(lambda x: x[:B], memories))
      return jax.tree.map(jnp.copy, Decoding(text, length, carry))

    return jax.jit(seat)

  def compiled(self, cell: Cell) -> Programs:
    window, accepted = self.window(cell), self.c.accepted
    step = steps.decode_step(self.config, self.memory(cell), window, accepted, self.until)
    given, start = (jax.eval_shape(self.read), self.prompts), self.start(cell)
    state = jax.eval_shape(start, *given)
    lowered = step.lower(self.weights(cell), state, state.text, jnp.float32(0))
    return Programs(start.lower(*given).compile(), lowered.compile())

  def compiled_pass(self) -> Any:
    text = jax.ShapeDtypeStruct((len(self.prompts), self.until), jnp.int32)
    return steps.one_pass(self.config, self.c.prompt).lower(self.params, text).compile()

  def decoded(
    self, cell: Cell, programs: Programs, memories: Memories, said: jax.Array, tie: float
  ) -> Decoded:
    state, weights = programs.start(memories, self.prompts), self.weights(cell)
    inner, runs = self.c.inner, self.c.runs if cell.scheme == REST else None
    return steps.decode(
      programs.step, weights, state, said, tie, self.until, inner=inner, runs=runs
    )


def bench(c: Config) -> Bench:
  """A checkpoint and held-out text, or random weights and tokens, made where they will be used.

  BadInput: a checkpoint that cannot be read, or a text too short for its prompts.
  """
  dtype, B = DTYPES[c.dtype], max(c.batches)
  if c.model is not None:
    params, config, read, _ = target(c.model, context=c.context, dtype=dtype)
    text = read(corpus.heldout().tobytes()).ids
    if len(text) < B * c.prompt:
      raise BadInput(f"batches x prompt = {B} x {c.prompt}, allowed: {len(text)} held-out tokens")
    at = np.linspace(0, len(text) - c.prompt, B, dtype=np.int64)[:, None] + np.arange(c.prompt)
    return Bench(c, hybrid.cast(params, dtype), config, jnp.asarray(text[at]))
  config = dataclasses.replace(SHAPES[c.shape], window=c.context)
  init = jax.jit(functools.partial(hybrid.init, config, dtype=dtype))
  prompts = steps.known(config, jnp.arange(c.prompt)[None], jnp.arange(B))
  return Bench(c, init(jax.random.key(0)), config, prompts)


class Plain(NamedTuple):
  """What plain decoding wrote: `noise` is the largest difference of a token's logit to that of one
  pass over the same text, from its first token on."""

  text: jax.Array
  logit: np.ndarray
  noise: float


def plainly(b: Bench, programs: Programs, again: Callable, memories: Memories) -> Plain:
  """`again` is the one pass, compiled. BadInput: the two differ by more than rounding."""
  cell = Cell(len(b.prompts), PLAIN, "xla")
  never = jnp.zeros((cell.batch, b.until), jnp.int32), -1.0
  text, logits, *_ = b.decoded(cell, programs, memories, *never)
  logit = np.stack(logits)
  passed = np.asarray(again(b.params, text))
  moved = float(np.abs(again(steps.nudged(b.params), text) - passed).max())
  noise = float(np.abs(logit - passed).max())
  if not noise <= (most := NUDGED * moved):
    raise BadInput(f"plain decoding's logits are {noise:.1e} off one pass's, allowed {most:.1e}")
  return Plain(jnp.asarray(text), logit, noise)


class Compared(NamedTuple):
  """A text beside plain decoding's, up to the first token that differs in any slot.

  first  its index, None if there is none
  ties   tokens that were not the most likely, but within TIE logit errors of it
  error  largest difference of a token's logit
  """

  first: int | None
  ties: int
  error: float

  def fault(self, noise: float) -> str | None:
    """Why this is not the same text, in words."""
    if not self.error <= SLACK * noise:
      return f"logits differ by {self.error:.1e}, allowed {SLACK * noise:.1e}"
    return None if self.first is None else f"its text is another from token {self.first} on"


def compared(got: Decoded, want: Plain) -> Compared:
  logit, lead = np.stack(got.logit), np.stack(got.lead)
  B, tokens = logit.shape
  same = np.asarray(got.text == want.text[:B])[:, -tokens:].cumprod(axis=1).astype(bool)
  error = np.abs(logit - want.logit[:B])[same].max(initial=0.0)
  first = None if same.all() else int(same.sum(axis=1).min())
  return Compared(first, int((lead[same] > 0).sum()), float(error))


def run(c: Config, record: Record) -> None:
  """One row is one step; shares are of that step's median time."""
  record.say("making the model")
  b = bench(c)
  wanted = [cell for cell in cells(c) if str(cell) not in record.finished]
  alone = Cell(len(b.prompts), PLAIN, "xla")

  @functools.lru_cache(1)  # those of one batch are there at a time
  def programs(batch: int) -> dict[Any, Any]:
    """All are compiled before any of them is timed, and what comes before the first beside them."""
    jobs: dict[Any, Callable[[], Any]] = {
      cell: functools.partial(b.compiled, cell) for cell in wanted if cell.batch == batch
    }
    if batch == wanted[0].batch:
      jobs |= {"read": b.read, "pass": b.compiled_pass, alone: lambda: b.compiled(alone)}
    record.say("compiling")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
      return dict(zip(jobs, pool.map(lambda job: job(), jobs.values()), strict=True))

  @functools.cache
  def before() -> tuple[Memories, Plain]:
    """Memories of the prompts, and the text that follows them."""
    first = programs(wanted[0].batch)
    memories = first["read"]
    return memories, plainly(b, first[alone], first["pass"], memories)

  without: dict[tuple[int, str], float] = {
    (row["batch"], row["ops"]): row["step_us"] for row in record.rows if row["scheme"] == REST
  }
  for cell in record.parts(cells(c)):
    (memories, want), rest = before(), cell.scheme == REST
    said = want.text[: cell.batch]
    got = b.decoded(cell, programs(cell.batch)[cell], memories, said, TIE * want.noise)
    found = None if rest else compared(got, want)
    if found is not None and (fault := found.fault(want.noise)):
      record.console.print(f"{cell}: {fault}: not timed")
      continue
    timing = steps.timing(got.times)
    if rest:
      without[cell.batch, cell.ops] = round(timing.median, 1)
    share = lambda part, B=cell.batch, timing=timing: round(1 - without[B, part] / timing.median, 4)
    accepted = got.emitted[got.emitted > 0]
    record(
      scheme=cell.scheme,
      ops=cell.ops,
      batch=cell.batch,
      window=c.window,
      accepted=c.accepted,
      context=c.context,
      prompt=c.prompt,
      tokens=None if found is None else cell.batch * c.tokens,
      steps=None if found is None else len(got.emitted),
      accept_length=None if found is None else round(float(accepted.mean()), 3),
      ties=None if found is None else found.ties,
      step_us=round(timing.median, 1),
      low_us=round(timing.low, 1),
      high_us=round(timing.high, 1),
      recurrent_share=None if rest else share(BARE),
      state_share=None if rest else share(PROJECTED),
      logit_error=None if found is None else found.error,
      logit_noise=want.noise,
      parameters=sum(x.size for x in jax.tree.leaves(b.params)),
      model=c.shape if c.model is None else c.model.name,
      device=jax.devices()[0].device_kind,
    )


PARTS = (("all but the recurrent layers", "0.85"), ("their projections", "0.6"),
         ("their convolutions and states", "0.25"))  # fmt: skip


def figure(rows: list[Row]) -> Figure:
  """A panel a batch: milliseconds of a step of every scheme, and what they go to."""
  batches = sorted({row["batch"] for row in rows})
  several = len({row["ops"] for row in rows if row["scheme"] != REST}) > 1
  names = [r for r in rows if r["scheme"] != REST and r["batch"] == batches[-1]]
  fig = Figure(figsize=(3.6 + 3.2 * (len(batches) - 1) + 2.0, 1.5 + 0.24 * len(names)))
  panels: Any = fig.subplots(1, len(batches), squeeze=False)[0]
  for axes, B in zip(panels, batches, strict=True):
    mine = [row for row in rows if row["batch"] == B]
    bare, projected = (
      next(r["step_us"] for r in mine if (r["scheme"], r["ops"]) == (REST, what))
      for what in (BARE, PROJECTED)
    )
    of = [row for row in mine if row["scheme"] != REST]
    labels = [f"{r['scheme']}, {r['ops']}" if several else r["scheme"] for r in of]
    left = np.zeros(len(of))
    ends = (
      np.full(len(of), bare),
      np.full(len(of), projected),
      np.array([r["step_us"] for r in of]),
    )
    for (what, grey), end in zip(PARTS, ends, strict=True):
      axes.barh(labels, (end - left) / 1e3, left=left / 1e3, color=grey, label=what, height=0.7)
      left = end
    for row, label in zip(of, labels, strict=True):
      text = f" {100 * row['recurrent_share']:.0f} %"
      axes.text(row["step_us"] / 1e3, label, text, va="center", fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(
      xlabel="milliseconds a step", title=f"{rows[0]['model']}, {B} slots; %: recurrent layers"
    )
    axes.grid(visible=False, axis="y")
  for axes in panels[1:]:
    axes.set_yticklabels([])
  fig.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(PARTS))
  return fig
