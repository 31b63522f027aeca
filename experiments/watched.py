"""An engine of which nothing is believed: states, marks, cache entries and texts are all compared.

The programs of the engine are wrapped. What a step commits goes to replicas that are kept by
request (experiments/witness.py), so a state in the wrong slot, at the wrong depth or without its
pending history is one that differs.
"""

import hashlib
from collections.abc import Hashable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes import SCHEMES
from commit_schemes.decoding.engine import Engine
from commit_schemes.decoding.loop import Marking
from commit_schemes.decoding.prefix_cache import Node, PrefixCache
from commit_schemes.decoding.slots import compiled
from commit_schemes.footprint import nbytes
from commit_schemes.model import model_memory
from experiments.record import Row
from experiments.soak_world import MODELS, World, first_difference, rigged
from experiments.witness import Replica, bitwise, budget, witnessed
from gdn.layer import gate_params

COUNTS = (
  "requests", "forks", "retracted", "resumed", "evicted", "prefix_hits", "marks",
  "states_compared", "texts_compared", "texts_differing", "steps", "emitted",
)  # fmt: skip


class Wrong(AssertionError):
  """A state or a token that is not what an independent account says."""


def digest(memories: Any) -> str:
  """Every bit of it."""
  parts = [np.asarray(x).tobytes() for x in jax.tree.leaves(memories)]
  return hashlib.sha256(b"".join(parts)).hexdigest()


class Watched:
  """One scheme in the world: an engine, a replica of every request's states, and what was seen."""

  def __init__(self, world: World, name: str):
    c, self.world, self.scheme = world.c, world, SCHEMES[name]
    self.exact = bitwise(self.scheme, world.ops)
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
      rigged(world.truth, c.window, world.config.vocab), ops=world.ops,
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
    self.seen = dict.fromkeys(COUNTS, 0)
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
      replica.catch_up(self.world.ops, self.gates[i], leave, wide=not self.exact)
      got = np.asarray(memories[i].recurrent)
      where = f"{what} of layer {i}, request {name!r}, after {self.seen['steps']} steps"
      if self.exact:
        if not np.array_equal(got, replica.S):
          raise Wrong(f"{where}: {np.sum(got != replica.S)} of {got.size} elements differ")
      else:
        error = float(np.sqrt(np.mean(np.square(got[0].astype(np.float64) - replica.wide))))
        allowed = budget(replica, self.scheme, self.world.ops, self.world.c.window)
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
    """Wrong: a finished text is not plain decoding's, and no close call either.

    A call is close within the error that the top-2 logits have had earlier in this text, or within
    the model's own noise.
    """
    text = self.engine.texts[name]
    want = self.world.plain[self.world.prompts[text.known[0]]]
    self.seen["texts_compared"] += 1
    at, error = first_difference(text, want)
    if at is not None:
      top = want.top[text.prompt - want.prompt + at]
      margin, allowed = float(top[0] - top[1]), max(error, self.world.noise)
      if margin > allowed:
        raise Wrong(f"token {at} of {name!r}: margin {margin:.1e}, logit error {allowed:.1e}")
      self.seen["texts_differing"] += 1

  def forget(self, name: Hashable) -> None:
    del self.replicas[name], self.engine.texts[name]

  def row(self) -> Row:
    """What has been compared so far, and how; the scheme's name is the caller's."""
    c = self.world.c
    return {
      "model": c.model if c.model in MODELS else Path(c.model).name,
      "compared": "bitwise" if self.exact else "budget",
      "error_over_budget": round(self.worst, 4),
      "logit_noise": self.world.noise,
      "window": c.window,
      "slots": c.slots,
      **self.seen,
      "device": jax.devices()[0].device_kind,
    }
