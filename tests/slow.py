"""What takes long for what it adds to others: CI leaves it out."""

from collections.abc import Iterable
from typing import Any

import pytest

PARTIAL = {"replay_1", "replay_8"}  # caches of none, of four, and of all states stay


def slow(*values: Any) -> Any:
  """Parameters of a test that is one of these."""
  return pytest.param(*values, marks=pytest.mark.slow)


def each(names: Iterable[str], *others: str) -> list[Any]:
  """A test's schemes; `others` are those that add little to the rest in this one."""
  return [slow(name) if name in PARTIAL.union(others) else name for name in names]
