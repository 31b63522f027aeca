"""Device time of a jitted function: CUPTI's record of each kernel that it launched."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def cupti() -> Any:
  """Its bindings. They come with jax's plugin for a GPU, and this file is imported without one."""
  from jax._src.lib import mosaic_gpu

  return mosaic_gpu._mosaic_gpu_ext


class Timing(NamedTuple):
  """Microseconds on the device: quartiles over calls, and kernels launched by one call."""

  median: float
  low: float
  high: float
  calls: int
  kernels: int


def device_time(
  f: Callable[..., Any],
  inputs: Sequence[tuple[Any, ...]],
  *,
  calls: int = 24,
  carry: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] | None = None,
  only: str = "",
) -> Timing:
  """Median device time of one call over inputs taken in turn, so that no cache holds the next one.

  `carry(args, out)` makes the next call's arguments where f donates one of them. With `only`, other
  kernels than those whose name contains it are left out.
  """
  ext = cupti()
  threaded = carry or (lambda args, out: args)
  previous = None

  def call(i: int) -> Any:
    nonlocal previous
    args = inputs[i % len(inputs)]
    previous = f(*(threaded(args, previous) if previous is not None else args))
    return previous

  for i in range(3):
    jax.block_until_ready(call(i))
  ext._cupti_init()
  try:
    for i in range(calls):
      out = call(3 + i)
    jax.block_until_ready(out)
  finally:
    records = ext._cupti_get_timings(True)
  records = [(name, ms) for name, ms in records if only in name]
  kernels, rest = divmod(len(records), calls)
  if rest or not kernels:
    raise RuntimeError(f"{len(records)} kernel records of {calls} calls")
  times = [
    1e3 * sum(ms for _, ms in records[i * kernels : (i + 1) * kernels]) for i in range(calls)
  ]
  low, median, high = statistics.quantiles(times, n=4)
  return Timing(median, low, high, calls, kernels)


def mean_time(
  f: Callable[..., Any],
  inputs: Sequence[tuple[Any, ...]],
  *,
  calls: int,
  carry: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] | None = None,
) -> tuple[float, float]:
  """Microseconds of one call: on the device, and by the wall with calls queued behind each other.

  A mean over `calls` in turn, for functions that do not launch the same kernels every time, such as
  a ring that now and then folds; a median would hide the fold. Where there is no GPU both are by
  the wall. Arguments as for `device_time`.
  """
  threaded = carry or (lambda args, out: args)
  out = None

  def some(first: int, count: int) -> float:
    nonlocal out
    began = time.perf_counter()
    for i in range(first, first + count):
      args = inputs[i % len(inputs)]
      out = f(*(threaded(args, out) if out is not None else args))
    jax.block_until_ready(out)
    return 1e6 * (time.perf_counter() - began) / count

  some(0, 3)
  wall = some(3, calls)
  if jax.default_backend() != "gpu":
    return wall, wall
  ext = cupti()
  ext._cupti_init()
  try:
    some(3 + calls, calls)
  finally:
    records = ext._cupti_get_timings(True)
  if not records:
    raise RuntimeError(f"no kernel records of {calls} calls")
  return 1e3 * sum(ms for _, ms in records) / calls, wall


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
