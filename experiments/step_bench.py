"""One case of `step_time`: compiled, checked on hostile rows and as it will be timed, timed."""

import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError

from commit_schemes.footprint import LayerShape
from experiments import ahead, step_inputs, step_programs
from experiments.clock import Timing, copy_ceiling, device_time, on_gpu
from experiments.processes import workers
from experiments.step_args import Case
from experiments.step_cases import Kind
from experiments.step_checks import Off, Pairs, largest
from experiments.step_inputs import CHAINS, gate_params, sample
from experiments.step_programs import Programs, Wanted
from gdn.typing import GateParams, Window
from pallas_kernels import tuning

# Relative error of outputs and states before they are rounded, beyond which nothing is timed. The
# target is half of it, and no kernel that was right has been above that; one was off by 2.6e-6 when
# its compiler had lost a register.
LIMIT = 2e-6
BF16 = 2.0**-8
REPEATS = 64
SEVERAL = 20  # slots
COLD = 1 << 28  # bytes: more than any cache holds


@jax.jit
def unlike(x: Any, y: Any) -> jax.Array:
  """How many elements of two trees differ; NaN is NaN."""
  differ = lambda x, y: jnp.sum((x != y) & ~((x != x) & (y != y)), dtype=jnp.int32)
  return sum(jax.tree.leaves(jax.tree.map(differ, x, y)), jnp.int32(0))


def later(args: tuple[Any, ...], donated: int) -> tuple[Any, ...]:
  """Arguments without what the call before leaves to this one, which a kind's `carry` puts in. The
  pool stays: a kernel that does not read it does not consume it."""
  return (*args[:1], *(None,) * (donated - 1), *args[max(donated, 1) :])


class Bench:
  """A layer's pool and parameters, and the programs of its cases. `slots` are those of the pool.

  `mosaic` says that a case in whose program there is no Mosaic kernel is not to be timed. So many
  other `processes` compile for the device.
  """

  def __init__(
    self, kinds: Mapping[str, Kind], shape: LayerShape, slots: int, calls: int, seed: int, *,
    mosaic: bool, processes: int = 0,
  ):  # fmt: skip
    self.kinds, self.shape, self.slots, self.calls = kinds, shape, slots, calls
    self.mosaic, self.seed, self.rng = mosaic, seed, np.random.default_rng(seed)
    self.ceiling = copy_ceiling(2048 if on_gpu() else 16)
    # They share one interpreter, or wait for the other processes.
    self.threads = ThreadPoolExecutor(processes or min(4, os.cpu_count() or 1))
    self.others = workers(processes, {"JAX_PLATFORMS": "cpu"}) if processes else None
    self._programs: dict[tuple[Case, bool], Future] = {}
    self._errors: dict[Case, float] = {}
    self._states: dict[str, jax.Array] = {}
    self._drawn: dict[Case, list[tuple[Any, ...]]] = {}
    self.evict = jax.jit(lambda x: jnp.broadcast_to(x, (COLD // 4,)))  # from every cache

  @cache  # noqa: B019, there is one bench a run
  def params(self, decay: str) -> GateParams:
    layer = Case("", "", decay, 1, 1).layer(self.shape)
    return gate_params(layer, np.random.default_rng(self.seed))

  def states(self, dtype: str) -> jax.Array:
    """The pool in one dtype; of another dtype there is none at the same time."""
    if dtype not in self._states:
      s = self.shape
      shape = (self.slots, s.value_heads, s.value_dim, s.key_dim)
      make = lambda: (0.3 * jax.random.normal(jax.random.key(1), shape, jnp.float32)).astype(dtype)
      self._states = {dtype: jax.jit(make)()}
    return self._states[dtype]

  def wanted(self, case: Case, **more: Any) -> Wanted:
    return Wanted(case, self.shape, self.slots, **more)

  def compiled(self, w: Wanted) -> Programs:
    """Programs that make the arguments behind the pool, and that run the case."""
    case, kind = w.case, self.kinds[w.case.kernel]
    if self.others is None or not step_programs.kernel_alone(kind, case):
      return step_programs.here(kind, w, mosaic=self.mosaic)
    try:
      soon = self.others.submit(step_programs.elsewhere, w)
      return step_programs.made(kind, w), ahead.unpacked(soon.result())
    except (BrokenExecutor, JaxRuntimeError) as e:
      warnings.warn(f"compiled here, not beside: {type(e).__name__}: {str(e)[:200]}", stacklevel=1)
      return step_programs.here(kind, w, mosaic=self.mosaic)

  def asked(self, case: Case) -> tuning.Asked:
    """The kernel of a case and its default. NotImplementedError: it has none."""
    if self.others is None:
      return step_programs.asked(self.wanted(case), self.kinds[case.kernel])
    return self.others.submit(step_programs.asked, self.wanted(case)).result()

  def program(self, case: Case, *, wide: bool = False) -> Future:
    """Compiled on another thread, so that what is asked for early is there when it is needed."""
    key = case, wide
    if key not in self._programs:
      self._programs[key] = self.threads.submit(self.compiled, self.wanted(case, wide=wide))
    return self._programs[key]

  def close(self) -> None:
    """Nothing more is compiled."""
    for pool in (self.threads, self.others):
      if pool is not None:
        pool.shutdown(wait=False, cancel_futures=True)

  @staticmethod
  def stand_in(case: Case) -> Case:
    """The shape that is checked on hostile rows: one slot, where a head has two blocks, or so many
    that some blocks go through more than one item and use their buffers again."""
    T = 96 if case.window > 64 else case.window
    return case._replace(batch=1 if case.batch == 1 else SEVERAL, window=T)

  def prefetch(self, cases: list[Case]) -> None:
    for case in cases:
      self.program(self.stand_in(case), wide=True)
      self.program(case)

  def window(self, case: Case, kinds: Sequence[str] = ()) -> Window:
    """Of rows that are hard, one of each kind, or of plain ones."""
    layer, slots = case.layer(self.shape), self.rng.permutation(self.slots)[: case.batch]
    if kinds:
      return step_inputs.window(layer, self.rng, case.window, kinds, slots)
    key = jax.random.key(int(self.rng.integers(2**31)))
    return step_inputs.plain(layer, case.window, jnp.asarray(slots, jnp.int32), key)

  def turns(self, case: Case) -> int:
    """Inputs that calls take in turn: more than a cache holds, or one for each call."""
    needed = -(
      -COLD // int(case.batch * self.kinds[case.kernel].bytes(case.layer(self.shape), case))
    )
    return max(2, min(needed, self.calls + 3))

  def _rounding(self, case: Case, name: str) -> float:
    """One rounding of what lies in a narrow state, beside it, or behind it."""
    names = (
      ("S", "states", "u", "k", "o") if self.kinds[case.kernel].donated > 1 else ("S", "states")
    )
    return BF16 if case.state != "float32" and name in names else 0.0

  def _pairs(self, case: Case, programs: Any, w: Window, rows: int, heads: int) -> Pairs:
    """What the kind's check compares of one call; a donated pool is gone afterwards."""
    (make, call), kind, p = programs, self.kinds[case.kernel], self.params(case.decay)
    S = self.states(case.state)
    some = sample(self.rng, self.shape, case.batch, rows, heads)
    args = make(w, p)
    roots, n = some.states(S, w.slots), max(kind.donated - 1, 0)
    out = call(S, *jax.tree.map(jnp.copy, args[:n]), *args[n:])
    if S.is_deleted():
      self._states = {}
    return kind.check(p, roots, args, out, some)

  def error(self, case: Case) -> float:
    """The largest error on hostile rows, outputs not yet rounded. Off: above the limit."""
    case = self.stand_in(case)
    if case not in self._errors:
      # In a narrower pool a branch starts from the rounded state of its parent.
      chains = case.state != "float32" and case.kernel.startswith("snapshot")
      hostile = CHAINS if chains else self.kinds[case.kernel].hostile
      limit = lambda name: LIMIT + self._rounding(case, name)
      programs, rows = self.program(case, wide=True).result(), 16 if case.window <= 16 else 8
      self._errors[case] = max(
        largest(self._pairs(case, programs, self.window(case, list(kinds)), rows, 4), limit)
        for kinds in np.resize(hostile, (-(-len(hostile) // case.batch), case.batch))
      )
    return self._errors[case]

  def repeat(self, case: Case, programs: Any = None, times: int = REPEATS) -> None:
    """Off: the same call does not always leave the same bits, so lanes race for something."""
    (make, call), kind = programs or self.program(case).result(), self.kinds[case.kernel]
    args = make(self.window(case), self.params(case.decay))
    n = max(kind.donated - 1, 0)

    def once() -> Any:
      S = self.states(case.state)
      S = jnp.copy(S) if kind.donated else S
      return call(S, *jax.tree.map(jnp.copy, args[:n]), *args[n:])

    first = once()
    if different := int(sum(unlike(first, once()) for _ in range(times))):
      raise Off(f"{different} elements in {times} repetitions of a call are not the same")

  def check(self, case: Case, programs: Any) -> None:
    """Off: the very program that is timed is wrong, or not the same each time."""
    kind, few = self.kinds[case.kernel], 4 if case.window <= 16 else 2 if case.window <= 64 else 1
    self.repeat(case, programs)
    largest(
      self._pairs(case, programs, self.window(case), few, few),
      lambda name: LIMIT + max(self._rounding(case, name), BF16 * (name in kind.rounds)),
    )

  def inputs(self, case: Case, make: Any) -> list[tuple[Any, ...]]:
    """Of calls that take them in turn. They are drawn once for all configurations of a case."""
    donated, S = self.kinds[case.kernel].donated, self.states(case.state)
    if case not in self._drawn:
      draw = lambda: (S, *make(self.window(case), self.params(case.decay)))
      others = [later(draw(), donated)[1:] for _ in range(self.turns(case) - 1)]
      self._drawn = {case: [draw()[1:], *others]}
    first, *others = self._drawn[case]
    n = max(donated - 1, 0)  # what the first call takes over
    first = (*jax.tree.map(jnp.copy, first[:n]), *first[n:])
    return [(S, *args) for args in (first, *others)]

  def clock(self, case: Case, programs: Any) -> Timing:
    """Its time, whether it is right or not."""
    kind, (make, call) = self.kinds[case.kernel], programs
    inputs = self.inputs(case, make)
    jax.block_until_ready(self.evict(jnp.float32(1)))
    carry = kind.carry if kind.donated else None
    try:
      ours = self.mosaic and kind.mosaic and case.decay not in kind.xla_too
      only = "mosaic_gpu" if ours else ""
      return device_time(call, inputs, calls=self.calls, carry=carry, only=only)
    finally:
      if kind.donated:  # the pool has moved from call to call
        self._states = {}

  def time(self, case: Case) -> Timing:
    """Of a case whose error is known. Off: the very program that is timed is wrong."""
    programs = self.program(case).result()
    self.check(case, programs)
    return self.clock(case, programs)
