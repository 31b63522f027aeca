"""Continuous batching: whoever comes and goes, each request's text is the one it has alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commit_schemes import SCHEMES
from commit_schemes.decoding import schedule, trees
from commit_schemes.decoding.block import block_drafter
from commit_schemes.decoding.drafts import nothing
from commit_schemes.decoding.loop import Batch, Marking
from commit_schemes.decoding.schedule import Request, Schedule, slots_within
from commit_schemes.decoding.slots import batch_of, compiled
from commit_schemes.model import Pair, model_memory
from experiments import soak_world
from gdn import drafter
from gdn.drafter import DrafterConfig
from tests import tiny
from tests.tiny import C, engine, equal, same_text, turn

pytestmark = pytest.mark.usefixtures("quick_compiles")

I32 = jnp.int32


def submit_many(e, n=9):
  for i in range(n):
    e.submit(i, turn(i % C.prompts, 3 * i), tokens=5 + 3 * i, draft=i % C.window)


def test_every_request_and_draft_length_shares_one_compiled_step():
  """Nine requests through four slots: drafts of 0 to 8 tokens side by side, chains and trees."""
  traces, draft = [], soak_world.rigged(tiny.world().truth, C.window)
  e = engine(programs=tiny.programs_of(
    "ring_exact", drafter=lambda *a: (traces.append(1), draft(*a))[1]
  ))  # fmt: skip
  submit_many(e)
  nodes = set()
  while any(e.schedule.running) or e.schedule.waiting:
    e.step()
    nodes |= {r.draft for r in e.schedule.running if r}
  assert len(traces) == 1
  assert nodes == set(range(9))
  for i in range(9):
    assert len(e.texts[i].tokens) == 5 + 3 * i
    same_text(e.texts[i])
  assert e.texts[0].steps == 5, "without a draft every step gives one token"
  assert e.texts[8].steps < len(e.texts[8].tokens) / 2, "drafts are accepted"


def test_more_requests_than_slots_wait_their_turn():
  e = engine()
  submit_many(e, 7)
  seen = []
  while any(e.schedule.running) or e.schedule.waiting:
    e.step()
    running = [r.name for r in e.schedule.running if r]
    assert len(running) <= C.slots
    seen += [name for name in running if name not in seen]
  assert seen == sorted(seen)
  for i in range(7):
    assert len(e.texts[i].tokens) == 5 + 3 * i
    same_text(e.texts[i])


WRONG = {
  "a prompt and answer longer than the cache": (
    {"prompt": b"x" * 90, "tokens": 7, "draft": 1},
    "a prompt of 90 and 7 tokens after it is not allowed; allowed: together at most 96",
  ),
  "an empty prompt": ({"prompt": b"", "tokens": 4, "draft": 1}, "a prompt of 0 tokens"),
  "an id outside the vocabulary": (
    {"prompt": [1, 256], "tokens": 4, "draft": 1},
    r"token \[256\] .* allowed: integers from 0 to 255",
  ),
  "a negative id": ({"prompt": [-1], "tokens": 4, "draft": 1}, r"token \[-1\] is not allowed"),
  "a str": ({"prompt": "text", "tokens": 4, "draft": 1}, "bytes or token ids, not str"),
  "no sequence": ({"prompt": 7, "tokens": 4, "draft": 1}, "bytes or token ids, not 7"),
  "no ids": ({"prompt": [1.5], "tokens": 4, "draft": 1}, "bytes or token ids, not"),
  "a draft longer than compiled for": (
    {"prompt": b"ab", "tokens": 4, "draft": C.window},
    f"draft={C.window} .* allowed: 0 to {C.window - 1}",
  ),
  "nothing to decode": ({"prompt": b"ab", "tokens": 0, "draft": 1}, "tokens=0"),
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [("tokens", 2.5), ("draft", 0.5), ("tokens", None)])
def test_a_request_of_part_of_a_token_is_refused(field, value):
  """Half a token is left for ever. Types are checked here and nowhere else, so it is put there."""
  request = Request(name="a", prompt=(1,), tokens=2, draft=1)
  object.__setattr__(request, field, value)
  with pytest.raises(ValueError, match=f"{field}={value} is not allowed: no integer"):
    schedule.check(request, schedule.Limits(C.capacity, 256, C.window))


def test_a_wrong_request_is_named_and_the_others_go_on():
  e = engine()
  e.submit("good", turn(1, 0), tokens=30, draft=5)
  e.step()
  for what, (request, says) in WRONG.items():
    with pytest.raises(ValueError, match=says):
      e.submit(what, **request)
  with pytest.raises(ValueError, match="request 'good' exists already"):
    e.submit("good", turn(1, 0), tokens=1, draft=0)
  with pytest.raises(ValueError, match="tokens=1; 'good' has"):
    e.fork("good", "fork", tokens=1, draft=0)
  for call in (e.retract, e.resume, e.evict):
    with pytest.raises(KeyError, match="nobody"):
      call("nobody")
  assert set(e.texts) == {"good"}
  e.run()
  same_text(e.texts["good"])


def test_bytes_that_are_not_text_are_tokens_like_any_other():
  """What is decoded from them comes back as bytes; nothing decodes them to characters."""
  e = engine()
  e.submit("bytes", b"\x00\xff\xfe\x80\xc0", tokens=20, draft=3)
  e.submit("ids", [0, 255, 254, 128, 192], tokens=20, draft=0)
  e.run()
  assert e.texts["bytes"].bytes() == bytes(e.texts["ids"].tokens)
  assert len(e.texts["bytes"].bytes()) == 20


def leaves_of(e, slot):
  return jax.device_get(e.programs.save(e.state, jnp.asarray([slot], I32)))


def test_a_retracted_request_goes_on_bit_for_bit():
  """With rows pending in a ring that has wrapped, in another slot, its own used by a stranger."""
  e = engine()
  e.submit("a", turn(2, 0), tokens=60, draft=2)
  while len(e.texts["a"].known) < 60:
    e.step()
  ring = jax.device_get(e.state.carry[0].recurrent)
  assert ring.h[0] > 0
  assert ring.base[0] + ring.h[0] > 0
  before = leaves_of(e, 0)
  e.retract("a")
  e.submit("b", turn(1, 5), tokens=20, draft=4)
  e.step()
  e.resume("a")
  e.step()  # admits and decodes once
  assert e.schedule.running[1].name == "a"
  same_text(e.texts["b"])
  other = engine()
  other.state = other.programs.restore(other.state, jnp.asarray([3], I32), before)
  equal(leaves_of(other, 3), before)
  e.run()
  same_text(e.texts["a"])


def test_a_fork_and_its_source_share_nothing():
  e = engine()
  e.submit("a", turn(3, 0), tokens=40, draft=7)
  for _ in range(4):
    e.step()
  e.fork("a", "b", tokens=55, draft=0)
  e.step()
  e.fork("a", "c", tokens=30, draft=9)
  e.evict("a")
  e.run()
  assert len(e.texts["b"].tokens) == 55
  assert len(e.texts["c"].tokens) == 30
  for name in "abc":
    same_text(e.texts[name])


@pytest.mark.parametrize("name", ["ring_exact", "tree_wy"])
def test_padding_rows_touch_nothing(name):
  """Slot -1 and windows without nodes, beside a last slot that is alive."""
  e = engine(name)
  submit_many(e, 4)
  for _ in range(3):
    e.step()
  rows = [leaves_of(e, slot) for slot in range(C.slots)]
  none = Batch(jnp.asarray([-1, -1, 3, -1], I32), jnp.asarray([C.window, 1, 0, 0], I32))
  e.state, report = e.programs.step(e.state, none)
  for slot in range(C.slots):
    equal(leaves_of(e, slot), rows[slot])
  assert not np.any(report.emitted)
  assert not np.any(report.tokens)
  assert np.isnan(report.top).all()
  # Rows in another order than the slots, one of them padding.
  some = Batch(jnp.asarray([2, -1, 0, -1], I32), jnp.asarray([1, 1, 1, 1], I32))
  e.state, report = e.programs.step(e.state, some)
  assert report.emitted.tolist() == [1, 0, 1, 0]
  for slot in (1, 3):
    equal(leaves_of(e, slot), rows[slot])


def test_a_slot_is_as_good_as_new_for_its_next_tenant():
  """NaN and live cursors wherever a former tenant may have left them."""
  e = engine()
  for i in range(4):
    e.submit(i, turn(i, 0), tokens=30, draft=5)
  e.step()
  for name in range(4):
    e.evict(name)
  e.state = e.state._replace(carry=tiny.poisoned(e.state.carry))
  e.submit("next", turn(0, 9), tokens=25, draft=6)
  e.run()
  same_text(e.texts["next"])


def test_every_leaf_of_a_new_pool_is_a_buffer_of_its_own():
  """Layers that share zeros would be donated twice: with one layer of a kind nobody sees it."""
  config = dataclasses.replace(tiny.world().config, layers=3, attention_every=3)
  params = tiny.world().params._replace(layers=())
  memory = model_memory(config, SCHEMES["snapshot"].make(tiny.world().spec(4)))
  new = compiled(params, config, memory, nothing).new(2, 16)
  buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(new)]
  assert len(set(buffers)) == len(buffers)


def test_a_block_drafter_and_its_rows_come_and_go_with_their_slots():
  """Its layers' rows are memories like the others: prefix hits, retraction and forks take them."""
  w = tiny.world()
  small = DrafterConfig(w.config, block=C.window, taps=(0, 1), layers=1, inner=32, window=12)
  pair = Pair(w.params, drafter.init(small, jax.random.key(5)))
  memory = model_memory(w.config, SCHEMES["ring_exact"].make(w.spec(C.window)), drafter=small)
  programs = compiled(
    pair, w.config, memory, block_drafter(small, trees.chain(C.window)), marking=Marking(C.block, 2)
  )
  e = engine(programs=programs, budget=tiny.MANY)
  assert len(jax.tree.leaves(programs.empty())) > len(jax.tree.leaves(w.config.layers * [0]))
  e.submit("a", turn(1, 0), tokens=40, draft=9)
  for _ in range(5):
    e.step()
  e.fork("a", "b", tokens=50, draft=4)
  e.retract("a")
  e.resume("a")
  e.run()
  e.submit("c", turn(1, 30), tokens=20, draft=9)
  e.run()
  assert e.texts["c"].restored > 0
  for name in "abc":
    same_text(e.texts[name])


# The schedule alone.


def request(name, tokens=5):
  return Request(name=name, prompt=(1,), tokens=tokens, draft=0)


@given(
  slots=st.integers(1, 4),
  moves=st.lists(st.tuples(st.sampled_from("sarpmd"), st.integers(0, 9)), max_size=40),
)
def test_nobody_is_lost_or_seated_twice(slots, moves):
  s, alive = Schedule((None,) * slots), set()
  for move, name in moves:
    running = {r.name for r in s.running if r}
    if move == "s" and name not in alive:
      s, alive = schedule.submit(s, request(name)), alive | {name}
    elif move == "a":
      free, waiting = s.running.count(None), len(s.waiting)
      s, admitted = schedule.admit(s)
      assert len(admitted) == min(free, waiting)
    elif move == "r" and running:
      slot = schedule.slot_of(s, min(running))
      s, alive = schedule.release(s, slot), alive - {min(running)}
    elif move == "p" and name in running:
      s = schedule.park(s, name)
    elif move == "m" and s.parked:
      s = schedule.resume(s, s.parked[0].name)
    elif move == "d" and name in alive:
      s, alive = schedule.drop(s, name), alive - {name}
    names = [r.name for r in schedule.requests(s)]
    assert len(names) == len(set(names))
    assert set(names) == alive
    assert len(s.running) == slots


@given(
  carry=st.integers(1, 10**9), flight=st.integers(0, 10**9), per=st.integers(1, 5),
  spare=st.integers(0, 1), budget=st.integers(0, 10**11),
)  # fmt: skip
def test_what_is_admitted_fits_and_one_more_does_not(carry, flight, per, spare, budget):
  cost = lambda n: n * (per * carry + flight) + spare * flight
  if budget < cost(1):
    with pytest.raises(ValueError, match=f"admits no request; one takes {cost(1):,}"):
      slots_within(budget, carry, flight, per_request=per, spare_rows=spare)
    return
  n = slots_within(budget, carry, flight, per_request=per, spare_rows=spare)
  assert cost(n) <= budget < cost(n + 1)


def test_the_published_scratch_is_ten_rows():
  """SGLang PR 28010: 48 slots at 5 a request admit 9; 11.25 GiB is 10 rows of 1,152 MiB."""
  state, T = 72 * 2**20, 16
  budget = 9 * 5 * state + 10 * T * state
  assert slots_within(budget, state, T * state, per_request=5, spare_rows=1) == 48 // 5 == 9
  assert 10 * T * state == 11.25 * 2**30


def test_batch_rows_are_slots():
  assert batch_of([0, 3, 1]).slots.tolist() == [-1, 1, 2]
