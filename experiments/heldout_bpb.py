"""Held-out bits per byte by position: does the model hold over the longest text that is used?

Each stream of `length` bytes is scored twice: as a whole, and restarted from empty memories every
`restart` bytes. Both see the same bytes, so their difference is what position does, not what the
text at that position happens to be. A model that wears out would rise above its restarted self.
"""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from experiments import corpus
from experiments.score import stream_bits
from gdn.checkpoint import load
from gdn.config import Config
from gdn.hybrid import Params

WEIGHTS = Path(__file__).parent / "models" / "python-bytes.safetensors"
COLUMNS = ("stream", "scored", "first_byte", "bytes", "heldout_bits_per_byte")


@dataclass(frozen=True)
class HeldoutConfig:
  """`streams` texts of `length` bytes one after the other; bins of at most `width` bytes."""

  streams: int = 9
  length: int = 65_536
  restart: int = 4_096
  width: int = 4_096
  piece: int = 4_096
  weights: Path = WEIGHTS

  def __post_init__(self):
    """ValueError: the held-out text is too short for it, or lengths do not divide."""
    size = len(corpus.heldout())
    if self.streams < 1 or self.streams * self.length + 1 > size:
      raise ValueError(
        f"streams {self.streams} x length {self.length}: held-out text has {size - 1} bytes to score"
      )
    for name in ("restart", "width", "piece"):
      if getattr(self, name) < 1 or self.length % getattr(self, name):
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: a divisor of {self.length}")


FULL = HeldoutConfig()
TINY = HeldoutConfig(streams=1, length=4_096, restart=1_024, width=1_024, piece=1_024)
PRESETS = {"full": FULL, "tiny": TINY}


def bins(config: HeldoutConfig) -> list[tuple[int, int]]:
  """First byte and size of each bin: doubling up to `width`, then equal."""
  edges = [0, *(2**i for i in range(6, 32) if 2**i < config.width)]
  edges += range(config.width, config.length + 1, config.width)
  return [(a, b - a) for a, b in zip(edges, edges[1:], strict=False)]


def rows(
  config: HeldoutConfig, params: Params, model: Config, progress: Progress
) -> Iterator[dict[str, Any]]:
  """Long form: one bin of one stream scored one way."""
  n = config.length
  text = corpus.heldout()
  whole = np.stack([text[i * n : (i + 1) * n + 1] for i in range(config.streams)])
  cuts = np.stack(
    [text[i : i + config.restart + 1] for i in range(0, config.streams * n, config.restart)]
  )
  tracked = n // config.piece + max(1, config.restart // config.piece)
  task = progress.add_task("held-out bits per byte", total=tracked)
  for scored, batch in (("whole", whole), ("restarted", cuts)):
    bits = []
    for piece in stream_bits(params, model, batch, piece=config.piece):
      bits.append(piece)
      progress.advance(task)
    for stream, row in enumerate(np.concatenate(bits, axis=1).reshape(config.streams, n)):
      for first, size in bins(config):
        mean = float(np.mean(row[first : first + size], dtype=np.float64))
        yield dict(zip(COLUMNS, (stream, scored, first, size, f"{mean:.5f}"), strict=True))


def run(config: HeldoutConfig, out_dir: str | Path) -> None:
  """Writes rows.csv."""
  params, model = load(config.weights)
  text = io.StringIO()
  writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
  writer.writeheader()
  with Progress() as progress:
    writer.writerows(rows(config, params, model, progress))
  folder = Path(out_dir)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "rows.csv").write_text(text.getvalue())
