"""One style for every figure, readable in black and white; a scheme looks the same in all."""

import csv
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from PIL import Image

from commit_schemes import SCHEMES
from experiments.record import Row, write

PUBLISHED = Path(__file__).parent / "published.csv"

STYLE: Any = {
  "figure.dpi": 100,
  "savefig.dpi": 150,
  "figure.constrained_layout.use": True,
  "font.size": 8.5,
  "axes.titlesize": 9,
  "axes.titlelocation": "left",
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "axes.axisbelow": True,
  "grid.color": "#dddddd",
  "grid.linewidth": 0.6,
  "lines.linewidth": 1.3,
  "lines.markersize": 4.5,
  "legend.frameon": False,
  "legend.fontsize": 7.5,
  "pdf.fonttype": 42,  # text stays text
}
# Okabe and Ito's colours, told apart by most eyes, then some of Tol's: one for every scheme.
COLOURS = (
  "#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
  "#882255", "#999933", "#332288", "#661100",
)  # fmt: skip
# As many as have no divisor with the markers in common: without colours, too, 84 lines differ.
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 2, 1, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h", "p")

HOLLOW: dict[str, Any] = {"fillstyle": "none", "linestyle": "none", "markeredgewidth": 1.2}
"""For published values: a marker's outline and nothing more."""


def look(index: int) -> dict[str, Any]:
  """Colour, dashes and marker of the index-th line: three ways to tell it from the others."""
  pick = lambda of: of[index % len(of)]
  return {"color": pick(COLOURS), "linestyle": pick(DASHES), "marker": pick(MARKERS)}


def scheme_look(name: str) -> dict[str, Any]:
  """The look of one scheme. KeyError: it is not in SCHEMES."""
  return look({scheme: i for i, scheme in enumerate(SCHEMES)}[name])


def logarithmic(axis: Axis, ticks: tuple[float, ...] = ()) -> None:
  """Plain numbers at these multiples of the powers of ten, by default more of them where the axis
  is short. Its scale is log, and what it shows is drawn already."""
  low, high = axis.get_view_interval()
  dense = (1, 1.5, 2, 3, 4, 6, 8)
  axis.set_major_locator(LogLocator(subs=ticks or ((1, 2, 5) if high > 8 * low else dense)))
  axis.set_major_formatter("{x:g}")
  axis.set_minor_locator(NullLocator())


def steps(axis: Axis, values: Iterable[int]) -> None:
  """A tick at each of these values and nowhere else, on any scale."""
  axis.set_ticks(sorted(set(values)), [f"{x:,}" for x in sorted(set(values))])
  axis.set_minor_locator(NullLocator())


def published(group: str) -> list[Row]:
  """Published values of one group, each with its setting, source and what is known about it."""
  with PUBLISHED.open(newline="") as file:
    return [dict(row) for row in csv.DictReader(file) if row["group"] == group]


def value_of(id: str) -> float:
  """One published value. StopIteration: there is none of this id, or it is no number."""
  with PUBLISHED.open(newline="") as file:
    return next(float(row["value"]) for row in csv.DictReader(file) if row["id"] == id)


def between(ax: Any, x: float, low: str, high: str, style: dict[str, Any]) -> None:
  """A published range by the ids of its ends, hollow at x: its look, and a line between both."""
  ends = [value_of(low), value_of(high)]
  ax.plot([x] * 2, ends, **style | HOLLOW | {"markersize": 7, "zorder": 5})
  ax.vlines(x, *ends, color=style["color"], linewidth=0.8, zorder=5)


def draw(
  figure: Callable[[list[Row]], Figure], rows: list[Row], folder: Path, caption: str = ""
) -> None:
  """Writes figure.png and figure.pdf to `folder`, whole or not at all, `caption` at the foot."""
  with matplotlib.rc_context(STYLE):
    fig = figure(rows)
    if caption:
      fig.text(0.005, -0.005, caption, fontsize=6, color="#555555", va="top")
    # Without a date and a version the same rows give the same file.
    for kind, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None})):
      image = io.BytesIO()
      fig.savefig(image, format=kind, metadata=metadata, bbox_inches="tight", pad_inches=0.08)
      done = few_colours(image.getvalue()) if kind == "png" else image.getvalue()
      write(folder / f"figure.{kind}", done)


def few_colours(png: bytes) -> bytes:
  """The same picture with a palette of 128 colours: half the size, and lines need no more."""
  small = io.BytesIO()
  flat = Image.open(io.BytesIO(png)).convert("RGB")
  flat.quantize(128, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
  return small.getvalue()


@dataclass(frozen=True)
class Picture:
  """A drawn figure, which Jupyter shows."""

  png: bytes = field(repr=False)

  def _repr_png_(self) -> bytes:
    return self.png


def picture(figure: Callable[[Any], Figure], rows: Any) -> Picture:
  """The figure of some rows in the one style."""
  with matplotlib.rc_context(STYLE | {"savefig.dpi": 100}):
    image = io.BytesIO()
    figure(rows).savefig(image, format="png", bbox_inches="tight")
  return Picture(image.getvalue())
