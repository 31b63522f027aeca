"""The block drafter in the decode loop: its memory commits like the others, chains and trees."""

import dataclasses
import functools
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.decoding import trees
from commit_schemes.decoding.accept import Verdict, greedy, sampled
from commit_schemes.decoding.block import block_drafter, next_logits
from commit_schemes.decoding.drafts import Behind, nothing
from commit_schemes.decoding.loop import decode, every, prefilled, step
from commit_schemes.model import Draft, Pair, model_memory
from experiments.train_drafter import TINY_DRAFTER
from gdn import drafter, hybrid
from gdn.config import Config
from gdn.ops import XLA
from gdn.streaming import empty, streaming
from gdn.typing import Accepted
from gdn.window import ancestors
from tests.test_decoding import chi_square_bound

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = dataclasses.replace(
  TINY_DRAFTER.drafter, sliding=5, sliding_layers=(1,), causal_layers=(0,)
)
CONFIG = SMALL.target
CHAIN, TREE = trees.chain(SMALL.block), trees.best_first(8, SMALL.block - 1)


@functools.cache
def pair():
  return Pair(hybrid.init(CONFIG, jax.random.key(3)), drafter.init(SMALL, jax.random.key(4)))


PROMPTS = [bytes(range(65, 95)), b"ab", bytes(range(40, 60))]  # one longer than the drafter's rows


@functools.cache
def memory_of(name, window=8):
  spec = Spec(CONFIG.key_heads, window, dtypes=Dtypes(raw=jnp.float32))
  return model_memory(CONFIG, SCHEMES[name].make(spec), drafter=SMALL)


def started(name="ring_exact", window=8):
  return prefilled(pair(), CONFIG, memory_of(name, window), PROMPTS, capacity=64)


@functools.cache
def one_step(name, shape, accept):
  run = lambda params, state, on: step(
    params, CONFIG, memory_of(name), block_drafter(SMALL, shape), state, every(on, 8), accept
  )
  return jax.jit(run)


@jax.jit
def by_hand(params, text, at):
  """The block after text[:at + 1] from one forward pass over known text: no memory, no ring."""
  target, weights = params
  where = jnp.arange(text.shape[0], dtype=jnp.int32)[None]
  memories = empty(CONFIG, 1, jnp.float32)
  _, features, _ = hybrid.featured(
    target, CONFIG, text[None], where, streaming(XLA), memories, SMALL.taps
  )
  rows = drafter.context_rows(weights, SMALL, features, where)
  back = jnp.where(where >= at - SMALL.window, at - where, 0)[:, None]
  anchor, at = text[at][None, None], at[None, None]
  return drafter.marginals(weights, SMALL, target.embed, anchor, at, rows, back)[0, 0]


def to_the_end(logits, draft):
  """Accepts the path to each slot's last node whatever the target says: commits of a leaf."""

  def slot(parents, nodes):
    T = parents.shape[0]
    M = ancestors(jnp.where(jnp.arange(T) < nodes, parents, -1))
    at = jnp.maximum(nodes - 1, 0)
    on = M[at] | (jnp.arange(T) == at)
    path = jnp.sort(jnp.where(on, jnp.arange(T, dtype=jnp.int32), T))
    return path, jnp.where(nodes > 0, on.sum(), 0).astype(jnp.int32), at

  path, length, at = jax.vmap(slot)(draft.parents, draft.nodes)
  best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
  return Verdict(Accepted(path, length), jnp.take_along_axis(best, at[:, None], axis=1)[:, 0])


def after_steps(shape, accept, n):
  state, run = started(), one_step("ring_exact", shape, accept)
  for i in range(n):
    state, _ = run(pair(), state, jnp.asarray([True, i % 3 != 1, True]))
  return state


@functools.cache
def drafted(shape):
  return jax.jit(
    lambda params, state: next_logits(
      SMALL,
      params,
      state.carry[CONFIG.layers :],
      jnp.take_along_axis(state.text, state.length[:, None] - 1, axis=1)[:, 0],
      state.length - 1,
      jnp.arange(len(PROMPTS), dtype=jnp.int32),
    )
  )


@pytest.mark.parametrize(
  "shape", [pytest.param(CHAIN, marks=pytest.mark.slow), TREE], ids=["chain", "tree"]
)
def test_the_memory_holds_what_one_pass_over_the_committed_text_gives(shape):
  """Over a wrapped ring, with slots of several lengths, one of which rests in between."""
  state = after_steps(shape, to_the_end, 8)
  length = np.asarray(state.length)
  assert length.max() > SMALL.window + 8
  assert length[2] >= len(PROMPTS[2]) + 2 * 8
  got = drafted(shape)(pair(), state)
  moved = drafted(shape)(jax.tree.map(lambda x: x * (1 + 2.0**-22), pair()), state)
  noise = float(np.abs(moved - got).max())  # what four roundings of the weights do to the block
  behind = Behind(pair(), state.carry, jnp.arange(len(PROMPTS), dtype=jnp.int32))
  draft = jax.jit(block_drafter(SMALL, CHAIN))(state.text, state.length, behind)
  for b in range(len(PROMPTS)):
    want = by_hand(pair(), state.text[b], state.length[b] - 1)
    np.testing.assert_allclose(got[b], want, rtol=0, atol=16 * noise)
    best, second = jax.lax.top_k(want, 2)[0].T
    assert float((best - second).min()) > 32 * noise  # so that the tokens are decided
    assert draft.tokens[b].tolist() == [state.text[b, length[b] - 1], *jnp.argmax(want, axis=1)]
  assert noise < 1e-4 < np.abs(np.diff(got, axis=0)).max()


def test_a_resting_slot_keeps_every_bit_of_its_draft_memory():
  state = started()
  after, report = one_step("ring_exact", TREE, to_the_end)(
    pair(), state, jnp.asarray([True, False, True])
  )
  assert report.emitted[1] == 0 < report.emitted[0]
  slot = lambda tree, b: jax.tree.map(lambda x: x[b], tree)
  jax.tree.map(np.testing.assert_array_equal, slot(after, 1), slot(state, 1))
  assert (np.asarray(after.carry[-1].k[0]) != np.asarray(state.carry[-1].k[0])).any()


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_greedy_text_is_plain_decodings(shape):
  run = lambda drafter, window: decode(
    pair(), CONFIG, memory_of("tree_wy", window), drafter, started("tree_wy", window), until=60
  )[0]
  want, got = run(nothing, 1), run(block_drafter(SMALL, shape), 8)
  for b, p in enumerate(PROMPTS):
    np.testing.assert_array_equal(got.text[b, : len(p) + 30], want.text[b, : len(p) + 30])


def heap(logp, budget):
  """DDTree as printed: pop the best path, push its next sibling and its first child."""
  order = np.argsort(-logp, axis=1, kind="stable")
  rank = np.take_along_axis(logp, order, axis=1)
  queue, out, tie = [(-rank[0, 0], 0, (0,))], [], itertools.count(1)
  while queue and len(out) < budget:
    _, _, path = heapq.heappop(queue)
    out.append(path)
    weight = lambda p: -sum(rank[d, r] for d, r in enumerate(p))
    if path[-1] + 1 < logp.shape[1]:
      sibling = (*path[:-1], path[-1] + 1)
      heapq.heappush(queue, (weight(sibling), next(tie), sibling))
    if len(path) < logp.shape[0]:
      heapq.heappush(queue, (weight((*path, 0)), next(tie), (*path, 0)))
  return {tuple(int(order[d, r]) for d, r in enumerate(path)) for path in out}


@functools.cache
def built(nodes, depth):
  return jax.jit(trees.best_first(nodes, depth).build)


def paths(tokens, parents, nodes):
  out = [()]
  for t in range(1, nodes):
    assert -1 < parents[t] < t
    out.append((*out[parents[t]], int(tokens[t - 1])))
  return out[1:]


@given(
  shape=st.sampled_from([(2, 3, 4), (9, 3, 4), (16, 5, 6), (12, 1, 4), (30, 2, 3), (1, 2, 3)]),
  spread=st.sampled_from([0.1, 1.0, 8.0]),
  seed=st.integers(0, 2**31),
)
def test_the_best_first_tree_is_the_heaps(shape, spread, seed):
  (nodes, depth, vocab), B = shape, 2
  logits = (spread * np.random.default_rng(seed).normal(size=(B, depth, vocab))).astype(np.float32)
  tokens, parents, count = map(np.asarray, built(nodes, depth)(jnp.asarray(logits)))
  logp = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)), np.float64)
  for b in range(B):
    got = paths(tokens[b], parents[b], count[b])
    assert len(set(got)) == len(got)
    assert set(got) == (heap(logp[b], nodes - 1) if nodes > 1 else set())
    weight = [sum(logp[b, d, x] for d, x in enumerate(path)) for path in got]
    assert (np.diff(weight) <= 1e-5).all()  # a smaller budget is a prefix


def test_a_top_k_tree_has_the_likeliest_children_everywhere():
  shape = trees.top_k(2, 1, 3)
  logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
  tokens, parents, count = map(np.asarray, shape.build(logits))
  assert (shape.depth, shape.nodes) == (3, 11) == (3, count[0])
  order = np.argsort(-np.asarray(logits), axis=2)
  for b in range(2):
    want = {
      tuple(int(order[b, d, r]) for d, r in enumerate(ranks[:n]))
      for ranks in itertools.product(range(2), range(1), range(3))
      for n in (1, 2, 3)
    }
    assert set(paths(tokens[b], parents[b], count[b])) == want
  alone = trees.chain(4).build(logits)
  assert alone[0].tolist() == order[:, :, 0].tolist()
  assert alone[1].tolist() == [[-1, 0, 1, 2]] * 2
  assert [x.tolist() for x in trees.chain(1).build(logits)] == [[[], []], [[-1], [-1]], [1, 1]]


VOCAB, DRAWS = 4, 40_000
DRAFTS = {
  "chain": trees.chain(3),
  "top-k tree": trees.top_k(2, 2),
  "best-first tree": trees.best_first(6, 2),
  "drawn chain": None,
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_sampling_from_block_drafts_keeps_the_targets_distribution(kind):
  """Chosen drafts are point masses; drawn ones bring the marginals that they were drawn from."""
  rng = np.random.default_rng(5)
  first = rng.dirichlet(np.ones(VOCAB)).astype(np.float32)
  second = rng.dirichlet(np.ones(VOCAB), size=VOCAB).astype(np.float32)
  marginals = jnp.asarray(np.log(rng.dirichlet(np.ones(VOCAB), size=2)), jnp.float32)

  def draw(key):
    a, b, c = jax.random.split(key, 3)
    if (shape := DRAFTS[kind]) is None:
      token = jax.random.categorical(a, marginals, axis=-1).astype(jnp.int32)[None]
      parents, nodes = jnp.asarray([[-1, 0, 1]], jnp.int32), jnp.asarray([3], jnp.int32)
      proposal = jax.nn.softmax(jnp.concatenate([marginals, marginals[:1]]))[None]
    else:
      token, parents, nodes = shape.build(marginals[None])
      proposal = None
    tokens = jnp.concatenate([jnp.zeros((1, 1), jnp.int32), token], axis=1)
    p = jnp.concatenate([jnp.asarray(first)[None], jnp.asarray(second)[token[0]]])
    verdict = sampled(b, jnp.log(p)[None], Draft(tokens, parents, nodes), proposal)
    path, length, bonus = verdict.accepted.path[0], verdict.accepted.length[0], verdict.bonus[0]
    one = jnp.where(length > 1, tokens[0, path[1]], bonus)
    after = jnp.where(length > 2, tokens[0, path[2]], bonus)
    fresh = jax.random.categorical(c, jnp.log(jnp.asarray(second)[one])).astype(jnp.int32)
    return one, jnp.where(length > 1, after, fresh)

  pairs = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(2), DRAWS))
  counts = np.zeros((VOCAB, VOCAB))
  np.add.at(counts, tuple(map(np.asarray, pairs)), 1)
  want = DRAWS * first.astype(np.float64)[:, None] * second
  statistic = float(np.sum((counts - want) ** 2 / want))
  assert statistic < chi_square_bound(VOCAB * VOCAB), f"chi-square {statistic:.1f}"


def test_drafts_that_do_not_fit_are_named():
  deep = f"draft of {SMALL.block} tokens after the anchor does not fit: the drafter's block is 4"
  with pytest.raises(ValueError, match=deep):
    block_drafter(SMALL, trees.chain(SMALL.block + 1))
  with pytest.raises(ValueError, match=r"a window of 9 nodes does not fit: spec\.window=8"):
    one_step("ring_exact", trees.best_first(9, 3), greedy)(pair(), started(), jnp.ones(3, bool))
  draft, text, length = block_drafter(SMALL, CHAIN), jnp.ones((1, 4), jnp.int32), jnp.ones(1, int)
  with pytest.raises(ValueError, match="needs memories and, as params, Pair"):
    draft(text, length)
  with pytest.raises(ValueError, match="rows of 0 draft layers, the drafter has 2"):
    draft(text, length, Behind(pair(), started().carry[: CONFIG.layers], jnp.zeros(1, jnp.int32)))
  state = SCHEMES["snapshot"].make(Spec(2, 8))
  with pytest.raises(ValueError, match=r"drafter is for a Config.*, the model is a Config"):
    model_memory(Config(), state, drafter=SMALL)
  for make in (lambda: trees.chain(0), lambda: trees.best_first(0, 2), lambda: trees.top_k(2, 0)):
    with pytest.raises(ValueError, match="must be at least 1"):
      make()
