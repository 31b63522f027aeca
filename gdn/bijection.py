"""Names of a file onto parameters, as a bijection: every tensor has a place, every place a tensor,
or there is one error that says everything that disagrees.

Nothing is read here: a plan is made from names, shapes and dtypes, so a file that does not fit is
refused before its first byte of data.
"""

import functools
import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gdn.faults import Fault, lines
from gdn.file_names import source

Layout = Callable[[Any], tuple[Any, ...]]
Described = jax.ShapeDtypeStruct


def same(x: Any) -> tuple[Any, ...]:
  return (x,)


def transposed(x: Any) -> tuple[Any, ...]:
  return (x.T,)


class Rule(NamedTuple):
  """What becomes of the tensors whose whole name matches `theirs`, a regular expression.

  ours    replacements that give the paths it is written to; `path[7]` is one entry of a stack along
          its first axis, `path[:,7]` along its second
  layout  the tensor in, one array for each path out; ValueError or TypeError: it has another shape
  entry   of a stack along its first axis, which is then read entry by entry: what `layout` makes of
          one entry
  axes    of each path the one along which the entries lie
  """

  theirs: str
  ours: tuple[str, ...]
  layout: Layout = same
  entry: Layout | None = None
  axes: tuple[int, ...] = ()


ENTRY = re.compile("0|[1-9][0-9]{0,9}")  # as a number is written, and no longer than a size


class Place(NamedTuple):
  """A parameter, or one entry of it along an axis."""

  path: str
  entry: int | None
  axis: int = 0

  @classmethod
  def parse(cls, text: str) -> "Place":
    """ValueError: no stack has such an entry."""
    path, bracket, entry = text.rstrip("]").partition("[")
    if not bracket:
      return cls(path, None)
    if not ENTRY.fullmatch(number := entry.lstrip(":,")):
      raise ValueError(f"{path} has no entry {number}")
    return cls(path, int(number), entry.count(","))

  def __str__(self) -> str:
    return self.path if self.entry is None else f"{self.path}[{':,' * self.axis}{self.entry}]"

  def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
    """What belongs here, of a parameter of that shape."""
    return whole if self.entry is None else whole[: self.axis] + whole[self.axis + 1 :]


class Step(NamedTuple):
  """One tensor's way into the parameters."""

  layout: Layout
  places: tuple[Place, ...]
  entry: Layout | None = None
  axes: tuple[int, ...] = ()


@functools.lru_cache(maxsize=1024)
def laid_out(layout: Layout, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
  """Shapes of what a layout makes; all experts of a model ask the same."""
  return tuple(x.shape for x in jax.eval_shape(layout, Described(shape, jnp.float32)))


def plan(
  found: Mapping[str, Described],
  wanted: Mapping[str, Described],
  rules: tuple[Rule, ...],
  accepts: Callable[[str], tuple[Any, ...]],
) -> dict[str, Step]:
  """The step of every tensor in `found`; `accepts(path)` are the dtypes that may become that path.

  ValueError: one, with every name that matches no rule or several, every place that is written
  twice, never or is not ours, and every shape or dtype that differs; a line for each kind of it.
  """
  steps: dict[str, Step] = {}
  writers: dict[Place, str] = {}
  wrong: list[Fault] = []
  compiled = [(re.compile(rule.theirs), rule) for rule in rules]
  for name, x in found.items():
    hits = [(rule, match) for theirs, rule in compiled if (match := theirs.fullmatch(name))]
    if len(hits) != 1:
      wrong.append(Fault(name, f"matches {len(hits)} rules, allowed: 1"))
      continue
    [(rule, match)] = hits
    try:
      places = tuple(Place.parse(match.expand(ours)) for ours in rule.ours)
    except ValueError as error:
      wrong.append(Fault(name, f"left over, the model's {error}"))
      continue
    steps[name] = Step(rule.layout, places, rule.entry, rule.axes)
    if unknown := [p for p in places if not exists(p, wanted)]:
      wrong += [Fault(name, f"left over, the model has no {p}") for p in unknown]
      continue
    for place in places:
      if earlier := writers.get(place):
        wrong.append(Fault(name, f"{place} is written a second time, first by {earlier}"))
      writers.setdefault(place, name)
    wrong += misfits(name, x, steps[name], wanted, accepts)
  wrong += missing(writers, wanted, rules, sorted(found))
  if wrong:
    raise ValueError("\n  ".join(["weights and model disagree:", *lines(wrong)]))
  return steps


def exists(place: Place, wanted: Mapping[str, Described]) -> bool:
  if place.path not in wanted or place.entry is None:
    return place.path in wanted
  shape = wanted[place.path].shape
  return place.axis < len(shape) and place.entry < shape[place.axis]


def misfits(
  name: str, x: Described, step: Step, wanted: Mapping[str, Described],
  accepts: Callable[[str], tuple],
) -> list[Fault]:  # fmt: skip
  """What is wrong with the shape and dtype of one tensor."""
  wrong = []
  shapes = [p.shape(wanted[p.path].shape) for p in step.places]
  listed = lambda shapes: ", ".join(f"{p} {s}" for p, s in zip(step.places, shapes, strict=True))
  try:
    made = list(laid_out(step.layout, x.shape))
  except (TypeError, ValueError, IndexError):
    wrong.append(Fault(name, f"shape {x.shape} does not give {listed(shapes)}"))
  else:
    if made != shapes:
      wrong.append(Fault(name, f"shape {x.shape} gives {listed(made)}, wanted {listed(shapes)}"))
  for place in step.places:
    allowed = [jnp.dtype(dtype).name for dtype in accepts(place.path)]
    if jnp.dtype(x.dtype).name not in allowed:
      says = f"dtype {jnp.dtype(x.dtype).name}, wanted {' or '.join(allowed)}"
      wrong.append(Fault(name, says, whatever=True))
      break
  return wrong


def missing(
  writers: Mapping[Place, str], wanted: Mapping[str, Described], rules: tuple[Rule, ...],
  found: list[str],
) -> list[Fault]:  # fmt: skip
  """Parameters that are not written, or not once, by the names that the file would have for them;
  `found` are those it has, sorted."""
  entries: dict[str, dict[int | None, int]] = {}
  for path, entry, axis in writers:
    entries.setdefault(path, {})[entry] = axis
  wrong: list[Fault] = []
  gone: dict[Place, int] = {}  # of a stack the first entry, for all: a size may be wrong by far
  for path, x in wanted.items():
    have = entries.get(path, {})
    if not have:
      gone[Place(path, None)] = 1
    elif None in have and len(have) > 1:
      wrong.append(Fault(path, "is written as a whole and by entries"))
    elif None not in have:
      axis = max(have.values())
      if left := x.shape[axis] - len(have):
        gone[Place(path, next(i for i in itertools.count() if i not in have), axis)] = left
  wanted_for: dict[str, list[Place]] = {}
  for place in gone:
    name = source(place, len(wanted[place.path].shape) > 2, rules, found)
    wanted_for.setdefault(name, []).append(place)
  for name, places in wanted_for.items():
    listed = [str(place) for place in places]
    of = "" if listed == [name] else f", wanted for {' and '.join(listed)}"
    wrong.append(Fault(name, f"missing{of}", number=max(gone[place] for place in places)))
  return wrong
