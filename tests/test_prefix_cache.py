"""The radix tree keeps what it was given, under its budget; what it gives back is a prefill's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commit_schemes import narrow
from commit_schemes.decoding.prefix_cache import PrefixCache
from commit_schemes.footprint import nbytes
from gdn.typing import Accepted
from tests import laws, tiny
from tests.strategies import make_case
from tests.tiny import MANY, C, engine, equal, same_text, turn

pytestmark = pytest.mark.usefixtures("quick_compiles")

BLOCK = 2


def entry(text):
  return (np.asarray([sum(text), len(text)], np.int32),)


SIZE = nbytes(entry(()))


def tree(entries: int) -> PrefixCache:
  return PrefixCache(entries * SIZE, BLOCK, entry(()))


texts = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(lambda x: tuple(x + x[::-1]))


def check(cache: PrefixCache, kept: set) -> None:
  """The tree is a radix tree, and its bytes are those of its entries."""
  stored = set()
  for node in cache.nodes():
    assert node.depth == len(node.text())
    assert node.pins == 0
    for first, child in node.children.items():
      assert child.parent is node
      assert child.edge[0] == first
      assert child.used <= node.used
    if node.parent is not None:
      assert node.edge
      assert node.memories is not None or len(node.children) > 1, "a node that does nothing"
    if node.memories is not None:
      stored.add(node.text())
      equal(node.memories, entry(node.text()))
  assert stored == kept
  assert cache.bytes == len(kept) * SIZE


@given(stored=st.lists(texts, max_size=20), asked=st.lists(texts, max_size=5))
def test_the_longest_stored_prefix_is_found(stored, asked):
  cache = tree(100)
  for text in stored:
    assert cache.store(text, entry(text))
  check(cache, set(stored))
  for text in asked:
    text = (*text, 1, 0)
    want = max((s for s in stored if text[: len(s)] == s), key=len, default=None)
    hit = cache.match(text)
    assert (hit and hit.text()) == want
    if hit:
      cache.unpin(hit)


@given(moves=st.lists(st.tuples(st.booleans(), texts), max_size=40), entries=st.integers(1, 4))
def test_the_least_recently_used_leaf_leaves_first(moves, entries):
  """Against a list in order of use: a use of a text is one of each of its stored prefixes."""
  cache, order = tree(entries), []
  prefixes = lambda text: [s for s in order if text[: len(s)] == s]
  leaf = lambda text: not any(s != text and s[: len(text)] == text for s in order)

  def touch(text):
    for s in sorted(prefixes(text), key=len, reverse=True):  # the parent is the newest of them
      order.remove(s)
      order.append(s)

  for storing, text in moves:
    if storing:
      if text not in order:
        order.append(text)
      touch(text)
      cache.store(text, entry(text))
      while len(order) > entries:
        order.remove(next(s for s in order if leaf(s)))
    elif hit := cache.match(text):
      touch(max(prefixes(text), key=len))
      cache.unpin(hit)
    check(cache, set(order))


def test_an_entry_in_use_is_not_evicted():
  cache = tree(1)
  cache.store((1, 1), entry((1, 1)))
  hit = cache.match((1, 1, 5))
  cache.store((2, 2), entry((2, 2)))
  assert hit.memories is not None
  assert cache.has((1, 1))
  cache.unpin(hit)
  assert cache.bytes <= cache.budget


def test_wrong_entries_are_refused():
  cache = tree(4)
  for text in ((), (1,), (1, 2, 3)):
    with pytest.raises(ValueError, match=rf"{len(text)} tokens; allowed: a multiple of .* 2"):
      cache.store(text, entry(text))
  with pytest.raises(ValueError, match="not the materialised memories"):
    cache.store((1, 2), (np.zeros(3, np.int32),))
  assert PrefixCache(SIZE - 1, BLOCK, entry(())).store((1, 2), entry((1, 2))) is False
  with pytest.raises(ValueError, match="budget=-1 and block=2"):
    PrefixCache(-1, 2, entry(()))


def test_a_carry_with_pending_history_is_refused():
  """Whatever it looks like: KV rows in a ring have the shapes of KV rows in order."""
  e = engine("tree_wy", budget=MANY)
  e.submit(0, turn(0, 20), tokens=9, draft=3)
  e.step()
  rows = e.programs.save(e.state, jnp.zeros(1, jnp.int32))
  text = e.texts[0].known[: C.block]
  with pytest.raises(ValueError, match="not the materialised memories"):
    e.cache.store(text, rows.carry)
  attention = rows.carry[-1]
  like_rows = (*e.programs.empty()[:-1], attention)
  with pytest.raises(ValueError, match="not the materialised memories"):
    e.cache.store(text, like_rows)
  with pytest.raises(ValueError, match="KV rows of 0 tokens where 8 tokens leave 8"):
    e.cache.store(text, e.programs.empty())


def test_a_prompt_restored_from_a_prompt_is_prefilled_bit_for_bit():
  """The same arithmetic in the same pieces, so the same bits in every memory."""
  cold, warm = engine(budget=None), engine(budget=MANY)
  warm.submit("first", turn(4, 17), tokens=1, draft=0)
  warm.run()
  for e in (cold, warm):
    e.submit("again", turn(4, 40), tokens=30, draft=5)
    e.step()
  assert warm.texts["again"].restored == (len(turn(4, 17)) - 1) // C.block * C.block > 0
  assert cold.texts["again"].restored == 0
  slot = jnp.zeros(1, jnp.int32)
  equal(cold.programs.save(cold.state, slot), warm.programs.save(warm.state, slot))
  warm.run()
  same_text(warm.texts["again"])


@pytest.mark.parametrize("name", ["snapshot", "ring_exact", "tree_wy"])
def test_a_generated_prefix_is_reused_as_if_prefilled(name):
  """Marks from inside commits, at boundaries by the post-verify length: the next turn hits them."""
  e = engine(name, budget=MANY)
  e.submit("first", turn(1, 0), tokens=60, draft=9)
  e.run()
  e.submit("second", turn(1, 59), tokens=12, draft=4)
  e.run()
  known = len(turn(1, 59)) - 1
  assert e.texts["second"].restored == known // C.block * C.block
  same_text(e.texts["first"])
  same_text(e.texts["second"])


def test_decoding_goes_on_while_the_cache_evicts():
  """Room for two entries, requests that share prefixes and others that do not."""
  e = engine(budget=2 * nbytes(tiny.built("ring_exact").empty()))
  for i in range(8):
    e.submit(i, turn(i % 3, 5 * i), tokens=15 + i, draft=i)
  while any(e.schedule.running) or e.schedule.waiting:
    e.step()
    assert e.cache.bytes <= e.cache.budget
  for i in range(8):
    same_text(e.texts[i])


def test_more_boundaries_than_marks_is_a_miss_and_no_wrong_text():
  e = engine("ring_exact", budget=MANY, programs=tiny.programs_of("ring_exact", marks=1))
  for i in range(4):
    e.submit(i, turn(i, 0), tokens=40, draft=9)
  e.run()
  for i in range(4):
    e.submit(10 + i, turn(i, 30), tokens=20, draft=2)
  e.run()
  assert any(e.texts[10 + i].restored for i in range(4))
  for i in (0, 1, 2, 3, 10, 11, 12, 13):
    same_text(e.texts[i])


def test_a_cache_of_other_blocks_than_the_pieces_is_refused():
  programs = tiny.built("ring_exact")
  with pytest.raises(ValueError, match="a cache of blocks of 3 beside pieces of 8 tokens"):
    tiny.Engine(
      programs, tiny.world().limits(C.window), slots=2, block=C.block,
      cache=PrefixCache(1, 3, programs.empty()),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["tree_wy", "ring_open_loop"])
def test_marks_are_rows_of_the_whole_pools_state(name):
  """`narrow` before `state_at` gives the rows that `state_at` of everything has, bit for bit.

  Of schemes whose states the soak cannot compare bitwise; it compares the marks of all.
  """
  forest = [([-1, 0, 0, 1, 1, 2], [0, 1, 4]), ([-1, 0, 1, 2, 3, 4], [0, 1]), ([-1, 0, 1], [])]
  case = make_case(0, forest, slots=(3, 0, 4))
  scheme = laws.build(name)
  _, flight = scheme.verify(scheme.init(jnp.asarray(case.S)), case.window(), case.gates)
  carry = scheme.commit(flight, case.accepted())
  _, flight = scheme.verify(carry, case.window(), case.gates)  # finds history pending
  accepted = Accepted(jnp.asarray(case.path), jnp.asarray([2, 1, 0], jnp.int32))
  rows = jnp.asarray([1, -1, 0], jnp.int32)
  some = Accepted(accepted.path[jnp.asarray([1, 0, 0])], jnp.asarray([1, 0, 2], jnp.int32))
  got = jax.jit(lambda f: scheme.state_at(narrow(f, rows), some))(flight)
  whole = scheme.state_at(flight, accepted)
  laws.same(got[0], whole[0])
  laws.same(got[2], whole[3])
  laws.same(got[1], 0)
