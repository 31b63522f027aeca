"""Device time of a jitted function: CUPTI's record of each kernel that it launched.

Where there is no GPU, times are by the wall, so that experiments can be tried anywhere.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Carry = Callable[[tuple[Any, ...], Any], tuple[Any, ...]]


class Timing(NamedTuple):
  """Microseconds on the device: quartiles over calls, and kernels launched by one call."""

  median: float
  low: float
  high: float
  calls: int
  kernels: float


def on_gpu() -> bool:
  return jax.default_backend() == "gpu"


def in_turn(
  f: Callable[..., Any],
  inputs: Sequence[tuple[Any, ...]],
  carry: Carry | None,
  wait: Callable[[Any], Any] = jax.block_until_ready,
) -> Callable[[int], None]:
  """run(n) calls f on the next n of the inputs, starting over after the last, and waits."""
  threaded, count, out = carry or (lambda args, out: args), 0, None

  def run(n: int) -> None:
    nonlocal count, out
    for _ in range(n):
      args = inputs[count % len(inputs)]
      out = f(*(threaded(args, out) if count else args))
      count += 1
    wait(out)

  return run


def kernels(run: Callable[[], Any]) -> list[tuple[str, float]]:
  """Name and microseconds of every kernel while `run`, which waits for its results, is called."""
  # With jax's plugin for a GPU, and this file is imported without one.
  from jax._src.lib import mosaic_gpu

  ext = mosaic_gpu._mosaic_gpu_ext
  ext._cupti_init()
  try:
    run()
  finally:
    records = ext._cupti_get_timings(True)
  return [(name, 1e3 * ms) for name, ms in records]


def summary(times: Sequence[float], calls: int, launched: float) -> Timing:
  low, median, high = statistics.quantiles(times, n=4)
  return Timing(median, low, high, calls, launched)


def device_time(
  f: Callable[..., Any],
  inputs: Sequence[tuple[Any, ...]],
  *,
  calls: int = 24,
  carry: Carry | None = None,
  only: str = "",
  wait: Callable[[Any], Any] = jax.block_until_ready,
) -> Timing:
  """Median device time of one call over inputs taken in turn, so that no cache holds the next one.

  `carry(args, out)` makes the next call's arguments where f donates one of them. With `only`, other
  kernels than those whose name contains it are left out. RuntimeError: calls differ in their
  kernels, or launch none.
  """
  run = in_turn(f, inputs, carry, wait)
  run(3)
  if not on_gpu():
    return summary([_wall(lambda: run(1)) for _ in range(calls)], calls, 0)
  records = [us for name, us in kernels(lambda: run(calls)) if only in name]
  count, rest = divmod(len(records), calls)
  if rest or not count:
    raise RuntimeError(f"{len(records)} kernel records of {calls} calls")
  times = [sum(records[i * count : (i + 1) * count]) for i in range(calls)]
  return summary(times, calls, count)


def cycle_time(
  f: Callable[..., Any],
  inputs: Sequence[tuple[Any, ...]],
  *,
  cycle: int,
  repeats: int = 20,
  carry: Carry | None = None,
) -> Timing:
  """Device time of one call, a mean over the `cycle` calls in which f comes back to where it was.

  For functions that do not launch the same kernels every time, such as a ring that now and then
  folds: quartiles are over `repeats` whole cycles, so no phase is left out.
  """
  run = in_turn(f, inputs, carry)
  whole = lambda: run(cycle)
  whole()
  if not on_gpu():
    return summary([_wall(whole) / cycle for _ in range(repeats)], repeats * cycle, 0)
  records = [[us for _, us in kernels(whole)] for _ in range(repeats)]
  if not all(records):
    raise RuntimeError(f"no kernel records of {cycle} calls")
  launched = sum(map(len, records)) / (repeats * cycle)
  return summary([sum(times) / cycle for times in records], repeats * cycle, launched)


def mean_time(
  f: Callable[..., Any],
  inputs: Sequence[tuple[Any, ...]],
  *,
  calls: int,
  carry: Carry | None = None,
) -> tuple[float, float]:
  """Microseconds of one call: on the device, and by the wall with calls queued behind each other.

  A mean over `calls` in turn, for functions that do not launch the same kernels every time.
  Where there is no GPU both are by the wall. Arguments as for `device_time`.
  """
  run = in_turn(f, inputs, carry)
  run(3)
  wall = _wall(lambda: run(calls)) / calls
  if not on_gpu():
    return wall, wall
  records = kernels(lambda: run(calls))
  if not records:
    raise RuntimeError(f"no kernel records of {calls} calls")
  return sum(us for _, us in records) / calls, wall


def _wall(run: Callable[[], Any]) -> float:
  began = time.perf_counter()
  run()
  return 1e6 * (time.perf_counter() - began)


def copy_ceiling(megabytes: int = 2048) -> float:
  """Bytes per second, read plus written, of a large device copy: what memory gives at best."""
  x = jnp.ones((megabytes << 18,), jnp.float32)
  scale = jax.jit(lambda x: x * 1.5)
  rates = [2 * x.nbytes / (1e-6 * device_time(scale, [(x,)], calls=10).median)]
  copy = jnp.copy
  jax.block_until_ready(copy(x))
  for _ in range(5):
    start = time.perf_counter()
    jax.block_until_ready([copy(x) for _ in range(4)])
    rates.append(8 * x.nbytes / (time.perf_counter() - start))
  return max(rates)
