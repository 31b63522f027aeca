"""How far the recurrent state drifts from float64 under every scheme, over real source code.

Teacher-forced: the raw streams of the recurrent layers are captured once, a prompt-lookup draft is
accepted as far as it equals the text, and every scheme sees the same streams and acceptances. One
factor at a time is changed around a base point of float32 records, checkpoint and dots. Then each
scheme decodes freely, beside plain decoding.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from rich.console import Group

from commit_schemes import SCHEMES, Dtypes, Spec
from experiments import corpus, drift_report, forced, free
from experiments.ablation import SITES, lowered, neumann
from experiments.record import BadInput, Record
from experiments.streams import Streams, capture
from experiments.streams import load as stored_streams
from experiments.target import Target, target
from experiments.truth import Truth, truth
from gdn import ops
from gdn.checkpoint import fingerprint

BF16, F32 = jnp.bfloat16, jnp.float32
ABLATED = "ring_open_loop"  # the scheme whose folds the published claims are about


class Factor(NamedTuple):
  """One change to the base point, and what it is in the rows."""

  dtypes: Dtypes = Dtypes()
  dots: ops.Dots = ops.EXACT
  inverse: ops.Solve = ops.substitute

  def spec(self, key_heads: int, window: int) -> Spec:
    arithmetic = ops.xla(dots=self.dots, inverse=self.inverse, out=F32)
    return Spec(key_heads, window, arithmetic, dtypes=self.dtypes)


# Records of hi + lo bfloat16 are `ring_compensated`, a scheme of its own.
FACTORS: Mapping[str, Factor] = MappingProxyType(
  {
    "none": Factor(),
    "records bf16": Factor(Dtypes(rows=(BF16,))),
    "checkpoint bf16": Factor(Dtypes(checkpoint=BF16)),
    "all dots bf16x3 (emulated)": Factor(dots=lowered("bf16x3")),
    "all dots tf32 (emulated)": Factor(dots=lowered("tf32")),
    "all dots bf16 (emulated)": Factor(dots=lowered("bf16")),
    "inverse by Neumann doubling": Factor(inverse=neumann),
    "records bf16, checkpoint bf16, all dots tf32 (emulated)": Factor(
      Dtypes(checkpoint=BF16, rows=(BF16,)), lowered("tf32")
    ),
  }
  | {
    f"{site} dots {p} (emulated)": Factor(dots=lowered(p, (site,)))
    for p in ("tf32", "bf16")
    for site in SITES
  }
)


@dataclass(frozen=True, kw_only=True)
class Config:
  """Held-out text, the recurrent layers to follow, what to run, and the free-running text."""

  tokens: int = 16_384
  probes: int = 128
  window: int = 16
  windows: tuple[int, ...] = (4, 8)
  layers: tuple[int, ...] = (0, 6)
  schemes: tuple[str, ...] = (
    "snapshot", "replay_0", "replay_4", "delta_cache",
    "ring_open_loop", "ring_exact", "ring_compensated", "tree_wy",
  )  # fmt: skip
  factors: tuple[str, ...] = tuple(FACTORS)[1:8]
  prompt: int = 1024
  prompt_at: int = 180_000
  free_tokens: int = 1024
  model: Path | None = None  # None is the bundled model
  streams: Path | None = None  # of `capture`, in place of streams over the held-out text

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    most = 600_000
    checks = (
      ("tokens", self.tokens, self.window < self.tokens <= most, f"{self.window + 1} to {most}"),
      ("probes", self.probes, 2 <= self.probes <= 1024, "2 to 1024"),
      ("window", self.window, 2 <= self.window <= 64, "2 to 64"),
      ("windows", self.windows, all(2 <= w <= 64 for w in self.windows), "each 2 to 64"),
      ("layers", self.layers, bool(self.layers), "at least one recurrent layer"),
      (
        "schemes",
        self.schemes,
        bool(self.schemes) and set(self.schemes) <= set(SCHEMES),
        ", ".join(SCHEMES),
      ),
      ("factors", self.factors, set(self.factors) <= set(FACTORS), ", ".join(FACTORS)),
      ("prompt", self.prompt, 1 <= self.prompt <= most, f"1 to {most}"),
      (
        "prompt_at",
        self.prompt_at,
        0 <= self.prompt_at <= most - self.prompt,
        f"0 to {most - self.prompt}",
      ),
      ("free_tokens", self.free_tokens, 0 <= self.free_tokens <= most, f"0 to {most}"),
    )
    for name, value, good, allowed in checks:
      if not good:
        raise ValueError(f"{name}={value!r} is not allowed; allowed: {allowed}")


EVERY_LAYER = (0, 1, 2, 4, 5, 6)
CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "demo": Config(),
    "full": Config(
      tokens=65_536,
      layers=EVERY_LAYER,
      schemes=tuple(SCHEMES),
      factors=tuple(FACTORS)[1:],
      free_tokens=16_384,
    ),
    "smoke": Config(
      tokens=256, probes=8, windows=(4,), layers=(0,), schemes=("snapshot", "ring_open_loop"),
      factors=("records bf16",), prompt=64, free_tokens=16,
    ),
  }
)  # fmt: skip


class Part(NamedTuple):
  """One line of the experiment: rows to measure, on their own."""

  name: str
  cost: float
  rows: Callable[[Callable[[float], None]], list[dict[str, Any]]]


def row(**values: Any) -> dict[str, Any]:
  columns = (
    "part", "scheme", "ablation", "window", "layer", "token", "state_error", "output_error",
    "first_difference", "margin", "logit_error", "repeats", "plain_repeats",
    "accept_length",
  )  # fmt: skip
  return {c: values.get(c) for c in columns}


def relative(got: np.ndarray, want: np.ndarray) -> float:
  """Frobenius norm of the difference over that of `want`."""
  return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


def forced_rows(
  streams: Streams, want: Truth, plan: forced.Schedule, scheme: str, ablation: str, window: int,
  progress: Callable[[float], None],
) -> list[dict[str, Any]]:  # fmt: skip
  spec = FACTORS[ablation].spec(streams.raw.k.shape[1], window)
  rows = []
  probes = forced.run(SCHEMES[scheme].make(spec), streams, plan, window, progress)
  for i, probe in enumerate(probes):
    for n, layer in enumerate(streams.layers):
      at = streams.heads(n)
      rows.append(
        row(
          part="forced",
          scheme=scheme,
          ablation=ablation,
          window=window,
          layer=layer,
          token=probe.token,
          state_error=relative(probe.state[at], want.states[i, at]),
          output_error=relative(probe.output[at], want.outputs[i, at]),
          accept_length=float(np.mean(plan.accepted)),
        )
      )
  return rows


def followed(
  config: Config, model: Target, progress: Callable[[float], None]
) -> tuple[Streams, np.ndarray]:
  """Streams of the layers, and their tokens. BadInput: there are no such streams of this model."""
  try:
    if config.streams is None:
      ids = model.read(corpus.heldout().tobytes()).ids[: config.tokens]
      return capture(*model[:2], ids, layers=config.layers, progress=progress), ids
    streams, ids = stored_streams(config.streams, fingerprint(model.params))
    return streams.only(config.layers).first(config.tokens), ids[: config.tokens]
  except (OSError, ValueError) as error:
    raise BadInput(str(error)) from error


def parts(config: Config, record: Record) -> Iterator[Part]:
  """All lines of the experiment; streams and truth are worked out if a forced line needs them."""
  longest = max(config.tokens, config.prompt + config.free_tokens + config.window)
  model = target(config.model, context=longest)
  recurrent = tuple(i for i in range(model.config.layers) if not model.config.is_attention(i))
  if not set(config.layers) <= set(recurrent):
    raise BadInput(f"layers={config.layers} is not allowed; allowed: some of {recurrent}")
  T = config.window
  lines = [(s, "none", T) for s in config.schemes]
  lines += [(s, "none", w) for w in config.windows for s in config.schemes if s == ABLATED]
  lines += [(ABLATED, a, T) for a in config.factors]
  lines = list(dict.fromkeys(lines))  # T may be one of the windows
  label = lambda s, a, w: f"{s}, T = {w}" + ("" if a == "none" else f", {a}")
  if not {label(*x) for x in lines} <= record.finished:
    tell = lambda what: lambda fraction: record.say(f"{what} {min(fraction, 1):4.0%}")
    streams, text = followed(config, model, tell("capturing streams"))
    probes = np.unique(np.geomspace(T, len(text), config.probes).astype(int)).tolist()
    want = truth(streams, probes, progress=tell("float64 reference"))
    plans = {w: forced.schedule(text, w, probes) for w in {w for _, _, w in lines}}
  for s, a, w in lines:
    name = label(s, a, w)
    if name in record.finished:
      yield Part(name, 1.0, lambda progress: [])
    else:
      yield Part(name, 1.0, partial(forced_rows, streams, want, plans[w], s, a, w))
  if config.free_tokens:
    ids = model.read(corpus.heldout().tobytes()).ids
    prompt = ids[config.prompt_at : config.prompt_at + config.prompt].tolist()
    if not prompt:
      raise BadInput(f"prompt_at = {config.prompt_at}, allowed: less than {len(ids)} tokens")
    plain = free.Plain(model.params, model.config, prompt, config.free_tokens)
    for s in config.schemes:
      one = lambda progress, s=s: [row(part="free", window=T, **plain.beside(s, T, progress))]
      yield Part(f"{s}, free-running", 0.5, one)


def run(config: Config, record: Record) -> None:
  """Two lines at a time: each is a sequence of small operations that leaves a core idle."""
  everything = list(parts(config, record))
  done: dict[str, float] = {}
  stopped = threading.Event()

  def tell(name: str, fraction: float) -> None:
    """A line's progress. Where the run was interrupted, the line ends here, not minutes later."""
    if stopped.is_set():
      raise CancelledError(name)
    done[name] = fraction

  with ThreadPoolExecutor(2) as pool:
    try:
      futures: dict[str, Future] = {
        p.name: pool.submit(p.rows, partial(tell, p.name))
        for p in everything
        if p.name not in record.finished
      }
      cost = {p.name: p.cost for p in everything}
      for name in record.parts([p.name for p in everything], cost=cost.__getitem__):
        while not futures[name].done():
          record.advance(done.get(name, 0.0))
          time.sleep(0.2)
        for r in futures[name].result():
          record(**r)
    except BaseException:
      stopped.set()
      pool.shutdown(wait=False, cancel_futures=True)
      raise


def figure(rows: list[dict[str, Any]]) -> Any:
  """Errors against tokens: by scheme, by what is lowered, by window."""
  return drift_report.figure(rows, ABLATED)


def table(rows: list[dict[str, Any]]) -> Group:
  """Last errors of every line, the free-running text, and what follows for the published claims."""
  return drift_report.table(rows, ABLATED)
