"""A toy experiment that stops where a test wants it to, and the files of a run that does not."""

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console

from experiments.record import Record, Row, measure

FINAL = ("rows.csv", "meta.json", "figure.png", "figure.pdf")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  parts: tuple[str, ...] = ("a", "b", "c")
  scale: float = 1 / 3


def toy(*, stop: tuple[str, int] | None = None, **limits: float) -> Any:
  """Three rows a part; an interrupt arrives before the row `stop`. `measured` says what ran."""
  measured = []

  def run(config: Config, record: Record) -> None:
    for part in record.parts(config.parts, **limits):
      for i in range(3):
        if (part, i) == stop:
          raise KeyboardInterrupt
        measured.append((part, i))
        record(part=part, i=i, value=config.scale * i, missing=None, flag=i == 1)
        record.advance(i / 3)

  return SimpleNamespace(run=run, measured=measured)


def quiet(experiment: Any, folder: Path, config: Any = Config()) -> list[Row]:
  return measure(experiment, config, folder, Console(file=io.StringIO()))
