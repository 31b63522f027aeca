"""Tables at 80 columns: no line is longer, nothing is cut off, no word is broken."""

import importlib
import io
import itertools

import pytest
from rich.console import Console, Group
from rich.table import Table

from experiments import narrow, provenance, record
from experiments.command_line import derived, every_row, experiments

COMMITTED = [n for n in experiments() if (provenance.RESULTS / n / "rows.csv").exists()]


def printed(x, width: int = 80) -> str:
  out = io.StringIO()
  narrow.show(x, Console(width=width, file=out))
  return out.getvalue()


def tables(x):
  if isinstance(x, Group):
    for part in x.renderables:
      yield from tables(part)
  elif isinstance(x, Table):
    yield x


@pytest.mark.parametrize("name", [*COMMITTED, *derived()])
def test_every_table_is_readable_at_80_columns(name: str):
  module = importlib.import_module(f"experiments.{name}")
  rows = (
    record.read_rows(provenance.RESULTS / name / "rows.csv")
    if name in COMMITTED
    else module.derived_rows()
  )
  shown = getattr(module, "table", every_row)(rows)
  text = printed(shown)
  assert max(map(len, text.splitlines())) <= 80
  assert "…" not in text
  words = set(text.replace("│", " ").replace("┃", " ").split())
  for table in tables(shown):
    for column in table.columns:
      if not any(str(cell).strip() for cell in column.cells):
        continue  # a column of nothing is left out
      for cell in itertools.chain([column.header], column.cells):
        missing = [w for w in str(cell).split() if len(w) < 70 and not any(w in x for x in words)]
        assert not missing, (name, str(column.header), missing)


def example(columns: int, rows: int = 3) -> Table:
  table = Table(title="numbers")
  table.add_column("scheme")
  for i in range(columns):
    table.add_column(f"column {i}", justify="right")
  for r in range(rows):
    table.add_row(f"scheme_{r}", *(f"{r}.{i}e+00" for i in range(columns)))
  return table


def test_a_table_that_fits_is_left_alone():
  table = example(4)
  assert list(narrow.fitted(table, 80)) == [table]


def test_columns_that_do_not_fit_go_below_with_those_that_tell_rows_apart():
  text = printed(example(14))
  assert text.count("scheme_1") > 1
  assert all(f"1.{i}e+00" in text for i in range(14))
  assert text.count("numbers") == 1


def test_what_is_the_same_in_all_rows_is_said_once():
  table = example(12)
  table.add_column("device")
  table.columns[-1]._cells = ["H200"] * 3
  text = printed(table)
  assert text.count("H200") == 1
  assert "device H200" in text


def test_sentences_become_paragraphs():
  table = Table("id", "value", "reason", title="claims")
  table.add_row("one", "3 us", "because " * 20)
  table.add_row("two", "", "")
  lines = printed(table).splitlines()
  assert lines[0].strip() == "claims"
  assert lines[1].strip() == "one"
  assert lines[2].strip() == "value 3 us"
  assert lines[3].startswith("    reason because because")
  assert lines[4].startswith("    because")
  assert lines[-1].strip() == "two"
