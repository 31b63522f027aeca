"""Tables on a terminal that they are too wide for: nothing is cut off, no word is broken.

What has one value in all rows goes under the table, and the lines between columns go. What is then
still too wide is printed in several tables, each with the columns that tell its rows apart; a long
first column is wrapped instead where the others leave it room. Where other cells are sentences,
every row becomes a paragraph.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, Group
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

GAP = 2  # between two columns
LEAST = 24  # of a first column that is wrapped


class Column(NamedTuple):
  """`narrow` is its width with the header on several lines, but no word."""

  header: str
  cells: list[str]
  justify: Any

  @property
  def longest(self) -> int:
    return max(map(len, self.cells), default=1)

  @property
  def narrow(self) -> int:
    return max([*map(len, self.header.split()), self.longest, 1])


def columns_of(table: Table) -> list[Column]:
  return [Column(str(c.header), list(map(str, c.cells)), c.justify) for c in table.columns]


def total(widths: list[int]) -> int:
  return sum(widths) + GAP * len(widths)


def telling(columns: list[Column]) -> int:
  """How many leading columns no two rows share; at least one."""
  for n in range(1, len(columns)):
    if len({*zip(*(c.cells for c in columns[:n]), strict=True)}) == len(columns[0].cells):
      return n
  return 1


def plain(columns: list[Column], width: int, title: Any, caption: str) -> Table:
  """Headers on one line if there is room; a first column that is too wide gets what is left."""
  wide, narrow = [max(len(c.header), c.longest) for c in columns], [c.narrow for c in columns]
  widths = wide if total(wide) <= width else narrow
  widths[0] = min(widths[0], width - total(widths[1:]) - GAP)
  out = Table(title=title, caption=caption or None, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
  out.title_justify = out.caption_justify = "left"
  out.pad_edge, out.show_edge = False, False
  for c, n in zip(columns, widths, strict=True):
    out.add_column(Text(c.header), justify=c.justify, width=n)
  for row in zip(*(c.cells for c in columns), strict=True):
    out.add_row(*map(Text, row))
  return out


def paragraphs(columns: list[Column], title: Any) -> Group:
  """The first cell, then the others with their headers, the last as a sentence of its own."""
  rows: list[Any] = [] if title is None else [Text(str(title), style="italic")]
  for key, *cells in zip(*(c.cells for c in columns), strict=True):
    pairs = zip(columns[1:], cells, strict=True)
    named = [f"{c.header} {x}".strip() for c, x in pairs if x.strip()]
    parts = filter(None, (", ".join(named[:-1]), *named[-1:]))
    rows += [Text(key, style="bold"), *(Padding(Text(x), (0, 0, 0, 4)) for x in parts)]
  return Group(*rows)


def narrowed(table: Table, width: int) -> Iterator[Any]:
  """The same cells in tables, or paragraphs, of at most `width` columns."""
  columns, title = columns_of(table), table.title
  rows = len(columns[0].cells) if columns else 0
  same = [c for c in columns[1:] if rows > 1 and len(set(c.cells)) == 1]
  note = ", ".join(f"{c.header} {c.cells[0]}" for c in same if c.cells[0].strip())
  columns = [c for c in columns if c not in same]
  if any(c.longest > width // 2 for c in columns[1:]):
    yield paragraphs(columns, title)
    return
  rest = [c.narrow for c in columns[1:]]
  if columns and columns[0].narrow > LEAST and total(rest) + LEAST + GAP <= width:
    yield plain(columns, width, title, note)
    return
  keys, values = columns[: telling(columns)], columns[telling(columns) :]
  while True:
    n = len(values)
    while n > 1 and total([c.narrow for c in (*keys, *values[:n])]) > width:
      n -= 1
    last = n >= len(values)
    yield plain([*keys, *values[:n]], width, title, note if last else "")
    if last:
      return
    values, title = values[n:], None


def fitted(x: Any, width: int) -> Iterator[Any]:
  """A table as it is where it fits, otherwise narrowed; of a group each, anything else as it is."""
  if isinstance(x, Group):
    for part in x.renderables:
      yield from fitted(part, width)
  elif isinstance(x, Table) and x.columns and natural(x) > width:
    yield from narrowed(x, width)
  else:
    yield x


def natural(table: Table) -> int:
  """Columns that a table takes where nothing in it wraps."""
  wide = Console(width=10_000)
  return Measurement.get(wide, wide.options, table).maximum


def show(x: Any, console: Console | None = None) -> None:
  """Prints it at the terminal's width."""
  console = console or Console()
  for part in fitted(x, console.width):
    console.print(part)
