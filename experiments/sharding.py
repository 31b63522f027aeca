"""Greedy text on a mesh of devices against one device: heads over one axis, slots over the other.

The same requests through `decoding.sharding` and through one device of the same host, in float32;
each text is equal, or at its first difference the top-2 margin lies within the measured logit
error. Needs as many devices as the largest mesh. A checkpoint is loaded onto each mesh from its
folder; with `--against mesh` no device ever holds it whole, and the first mesh's texts are what the
others are compared with.
"""

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from matplotlib.figure import Figure

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.decoding.drafts import prompt_lookup
from commit_schemes.decoding.engine import Engine
from commit_schemes.decoding.placement import Placed, loaded, mesh, placed
from commit_schemes.decoding.schedule import Limits
from commit_schemes.decoding.sharding import sharded
from commit_schemes.decoding.slots import Programs, compiled
from commit_schemes.model import model_memory
from experiments import corpus, figures
from experiments.free import Text, compare, within_margin
from experiments.models import named
from experiments.record import BadInput, Record, Row
from experiments.soak_world import TINY
from experiments.target import Text as Tokens
from experiments.target import as_bytes, described, is_folder, target
from gdn import hybrid
from gdn.config import Config as ModelConfig
from gdn.hybrid import Params, cast

NAMES = ("bundled", "tiny")
AT = 1000  # where in the held-out text the first prompt begins


@dataclass(frozen=True, kw_only=True)
class Config:
  """`meshes` are (groups of slots, devices that share a group's heads); `model` is bundled, tiny or
  the path of a checkpoint."""

  model: str = "bundled"
  meshes: tuple[tuple[int, int], ...] = ((1, 2), (2, 1))
  against: str = "device"
  schemes: tuple[str, ...] = ("snapshot", "ring_exact", "tree_wy")
  window: int = 16
  slots: int = 4
  requests: int = 8
  prompt: int = 128
  tokens: int = 128

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    for name, good, allowed in (
      ("model", named(self.model, NAMES), "bundled, tiny, or the path of a checkpoint"),
      ("meshes", self.meshes and min(map(min, self.meshes)) >= 1, "pairs of at least 1"),
      ("against", self.against in ("device", "mesh"), "device, mesh"),
      ("meshes", self.against == "device" or len(self.meshes) > 1, "at least 2 against a mesh"),
      ("schemes", set(self.schemes) <= set(SCHEMES), ", ".join(SCHEMES)),
      ("window", 1 <= self.window <= 64, "1 to 64"),
      ("slots", all(self.slots % m[0] == 0 for m in self.meshes), "a multiple of every mesh's"),
      ("requests", self.requests >= 1, "at least 1"),
      ("prompt", 1 <= self.prompt <= 4096, "1 to 4096"),
      ("tokens", 1 <= self.tokens <= 4096, "1 to 4096"),
    ):
      if not good:
        raise ValueError(f"{name} = {getattr(self, name)!r}, allowed: {allowed}")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "four": Config(meshes=((2, 2), (4, 1))),
    "smoke": Config(
      model="tiny",
      meshes=((1, 2),),
      schemes=("ring_exact",),
      slots=2,
      requests=3,
      prompt=24,
      tokens=12,
      window=4,
    ),
  }
)


def texts(
  c: Config, config: ModelConfig, text: list[int], programs: Programs
) -> tuple[dict[int, Text], float]:
  """Every request's text, and tokens a second without compilation."""
  limits = Limits(c.prompt + c.tokens, config.vocab, c.window)
  engine = Engine(programs, limits, slots=c.slots)
  engine.submit("compile", text[: c.prompt], tokens=1, draft=0)
  engine.run()
  for i in range(c.requests):
    at = AT + 5 * i * c.prompt
    engine.submit(i, text[at : at + c.prompt], tokens=c.tokens, draft=c.window - 1)
  began = time.perf_counter()
  engine.run()
  rate = c.requests * c.tokens / (time.perf_counter() - began)
  done = {i: engine.texts[i] for i in range(c.requests)}
  as_text = lambda t: Text(np.asarray(t.tokens), np.stack(t.top), len(t.tokens) / t.steps)
  return {i: as_text(t) for i, t in done.items()}, rate


class Model(NamedTuple):
  """A model in float32, what it calls tokens, and its weights on one device or on a mesh."""

  config: ModelConfig
  read: Callable[[bytes], Tokens]
  whole: Callable[[], Params]
  on: Callable[[Mesh], Placed]


def model(c: Config) -> Model:
  """BadInput: it cannot be read, or its context is too short."""
  context = c.prompt + c.tokens
  path = Path(c.model) if c.model not in NAMES else None
  read: Callable[[bytes], Tokens]
  if c.model == "tiny":
    config, read = TINY, as_bytes
    whole = lambda: hybrid.init(TINY, jax.random.key(0))
  else:
    config, reads = described(path, context=context)
    read, whole = reads.read, lambda: cast(target(path, context=context).params, jnp.float32)
  whole = functools.cache(whole)
  if path is not None and is_folder(path):
    on = lambda devices: loaded(path, devices, dtype=jnp.float32)[0]
  else:
    on = lambda devices: placed(whole(), config, devices)
  return Model(config, read, whole, on)


def run(c: Config, record: Record) -> None:
  """BadInput: too few devices, or a model that they cannot share."""
  try:
    meshes = {m: mesh(*m) for m in c.meshes}
  except ValueError as e:
    raise BadInput(f"meshes = {c.meshes}: {e}") from e
  config, read, whole, on = model(c)
  last = AT + 5 * c.requests * c.prompt
  text = read(corpus.heldout().tobytes()).ids[:last].tolist()
  if len(text) < last:
    raise BadInput(f"{last} tokens of held-out text are wanted, there are {len(text)}")
  drafter = prompt_lookup(c.window)
  spec = lambda config: Spec(config.key_heads, c.window, dtypes=Dtypes(raw=jnp.float32))
  for name in record.parts(c.schemes):
    make: Any = lambda config: SCHEMES[name].make(spec(config))  # noqa: B023
    alone, rate = None, None
    if c.against == "device":
      memory = model_memory(config, make(config))
      alone, rate = texts(c, config, text, compiled(whole(), config, memory, drafter))
    for (groups, heads), devices in meshes.items():
      try:
        programs = sharded(on(devices), config, make, drafter, devices)
      except (OSError, ValueError) as e:  # heads that do not divide, a folder that does not load
        raise BadInput(f"model {c.model}: {e}") from e
      many, many_rate = texts(c, config, text, programs)
      if alone is None:
        alone = many
        continue
      for i in range(c.requests):
        row = compare(many[i], alone[i])
        record(
          scheme=name, against=c.against, slot_groups=groups, head_devices=heads, request=i,
          tokens=c.tokens, **row, equal=within_margin(row), accept_length=many[i].accept_length,
          tokens_per_s=round(many_rate, 1),
          one_device_tokens_per_s=None if rate is None else round(rate, 1),
          device=jax.devices()[0].device_kind,
        )  # fmt: skip


def figure(rows: list[Row]) -> Figure:
  """Tokens until the first difference, of those compared, for each scheme and mesh."""
  fig = Figure(figsize=(6.4, 3.2))
  ax = fig.subplots()
  labels = [f"{r['scheme']}, {r['slot_groups']} x {r['head_devices']}" for r in rows]
  places = {label: i for i, label in enumerate(dict.fromkeys(labels))}
  for i, equal in enumerate((True, False)):
    some = [(r, n) for r, n in zip(rows, labels, strict=True) if r["equal"] == equal]
    until = lambda r: r["tokens"] if r["first_difference"] is None else r["first_difference"]
    same = [until(r) for r, _ in some]
    ax.plot(same, [places[n] for _, n in some], **figures.look(i) | {"linestyle": "none"},
            label="equal by the margin rule" if equal else "different")  # fmt: skip
  ax.set_yticks(list(places.values()), list(places))
  ax.set_xlim(0, 1.05 * rows[0]["tokens"])
  ax.set_xlabel(f"tokens before the first that differs, of {rows[0]['tokens']}")
  other = "one device" if rows[0].get("against", "device") == "device" else "another mesh"
  ax.set_title(f"greedy text on a mesh (groups of slots x devices a head group) and on {other}")
  ax.legend(loc="lower left")
  return fig
