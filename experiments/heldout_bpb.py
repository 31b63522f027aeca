"""Held-out bits per byte by position, up to the longest text that any experiment uses.

Each stream of `length` tokens is scored twice: as a whole, and restarted from empty memories every
`restart` tokens. Both see the same text, so their difference is what position does, not what the
text at that position happens to be. A model that wears out would rise above its restarted self.
Bins are of tokens, which are bytes unless the model's folder has a tokenizer; rows say how many
bytes of the text each bin holds, and bits are per byte of those.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np
from matplotlib.figure import Figure

from experiments import corpus
from experiments.figures import look
from experiments.record import BadInput, Record, Row
from experiments.score import stream_bits
from experiments.target import target

WAYS = ("whole", "restarted")


@dataclass(frozen=True, kw_only=True)
class Config:
  """`streams` texts of `length` tokens one after the other; bins double up to `width` tokens."""

  streams: int = 9
  length: int = 65_536
  restart: int = 4_096
  width: int = 4_096
  piece: int = 4_096
  model: Path | None = None  # None is the bundled model

  def __post_init__(self):
    """ValueError: the held-out text is too short, or the lengths do not divide."""
    for name in ("streams", "length", "restart", "width", "piece"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: at least 1")
    size = len(corpus.heldout()) - 1
    if self.streams * self.length > size:
      raise ValueError(
        f"streams = {self.streams} of length = {self.length}, allowed: {size} in all"
      )
    for name in ("restart", "width", "piece"):
      if self.length % getattr(self, name):
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: a divisor of {self.length}")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "smoke": Config(streams=1, length=1_024, restart=256, width=256, piece=256),
  }
)


def bins(config: Config) -> list[tuple[int, int]]:
  """First token and size of each bin: doubling up to `width`, then equal."""
  edges = [0, *(2**i for i in range(6, 32) if 2**i < config.width)]
  edges += range(config.width, config.length + 1, config.width)
  return [(a, b - a) for a, b in pairwise(edges)]


def run(config: Config, record: Record) -> None:
  """One row is one bin of one stream, scored one way."""
  params, model, read, _ = target(config.model, context=config.length)
  (text, sizes), n = read(corpus.heldout().tobytes()), config.length
  if config.streams * n >= len(text):
    raise BadInput(f"{config.streams} streams of {n} tokens, allowed: {len(text) - 1} in all")
  for stream, way in record.parts([(s, way) for s in range(config.streams) for way in WAYS]):
    size = n if way == "whole" else config.restart
    starts = range(stream * n, (stream + 1) * n, size)
    batch = np.stack([text[i : i + size + 1] for i in starts])
    bits = []
    for piece in stream_bits(params, model, batch, piece=config.piece):
      bits.append(piece)
      record.advance(sum(x.size for x in bits) / n)
    line = np.concatenate(bits, axis=1).reshape(n)
    told = sizes[stream * n + 1 : (stream + 1) * n + 1]  # bytes of the tokens that are scored
    for first, width in bins(config):
      bits_of, bytes_of = line[first : first + width], told[first : first + width]
      mean = np.sum(bits_of, dtype=np.float64) / np.sum(bytes_of)
      record(
        stream=stream,
        scored=way,
        first_token=first,
        tokens=width,
        first_byte=int(np.sum(told[:first])),
        bytes=int(np.sum(bytes_of)),
        heldout_bits_per_byte=round(float(mean), 5),
      )


def by_position(rows: list[Row], way: str) -> dict[tuple[int, int], np.ndarray]:
  """Bits per byte of each stream, by (first token, tokens) of the bin. Rows that say nothing of
  tokens are of bytes."""
  found: dict[tuple[int, int], list[float]] = {}
  for row in rows:
    if row["scored"] == way:
      names = ("first_token", "tokens") if "tokens" in row else ("first_byte", "bytes")
      at = row[names[0]], row[names[1]]
      found.setdefault(at, []).append(row["heldout_bits_per_byte"])
  return {at: np.array(values) for at, values in sorted(found.items())}


def figure(rows: list[Row]) -> Figure:
  """Left, bits per byte of both ways; right, whole minus restarted, every stream a dot."""
  fig = Figure(figsize=(7.0, 2.8))
  left, right = fig.subplots(1, 2)
  whole, restarted = (by_position(rows, way) for way in WAYS)
  middle = np.array([(first or 1) + width / 2 for first, width in whole])
  streams = len(next(iter(whole.values())))
  for i, (way, of) in enumerate(zip(WAYS, (whole, restarted), strict=True)):
    left.plot(middle, [values.mean() for values in of.values()], label=way, **look(i))
  left.set(ylabel="held-out bits per byte", title=f"mean of {streams} streams")
  gap = np.array([whole[at] - restarted[at] for at in whole])
  right.plot(np.repeat(middle, streams), gap.reshape(-1), ".", color="#999999", markersize=3)
  right.plot(middle, gap.mean(axis=1), label="mean", **look(0))
  right.axhline(0.0, color="#000000", linewidth=0.6)
  right.set(ylabel="bits per byte", title="whole minus restarted, on the same text")
  unit = "bytes" if all(r.get("tokens", r["bytes"]) == r["bytes"] for r in rows) else "tokens"
  for axes in (left, right):
    axes.set_xscale("log", base=2)
    axes.set_xlabel(f"position in the text, {unit}")
    axes.legend()
  return fig
