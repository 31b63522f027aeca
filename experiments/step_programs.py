"""The programs of a case of `step_time`: one makes its arguments, one runs it.

`here` compiles both in this process. Where the program is a kernel of ours and the device is one of
`ahead.DESCRIBED`, another process can compile it (`elsewhere`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from commit_schemes.footprint import LayerShape, zero_window
from experiments import ahead, step_cases
from experiments.step_args import Case, Given
from experiments.step_cases import Kind
from pallas_kernels import MOSAIC_GPU, tuning

Programs = tuple[Callable[..., Any], Callable[..., Any]]


class Wanted(NamedTuple):
  """A case on a layer whose pool has so many slots; `wide` is with outputs in float32. A kernel
  with `fields` takes its default with these, and not what was fastest on the device."""

  case: Case
  shape: LayerShape
  slots: int
  wide: bool = False
  fields: tuple[tuple[str, Any], ...] | None = None

  def trial(self) -> AbstractContextManager[list[tuning.Asked]]:
    return nullcontext([]) if self.fields is None else tuning.trial(dict(self.fields))


def making(kind: Kind, w: Wanted) -> tuple[Any, tuple[Any, ...]]:
  """Jitted: what follows the pool, from a window and gates; and their shapes."""
  s, case = w.case.layer(w.shape), w.case
  given = jax.eval_shape(lambda: zero_window(s, case.batch, case.window, jnp.bfloat16))
  return jax.jit(lambda window, p: kind.args(Given(s, case, window, p, w.slots))), given


def calling(kind: Kind, w: Wanted) -> tuple[Callable[..., Any], tuple[Any, ...], range]:
  """The case as a function, shapes of its arguments, and which of them it takes over."""
  s = w.shape
  size = (w.slots, s.value_heads, s.value_dim, s.key_dim)
  call = (kind.wide or kind.call) if w.wide else kind.call
  make, given = making(kind, w)
  # A function of its own each time: jax would not trace one that it knows once more.
  f = lambda S, *args: call(S, *args)
  pool = jax.ShapeDtypeStruct(size, jnp.dtype(w.case.state))
  return f, (pool, *jax.eval_shape(make, *given)), range(0 if w.wide else kind.donated)


def with_kernel(lowered: Any) -> Any:
  """NotImplementedError: there is none in it."""
  if "mosaic_gpu" not in lowered.as_text():
    raise NotImplementedError("there is no kernel for it: it runs on XLA")
  return lowered


def made(kind: Kind, w: Wanted) -> Callable[..., Any]:
  make, given = making(kind, w)
  return make.lower(*given).compile()


def here(kind: Kind, w: Wanted, *, mosaic: bool) -> Programs:
  """NotImplementedError: with `mosaic`, there is no kernel in a program that should have one."""
  f, args, donated = calling(kind, w)
  with w.trial():
    lowered = jax.jit(f, donate_argnums=donated).lower(*args)
  if mosaic and kind.mosaic:
    with_kernel(lowered)
  return made(kind, w), lowered.compile()


def kernel_alone(kind: Kind, case: Case) -> bool:
  """XLA's own programs are chosen by trying them on the device, ours are not."""
  return kind.mosaic and case.decay not in kind.xla_too


def elsewhere(w: Wanted) -> ahead.Packed:
  """The program that runs the case, by a process that does not hold the device."""
  f, args, donated = calling(step_cases.kinds(MOSAIC_GPU)[w.case.kernel], w)
  with w.trial():
    lowered = ahead.lowered(f, *args, donate=donated)
  return ahead.packed(with_kernel(lowered).compile())


def asked(w: Wanted, kind: Kind | None = None) -> tuning.Asked:
  """What kernel runs the case, by default one of ours, and with what configuration.
  NotImplementedError: it has none."""
  f, args, _ = calling(kind or step_cases.kinds(MOSAIC_GPU)[w.case.kernel], w)
  with w._replace(fields=()).trial() as found:
    jax.eval_shape(f, *args)
  if not found:
    raise NotImplementedError(f"{w.case}: it has no configuration")
  return found[-1]
