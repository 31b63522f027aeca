"""Greedy text under every scheme is plain decoding's; sampling keeps the target's distribution."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.decoding.accept import greedy, sampled
from commit_schemes.decoding.drafts import nothing, prompt_lookup
from commit_schemes.decoding.loop import decode, every, prefilled, step
from commit_schemes.model import Draft, model_memory, verify
from commit_schemes.replay import replay
from experiments import corpus
from gdn import checkpoint
from gdn.hybrid import cast, forward
from gdn.ops import XLA
from gdn.streaming import empty, streaming
from tests.slow import each
from tests.strategies import chain, path_to, trees

WEIGHTS = Path(__file__).parent.parent / "experiments" / "models" / "python-bytes.safetensors"
T, TOKENS, TREE_TOKENS = 16, 96, 48
# Slots 0 and 1 draft chains, 2 and 3 trees after the same prompts, so that one program has both.
WANTED = np.asarray([TOKENS, TOKENS, TREE_TOKENS, TREE_TOKENS])
LOSSLESS = {n: s.make for n, s in SCHEMES.items() if s.lossless}
EVERY = LOSSLESS | {"replay_16": lambda spec: replay(spec, keep=T)}


@functools.cache
def model():
  params, config = checkpoint.load(WEIGHTS)
  return cast(params, jnp.float32), config


@functools.cache
def prompts():
  text = corpus.heldout().tobytes()
  return [text[1000:1300], text[200_000:200_200]]


def memory_of(make, window=T):
  config = model()[1]
  return model_memory(config, make(Spec(config.key_heads, window, dtypes=Dtypes(raw=jnp.float32))))


@functools.cache
def known():
  """Slots that have read their prompts. The carry is what a scheme's is made from: memories."""
  memory = memory_of(SCHEMES["snapshot"].make)
  state = prefilled(*model(), memory, 2 * prompts(), capacity=300 + TOKENS + T)
  return state._replace(carry=memory.whole.materialize(state.carry))


def started(memory, rows=slice(None)):
  state = jax.tree.map(lambda x: jnp.array(x[rows]), known())
  return state._replace(carry=memory.whole.init(state.carry))


def branching(text, length, behind=None):
  """Prompt lookup's chain on the even nodes, a wrong sibling before each: a real tree."""
  del behind
  chain = prompt_lookup(T // 2)(text, length)
  tokens = jnp.stack([(chain.tokens + 1) % 256, chain.tokens], axis=2).reshape(-1, T)[:, 1:]
  parents = jnp.arange(T - 1, dtype=jnp.int32)
  parents = jnp.where(parents == 0, -1, (parents - 1) // 2 * 2)
  return Draft(tokens, jnp.broadcast_to(parents[None], tokens.shape), 2 * chain.nodes - 1)


def chains_and_trees(text, length, behind=None):
  a, b = prompt_lookup(T)(text, length), branching(text, length)
  chain = jnp.arange(len(text)) < 2
  pad = lambda x: jnp.pad(x, ((0, 0), (0, T - x.shape[1])))
  return Draft(
    *(jnp.where(chain[:, None], x, pad(y)) for x, y in zip(a[:2], b[:2], strict=True)),
    jnp.where(chain, a.nodes, b.nodes),
  )


@functools.cache
def program(name, drafter=chains_and_trees, window=T):
  """One step of the slots that run; its state is donated."""
  config, memory = model()[1], memory_of(EVERY[name], window)
  one = lambda params, state, on: step(params, config, memory, drafter, state, every(on, T))
  return memory, jax.jit(one, donate_argnums=1)


def run(name, wanted=WANTED, rows=slice(None), **how):
  """`wanted` tokens after each prompt, the two highest logits behind each, and tokens a step."""
  memory, one = program(name, **how)
  state, reports = started(memory, rows), []
  first = np.asarray(state.length)
  while (running := np.asarray(state.length) < first + wanted).any():
    state, report = one(model()[0], state, jnp.asarray(running))
    reports.append(jax.device_get(report))
  text = [np.asarray(state.text[i, n : n + w]) for i, (n, w) in enumerate(zip(first, wanted))]  # noqa: B905
  top = [np.concatenate([r.top[i, : r.emitted[i]] for r in reports]) for i in range(len(text))]
  emitted = [np.asarray([r.emitted[i] for r in reports if r.emitted[i]]) for i in range(len(text))]
  return text, [x[:w] for x, w in zip(top, wanted, strict=True)], emitted


@functools.cache
def plain():
  """Texts and highest logits of both prompts, one token a step."""
  return run("snapshot", WANTED[:2], slice(2), drafter=nothing, window=1)[:2]


def equal_by_the_margin_rule(text, top):
  """Equal, or at the first difference plain decoding's top-2 margin is within the logit error."""
  for i, (got, best) in enumerate(zip(text, top, strict=True)):
    w, b = (x[i % 2][: len(got)] for x in plain())
    differs = np.flatnonzero(got != w)
    if len(differs):
      n = differs[0]
      margin, error = b[n, 0] - b[n, 1], np.abs(best[:n] - b[:n]).sum(1).max(initial=0)
      assert margin <= error, f"token {n} differs: margin {margin:.1e}, logit error {error:.1e}"


@pytest.mark.parametrize("name", each(EVERY, "replay_4_compact", "replay_16", "ring_open_loop"))
def test_greedy_text_is_plain_decodings(name):
  """On chains and on trees, in slots of different lengths."""
  assert name not in SCHEMES or "tree" in SCHEMES[name].topologies
  text, top, emitted = run(name)
  equal_by_the_margin_rule(text, top)
  assert all(e.max() > T // 2 and e.mean() > 1.5 for e in emitted[:2])
  assert all(e.max() > T // 4 and e.mean() > 1.5 for e in emitted[2:])


@pytest.mark.parametrize("slot", [0, 1])
def test_a_slot_decodes_as_it_would_alone(slot):
  """Slots share steps and nothing else. By `decode`, to the same length."""
  params, config = model()
  memory = memory_of(SCHEMES["tree_wy"].make)
  state = started(memory, slice(slot, slot + 1))
  n = int(state.length[0])
  state, reports = decode(params, config, memory, prompt_lookup(T), state, until=n + 64)
  top = np.concatenate([r.top[0, : int(r.emitted[0])] for r in reports])[:64]
  want, want_top = (x[slot][:64] for x in plain())
  differs = np.flatnonzero(np.asarray(state.text[0, n : n + 64]) != want)
  if len(differs):
    at = differs[0]
    error = np.abs(top[:at] - want_top[:at]).sum(1).max(initial=0)
    assert want_top[at, 0] - want_top[at, 1] <= error


def test_a_slot_that_does_not_run_keeps_every_bit():
  memory, one = program("ring_exact")
  before = started(memory)
  after, report = one(model()[0], started(memory), jnp.asarray([True, False, True, False]))
  assert not report.emitted[jnp.asarray([1, 3])].any()
  assert report.emitted[0] > 0
  second = lambda tree: jax.tree.map(lambda x: x[1::2], tree)
  jax.tree.map(np.testing.assert_array_equal, second(after), second(before))


@pytest.mark.parametrize(
  ("prompts", "says"),
  [
    ([], "no prompt"),
    ([b"a", b""], "prompt 1 has 0 tokens; allowed: 1 to 31"),
    ([b"x" * 32], "prompt 0 has 32 tokens; allowed: 1 to 31"),
    ([[1, 300]], "prompt 0 has a token outside 0 to 255"),
  ],
)
def test_bad_prompts_are_named(prompts, says):
  with pytest.raises(ValueError, match=says):
    prefilled(*model(), memory_of(SCHEMES["snapshot"].make), prompts, capacity=32)


def test_verify_is_the_forward_pass_over_known_text():
  """One window over all layers against the whole forward pass: positions, conv, attention."""
  params, config = model()
  memory = memory_of(SCHEMES["tree_wy"].make)
  at = len(prompts()[0]) - 1
  ids = jnp.asarray(corpus.heldout()[None, 1000 : 1000 + at + T], jnp.int32)
  draft = Draft(ids[:, at:], jnp.asarray([chain(T)], jnp.int32), jnp.asarray([T], jnp.int32))
  where = jnp.arange(at + T, dtype=jnp.int32)[None]
  one = lambda p, carry: verify(
    p, config, memory, carry, draft, where[:, at:], jnp.zeros(1, jnp.int32)
  )[0]
  got = jax.jit(one)(params, started(memory, slice(1)).carry)

  memories = lambda p: empty(config, 1, p.embed.dtype)
  run = jax.jit(lambda p: forward(p, config, ids, where, streaming(XLA), memories(p))[0])
  want, half = (
    np.asarray(run(cast(params, dtype))[:, at:]) for dtype in (jnp.float32, jnp.bfloat16)
  )
  error = np.abs(np.asarray(got) - want).max()
  # float32 against bfloat16 arithmetic of the same model: 2^-16 of its error, and slack.
  assert (
    error
    <= 8 * 2.0**-16 * np.abs(half - want).max()
    + 4 * np.finfo(np.float32).eps * T * np.abs(want).max()
  )


def slow_lookup(text, window, longest=3):
  for n in range(longest, 0, -1):
    for at in range(len(text) - n - 1, -1, -1):
      if text[at : at + n] == text[-n:] and len(text) > n:
        return text[at + n : at + n + window - 1]
  return []


@given(text=st.lists(st.integers(0, 3), min_size=1, max_size=24), window=st.sampled_from([1, 2, 5]))
def test_prompt_lookup_takes_the_longest_then_the_latest_match(text, window):
  row = np.full((1, 24), 3, np.int32)
  row[0, : len(text)] = text
  draft = looked_up(window)(jnp.asarray(row), jnp.asarray([len(text)]))
  n = int(draft.nodes[0])
  assert draft.tokens[0, :n].tolist() == text[-1:] + slow_lookup(text, window)


@functools.cache
def looked_up(window):
  return jax.jit(prompt_lookup(window))


@given(tree=trees(8), seed=st.integers(0, 2**31))
def test_greedy_acceptance_walks_the_tree(tree, seed):
  parents, _ = tree
  rng = np.random.default_rng(seed)
  parents = [-1] + [max(p, 0) for p in parents[1:]]
  logits = rng.normal(size=(8, 4)).astype(np.float32)
  tokens = rng.integers(0, 4, size=8).astype(np.int32)
  best, at, path = logits.argmax(1), 0, [0]
  while True:
    child = [t for t in range(8) if parents[t] == at and t > 0 and tokens[t] == best[at]]
    if not child:
      break
    at = child[0]
    path.append(at)
  draft = Draft(*(jnp.asarray([x], jnp.int32) for x in (tokens, parents)), jnp.asarray([8]))
  got = jitted_greedy()(jnp.asarray(logits)[None], draft)
  n = int(got.accepted.length[0])
  assert got.accepted.path[0, :n].tolist() == path == path_to(parents, path[-1])
  assert got.bonus[0] == best[at]


@functools.cache
def jitted_greedy():
  return jax.jit(greedy)


def chi_square_bound(cells):
  """Mean and six standard deviations of chi-square with `cells` - 1 degrees of freedom."""
  return (cells - 1) + 6 * np.sqrt(2 * (cells - 1))


VOCAB, DRAWS = 4, 40_000
TREES = {
  "chain": ([-1, 0, 1], "iid"),
  "siblings": ([-1, 0, 0], "iid"),
  "tree": ([-1, 0, 0, 1, 1, 2], "iid"),
  "top-k chain": ([-1, 0, 1], "top"),
  "top-k tree": ([-1, 0, 0, 1, 1, 2, 2], "top"),
}


@pytest.mark.parametrize("kind", TREES)
def test_sampling_keeps_the_targets_distribution(kind):
  """The first two emitted tokens, over many draws, against the target's own joint distribution."""
  parents, rule = TREES[kind]
  n = len(parents)
  rng = np.random.default_rng(0)
  first = rng.dirichlet(np.ones(VOCAB)).astype(np.float32)
  second = rng.dirichlet(np.ones(VOCAB), size=VOCAB).astype(np.float32)
  q = rng.dirichlet(np.ones(VOCAB), size=n).astype(np.float32)

  def tokens(key):
    if rule == "iid":
      keys = jax.random.split(key, n)
      drawn = [
        jax.random.categorical(keys[t], jnp.log(jnp.asarray(q[max(p, 0)])))
        for t, p in enumerate(parents)
      ]
    else:
      seen = {}
      drawn = []
      for p in parents:
        seen[p] = seen.get(p, -1) + 1
        drawn.append(jnp.asarray(int(np.argsort(-q[max(p, 0)])[seen[p]])))
    return jnp.stack(drawn).astype(jnp.int32)

  def draw(key):
    a, b, c = jax.random.split(key, 3)
    token = tokens(a)
    # The target's distribution after a node is that of the node's token; the anchor has its own.
    p = jnp.concatenate([jnp.asarray(first)[None], jnp.asarray(second)[token[1:]]])
    draft = Draft(token[None], jnp.asarray([parents], jnp.int32), jnp.asarray([n], jnp.int32))
    proposal = jnp.asarray(q)[None] if rule == "iid" else None
    verdict = sampled(b, jnp.log(p)[None], draft, proposal)
    path, length, bonus = verdict.accepted.path[0], verdict.accepted.length[0], verdict.bonus[0]
    one = jnp.where(length > 1, token[path[1]], bonus)
    after = jnp.where(length > 2, token[path[2]], bonus)
    fresh = jax.random.categorical(c, jnp.log(jnp.asarray(second)[one])).astype(jnp.int32)
    return one, jnp.where(length > 1, after, fresh)

  pairs = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(1), DRAWS))
  counts = np.zeros((VOCAB, VOCAB))
  np.add.at(counts, tuple(map(np.asarray, pairs)), 1)
  want = DRAWS * first.astype(np.float64)[:, None] * second
  statistic = float(np.sum((counts - want) ** 2 / want))
  assert statistic < chi_square_bound(VOCAB * VOCAB), f"chi-square {statistic:.1f}"


def test_treating_top_k_children_as_draws_is_caught():
  """The trap: the same test must fail when a point mass is taken for a draw from q."""
  parents, n = [-1, 0], 2
  p, q = np.array([0.1, 0.9], np.float32), np.array([0.6, 0.4], np.float32)
  draft = Draft(jnp.asarray([[0, 0]]), jnp.asarray([parents]), jnp.asarray([n]))
  logits = jnp.log(jnp.asarray([[p, p]]))
  proposal = jnp.asarray([[q, q]])

  def first(key, proposal):
    verdict = sampled(key, logits, draft, proposal)
    return jnp.where(verdict.accepted.length[0] > 1, 0, verdict.bonus[0])

  keys = jax.random.split(jax.random.key(0), DRAWS)
  right = jax.jit(jax.vmap(lambda k: first(k, None)))(keys)
  wrong = jax.jit(jax.vmap(lambda k: first(k, proposal)))(keys)
  deviation = lambda x: abs(float(jnp.mean(x == 0)) - p[0]) / np.sqrt(p[0] * p[1] / DRAWS)
  assert deviation(right) < 6
  assert deviation(wrong) > 6


def test_sampling_refuses_a_temperature_of_zero():
  draft = Draft(*(jnp.zeros((1, 2), jnp.int32),) * 2, jnp.ones(1, jnp.int32))
  with pytest.raises(ValueError, match=r"temperature=0\.0 must be above 0"):
    sampled(jax.random.key(0), jnp.zeros((1, 2, 4)), draft, temperature=0.0)
