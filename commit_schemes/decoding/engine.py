"""Continuous batching: requests come and go, and every step decodes whoever holds a slot.

engine = Engine(programs, limits, slots=8, cache=PrefixCache(2**30, 64, programs.empty()))
engine.submit("a", prompt, tokens=100, draft=15)
engine.run()
engine.texts["a"].tokens

All bookkeeping is on the host and says which rows of the pools a step may touch; the programs do
the rest. A wrong request is one ValueError and changes nothing: running requests go on.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes.decoding import schedule
from commit_schemes.decoding.prefix_cache import PrefixCache
from commit_schemes.decoding.schedule import Limits, Request, Schedule
from commit_schemes.decoding.slots import Programs, batch_of


@dataclass
class Text:
  """A request's tokens after its prompt so far, and the two highest logits behind each."""

  known: list[int]
  prompt: int
  top: list[np.ndarray] = field(default_factory=list)
  steps: int = 0
  restored: int = 0  # tokens of the prompt that a prefix cache gave

  @property
  def tokens(self) -> list[int]:
    return self.known[self.prompt :]

  def bytes(self) -> bytes:
    """The tokens as bytes, which need not be text. ValueError: a token above 255."""
    return bytes(self.tokens)


class Engine:
  """`slots` requests run at once; the rest wait. `block` tokens of a prompt are read at a time.

  ValueError: fewer than one slot, or a cache of another block.
  """

  def __init__(
    self,
    programs: Programs,
    limits: Limits,
    *,
    slots: int,
    block: int = 64,
    cache: PrefixCache | None = None,
  ):
    if slots < 1 or block < 1:
      raise ValueError(f"slots={slots} and block={block} must be at least 1")
    if cache is not None and cache.block != block:
      raise ValueError(f"a cache of blocks of {cache.block} beside pieces of {block} tokens")
    self.programs, self.limits, self.block, self.cache = programs, limits, block, cache
    self.schedule = Schedule((None,) * slots)
    self.state = programs.new(slots, limits.capacity)
    self.texts: dict[Hashable, Text] = {}
    self._saved: dict[Hashable, Any] = {}  # rows of requests that have lost their slot

  def submit(self, name: Hashable, prompt: Any, *, tokens: int, draft: int) -> None:
    """Queue a request. ValueError: what of it is wrong, and what is allowed."""
    request = Request(name=name, prompt=schedule.ids(prompt), tokens=tokens, draft=draft)
    schedule.check(request, self.limits)
    self.schedule = schedule.submit(self.schedule, request)
    self.texts[name] = Text(list(request.prompt), len(request.prompt))

  def fork(self, name: Hashable, new: Hashable, *, tokens: int, draft: int) -> None:
    """Queue a request that goes on from where a running one stands, sharing nothing with it.

    `tokens` counts from the prompt. KeyError: `name` is not running. ValueError: as for `submit`.
    """
    slot = schedule.slot_of(self.schedule, name)
    request = replace(self._running(slot), name=new, tokens=tokens, draft=draft)
    text = self.texts[name]
    if tokens <= len(text.tokens):
      raise ValueError(f"tokens={tokens}; {name!r} has {len(text.tokens)} already")
    schedule.check(request, self.limits)
    self.schedule = schedule.submit(self.schedule, request)
    self.texts[new] = replace(text, known=list(text.known), top=list(text.top))
    self._saved[new] = self._save(slot)

  def retract(self, name: Hashable) -> None:
    """Take a running request's slot away; `resume` queues it again. KeyError: it is not running."""
    slot = schedule.slot_of(self.schedule, name)
    self._saved[name] = self._save(slot)
    self.schedule = schedule.park(self.schedule, name)

  def resume(self, name: Hashable) -> None:
    """A retracted request is the next to be admitted. KeyError: it is not retracted."""
    self.schedule = schedule.resume(self.schedule, name)

  def evict(self, name: Hashable) -> None:
    """Forget a request, wherever it is; its text so far stays. KeyError: it is not known."""
    self.schedule = schedule.drop(self.schedule, name)
    self._saved.pop(name, None)

  def step(self) -> list[Hashable]:
    """Admit, decode one window of every running request; who has finished."""
    self.schedule, admitted = schedule.admit(self.schedule)
    for slot, request in admitted:
      self._seat(slot, request)
    left = [self._left(r) for r in self.schedule.running]
    nodes = [
      0 if r is None else min(1 + r.draft, n)
      for r, n in zip(self.schedule.running, left, strict=True)
    ]
    self.state, report = self.programs.step(self.state, batch_of(nodes))
    emitted, tokens, top = jax.device_get((report.emitted, report.tokens, report.top))
    finished = []
    for slot, n in enumerate(emitted):
      if (tenant := self.schedule.running[slot]) is not None:
        text = self.texts[tenant.name]
        text.known += tokens[slot, :n].tolist()
        text.top += list(top[slot, :n])
        text.steps += 1
    if self.cache is not None and report.marks is not None:
      self._store(report.marks)
    for slot, tenant in enumerate(self.schedule.running):
      if tenant is not None and not self._left(tenant):
        self.schedule = schedule.release(self.schedule, slot)
        finished.append(tenant.name)
    return finished

  def run(self) -> None:
    """Decode until nobody runs or waits."""
    while any(self.schedule.running) or self.schedule.waiting:
      self.step()

  def _running(self, slot: int) -> Request:
    request = self.schedule.running[slot]
    assert request is not None
    return request

  def _left(self, request: Request | None) -> int:
    return 0 if request is None else request.tokens - len(self.texts[request.name].tokens)

  def _save(self, slot: int) -> Any:
    return jax.device_get(self.programs.save(self.state, jnp.asarray([slot], jnp.int32)))

  def _seat(self, slot: int, request: Request) -> None:
    at = jnp.asarray([slot], jnp.int32)
    if (rows := self._saved.pop(request.name, None)) is not None:
      self.state = self.programs.restore(self.state, at, rows)
      return
    prompt = np.zeros((1, self.limits.capacity), np.int32)
    prompt[0, : len(request.prompt)] = request.prompt
    memories = self._read(request)
    length = np.asarray([len(request.prompt)], np.int32)
    self.state = self.programs.admit(self.state, at, prompt, length, memories)

  def _read(self, request: Request) -> Any:
    """Memories of a prompt but for its last token, from the longest stored prefix on."""
    prompt, end = request.prompt, len(request.prompt) - 1
    memories, depth = self.programs.empty(), 0
    hit = None if self.cache is None else self.cache.match(prompt[:end])
    if self.cache is not None and hit is not None:
      memories, depth = hit.memories, hit.depth
    self.texts[request.name].restored = depth
    while depth < end:
      count = min(self.block, end - depth)
      ids = np.zeros((1, self.block), np.int32)
      ids[0, :count] = prompt[depth : depth + count]
      memories = self.programs.prefill(
        memories, ids, np.asarray([depth], np.int32), np.asarray([count], np.int32)
      )
      depth += count
      if self.cache is not None and count == self.block:
        self.cache.store(prompt[:depth], memories)
    if self.cache is not None and hit is not None:
      self.cache.unpin(hit)
    return memories

  def _store(self, marks: Any) -> None:
    assert self.cache is not None
    for i, (slot, depth) in enumerate(zip(marks.row.tolist(), marks.depth.tolist(), strict=True)):
      if slot < 0:
        continue
      known = self.texts[self._running(slot).name].known
      assert depth < len(known), "an anchor is in no memory yet"
      if not self.cache.has(text := known[:depth]):
        self.cache.store(text, jax.tree.map(lambda x: x[i : i + 1], marks.memories))  # noqa: B023
