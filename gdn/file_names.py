"""From a parameter back to the name that a file has for it: what a message about a file needs."""

import bisect
import functools
import itertools
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which imports this
  from gdn.bijection import Place, Rule


def source(place: "Place", stack: bool, rules: "tuple[Rule, ...]", found: list[str]) -> str:
  """What the rules call the tensor of a place, an entry of a `stack` or not; the place itself where
  they do not. `*` is any index. Of several names, those most like one that was found."""
  names: list[str] = []
  for rule in rules:
    for ours in rule.ours:
      path, _, entry = ours.partition("[")
      if stack != bool(entry or rule.entry) or (place.entry is not None and not entry):
        continue
      pattern, numbers = inverse(path)
      if match := pattern.fullmatch(place.path):
        groups = dict(zip(numbers, match.groups(), strict=True))
        if place.entry is not None:
          groups |= dict.fromkeys(re.findall(r"\\(\d)", entry), str(place.entry))
        names += spellings(rule.theirs, groups)
  alike = {name: likeness(name, found) for name in names}
  best = [name for name, n in alike.items() if n == max(alike.values())]
  return " or ".join(best) or str(place)


@functools.cache
def inverse(path: str) -> tuple[re.Pattern[str], tuple[str, ...]]:
  """What matches the paths that a replacement gives, and which group of the name each of its own
  is: an index is one part of a path, `>` all of it."""
  parts = re.split(r"(\\\d|\\g<0>)", path)
  group = {True: "(.+)", False: r"([^.]+)"}
  pattern = "".join(
    group[part[-1] == ">"] if i % 2 else re.escape(part) for i, part in enumerate(parts)
  )
  return re.compile(pattern), tuple(part[-1] for part in parts[1::2])


def spellings(theirs: str, groups: Mapping[str, str]) -> list[str]:
  """Names that match `theirs` with these groups: without what is optional in it, and with it."""
  if ">" in groups:  # the whole
    return [groups[">"]]
  names = []
  for kept in ("", r"\1"):
    text = re.sub(r"\(\?:([^()]*)\)\?", kept, theirs)
    number = itertools.count(1)
    text = re.sub(r"\(\\d\+\)", lambda _: groups.get(str(next(number)), "*"), text)  # noqa: B023
    names.append(re.sub(r"\\(.)", r"\1", text))
  return names


def likeness(name: str, found: list[str]) -> int:
  """How many leading parts a name has in common with one of `found`, which are sorted."""
  at = bisect.bisect(found, name)
  equal = lambda pair: pair[0] == pair[1]
  common = lambda other: itertools.takewhile(
    equal, zip(name.split("."), other.split("."), strict=False)
  )
  return max((len(list(common(x))) for x in found[max(at - 1, 0) : at + 1]), default=0)
