"""Dense against compacted replay of the accepted tail, for partial caches of K = 4 and 8.

SGLang PR 28010 keeps the first K states of a window and replays what was accepted beyond them. Its
K = 4 and 8 were slower than all 16 at concurrency 4, and it named the cause: selecting the few rows
that have a tail (nonzero and gather) and short tails, not the fused kernel. Here a layer's commit
is timed with both ways to replay, and the selection by itself, over accept lengths and concurrency;
verify is timed beside them, and so is a window that keeps all its states.

    dense     every row in one call, those without a tail masked
    compact   the rows with a tail one after another; how many is data
    select    only what the published cause names: find the rows with a tail, gather their records
    all       keep = T: a commit picks a state, nothing is replayed
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from commit_schemes.contract import pending
from commit_schemes.replay import replay
from commit_schemes.snapshot import snapshot
from experiments import figures
from experiments.clock import mean_time
from experiments.layer_step import (
  ACCEPTS,
  NAMES,
  OPS,
  LayerStep,
  accept_lengths,
  draw_accepts,
  once,
  runs_here,
)
from experiments.models import MODELS, layer_of, named, sizes
from experiments.record import Record, Row
from gdn.pool import take
from gdn.typing import Accepted

CLOCK = "CUPTI: device time of a call's kernels, mean over calls in turn; by the wall without a GPU"
READS = ("accept_length",)  # with accepts = block
TAILS = ("dense", "compact", "select", "all")


@dataclass(frozen=True, kw_only=True)
class Config:
  """One layer of `model`, a name or the path of a checkpoint, at tensor-parallel `degree`;
  `accepts` name the distributions."""

  model: str = "Qwen3.5-27B"
  degree: int = 2
  keeps: tuple[int, ...] = (4, 8)
  tails: tuple[str, ...] = TAILS
  accepts: tuple[str, ...] = ("block", "prompt_lookup", "geometric_4.2", "none", "uniform", "full")
  concurrency: tuple[int, ...] = (1, 4, 16, 64)
  window: int = 16
  ops: str = "mosaic"
  calls: int = 32

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    for name, good, allowed in (
      (
        "model",
        named(self.model, MODELS),
        f"{', '.join(MODELS)}, or the path of a checkpoint",
      ),
      ("window", 2 <= self.window <= 16, "2 to 16"),
      (
        "keeps",
        self.keeps and all(1 <= k < self.window for k in self.keeps),
        f"1 to {self.window - 1}",
      ),
      ("tails", self.tails and set(self.tails) <= set(TAILS), ", ".join(TAILS)),
      ("accepts", self.accepts and set(self.accepts) <= set(NAMES), ", ".join(NAMES)),
      (
        "concurrency",
        self.concurrency and min(self.concurrency) >= 1 and once(self.concurrency),
        "each at least 1, and once",
      ),
      ("ops", self.ops in OPS, ", ".join(OPS)),
      ("calls", self.calls >= 8, "at least 8"),
    ):
      if not good:
        raise ValueError(f"{name} = {getattr(self, name)!r}, allowed: {allowed}")
    if self.model in MODELS:
      MODELS[self.model].layer.shard(self.degree)


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "smoke": Config(
      model="bundled", degree=1, keeps=(2,), accepts=("uniform",), concurrency=(2,), window=4,
      ops="xla", calls=8,
    ),
  }
)  # fmt: skip


def select(flight: Any, accepted: Accepted, keep: int) -> Any:
  """Rows with a tail, moved to the front, and their records."""
  on = jnp.arange(accepted.path.shape[1])[None] < accepted.length[:, None]
  kept = jnp.sum(on & (accepted.path < keep), axis=1, dtype=jnp.int32)
  tail = pending(Accepted(accepted.path, accepted.length - kept), flight.slots)
  some = tail.length > 0
  rows = jnp.nonzero(some, size=some.shape[0], fill_value=-1)[0]
  return jax.tree.map(lambda x: take(x, rows), (flight.records, tail))


class Variant:
  """A layer whose commit replays in one way, verify and commit compiled for B slots.

  Safe to make in a thread: while a variant is timed, nothing compiles.
  """

  def __init__(self, c: Config, tail: str, keep: int, B: int):
    self.c, self.B, self.tail = c, B, tail
    self.layer = layer = layer_for(c, tail, keep)
    [(window, accepted)] = layer.inputs(B, 1)
    verify = jax.jit(layer.made.verify, donate_argnums=0)  # states go through it uncopied
    carry = jax.eval_shape(layer.fresh)
    self.verify = verify.lower(carry, window, layer.gates).compile()
    _, flight = jax.eval_shape(verify, carry, window, layer.gates)
    if tail == "select":
      one: Any = jax.jit(lambda S, rest, a: select(rest._replace(S=S), a, keep))
    else:
      one = jax.jit(lambda S, rest, a: layer.made.commit(rest._replace(S=S), a), donate_argnums=0)
    self.commit = one.lower(flight.S, flight._replace(S=None), accepted).compile()

  def verify_us(self) -> float:
    """Microseconds on the device."""
    layer = self.layer
    first, *rest = [(window, layer.gates) for window, _ in layer.inputs(self.B, 4)]
    inputs = [(layer.fresh(), *first), *((None, *x) for x in rest)]
    back = lambda args, out: (out[1].S, *args[1:])
    return mean_time(self.verify, inputs, calls=self.c.calls, carry=back)[0]

  def commit_us(self, lengths: np.ndarray) -> float:
    """The same of a flight that is committed again and again, with each row of `lengths` [n, B]."""
    layer = self.layer
    [(window, accepted)] = layer.inputs(self.B, 1)
    _, flight = self.verify(layer.fresh(), window, layer.gates)
    paths = [Accepted(accepted.path, jnp.asarray(n)) for n in lengths]
    inputs = [(flight.S, flight._replace(S=None), a) for a in paths]
    again = None if self.tail == "select" else lambda args, S: (S, *args[1:])
    return mean_time(self.commit, inputs, calls=self.c.calls, carry=again)[0]


def layer_for(c: Config, tail: str, keep: int) -> LayerStep:
  """A layer whose commit replays in this way."""
  kept: Any = "compact" if tail == "compact" else "dense"
  make = snapshot if tail == "all" else lambda spec: replay(spec, keep=keep, tail=kept)
  return LayerStep(
    "snapshot", layer_of(c.model, c.degree), c.window, OPS[c.ops], ACCEPTS["uniform"],
    pool=max(c.concurrency), make=make,
  )  # fmt: skip


def run(c: Config, record: Record) -> None:
  """BadInput: Mosaic kernels without a GPU. AssertionError: states are wrong; nothing is timed."""
  runs_here(f"ops = {c.ops}", OPS[c.ops])
  pairs = [(t, k) for t in c.tails for k in (c.keeps if t != "all" else (c.window,))]
  named = lambda p: f"{p[0]} keep {p[1]}"
  record.say("compiling")
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    wanted = [(p, B) for p in pairs if named(p) not in record.finished for B in c.concurrency]
    made = pool.map(lambda x: Variant(c, x[0][0], x[0][1], x[1]), wanted)
    variants = dict(zip(wanted, made, strict=True))
  for tail, keep in record.parts(pairs, name=named):
    layer_for(c, tail, keep).check()
    for B in c.concurrency:
      variant = variants.pop(((tail, keep), B))
      verify_us = variant.verify_us()
      for accepts in c.accepts:
        rng, counts = np.random.default_rng(0), accept_lengths(accepts, window=c.window)
        lengths = np.stack([draw_accepts(counts, rng, B, c.window) for _ in range(16)])
        tails = np.maximum(lengths - keep, 0)
        record(
          model=sizes(c.model).name, tail=tail, keep=keep, concurrency=B, accepts=accepts,
          accept_length=round(float(lengths.mean()), 3),
          rows_with_a_tail=round(float((tails > 0).mean()), 4),
          tail_length=round(float(tails[tails > 0].mean()) if tails.any() else 0.0, 3),
          commit_us=round(variant.commit_us(lengths), 2),
          verify_us=round(verify_us, 2), window=c.window, degree=c.degree, ops=c.ops,
          device=jax.devices()[0].device_kind,
        )  # fmt: skip


def figure(rows: list[Row]) -> Figure:
  """A panel a distribution: a layer's commit against concurrency, each way to replay."""
  accepts = list(dict.fromkeys(row["accepts"] for row in rows))
  across = min(3, len(accepts))
  down = -(-len(accepts) // across)
  fig = Figure(figsize=(3.4 * across, 3.2 * down))
  grid: Any = fig.subplots(down, across, squeeze=False, sharey=True)
  axes, unused = grid.flat[: len(accepts)], grid.flat[len(accepts) :]
  for ax in unused:
    ax.remove()
  ways = list(dict.fromkeys((row["tail"], row["keep"]) for row in rows))
  for ax, name in zip(axes, accepts, strict=True):
    some = [row for row in rows if row["accepts"] == name]
    for i, (tail, keep) in enumerate(ways):
      line = [row for row in some if (row["tail"], row["keep"]) == (tail, keep)]
      ax.plot([row["concurrency"] for row in line], [row["commit_us"] for row in line],
              label=f"{tail}, K = {keep}", **figures.look(i))  # fmt: skip
    share = max(row["rows_with_a_tail"] for row in some)
    ax.set_title(f"{name}: at most {100 * share:.0f} % of rows have a tail")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    some_at = sorted({row["concurrency"] for row in some})
    ax.set_xticks(some_at, list(map(str, some_at)))
    ax.set_xlabel("concurrency")
  for ax in grid[:, 0]:
    ax.set_ylabel("microseconds of a layer's commit")
  axes[0].legend()
  fig.suptitle(f"{rows[0]['model']}, {rows[0]['device']}, windows of {rows[0]['window']}")
  return fig


def claim(rows: list[Row], keep: int, concurrency: int, accepts: str) -> dict[str, float] | None:
  """Of the published cause at one point: microseconds of commit, selection, and a full cache.

  slower   verify + commit of the compacted tail over that of a window that keeps everything
  blamed   the selection's share of the compacted commit
  """
  at = {
    row["tail"]: row
    for row in rows
    if row["concurrency"] == concurrency and row["accepts"] == accepts
    if row["keep"] in (keep, row["window"])
  }
  if not {"compact", "select", "all"} <= set(at):
    return None
  total = lambda row: row["verify_us"] + row["commit_us"]
  return {
    "slower": total(at["compact"]) / total(at["all"]),
    "blamed": at["select"]["commit_us"] / at["compact"]["commit_us"],
  }


def table(rows: list[Row]) -> Table:
  """Does the published cause hold? K = 4 and 8 against all states, and what selection costs."""
  out = Table(title="compacted tails against keeping every state, verify and commit of a layer")
  for name in ("accept lengths", "concurrency", "K", "time / all", "selection / commit"):
    out.add_column(name, justify="right")
  for accepts in dict.fromkeys(row["accepts"] for row in rows):
    for n in dict.fromkeys(row["concurrency"] for row in rows):
      for keep in dict.fromkeys(row["keep"] for row in rows if row["tail"] == "compact"):
        if found := claim(rows, keep, n, accepts):
          out.add_row(
            accepts, str(n), str(keep), f"{found['slower']:.2f}", f"{found['blamed']:.2f}"
          )
  return out
