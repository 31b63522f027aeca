"""Which configuration a kernel runs with: the fastest measured one for a shape, or its default.

configs/KIND.json is of one kind of device, `NVIDIA_H200.json` say, and is written by the experiment
`tune`; nothing in it that was not measured. Of a kernel's entries for the same state and decay that
one is taken whose window is the next longer and whose number of heads is nearest. On a device
without a file, and for kernels that are not in it, the default is taken, with the multiprocessors
that the device has. What a configuration may be, its own dataclass says, and nobody else.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax._src import xla_bridge

CONFIGS = Path(__file__).parent / "configs"
Fields = dict[str, Any]


class Device(NamedTuple):
  """What is compiled for; `sms` 0 where nobody knows."""

  kind: str = ""
  sms: int = 0


class Shape(NamedTuple):
  """What a configuration depends on: tokens of a window or path, value heads of all slots."""

  state: str
  decay: str
  tokens: int
  heads: int


class Asked(NamedTuple):
  """A kernel that has looked for its configuration."""

  kernel: str
  shape: Shape
  default: Any


def device() -> Device:
  """The device of the mesh in use, or the first GPU.

  Wakes no GPU that has not been used yet: who comes with PyTorch tensors would find its memory
  taken.
  """
  abstract = jax.sharding.get_abstract_mesh().abstract_device
  if abstract is not None and abstract.platform == "gpu":
    return Device(abstract.device_kind, abstract.num_cores or 0)
  if xla_bridge.backends_are_initialized() and jax.default_backend() == "gpu":
    first = jax.devices()[0]
    return Device(first.device_kind, getattr(first, "core_count", 0))
  return Device()


def file(kind: str) -> Path:
  return CONFIGS / f"{kind.replace(' ', '_')}.json"


@functools.cache
def entries(kind: str) -> tuple[tuple[str, Shape, Fields], ...]:
  """Kernel, shape and configuration of every entry of a device kind."""
  path = file(kind)
  if not kind or not path.exists():
    return ()
  found = json.loads(path.read_text())["entries"]
  return tuple((e["kernel"], Shape(**e["shape"]), e["config"]) for e in found)


@functools.cache
def _found(asked: Asked, on: Device) -> Any:
  same = (asked.kernel, *asked.shape[:2])
  some = [(s, fields) for kernel, s, fields in entries(on.kind) if (kernel, *s[:2]) == same]

  def far(entry):
    s, want = entry[0], asked.shape
    off = abs(math.log(s.heads / want.heads))
    return s.tokens < want.tokens, abs(s.tokens - want.tokens), off

  _, fields = min(some, key=far, default=(None, {}))
  return dataclasses.replace(asked.default, **fields, **({"sms": on.sms} if on.sms else {}))


_TRIAL: ContextVar[tuple[Fields, list[Asked]] | None] = ContextVar("trial", default=None)


@contextlib.contextmanager
def trial(fields: Fields) -> Iterator[list[Asked]]:
  """In it every kernel takes its default with these fields; who has asked is in the list."""
  asked: list[Asked] = []
  token = _TRIAL.set((fields, asked))
  try:
    yield asked
  finally:
    _TRIAL.reset(token)


def chosen[Config: Any](
  kernel: str, default: Config, *, state: Any, channels: int, tokens: int, heads: int
) -> Config:
  """Looked up once a shape. ValueError: an entry, or a trial, that is no configuration."""
  shape = Shape(str(state), "gdn" if channels == 1 else "kda", tokens, heads)
  asked, tried = Asked(kernel, shape, default), _TRIAL.get()
  if tried is None:
    return _found(asked, device())
  tried[1].append(asked)
  return dataclasses.replace(_found(asked, Device(sms=device().sms)), **tried[0])
