"""Who runs: a queue of requests, a fixed number of slots, a budget in bytes. Pure; no device here.

A request waits, runs in a slot, and may be parked (retracted) and resumed. Requests are admitted in
order to the lowest free slot; there is no other policy.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, kw_only=True)
class Request:
  """A prompt, how many tokens shall follow it, and how many drafted tokens each step may try."""

  name: Hashable
  prompt: tuple[int, ...]
  tokens: int
  draft: int


class Limits(NamedTuple):
  """What the compiled programs can take: tokens of one text, the vocabulary, nodes of a window."""

  capacity: int
  vocab: int
  window: int


class Schedule(NamedTuple):
  """`running[slot]` is that slot's request or None."""

  running: tuple[Request | None, ...]
  waiting: tuple[Request, ...] = ()
  parked: tuple[Request, ...] = ()


def check(request: Request, limits: Limits) -> None:
  """ValueError: what of a request is out of range, and what is allowed."""
  for name, value in (("tokens", request.tokens), ("draft", request.draft)):
    if not hasattr(value, "__index__"):  # a part of a token would be left for ever
      raise ValueError(f"request {request.name!r}: {name}={value!r} is not allowed: no integer")
  n, prompt = len(request.prompt), request.prompt
  strange = [t for t in prompt if not isinstance(t, int) or not 0 <= t < limits.vocab]
  for what, wrong, allowed in (
    (f"a prompt of {n} tokens", n == 0, "at least 1"),
    (f"tokens={request.tokens}", request.tokens < 1, "at least 1"),
    (
      f"a prompt of {n} and {request.tokens} tokens after it",
      n + request.tokens > limits.capacity,
      f"together at most {limits.capacity}",
    ),
    (f"token {strange[:1]}", bool(strange), f"integers from 0 to {limits.vocab - 1}"),
    (
      f"draft={request.draft}",
      not 0 <= request.draft < limits.window,
      f"0 to {limits.window - 1}, as compiled",
    ),
  ):
    if wrong:
      raise ValueError(f"request {request.name!r}: {what} is not allowed; allowed: {allowed}")


def ids(prompt: Any) -> tuple[int, ...]:
  """Token ids of a prompt: any bytes, text or not, or integers. ValueError: a str, or no sequence.

  A str is refused because its bytes depend on an encoding that nobody has named.
  """
  if isinstance(prompt, str):
    raise ValueError("a prompt is bytes or token ids, not str; encode it")
  try:
    return tuple(t if isinstance(t, int) else t.__index__() for t in prompt)
  except (TypeError, AttributeError) as e:
    raise ValueError(f"a prompt is bytes or token ids, not {prompt!r:.60}") from e


def requests(s: Schedule) -> list[Request]:
  """Everybody known: running, waiting and parked."""
  return [r for r in (*s.running, *s.waiting, *s.parked) if r is not None]


def submit(s: Schedule, request: Request) -> Schedule:
  """The request at the end of the queue. ValueError: its name is taken."""
  if request.name in {r.name for r in requests(s)}:
    raise ValueError(f"request {request.name!r} exists already")
  return s._replace(waiting=(*s.waiting, request))


def admit(s: Schedule) -> tuple[Schedule, list[tuple[int, Request]]]:
  """The first of the queue into free slots: who and where."""
  free = [slot for slot, r in enumerate(s.running) if r is None]
  admitted = list(zip(free, s.waiting, strict=False))
  running = list(s.running)
  for slot, request in admitted:
    running[slot] = request
  return s._replace(running=tuple(running), waiting=s.waiting[len(admitted) :]), admitted


def slot_of(s: Schedule, name: Hashable) -> int:
  """Where a request runs. KeyError: it does not."""
  for slot, request in enumerate(s.running):
    if request is not None and request.name == name:
      return slot
  raise KeyError(f"request {name!r} is not running")


def release(s: Schedule, slot: int) -> Schedule:
  """The slot without its request."""
  return s._replace(running=(*s.running[:slot], None, *s.running[slot + 1 :]))


def park(s: Schedule, name: Hashable) -> Schedule:
  """A running request leaves its slot until `resume`. KeyError: it is not running."""
  slot = slot_of(s, name)
  request = s.running[slot]
  assert request is not None
  return release(s, slot)._replace(parked=(*s.parked, request))


def resume(s: Schedule, name: Hashable) -> Schedule:
  """A parked request is the next in the queue. KeyError: it is not parked."""
  [*found] = [r for r in s.parked if r.name == name]
  if not found:
    raise KeyError(f"request {name!r} is not parked")
  rest = tuple(r for r in s.parked if r.name != name)
  return s._replace(parked=rest, waiting=(*found, *s.waiting))


def drop(s: Schedule, name: Hashable) -> Schedule:
  """The schedule without a request, wherever it was. KeyError: it is not known."""
  if name not in {r.name for r in requests(s)}:
    raise KeyError(f"request {name!r} is not known")
  others = lambda some: tuple(r for r in some if r.name != name)
  running = tuple(None if r is not None and r.name == name else r for r in s.running)
  return Schedule(running, others(s.waiting), others(s.parked))


def slots_within(
  budget: int, carry: int, flight: int, *, per_request: int = 1, spare_rows: int = 0
) -> int:
  """How many requests run at once: the most n with

      n (per_request carry + flight) + spare_rows flight <= budget       bytes

  `carry` is a slot's bytes between steps, `flight` a running window's on top of it (`Footprint`).
  SGLang keeps `per_request` slots a request for its prefix cache and one spare scratch row.
  ValueError: not even one fits.
  """
  n = (budget - spare_rows * flight) // (per_request * carry + flight)
  if n < 1:
    least = per_request * carry + (1 + spare_rows) * flight
    raise ValueError(f"a budget of {budget:,} bytes admits no request; one takes {least:,}")
  return n
