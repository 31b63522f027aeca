"""Bytes that every scheme keeps, per slot and per running request, against window and model.

Counted from the schemes' types, so exact: `carry` is what a slot takes between steps, `flight` what
a running request takes on top from verify to commit. Recurrent states and convolution tails of all
layers of one tensor-parallel rank; the attention's KV rows are the same under every scheme.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from commit_schemes import SCHEMES, Dtypes
from commit_schemes.footprint import LayerShape, ModelFootprint, ModelShape, model_footprint
from experiments import memory_report
from experiments.models import MODELS, shape_of
from experiments.record import BadInput, Record
from experiments.target import config_of

RECORDS: Mapping[str, Dtypes] = MappingProxyType(
  {"float32": Dtypes(rows=("float32",)), "bfloat16": Dtypes(rows=("bfloat16",))}
)


@dataclass(frozen=True, kw_only=True)
class Config:
  """Float32 checkpoints and bfloat16 inputs; `records` are the dtypes of keys and pseudo-values."""

  models: tuple[str, ...] = tuple(MODELS)
  schemes: tuple[str, ...] = tuple(SCHEMES)
  windows: tuple[int, ...] = (2, 4, 8, 16, 32)
  records: tuple[str, ...] = tuple(RECORDS)
  degree: int = 1
  model: Path | None = None  # a checkpoint, in place of `models`

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    known = {"models": MODELS, "schemes": SCHEMES, "records": RECORDS}
    for name, allowed in known.items():
      if not getattr(self, name) or set(getattr(self, name)) - set(allowed):
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: some of {', '.join(allowed)}")
    if not self.windows or not 1 <= min(self.windows) <= max(self.windows) <= 65_536:
      raise ValueError(f"windows = {self.windows}, allowed: each 1 to 65536")
    for model in self.models:
      MODELS[model].layer.shard(self.degree)


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "smoke": Config(
      models=(memory_report.SHOWN,), schemes=("snapshot", "ring_exact"), windows=(4, 16)
    ),
  }
)


@cache
def layer_footprint(scheme: str, layer: LayerShape, window: int, records: str) -> ModelFootprint:
  """Two models often have the same layer."""
  one = ModelShape(1, layer)
  return model_footprint(SCHEMES[scheme].make, one, window, dtypes=RECORDS[records])


def run(config: Config, record: Record) -> None:
  shapes = {name: MODELS[name] for name in config.models}
  if config.model is not None:
    shapes = {config.model.name: shape_of(config_of(config.model))}
    try:
      shapes[config.model.name].layer.shard(config.degree)
    except ValueError as error:
      raise BadInput(str(error)) from error
  for scheme in record.parts(config.schemes):
    points = [(m, r, T) for m in shapes for r in config.records for T in config.windows]
    for i, (model, records, window) in enumerate(points):
      layers, layer = shapes[model]
      counted = layer_footprint(scheme, layer.shard(config.degree), window, records)
      for memory, bytes_ in zip(counted._fields, counted, strict=True):
        carry, flight = bytes_.times(layers)
        record(
          scheme=scheme, records=records, model=model, degree=config.degree, window=window,
          memory=memory, carry_bytes=carry, flight_bytes=flight,
        )  # fmt: skip
      record.advance(i / len(points))


figure, table = memory_report.figure, memory_report.table
