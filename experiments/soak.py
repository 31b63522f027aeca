"""Thousands of random steps of continuous batching under every scheme, each state replayed.

Requests are admitted, forked, retracted, resumed and evicted at random, with draft lengths from 0
to the window's, chains and trees, drafts that are right by chance and prefixes that a cache knows.
Every `every` steps each slot's recurrent states are compared with an independent replay of its own
stream: bit for bit where the scheme is exact, else within the budget of `experiments.witness`. So
are memories that enter the prefix cache. Texts are compared with plain decoding's by the margin
rule. A row is written only if all of it held; the first state or token that is wrong is an error.
"""

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.decoding.drafts import Drafter, anchors, nothing
from commit_schemes.decoding.engine import Engine, Text
from commit_schemes.decoding.loop import Marking
from commit_schemes.decoding.prefix_cache import Node, PrefixCache
from commit_schemes.decoding.schedule import Limits
from commit_schemes.decoding.slots import compiled
from commit_schemes.footprint import nbytes
from commit_schemes.model import Draft, model_memory
from experiments import figures
from experiments.record import Record, Row
from experiments.witness import Replica, budget, witnessed
from gdn import hybrid
from gdn.config import Config as ModelConfig
from gdn.layer import gate_params
from gdn.ops import XLA, Ops
from pallas_kernels import MOSAIC_GPU

TINY = ModelConfig(
  width=32, inner=32, layers=2, attention_every=2, key_heads=2, value_heads=4, key_dim=8,
  value_dim=8, query_heads=4, kv_heads=2, head_dim=8, rotary=4, window=24,
)  # fmt: skip
HEADS = ModelConfig(width=128, inner=128, layers=2, attention_every=2, window=64)

MODELS: Mapping[str, tuple[ModelConfig, str, Ops]] = MappingProxyType(
  {
    "tiny float32": (TINY, "float32", XLA),
    "128-wide heads, bfloat16, Mosaic kernels": (HEADS, "bfloat16", MOSAIC_GPU),
  }
)


@dataclass(frozen=True, kw_only=True)
class Config:
  """`steps` under each scheme; `block` is the prefix cache's, which keeps `entries` prefixes.

  `chains` are schemes whose drafts are chains only: the Mosaic snapshot kernel takes a tree only
  where every state is kept, and cannot see from a shape that it was given one.
  """

  schemes: tuple[str, ...] = tuple(SCHEMES)
  chains: tuple[str, ...] = ("replay_1", "replay_4", "replay_8", "replay_4_compact")
  model: str = "128-wide heads, bfloat16, Mosaic kernels"
  steps: int = 20_000
  every: int = 100
  window: int = 12
  slots: int = 8
  capacity: int = 256
  block: int = 64
  entries: int = 24
  prompts: int = 8
  seed: int = 0

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    for name, good, allowed in (
      ("schemes", set(self.schemes) <= set(SCHEMES), ", ".join(SCHEMES)),
      ("chains", set(self.chains) <= set(SCHEMES), ", ".join(SCHEMES)),
      ("model", self.model in MODELS, ", ".join(MODELS)),
      ("steps", self.steps >= 1, "at least 1"),
      ("every", self.every >= 1, "at least 1"),
      ("window", 2 <= self.window <= 16, "2 to 16"),
      ("slots", self.slots >= 2, "at least 2"),
      ("capacity", self.capacity >= 8 * self.window, f"at least {8 * self.window}"),
      ("block", 1 <= self.block <= self.capacity, f"1 to {self.capacity}"),
      ("entries", self.entries >= 0, "at least 0"),
      ("prompts", 1 <= self.prompts <= 256, "1 to 256"),
    ):
      if not good:
        raise ValueError(f"{name} = {getattr(self, name)!r}, allowed: {allowed}")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "smoke": Config(
      chains=(),
      model="tiny float32",
      steps=500,
      window=10,
      slots=4,
      capacity=96,
      block=8,
      prompts=5,
    ),
  }
)


class Wrong(AssertionError):
  """A state or a token that is not what an independent account says."""


def rigged(truth: np.ndarray, window: int, *, trees: bool = True) -> Drafter:
  """Drafts the known continuation with errors, in windows that are chains and (by turns) trees.

  truth  int [texts, L]; a text is known by its first token
  """
  L = truth.shape[1]
  table, t = jnp.asarray(truth), jnp.arange(window, dtype=jnp.int32)
  # Node 1 is a decoy: its sibling, node 2, carries the chain on.
  tree = jnp.where(t == 0, -1, jnp.where(t <= 2, 0, t - 1))
  depth = jnp.where(t < 2, t, t - 1)

  def slot(text, length):
    branching = (length % 3 == 1) & trees
    at = length - 1 + jnp.where(branching, depth, t)
    right = table[text[0] % truth.shape[0], jnp.minimum(at, L - 1)]
    spoil = ((length * 31 + at * 17 + text[0]) % 7 == 0) | (branching & (t == 1))
    return jnp.where(spoil, (right + 1) % 256, right), jnp.where(branching, tree, t - 1)

  def draft(text, length, behind=None) -> Draft:
    del behind
    tokens, parents = jax.vmap(slot)(text, length)
    tokens = jnp.where(t[None] == 0, anchors(text, length)[:, None], tokens)
    return Draft(tokens, parents, jnp.where(length > 0, window, 0).astype(jnp.int32))

  return draft


class World:
  """What all schemes share: the model, prompts, and plain decoding's text after each."""

  def __init__(self, c: Config):
    self.c = c
    self.config, dtype, self.ops = MODELS[c.model]
    self.dtype = jnp.dtype(dtype)
    self.params = hybrid.init(self.config, jax.random.key(c.seed), self.dtype)
    rng = np.random.default_rng(c.seed)
    lengths = rng.integers(2, c.capacity // 4, c.prompts)
    self.prompts = [(i, *map(int, rng.integers(0, 256, n))) for i, n in enumerate(lengths)]
    self.plain = self._plainly()
    self.truth = np.stack([self.plain[p].known for p in self.prompts]).astype(np.int32)

  def spec(self, window: int) -> Spec:
    dtypes = Dtypes(raw=self.dtype)
    return Spec(self.config.key_heads, window, self.ops, self.config.decay_channels, dtypes)

  def limits(self, window: int) -> Limits:
    return Limits(self.c.capacity, self.config.vocab, window)

  def _plainly(self) -> dict[tuple[int, ...], Text]:
    memory = model_memory(self.config, SCHEMES["snapshot"].make(self.spec(1)), self.ops)
    programs = compiled(self.params, self.config, memory, nothing, ops=self.ops)
    engine = Engine(programs, self.limits(1), slots=self.c.prompts, block=self.c.block)
    for p in self.prompts:
      engine.submit(p, p, tokens=self.c.capacity - len(p), draft=0)
    engine.run()
    return {p: engine.texts[p] for p in self.prompts}


def digest(memories: Any) -> str:
  """Every bit of it."""
  parts = [np.asarray(x).tobytes() for x in jax.tree.leaves(memories)]
  return hashlib.sha256(b"".join(parts)).hexdigest()


class Soak:
  """One scheme in the world: an engine, a replica of every request's states, and what was seen."""

  def __init__(self, world: World, name: str):
    c, self.world, self.scheme = world.c, world, SCHEMES[name]
    self.rng = np.random.default_rng(c.seed + 1)
    spec = world.spec(c.window)
    self.layers = [i for i in range(world.config.layers) if not world.config.is_attention(i)]
    self.gates = {
      i: jax.device_get(gate_params(world.params.layers[i].mixer, world.config))  # type: ignore[arg-type]
      for i in self.layers
    }
    state = witnessed(self.scheme.make(spec), spec, world.dtype)
    self.memory = model_memory(world.config, state, world.ops)
    self.materialize = jax.jit(self.memory.whole.materialize)
    programs = compiled(
      world.params, world.config, self.memory,
      rigged(world.truth, c.window, trees=name not in c.chains), ops=world.ops,
      marking=Marking(c.block, max(1, c.slots // 2)),
    )  # fmt: skip
    self.programs = programs._replace(admit=self._admit, step=self._step)
    self._inner = programs
    empty = programs.empty()
    cache = PrefixCache(c.entries * nbytes(empty), c.block, empty)
    self.engine = Engine(
      self.programs, world.limits(c.window), slots=c.slots, block=c.block, cache=cache
    )
    self.replicas: dict[Hashable, dict[int, Replica]] = {}
    self.digests: WeakKeyDictionary[Node, str] = WeakKeyDictionary()
    self.seen = dict.fromkeys(
      ("requests", "forks", "retracted", "resumed", "evicted", "prefix_hits", "marks",
       "states_compared", "texts_compared", "texts_differing", "steps", "emitted"), 0
    )  # fmt: skip
    self.worst = 0.0  # of a state's error relative to its budget

  def _name(self, slot: int) -> Hashable:
    request = self.engine.schedule.running[slot]
    assert request is not None
    return request.name

  def _admit(self, state, slot, text, length, memories):
    """The engine's admission; the new tenant's states are the roots of its replicas."""
    name, host = self._name(int(slot[0])), jax.device_get(memories)
    self.replicas[name] = {i: Replica(host[i].recurrent) for i in self.layers}
    self.seen["prefix_hits"] += self.engine.texts[name].restored > 0
    return self._inner.admit(state, slot, text, length, memories)

  def _step(self, state, batch):
    """The engine's step; what each request has committed goes to its replicas."""
    state, report = self._inner.step(state, batch)
    logs = jax.device_get({i: state.carry[i].recurrent.log for i in self.layers})
    for slot in np.flatnonzero(np.asarray(batch.slots) >= 0):
      for i, replica in self.replicas[self._name(int(slot))].items():
        n = logs[i].length[slot]
        replica.add(jax.tree.map(lambda x: x[slot, :n], logs[i].raw))  # noqa: B023
    self._check_marks(batch, report)
    return state, report

  def _check_marks(self, batch, report) -> None:
    self.seen["emitted"] += int(report.emitted.sum())
    rows, depths, emitted = jax.device_get((report.marks.row, report.marks.depth, report.emitted))
    for at, row in enumerate(rows):
      if row < 0:
        continue
      name = self._name(row)
      known = len(self.engine.texts[name].known) + int(emitted[row])  # the engine hears of it next
      got = jax.device_get(jax.tree.map(lambda x: x[at : at + 1], report.marks.memories))  # noqa: B023
      self._compare(name, got, leave=known - 1 - int(depths[at]), what=f"mark at {depths[at]}")
      self.seen["marks"] += 1

  def _compare(self, name: Hashable, memories: Any, *, leave: int = 0, what: str = "state") -> None:
    """Wrong: a layer's state is not the replica's. `leave` tokens are not in the memories yet."""
    for i, replica in self.replicas[name].items():
      replica.catch_up(self.world.ops, self.gates[i], leave, wide=not self.scheme.exact)
      got = np.asarray(memories[i].recurrent)
      where = f"{what} of layer {i}, request {name!r}, after {self.seen['steps']} steps"
      if self.scheme.exact:
        if not np.array_equal(got, replica.S):
          raise Wrong(f"{where}: {np.sum(got != replica.S)} of {got.size} elements differ")
      else:
        error = float(np.sqrt(np.mean(np.square(got[0].astype(np.float64) - replica.wide))))
        allowed = budget(replica, records=not self.scheme.lossless)
        if not error <= allowed:
          raise Wrong(f"{where}: rms error {error:.2e}, allowed {allowed:.2e}")
        self.worst = max(self.worst, error / allowed if allowed else 0.0)
      self.seen["states_compared"] += 1

  def check_states(self) -> None:
    """Every running slot's materialised states against its request's replicas."""
    for slot, request in enumerate(self.engine.schedule.running):
      if request is not None:
        rows = self._inner.save(self.engine.state, jnp.asarray([slot], jnp.int32))
        self._compare(request.name, jax.device_get(self.materialize(rows.carry)))

  def check_cache(self) -> None:
    """What the cache holds for a text is, bit for bit, what it has held from the first time."""
    assert self.engine.cache is not None
    for node in self.engine.cache.nodes():
      if node.memories is not None:
        if len(node.text()) != node.depth or node.depth % self.world.c.block:
          raise Wrong(f"an entry of depth {node.depth} lies at {len(node.text())} tokens")
        if self.digests.setdefault(node, (d := digest(node.memories))) != d:
          raise Wrong(f"the entry of depth {node.depth} has changed")

  def check_text(self, name: Hashable) -> None:
    """Wrong: a finished text is not plain decoding's, and no close call either."""
    text = self.engine.texts[name]
    want = self.world.plain[self.world.prompts[text.known[0]]]
    n, skip = len(text.tokens), text.prompt - want.prompt
    differs = np.flatnonzero(np.asarray(text.tokens) != np.asarray(want.tokens[skip : skip + n]))
    self.seen["texts_compared"] += 1
    if len(differs):
      at = int(differs[0])
      ours, plain = np.stack(text.top[: at + 1]), np.stack(want.top[skip : skip + at + 1])
      error = float(np.abs(ours[:at] - plain[:at]).sum(1).max(initial=0.0))
      margin = float(plain[at, 0] - plain[at, 1])
      if margin > error:
        raise Wrong(f"token {at} of {name!r}: margin {margin:.1e}, logit error {error:.1e}")
      self.seen["texts_differing"] += 1

  def submit(self) -> None:
    """A prompt, or one with the beginning of its known answer: a second turn."""
    rng, c = self.rng, self.world.c
    prompt = self.world.prompts[rng.integers(c.prompts)]
    turn = int(rng.integers(0, c.capacity // 3)) if rng.random() < 0.5 else 0
    prompt = tuple(self.world.plain[prompt].known[: len(prompt) + turn])
    tokens = int(rng.integers(1, c.capacity - len(prompt) + 1))
    self.engine.submit(
      self.seen["requests"], prompt, tokens=tokens, draft=int(rng.integers(0, c.window))
    )
    self.seen["requests"] += 1

  def disturb(self) -> None:
    """One of the things that happen to requests."""
    rng, engine, seen = self.rng, self.engine, self.seen
    running = [r for r in engine.schedule.running if r is not None]
    what = rng.random()
    if running and what < 0.05:
      victim = running[rng.integers(len(running))]
      engine.retract(victim.name)
      seen["retracted"] += 1
    elif running and what < 0.10 and len(engine.schedule.waiting) < 3:
      source = running[rng.integers(len(running))]
      done, room = len(engine.texts[source.name].tokens), self.world.c.capacity
      tokens = int(rng.integers(done + 1, room - len(source.prompt) + 1))
      new = seen["requests"]
      draft = int(rng.integers(0, self.world.c.window))
      engine.fork(source.name, new, tokens=tokens, draft=draft)
      self.replicas[new] = {i: r.copy() for i, r in self.replicas[source.name].items()}
      seen["requests"] += 1
      seen["forks"] += 1
    elif engine.schedule.parked and what < 0.25:
      engine.resume(engine.schedule.parked[0].name)
      seen["resumed"] += 1
    elif running and what < 0.27:
      name = running[rng.integers(len(running))].name
      engine.evict(name)
      self.forget(name)
      seen["evicted"] += 1

  def forget(self, name: Hashable) -> None:
    del self.replicas[name], self.engine.texts[name]

  def row(self) -> Row:
    """What has been compared so far, and how; the scheme's name is the caller's."""
    c = self.world.c
    return {
      "model": c.model,
      "compared": "bitwise" if self.scheme.exact else "budget",
      "error_over_budget": round(self.worst, 4),
      "window": c.window,
      "slots": c.slots,
      **self.seen,
      "device": jax.devices()[0].device_kind,
    }

  def step(self) -> None:
    while len(self.engine.schedule.waiting) < 2:
      self.submit()
    self.disturb()
    for name in self.engine.step():
      self.check_text(name)
      self.forget(name)
    self.seen["steps"] += 1
    if self.seen["steps"] % self.world.c.every == 0:
      self.check_states()
      self.check_cache()


def run(c: Config, record: Record) -> None:
  record.say("plain decoding")
  world = World(c)
  for name in record.parts(c.schemes):
    soak = Soak(world, name)
    for i in range(c.steps):
      soak.step()
      record.advance(i / c.steps)
    record(scheme=name, **soak.row())


COUNTED = ("states_compared", "marks", "texts_compared", "prefix_hits", "forks", "resumed")


def figure(rows: list[Row]) -> Figure:
  """How often each thing has happened and been compared, and errors relative to their budgets."""
  fig = Figure(figsize=(9.0, 3.6))
  counts, errors = fig.subplots(1, 2, width_ratios=(3, 2))
  names = [row["scheme"] for row in rows]
  for i, what in enumerate(COUNTED):
    counts.plot([row[what] for row in rows], names, label=what.replace("_", " "),
                **figures.look(i) | {"linestyle": "none"})  # fmt: skip
  counts.set_xscale("symlog")
  counts.set_title(f"counts in {rows[0]['steps']:,} steps; nothing differed")
  counts.legend()
  errors.barh(names, [row["error_over_budget"] for row in rows], color="0.6")
  errors.set_title("largest state error / budget; none: bitwise")
  errors.set_yticklabels([])
  for ax in (counts, errors):
    ax.invert_yaxis()
  return fig
