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
from gdn.hybrid import cast
from tests.strategies import chain, path_to, trees

WEIGHTS = Path(__file__).parent.parent / "experiments" / "models" / "python-bytes.safetensors"
T, TOKENS, TREE_TOKENS = 16, 512, 96


@functools.cache
def model():
  params, config = checkpoint.load(WEIGHTS)
  return cast(params, jnp.float32), config


@functools.cache
def prompts():
  text = corpus.heldout().tobytes()
  return [text[1000:1300], text[200_000:200_200]]


def run(make, drafter, window, tokens, prompts=None):
  """Text [B, tokens] after the prompts, and the two highest logits behind each token."""
  params, config = model()
  prompts = prompts or globals()["prompts"]()
  memory = model_memory(
    config, make(Spec(config.key_heads, window, dtypes=Dtypes(raw=jnp.float32)))
  )
  longest = max(map(len, prompts))
  state = prefilled(params, config, memory, prompts, capacity=longest + tokens + T)
  state, reports = decode(params, config, memory, drafter, state, until=longest + tokens)
  text, top = [], []
  for i, p in enumerate(prompts):
    text.append(np.asarray(state.text[i, len(p) : len(p) + tokens]))
    top.append(np.concatenate([r.top[i, : int(r.emitted[i])] for r in reports])[:tokens])
  return np.stack(text), np.stack(top)


@functools.cache
def plain():
  return run(SCHEMES["snapshot"].make, nothing, 1, TOKENS)


def equal_by_the_margin_rule(text, top):
  """Equal, or at the first difference plain decoding's top-2 margin is within the logit error."""
  want, want_top = (x[:, : text.shape[1]] for x in plain())
  for got, best, w, b in zip(text, top, want, want_top, strict=True):
    differs = np.flatnonzero(got != w)
    if len(differs):
      n = differs[0]
      margin, error = b[n, 0] - b[n, 1], np.abs(best[:n] - b[:n]).sum(1).max(initial=0)
      assert margin <= error, f"token {n} differs: margin {margin:.1e}, logit error {error:.1e}"


@pytest.mark.parametrize("name", [n for n, s in SCHEMES.items() if s.lossless])
def test_greedy_text_is_plain_decodings(name):
  equal_by_the_margin_rule(*run(SCHEMES[name].make, prompt_lookup(T), T, TOKENS))


@pytest.mark.parametrize("keep", [0, 1, 4, 8, 16])
def test_greedy_text_is_plain_decodings_for_every_number_of_kept_states(keep):
  if f"replay_{keep}" in SCHEMES:
    return  # the test above has it
  equal_by_the_margin_rule(*run(lambda s: replay(s, keep=keep), prompt_lookup(T), T, TOKENS))


def branching(text, length, behind=None):
  """Prompt lookup's chain on the even nodes, a wrong sibling before each: a real tree."""
  del behind
  chain = prompt_lookup(T // 2)(text, length)
  tokens = jnp.stack([(chain.tokens + 1) % 256, chain.tokens], axis=2).reshape(-1, T)[:, 1:]
  parents = jnp.arange(T - 1, dtype=jnp.int32)
  parents = jnp.where(parents == 0, -1, (parents - 1) // 2 * 2)
  return Draft(tokens, jnp.broadcast_to(parents[None], tokens.shape), 2 * chain.nodes - 1)


@pytest.mark.parametrize("name", ["snapshot", "replay_4", "delta_cache", "ring_exact", "tree_wy"])
def test_greedy_text_on_trees_is_plain_decodings(name):
  assert "tree" in SCHEMES[name].topologies
  equal_by_the_margin_rule(*run(SCHEMES[name].make, branching, T, TREE_TOKENS))


def test_a_slot_decodes_as_it_would_alone():
  """Slots of different lengths share steps and nothing else."""
  both, _ = plain()
  for i, p in enumerate(prompts()):
    alone, top = run(SCHEMES["tree_wy"].make, prompt_lookup(T), T, 64, [p])
    want, want_top = both[i, :64], plain()[1][i, :64]
    differs = np.flatnonzero(alone[0] != want)
    if len(differs):
      n = differs[0]
      assert want_top[n, 0] - want_top[n, 1] <= np.abs(top[0, :n] - want_top[:n]).sum(1).max(
        initial=0
      )


def test_a_slot_that_does_not_run_keeps_every_bit():
  params, config = model()
  memory = model_memory(config, SCHEMES["ring_exact"].make(Spec(config.key_heads, T)))
  state = prefilled(params, config, memory, prompts(), capacity=512)
  one = jax.jit(lambda p, s, on: step(p, config, memory, prompt_lookup(T), s, every(on, T)))
  after, report = one(params, state, jnp.asarray([True, False]))
  assert report.emitted[1] == 0
  assert report.emitted[0] > 0
  second = lambda tree: jax.tree.map(lambda x: x[1], tree)
  jax.tree.map(np.testing.assert_array_equal, second(after), second(state))


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
  params, config = model()
  memory = model_memory(config, SCHEMES["snapshot"].make(Spec(config.key_heads, T)))
  with pytest.raises(ValueError, match=says):
    prefilled(params, config, memory, prompts, capacity=32)


def test_verify_is_the_forward_pass_over_known_text():
  """One window over all layers against the whole forward pass: positions, conv, attention."""
  from gdn.hybrid import forward
  from gdn.ops import XLA
  from gdn.streaming import empty, streaming

  params, config = model()
  memory = model_memory(config, SCHEMES["tree_wy"].make(Spec(config.key_heads, T)))
  text = corpus.heldout()[5000:5100].tolist()
  state = prefilled(params, config, memory, [text[:-T]], capacity=128)
  at = len(text) - T - 1
  tokens = jnp.asarray([text[at : at + T]], jnp.int32)
  draft = Draft(tokens, jnp.asarray([chain(T)], jnp.int32), jnp.asarray([T], jnp.int32))
  positions = at + jnp.arange(T, dtype=jnp.int32)[None]
  got, _ = verify(params, config, memory, state.carry, draft, positions, jnp.zeros(1, jnp.int32))

  n = at + T
  ids, every = jnp.asarray([text[:n]], jnp.int32), jnp.arange(n, dtype=jnp.int32)[None]
  run = lambda p: forward(p, config, ids, every, streaming(XLA), empty(config, 1, p.embed.dtype))[0]
  want = np.asarray(run(params)[:, at:])
  half = np.asarray(run(cast(params, jnp.bfloat16))[:, at:])
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
