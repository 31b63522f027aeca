"""One recurrent layer under a scheme, verify and commit together, on replayed accept lengths.

What `concurrency` and `tail` time. The pool has more slots than a batch, taken in turn, so that no
cache holds the states; every slot has a past, so that rings stand at every phase of their cycle.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import gcd
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes import SCHEMES, CommitScheme, Spec
from commit_schemes.contract import Topology
from commit_schemes.footprint import LayerShape
from experiments.clock import Timing, cycle_time
from experiments.provenance import RESULTS
from experiments.record import BadInput, read_rows
from experiments.step_inputs import gate_params
from experiments.witness import Replica, bitwise, budget
from gdn.ops import XLA, Ops
from gdn.typing import Accepted, GateParams, Raw, Window
from gdn.window import chain
from pallas_kernels import MOSAIC_GPU

OPS: Mapping[str, Ops] = MappingProxyType({"mosaic": MOSAIC_GPU, "xla": XLA})

# Prompt lookup with windows of 16 after eight held-out prompts of 512 bytes, 384 tokens each,
# greedy, by the bundled model in float32 (bytes, not subword tokens): accept length -> windows.
PROMPT_LOOKUP = {
  1: 138, 2: 90, 3: 6, 4: 8, 5: 7, 6: 6, 7: 11, 8: 9, 9: 5, 10: 3, 11: 7, 12: 3, 13: 32, 14: 2,
  16: 120,
}  # fmt: skip


def geometric(mean: float, longest: int) -> dict[int, float]:
  """A chain whose every draft is right with the same chance, cut off at `longest`: length -> p."""
  n = np.arange(1, longest + 1)
  at = lambda p: float(np.sum(n * p ** (n - 1)) / np.sum(p ** (n - 1)))
  low, high = 0.0, 1.0
  for _ in range(60):
    middle = (low + high) / 2
    low, high = (middle, high) if at(middle) < mean else (low, middle)
  return {int(i): float(low ** (i - 1)) for i in n}


Counts = Mapping[int, float]
ACCEPTS: Mapping[str, Counts] = MappingProxyType(
  {
    "prompt_lookup": PROMPT_LOOKUP,
    "geometric_4.2": geometric(4.2, 16),  # the mean of SGLang PR 28010
    "none": {1: 1.0},
    "uniform": dict.fromkeys(range(1, 17), 1.0),
    "full": {16: 1.0},
  }
)


TRAINED = "block"  # the trained block drafter's, from the rows of `accept_length`
NAMES = (*ACCEPTS, TRAINED)


def once(values: Sequence[object]) -> bool:
  """None of them comes twice."""
  return len(set(values)) == len(values)


def accept_lengths(
  name: str, rows: Path = RESULTS / "accept_length" / "rows.csv", *, window: int = 1
) -> Counts:
  """A distribution by name, accept length -> weight. BadInput: its rows have not been measured, or
  in narrower windows, which cut them off."""
  if name != TRAINED:
    return ACCEPTS[name]
  try:
    measured = [row for row in read_rows(rows) if row.get("drafter") == TRAINED]
  except OSError as e:
    raise BadInput(f"accepts = {name}: {rows}: {e.strerror}; `run accept_length` writes it") from e
  if not measured:
    raise BadInput(f"accepts = {name}: {rows} has no rows of it; `run accept_length` writes them")
  widest = max(row["block"] for row in measured)
  if widest < window:
    raise BadInput(
      f"window = {window}, allowed with accepts = {name}: at most {widest}, as measured"
    )
  counts: dict[int, float] = {}
  for row in measured:
    if row["block"] == widest:
      counts[row["tokens"]] = counts.get(row["tokens"], 0.0) + row["steps"]
  return counts


def draw_accepts(counts: Counts, rng: np.random.Generator, size: Any, T: int) -> np.ndarray:
  """Accept lengths, the anchor included, from a distribution; cut off at the window."""
  lengths, weight = np.asarray(list(counts)), np.asarray(list(counts.values()), float)
  return np.minimum(rng.choice(lengths, size, p=weight / weight.sum()), T).astype(np.int32)


def runs_here(name: str, ops: Ops) -> None:
  """BadInput: `name` are Mosaic kernels, and there is no GPU."""
  if ops is MOSAIC_GPU and jax.default_backend() != "gpu":
    raise BadInput(f"{name} needs a GPU, jax runs on {jax.default_backend()}")


class Error(NamedTuple):
  """Of states: over the budget of `witness` (0 where bitwise), and relative to float64."""

  over_budget: float
  relative: float


class LayerStep:
  """`step(carry, window, gates, accepted) -> (carry, o)` and inputs for it.

  pool      slots
  accepts   length -> weight
  make      a variant of the scheme, with the promises of `name`
  topology  of the windows that `step` will be given; those of `inputs` are chains
  """

  def __init__(
    self,
    name: str,
    shape: LayerShape,
    T: int,
    ops: Ops,
    accepts: Counts,
    *,
    pool: int = 64,
    make: Callable[[Spec], CommitScheme] | None = None,
    topology: Topology = "chain",
  ):
    self.scheme, self.shape, self.T, self.ops, self.pool = SCHEMES[name], shape, T, ops, pool
    self.accepts = accepts
    self.gates: GateParams = gate_params(shape, np.random.default_rng(0))
    spec = Spec(shape.key_heads, T, ops, shape.channels, topology=topology)
    self.made = made = (make or self.scheme.make)(spec)

    def step(carry, window, gates, accepted):
      o, flight = made.verify(carry, window, gates)
      return made.commit(flight, accepted), o

    self._step: Any = jax.jit(step, donate_argnums=0)
    self._ready: dict[int, Callable[..., Any]] = {}
    self.materialize = jax.jit(made.materialize)

  def step(self, carry: Any, window: Window, gates: GateParams, accepted: Accepted) -> Any:
    """(carry, o) after verify and commit; the carry that is given is donated."""
    step = self._ready.get(window.slots.shape[0], self._step)
    return step(carry, window, gates, accepted)

  def ready(self, *batches: int) -> "LayerStep":
    """Itself, with `step` compiled for these batches: from a thread, ahead of its turn."""
    carry = jax.eval_shape(self.fresh)
    for B in batches:
      [(window, accepted)] = self.inputs(B, 1)
      self._ready[B] = self._step.lower(carry, window, self.gates, accepted).compile()
    return self

  def fresh(self) -> Any:
    """A carry of random states."""
    s = self.shape
    size = (self.pool, s.value_heads, s.value_dim, s.key_dim)
    make = lambda: self.made.init(0.3 * jax.random.normal(jax.random.key(1), size, jnp.float32))
    return jax.jit(make)()

  def inputs(self, B: int, count: int, seed: int = 0) -> Iterator[tuple[Window, Accepted]]:
    """Chains of T real nodes in the next B slots of the pool, and what of them is accepted."""
    T, rng = self.T, np.random.default_rng(seed)
    draw = partial(self._raw, B)
    raws = [draw(jax.random.key(seed + i)) for i in range(min(count, 4))]
    parents = jnp.broadcast_to(chain(T)[None], (B, T))
    path = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], (B, T))
    for i in range(count):
      slots = jnp.asarray((i * B + np.arange(B)) % self.pool, jnp.int32)
      length = jnp.asarray(draw_accepts(self.accepts, rng, B, T))
      window = Window(raws[i % len(raws)], parents, jnp.full(B, T, jnp.int32), slots)
      yield window, Accepted(path, length)

  def _raw(self, B: int, key) -> Raw:
    s, T, keys = self.shape, self.T, jax.random.split(key, 5)
    shapes = (
      (s.key_heads, s.key_dim), (s.key_heads, s.key_dim), (s.value_heads, s.value_dim),
      (s.value_heads, s.channels), (s.value_heads,),
    )  # fmt: skip
    return Raw(*(
      jax.random.normal(k, (B, T, *x), jnp.bfloat16) for k, x in zip(keys, shapes, strict=True)
    ))  # fmt: skip

  def check(self, windows: int = 6) -> float:
    """Error of the states over its budget; 0 if bitwise. AssertionError: above it."""
    return self.error(windows).over_budget

  def error(self, windows: int = 6) -> Error:
    """Of the states after some windows. AssertionError: not bitwise, or above the budget."""
    B = min(4, self.pool)
    carry = self.fresh()
    S = np.asarray(self.materialize(carry))
    followed = (0, B - 1)
    replicas = {slot: Replica(S[slot : slot + 1]) for slot in followed}
    rng = np.random.default_rng(7)
    for i, (window, accepted) in enumerate(self.inputs(B, windows, seed=3)):
      length = draw_accepts(self.accepts, rng, B, self.T)
      length[0] = (1, self.T)[i % 2]
      window = window._replace(slots=jnp.arange(B, dtype=jnp.int32))
      accepted = Accepted(accepted.path, jnp.asarray(length))
      carry, _ = self.step(carry, window, self.gates, accepted)
      for slot, replica in replicas.items():
        replica.add(jax.tree.map(lambda x: np.asarray(x[slot, : length[slot]]), window.raw))  # noqa: B023
    got, exact, found = np.asarray(self.materialize(carry)), bitwise(self.scheme, self.ops), []
    rms = lambda x: float(np.sqrt(np.mean(np.square(x))))
    for slot, replica in replicas.items():
      replica.catch_up(self.ops, jax.device_get(self.gates), wide=True)
      error, over = rms(got[slot].astype(np.float64) - replica.wide), 0.0
      if exact:
        assert np.array_equal(got[slot], replica.S[0]), f"slot {slot}: not bitwise a replay"
      else:
        allowed = budget(replica, self.scheme, self.ops, self.T)
        assert error <= allowed, f"slot {slot}: rms error {error:.2e}, allowed {allowed:.2e}"
        over = error / allowed
      found.append(Error(over, error / rms(replica.wide)))
    return Error(*map(max, zip(*found, strict=True)))

  def used(self) -> Any:
    """A carry whose slots have all been through windows, each with accept lengths of its own."""
    carry = self.fresh()
    for window, accepted in self.inputs(self.pool, 6, seed=11):
      carry, _ = self.step(carry, window, self.gates, accepted)
    return carry

  def staggered(self, B: int, cycle: int) -> Any:
    """A carry whose slot i has been through i modulo `cycle` windows; B divides the pool."""
    carry, windows = self.fresh(), list(self.inputs(B, self.pool // B))
    for i in range(cycle):
      for window, accepted in windows:
        length = jnp.where(window.slots % cycle > i, accepted.length, 0)
        carry, _ = self.step(carry, window, self.gates, accepted._replace(length=length))
    return carry

  def cycle(self, carry: Any, B: int, cycle: int) -> Timing:
    """Time of a step of B slots: consecutive slots stand at consecutive phases of the cycle."""
    first, *rest = [(w, self.gates, a) for w, a in self.inputs(B, self.pool // gcd(B, self.pool))]
    inputs: list[tuple[Any, ...]] = [(carry, *first), *((None, *x) for x in rest)]
    back = lambda args, out: (out[0], *args[1:])
    return cycle_time(self.step, inputs, cycle=cycle, carry=back)
