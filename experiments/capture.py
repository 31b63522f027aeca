"""Streams of a model's recurrent layers over a text, stored for `drift --streams`; their spread.

Stored are q, k, v after the convolution, a, b and the gate parameters of the chosen layers, the
tokens they are of, and which model it was. The rows say what a scheme meets there: write strength
beta, log decay g, how alike a key is to the one before it (with identical keys the solve is worst
conditioned).
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from matplotlib.figure import Figure

from experiments import corpus, streams
from experiments.figures import look
from experiments.record import BadInput, Record, Row
from experiments.streams import Streams
from experiments.target import target
from gdn.checkpoint import fingerprint
from gdn.gates import gates, l2norm

HERE = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Config:
  """Which streams, over which text, and the file they go to."""

  tokens: int = 16_384
  layers: tuple[int, ...] = ()  # none named: all recurrent layers
  text: Path | None = None  # None is the held-out text
  model: Path | None = None  # None is the bundled model
  piece: int = 4_096
  to: Path = HERE / "checkpoints" / "streams.safetensors"

  def __post_init__(self):
    """ValueError: too short a length."""
    for name, least in (("tokens", 2), ("piece", 1)):
      if getattr(self, name) < least:
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: at least {least}")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {"full": Config(), "smoke": Config(tokens=256, layers=(0,), piece=128)}
)


def read_text(path: Path | None) -> bytes:
  """BadInput: there is no such file."""
  try:
    return corpus.heldout().tobytes() if path is None else path.read_bytes()
  except OSError as error:
    raise BadInput(f"text {path}: {error.strerror}") from error


def writable(file: Path) -> None:
  """BadInput: the file could not be written, which is said before the model has run."""
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.is_dir() and os.access(file.parent, os.W_OK | os.X_OK):
      return
    reason = "it is a folder" if file.is_dir() else "its folder cannot be written"
  except OSError as error:
    reason = error.strerror or str(error)
  raise BadInput(f"to = {file}: {reason}; allowed: a file in a folder that can be written")


def spread(found: Streams, layer: int) -> Iterator[dict[str, float | int | str]]:
  """Mean, tenth and ninetieth percentile of each quantity, by head."""
  one = found.only((layer,))
  beta, g = gates(one.raw.a, one.raw.b, one.gates)
  k = np.asarray(l2norm(one.raw.k), np.float64)
  alike = np.sum(k[1:] * k[:-1], axis=-1)
  for name, x in (("beta", beta), ("log_decay", g.mean(-1)), ("next_key_cosine", alike)):
    for head, values in enumerate(np.asarray(x, np.float64).T):
      low, high = np.quantile(values, (0.1, 0.9)).tolist()
      mean = float(np.mean(values))
      yield {"head": head, "quantity": name, "mean": mean, "tenth": low, "ninetieth": high}


def run(config: Config, record: Record) -> None:
  """One row is one quantity of one head: a key head for the cosine, else a value head."""
  writable(config.to)
  params, model, read, _ = target(config.model, context=config.tokens)
  ids = read(read_text(config.text)).ids[: config.tokens]
  if len(ids) < 2:
    raise BadInput(f"a text of {len(ids)} tokens, allowed: at least 2")
  say = lambda fraction: record.say(f"capturing streams {min(fraction, 1):4.0%}")
  try:
    found = streams.capture(
      params, model, ids, layers=config.layers or None, piece=config.piece, progress=say
    )
  except ValueError as error:
    raise BadInput(str(error)) from error
  streams.save(config.to, found, ids, fingerprint(params))
  for layer in record.parts(found.layers):
    for row in spread(found, layer):
      record(layer=layer, tokens=len(ids), **row)


def figure(rows: list[Row]) -> Figure:
  """Each quantity against the layer: every head's mean a dot, and the heads' mean."""
  fig = Figure(figsize=(7.2, 2.4))
  names = list(dict.fromkeys(row["quantity"] for row in rows))
  for axes, name in zip(np.atleast_1d(fig.subplots(1, len(names))), names, strict=True):
    of = [row for row in rows if row["quantity"] == name]
    layers = sorted({row["layer"] for row in of})
    axes.plot(
      [r["layer"] for r in of], [r["mean"] for r in of], ".", color="#999999", label="a head"
    )
    mean = [np.mean([r["mean"] for r in of if r["layer"] == layer]) for layer in layers]
    axes.plot(layers, mean, label="mean of heads", **look(0))
    axes.set(title=name.replace("_", " "), xlabel="layer")
    axes.legend()
  return fig
