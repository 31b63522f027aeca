"""A test for each kind of fault that users of serving engines reported: see tests/field_bugs.py."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commit_schemes import SCHEMES
from commit_schemes.decoding.accept import greedy
from commit_schemes.decoding.drafts import nothing, prompt_lookup
from commit_schemes.decoding.loop import Batch, step
from commit_schemes.decoding.slots import batch_of, seat, vacant
from commit_schemes.footprint import model_footprint, nbytes
from commit_schemes.model import Draft
from commit_schemes.model import prefill as prefill_piece
from experiments import soak_world
from experiments.models import shape_of
from gdn import prefill
from gdn.dots import EXACT
from gdn.streaming import empty
from gdn.typing import Accepted
from tests import arithmetic_laws, budget, tiny
from tests.field_bugs import FAULTS
from tests.tiny import MANY, C, engine, equal, same_text, turn

pytestmark = pytest.mark.usefixtures("quick_compiles")

I32 = jnp.int32
# The numbers of the list, which leaves some out.
NUMBERS = (
  *(1, 2, 5, 6, 7, 9, 11), *(12, 13, 14, 16, 17, 18), *(20, 22, 23, 26, 27, 28, 29),
  *(31, 32, 34, 36, 37), *range(38, 43),
)  # fmt: skip


def test_every_fault_has_a_test_or_a_reason():
  functions = {
    f"{path.stem}::{node.name}"
    for path in Path(__file__).parent.glob("test_*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef)
  }
  assert tuple(f.number for f in FAULTS) == NUMBERS
  for f in FAULTS:
    assert bool(f.tests) != bool(f.why), f"fault {f.number} needs tests or a reason, one of them"
    assert f.source
    assert f.fault
    assert not set(f.tests) - functions, f"fault {f.number} names tests that do not exist"


def mixed(text, length, behind=None) -> Draft:
  """No draft, prompt lookup or the known answer, by the text's first token."""
  drafts = [d(text, length) for d in (
    nothing, prompt_lookup(C.window), soak_world.rigged(tiny.world().truth, C.window)
  )]  # fmt: skip
  pad = lambda x, fill: jnp.pad(x, ((0, 0), (0, C.window - x.shape[1])), constant_values=fill)
  which = (text[:, 0] % 3)[:, None]
  choose = lambda *x: jnp.select([which == i for i in range(3)], x)
  return Draft(
    choose(*(pad(d.tokens, 0) for d in drafts)),
    choose(*(pad(d.parents, -1) for d in drafts)),
    choose(*(d.nodes[:, None] for d in drafts))[:, 0],
  )


def test_every_drafter_commits():
  """After n rounds each memory is serial decoding's: n tokens of dots with `width` terms apart."""
  programs, memories = tiny.programs_of("ring_exact", drafter=mixed), {}
  for draft in (0, C.window - 1):
    e = engine(programs=programs)
    for i in range(3):
      e.submit(i, turn(i, 0), tokens=31, draft=draft)
    for _ in range(31):
      running = {r.name: slot for slot, r in enumerate(e.schedule.running) if r}
      for name in set(e.step()) & set(running):
        rows = e.programs.save(e.state, jnp.asarray([running[name]], I32))
        memories[draft, name] = tiny.memory_of("ring_exact").whole.materialize(rows.carry)
    assert not any(e.schedule.running)
  for i in range(3):
    same_text(e.texts[i])
    n = len(turn(i, 0)) + 30
    allowed = n * tiny.world().config.width * float(np.finfo(np.float32).eps)
    for a, b in zip(*(jax.tree.leaves(memories[d, i]) for d in (0, C.window - 1)), strict=True):
      assert np.abs(a - b).max() <= allowed * max(1.0, np.abs(a).max())


def test_a_freed_slot_is_written_by_nobody():
  """Evicted between two steps; the others decode on, and its rows keep every bit."""
  e = engine()
  for i in range(3):
    e.submit(i, turn(i, 0), tokens=40, draft=9)
  e.step()
  e.evict(1)
  rows = e.programs.save(e.state, jnp.asarray([1], I32))
  for _ in range(4):
    e.step()
  equal(e.programs.save(e.state, jnp.asarray([1], I32)), rows)


def test_stale_metadata_of_padding_rows_is_never_read():
  """Whatever another mode has left there."""
  wild = (2**31 - 1, -(2**31), 7)
  e = engine()
  e.submit("a", turn(0, 0), tokens=20, draft=5)
  e.step()
  after = []
  for junk in wild:
    state = jax.tree.map(jnp.copy, e.state)
    batch = Batch(jnp.asarray([0, -1, -1, -1], I32), jnp.asarray([6, junk, junk, junk], I32))
    after.append(e.programs.step(state, batch))
  for other in after[1:]:
    equal(other, after[0])


def test_requests_that_no_cache_tracks_run_beside_those_it_does():
  """Shorter than a block, or in an engine without a cache whose step marks all the same."""
  for size in (MANY, 0, None):
    e = engine(budget=size)
    e.submit("short", turn(0, 0)[:2], tokens=3, draft=2)
    e.submit("long", turn(1, 0), tokens=50, draft=9)
    e.run()
    assert len(e.texts["short"].tokens) == 3
    assert e.texts["short"].restored == e.texts["long"].restored == 0
    same_text(e.texts["long"])


def test_eager_steps_are_compiled_steps():
  """The published partial cache was right one way and wrong the other."""
  name = "replay_4"
  w, memory = tiny.world(), tiny.memory_of(name)
  draft = soak_world.rigged(w.truth, C.window)
  one = lambda state, batch: step(w.params, w.config, memory, draft, state, batch)
  e = engine(name, programs=tiny.programs_of(name, marks=0))
  for i in range(3):
    e.submit(i, turn(i, 0), tokens=40, draft=9)
  e.step()
  batch = batch_of([C.window, 3, 1, 0])
  eager, told = one(jax.tree.map(jnp.copy, e.state), batch)
  compiled, report = e.programs.step(e.state, batch)
  equal(told.emitted, report.emitted)
  equal(told.tokens, report.tokens)
  equal(eager.text, compiled.text)
  assert int(report.emitted[0]) > 1


def test_a_step_commits_once_and_nothing_else_does():
  """With the verdict of its own acceptance; prompts and admissions commit nothing."""
  w, memory = tiny.world(), tiny.memory_of("tree_wy")
  verdicts, commits = [], []
  whole = memory.whole._replace(
    commit=lambda f, a: (commits.append(a), memory.whole.commit(f, a))[1]
  )
  watched = memory._replace(whole=whole)
  accept = lambda logits, draft: (verdicts.append(greedy(logits, draft)), verdicts[-1])[1]
  state = jax.eval_shape(lambda: vacant(w.config, memory, w.dtype, 1, 64))
  one = lambda s, b: step(w.params, w.config, watched, prompt_lookup(4), s, b, accept)
  i32 = lambda *s: jax.ShapeDtypeStruct(s, I32)
  jax.eval_shape(one, state, Batch(i32(1), i32(1)))
  assert len(commits) == len(verdicts) == 1
  assert commits[0] is verdicts[0].accepted
  memories = jax.eval_shape(lambda: empty(w.config, 1, w.dtype))
  read = lambda m, *a: prefill_piece(w.params, w.config, watched, m, *a, w.ops)
  jax.eval_shape(read, memories, i32(1, 8), i32(1), i32(1))
  jax.eval_shape(lambda *a: seat(watched, *a), state, i32(1), i32(1, 64), i32(1), memories)
  assert len(commits) == 1


def test_rows_that_accept_nothing_move_nothing():
  """A verified window of which nothing is accepted: text, cursors and every memory's content."""

  def refuse(logits, draft):
    verdict = greedy(logits, draft)
    none = Accepted(verdict.accepted.path, jnp.zeros_like(verdict.accepted.length))
    return verdict._replace(accepted=none)

  w, memory = tiny.world(), tiny.memory_of("tree_wy")
  e = engine("tree_wy")
  for i in range(3):
    e.submit(i, turn(i, 0), tokens=40, draft=9)
  for _ in range(2):
    e.step()
  one = jax.jit(lambda s, b: step(
    w.params, w.config, memory, soak_world.rigged(w.truth, C.window), s, b, refuse
  ))  # fmt: skip
  before, carry = jax.tree.map(np.array, e.state), e.state.carry
  content = jax.jit(memory.whole.materialize)
  after, report = one(e.state, batch_of([C.window, 1, 4, 0]))
  assert not np.any(report.emitted)
  equal((after.text, after.length), (before.text, before.length))
  equal(content(after.carry), content(carry))


def test_a_copy_is_carried_out_once():
  """A fork's rows are written when it is seated, and never again in a later step."""
  calls, programs = [], tiny.built("ring_exact")
  e = engine(programs=programs._replace(
    restore=lambda *a: (calls.append(a[1]), programs.restore(*a))[1]
  ))  # fmt: skip
  e.submit("a", turn(2, 0), tokens=40, draft=3)
  e.step()
  e.fork("a", "b", tokens=50, draft=5)
  e.retract("a")
  e.resume("a")
  e.run()
  assert len(calls) == 2
  assert not e._saved
  same_text(e.texts["a"])
  same_text(e.texts["b"])


def test_nan_in_slots_that_do_not_run_reaches_nobody():
  e = engine()
  e.submit("a", turn(3, 0), tokens=40, draft=9)
  e.step()
  spoil = lambda x: (
    x.at[1:].set(jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x.at[1:].set(x[0])
  )
  e.state = e.state._replace(carry=jax.tree.map(spoil, e.state.carry))
  e.run()
  same_text(e.texts["a"])


def test_every_memory_advances_by_every_commit():
  """Flushes, windows without a draft, full and single acceptance: all count the same tokens."""
  e = engine()
  for i in range(4):
    e.submit(i, turn(i, 0), tokens=50, draft=(0, 3, 9, 9)[i])
  flushed, emitted = False, set()
  for _ in range(12):
    before = np.asarray(e.state.carry[0].recurrent.base)
    known = [len(e.texts[i].known) for i in range(4)]
    e.step()
    gdn, attention = e.state.carry
    flushed |= bool(np.any(np.asarray(gdn.recurrent.base) != before))
    for slot, request in enumerate(e.schedule.running):
      if request is not None:
        n = len(e.texts[request.name].known)
        emitted.add(n - known[request.name])
        assert int(attention.length[slot]) == n - 1
        tokens = e.texts[request.name].known[: n - 1]
        embedded = tail_of(tokens)
        # The last W - 1 inputs of the convolution are those of the last tokens, in order.
        np.testing.assert_allclose(gdn.conv[slot], embedded, **one_dot(embedded))
  assert flushed
  assert 1 in emitted
  assert max(emitted) > 3


def tail_of(tokens):
  """Inputs of the first layer's convolution for the last three tokens."""
  from gdn.norms import rms_norm

  w = tiny.world()
  block = w.params.layers[0]
  x = rms_norm(w.params.embed[jnp.asarray(tokens[-3:])], block.norm)
  return np.asarray(x @ block.mixer.qkv)


def one_dot(x):
  """What two orders of one sum of `width` float32 products may differ by."""
  width, eps = tiny.world().config.width, float(np.finfo(np.float32).eps)
  return {"rtol": 0, "atol": width * eps * float(np.abs(x).max())}


def test_what_was_not_marked_is_not_stored():
  """Rows of `marks` that nobody asked for hold NaN here; nothing of it may enter the cache."""
  programs, seen = tiny.built("ring_exact"), []

  def poisoned(state, batch):
    state, report = programs.step(state, batch)
    row = report.marks.row
    seen.append(int((row < 0).sum()))
    spoil = lambda x: (
      jnp.where((row < 0).reshape(-1, *(1,) * (x.ndim - 1)), jnp.nan, x)
      if jnp.issubdtype(x.dtype, jnp.floating)
      else x
    )
    memories = jax.tree.map(spoil, report.marks.memories)
    return state, report._replace(marks=report.marks._replace(memories=memories))

  e = engine(budget=MANY, programs=programs._replace(step=poisoned))
  for i in range(4):
    e.submit(i, turn(i, 0), tokens=50, draft=i)
  e.run()
  assert sum(seen) > 0
  entries = [n for n in e.cache.nodes() if n.memories is not None]
  assert len(entries) > 10
  for node in entries:
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(node.memories))
    assert any(np.any(x) for x in jax.tree.leaves(node.memories))


@pytest.mark.parametrize("at", [63, 64])
@pytest.mark.parametrize("channels", [1, arithmetic_laws.K])
def test_strong_decay_at_a_chunk_boundary(at, channels):
  """Chunks of 64; the state before is forgotten at one token on either side of the boundary.

  A difference of two cumulated decays is off by at most eps (|G_t| + |G_s|).
  """
  S, tokens = arithmetic_laws.heads(at, 130, channels=channels)
  tokens[4][:, at] = -120.0
  run = lambda S, x: prefill.prefill(S, x, chunk=64, dots=EXACT)
  end, o = arithmetic_laws.by_head(run, S, tokens)
  (states, want), (states32, want32) = arithmetic_laws.walks(S, tokens, list(range(-1, 129)))
  eps = arithmetic_laws.EPS
  lost = 2 * eps * np.abs(np.cumsum(tokens[4], 1)).max()
  dS, do = arithmetic_laws.bounds(S, tokens, list(range(-1, 129)))
  o = np.moveaxis(np.asarray(o), 0, 1)
  budget.check("o", o, want, want32, eps=eps, bound=do + lost * np.abs(want))
  bound = dS[-1] + lost * np.abs(states[-1])
  budget.check("S", end, states[-1], states32[-1], eps=eps, bound=bound)


@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_allocated_are_bytes_budgeted(name):
  """A pool of n slots is n times what one slot is budgeted with: no spare row, nothing unpriced."""
  w, memory = tiny.world(), tiny.memory_of(name)
  pool = lambda n: nbytes(jax.eval_shape(lambda: memory.whole.init(empty(w.config, n, w.dtype))))
  assert pool(7) == 7 * pool(1)
  budgeted = model_footprint(
    SCHEMES[name].make, shape_of(w.config), C.window,
    dtypes=w.spec(C.window).dtypes, activations=w.dtype,
  )  # fmt: skip
  rows = jax.eval_shape(lambda: memory.whole.init(empty(w.config, 1, w.dtype)))[-1]
  assert pool(1) == budgeted.state.carry + budgeted.conv.carry + nbytes(rows)
