"""Device time of a jitted function: CUPTI's record of each kernel that it launched."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.lib import mosaic_gpu as mosaic_gpu_lib


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
  ext = mosaic_gpu_lib._mosaic_gpu_ext
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
