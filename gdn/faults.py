"""What is wrong with many tensors, in as few lines as there are kinds of it."""

import re
from collections.abc import Iterable
from typing import NamedTuple

INDEX = re.compile(r"(?<=\.)\d+(?=\.)|(?<=[\[,])\d+(?=\])")  # of a layer or an expert


class Fault(NamedTuple):
  """What is said of a name; `whatever` its name is, it is the same fault if the same is said. It
  may stand for a `number` of names that differ in their index."""

  name: str
  says: str
  whatever: bool = False
  number: int = 1


def lines(faults: Iterable[Fault]) -> list[str]:
  """One for all faults that differ in the index of a layer or an expert, with their number and the
  first of them; in order of names."""
  kinds: dict[tuple[str, str], list[Fault]] = {}
  alike = lambda text: INDEX.sub("#", text)
  for fault in sorted(faults):
    name = "" if fault.whatever else alike(fault.name)
    kinds.setdefault((name, alike(fault.says)), []).append(fault)
  said = []
  for (name, _), [first, *more] in kinds.items():
    others = "others" if not name else "like it"
    left = sum(fault.number for fault in (first, *more)) - 1
    count = f" and {left} {others}" if left else ""
    said.append(f"{first.name}{count}: {first.says}")
  return said
