"""The laws of the layer's arithmetic, as functions that raise: pools, windows, prefill, conv."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes.conv_window import conv_window
from gdn import conv, gates, ops, pool, prefill, recurrence, window
from gdn.dots import EXACT
from gdn.typing import Accepted, Tokens
from tests import budget, oracle
from tests.strategies import H, K, V, draw_gates, draw_raw, path_to

EPS = float(np.finfo(np.float32).eps)
same = np.testing.assert_array_equal


def heads(seed: int, T: int, *, kind: str = "random", channels: int = 1):
  """States [H, V, K] and tokens [H, T, ...] in float32: the exact inputs of every form."""
  rng = np.random.default_rng(seed)
  raw = draw_raw(rng, kind=kind, channels=channels, B=1, T=T)
  params = draw_gates(rng, kind=kind, channels=channels)
  tokens = oracle.tokens(*(x[0] for x in raw), *params, dtype=np.float32)
  return rng.normal(size=(H, V, K)).astype(np.float32), tokens


def by_head(f, S, tokens):
  """f(S [V, K], Tokens) compiled anew and lifted over heads."""
  return jax.jit(jax.vmap(f))(jnp.asarray(S), Tokens(*map(jnp.asarray, tokens)))


def walks(S, tokens, parents):
  """States and outputs [T, H, ...] in float64, and as the plain recurrence in float32 has them."""
  exact = oracle.walk(S.astype(np.float64), [x.astype(np.float64) for x in tokens], parents)
  return exact, oracle.walk(S, tokens, parents, oracle.pseudo_value)


def bounds(S, tokens, parents):
  return oracle.solve_bound(
    S.astype(np.float64), [x.astype(np.float64) for x in tokens], parents, EPS
  )


def slot_minus_one_reads_zeros_and_writes_nothing():
  """In every function of gdn/pool.py, where a negative index would be the last row."""
  rng = np.random.default_rng(0)
  rows = rng.normal(size=(4, 3, 2)).astype(np.float32)
  new = rng.normal(size=(3, 3, 2)).astype(np.float32)
  spoiled = jnp.asarray(rows).at[np.asarray([0, 3])].set(jnp.nan)
  got = pool.take(spoiled, jnp.asarray([2, -1, 1], jnp.int32))
  same(got, np.stack([rows[2], 0 * rows[3], rows[1]]))
  slots = jnp.asarray([2, -1, 0], jnp.int32)
  want = rows.copy()
  want[2], want[0] = new[0], new[2]
  same(pool.put(jnp.asarray(rows), slots, jnp.asarray(new)), want)

  at = jnp.asarray([[2, -1], [0, 1], [-1, 0]], jnp.int32)
  want = rows.copy()
  want[2, 2], want[0, 0] = new[0, 0], new[2, 1]
  same(pool.put_at(jnp.asarray(rows), slots, at, jnp.asarray(new[:, :2])), want)

  path = jnp.asarray([[2, -(2**30)], [2**30, 0], [1, 0]], jnp.int32)
  on = jnp.asarray([[True, False], [False, False], [True, True]])
  spoiled = np.where(np.arange(3)[:, None, None] == 1, np.float32(np.nan), new)
  got = pool.along(jnp.asarray(spoiled), path, on)
  same(got, np.stack([[new[0, 2], 0 * new[0, 0]], 0 * new[0, :2], [new[2, 1], new[2, 0]]]))


def ancestors_are_the_path(parents):
  """Every proper ancestor, no other node, and the log decays on every way to a node."""
  T = len(parents)
  M = np.asarray(window.ancestors(jnp.asarray(parents, jnp.int32)))
  want = np.zeros((T, T), bool)
  for t in range(T):
    want[t, path_to(parents, t)[:-1]] = True
  same(M, want)
  same(window.depth(jnp.asarray(M)), want.sum(1))
  g = np.random.default_rng(T).normal(size=(T, 3)).astype(np.float32)
  gap = np.asarray(window.path_decays(jnp.asarray(g), jnp.asarray(parents, jnp.int32)))
  for t in range(T):
    way = path_to(parents, t)
    after = {-1: way} | {s: way[i + 1 :] for i, s in enumerate(way)}
    for s in range(-1, T):
      total = g[after[s]].astype(np.float64).sum(0) if s in after else -np.inf
      np.testing.assert_allclose(
        gap[t, s + 1], total, rtol=0, atol=T * EPS * np.abs(g).sum(0).max()
      )
  if parents == list(range(-1, T - 1)):
    np.testing.assert_allclose(window.chain_decays(jnp.asarray(g)), gap, rtol=T * EPS)


def a_window_is_the_walk(S, tokens, parents):
  """Outputs and pseudo-values of `solve`, and `fold` along the path to the last node."""
  T = len(parents)
  path = np.asarray(path_to(parents, T - 1))

  def head(S, x):
    o, u = window.solve(window.project(S, None, EXACT), x, jnp.asarray(parents, jnp.int32))
    return o, window.fold(S, window.Writes(x.k[path], u[path], x.g[path]))

  o, end = by_head(head, S, tokens)
  (states, want), (states32, want32) = walks(S, tokens, parents)
  dS, do = bounds(S, tokens, parents)
  budget.check("o", np.moveaxis(o, 0, 1), want, want32, eps=EPS, bound=do)
  budget.check("S", end, states[-1], states32[-1], eps=EPS, bound=dS[-1])


def keys_carry_the_decay_behind_them(tokens):
  """`weighted` entry by entry: T roundings in the sum of later decays, then exp and a product."""
  _, k, v, _, g = tokens
  T = k.shape[1]
  later = np.stack([g[:, s + 1 :].astype(np.float64).sum(1) for s in range(T)], 1)
  want = k.astype(np.float64) * np.exp(later)
  k, end = jax.vmap(window.weighted)(window.Writes(*map(jnp.asarray, (k, v, g))))
  np.testing.assert_allclose(end, np.exp(g.astype(np.float64).sum(1, keepdims=True)), atol=EPS)
  assert (np.abs(k - want) <= (T * np.abs(later) + 4) * EPS * np.abs(want) + 1e-38).all()


def history_is_the_state_it_leads_to(S, tokens, cut: int):
  """A chain in two windows, where the second reads S and the first one's writes."""
  T = len(tokens[0][0])
  chain = list(range(-1, T - 1))

  def head(S, x):
    first, then = jax.tree.map(lambda y: y[:cut], x), jax.tree.map(lambda y: y[cut:], x)
    o, u = window.solve(window.project(S, None, EXACT), first, window.chain(cut))
    seen = window.project(S, window.Writes(first.k, u, first.g), EXACT)
    p, _ = window.solve(seen, then, window.chain(T - cut))
    return jnp.concatenate([o, p])

  (_, want), (_, want32) = walks(S, tokens, chain)
  _, do = bounds(S, tokens, chain)
  budget.check("o", np.moveaxis(by_head(head, S, tokens), 0, 1), want, want32, eps=EPS, bound=do)


def a_spoiled_node_reaches_its_descendants_only(S, tokens, parents, node: int):
  """NaN in each of a node's inputs in turn; all other nodes keep every bit, in solve and fold."""
  below = [t for t in range(len(parents)) if node in path_to(parents, t)]
  others = sorted(set(range(len(parents))) - set(below))
  solve = jax.jit(
    jax.vmap(
      lambda S, x: window.solve(window.project(S, None, EXACT), x, jnp.asarray(parents, jnp.int32))
    )
  )
  run = lambda x: [np.asarray(y) for y in solve(jnp.asarray(S), Tokens(*map(jnp.asarray, x)))]
  o, u = run(tokens)
  for i in range(len(tokens)):
    dirty = [x.copy() for x in tokens]
    dirty[i][:, node] = np.nan
    p, w = run(dirty)
    same(p[:, others], o[:, others])
    same(w[:, others], u[:, others])
    assert np.isnan(p[:, below]).all()


def the_scan_is_the_walk(S, tokens):
  """`recurrence.scan` against float64: it is the plain recurrence that sets the budgets."""
  chain = list(range(-1, len(tokens[0][0]) - 1))
  end, o = by_head(recurrence.scan, S, tokens)
  (states, want), (states32, want32) = walks(S, tokens, chain)
  budget.check("o", np.moveaxis(o, 0, 1), want, want32, eps=EPS)
  budget.check("S", end, states[-1], states32[-1], eps=EPS)


def prefill_is_the_walk(S, tokens, chunk: int):
  """The chunked form against the recurrence, for a length that is no multiple of the chunk."""
  T = len(tokens[0][0])
  chain = list(range(-1, T - 1))
  end, o = by_head(lambda S, x: prefill.prefill(S, x, chunk=chunk), S, tokens)
  (states, want), (states32, want32) = walks(S, tokens, chain)
  dS, do = bounds(S, tokens, chain)
  budget.check("o", np.moveaxis(o, 0, 1), want, want32, eps=EPS, bound=do)
  budget.check("S", end, states[-1], states32[-1], eps=EPS, bound=dS[-1])


def silu(x):
  return x * np.exp(-np.logaddexp(0, -x))


def walked_conv(tail, x, taps, parents):
  """The convolution node by node in float64, and the sum of its terms' magnitudes."""
  y, size = [], []
  for t in range(len(parents)):
    inputs = np.concatenate([tail, x[path_to(parents, t)]]).astype(np.float64)[-len(taps) :]
    terms = inputs * np.asarray(taps, np.float64)
    y.append(silu(terms.sum(0))), size.append(np.abs(terms).sum(0))
  return np.stack(y), np.stack(size)


def the_same_conv(got, want, size, *, taps: int, eps: float = EPS):
  """Within the roundings of a sum of `taps` products in float32, of silu (its slope is below 1.1),
  and of the result's dtype."""
  assert np.isfinite(got).all()
  allowed = 1.1 * (taps + 2) * EPS * size + (eps + 4 * EPS) * np.abs(want)
  assert (np.abs(got - want) <= allowed).all()


def the_conv_is_the_loop(tail, x, taps, parents, nodes, slots):
  """Arrays in NumPy; rows past `nodes` hold NaN and garbage."""
  y = np.asarray(
    ops.xla().conv(*map(jnp.asarray, (tail, x, taps, parents, nodes, slots))), np.float64
  )
  eps = float(jnp.finfo(x.dtype).eps)
  for i, (n, slot) in enumerate(zip(nodes, slots, strict=True)):
    n = n if slot >= 0 else 0
    same(y[i, n:], 0)
    if not n:
      continue
    want, size = walked_conv(tail[slot], x[i, :n], taps, parents[i, :n])
    the_same_conv(y[i, :n], want, size, taps=len(taps), eps=eps)


def the_long_conv_is_the_loop(tail, x, taps):
  """`causal` takes batch rows for slots, and chains."""
  y = np.asarray(conv.causal(*map(jnp.asarray, (tail, x, taps))))
  for i in range(len(x)):
    want, size = walked_conv(tail[i], x[i], taps, list(range(-1, x.shape[1] - 1)))
    the_same_conv(y[i], want, size, taps=len(taps))


def gates_are_float32_of_the_formula(a, b, params):
  """beta and g to a few roundings of float32, whatever the dtype of the inputs."""
  beta, g = gates.gates(jnp.asarray(a), jnp.asarray(b), params)
  A_log, dt_bias, beta_max = (np.asarray(x, np.float64) for x in params)
  x = np.asarray(a, np.float64) + dt_bias
  want = -np.exp(A_log)[:, None] * np.logaddexp(0, x)
  assert beta.dtype == g.dtype == jnp.float32
  np.testing.assert_allclose(g, want, rtol=8 * EPS, atol=EPS)
  want = beta_max * np.exp(-np.logaddexp(0, -np.asarray(b, np.float64)))
  np.testing.assert_allclose(beta, want, rtol=8 * EPS)


def conv_flight(tail, x, taps, parents, nodes, slots):
  memory = conv_window(ops.xla())
  carry = memory.init(jnp.asarray(tail))
  return memory, *memory.verify(carry, *map(jnp.asarray, (x, taps, parents, nodes, slots)))


def a_commit_slides_the_conv_window(inputs, accepted):
  """The last W - 1 of [tail; accepted inputs], bit for bit; all other slots keep theirs."""
  (tail, x, *_, slots), (path, length) = inputs, accepted
  memory, _, flight = conv_flight(*inputs)
  taken = Accepted(*map(jnp.asarray, accepted))
  got = memory.materialize(memory.commit(flight, taken))
  want = tail.copy()
  for i, slot in enumerate(slots):
    if slot >= 0:
      rows = np.concatenate([tail[slot], x[i, path[i, : length[i]]]])
      want[slot] = rows[len(rows) - tail.shape[1] :]
  same(got, want)
  same(memory.state_at(flight, taken), want)


def rejected_inputs_leave_no_trace_in_the_conv_window(inputs, accepted):
  """NaN in every rejected input changes no accepted output and no committed bit."""
  (tail, x, *rest), (path, length) = inputs, accepted
  keep = np.zeros(x.shape[:2], bool)
  for i, n in enumerate(length):
    keep[i, path[i, :n]] = True
  dirty = np.where(keep[:, :, None], x, np.asarray(np.nan, x.dtype))
  memory, y, flight = conv_flight(*inputs)
  _, z, spoiled = conv_flight(tail, dirty, *rest)
  same(np.asarray(z)[keep], np.asarray(y)[keep])
  taken = Accepted(*map(jnp.asarray, accepted))
  same(memory.commit(spoiled, taken), memory.commit(flight, taken))


def batched(case):
  """Window of a Case from strategies, and its pool."""
  return jnp.asarray(case.S), case.window(), case.gates


def first_node(case):
  """The case cut to its anchors: what one decode step reads."""
  cut = lambda x: x[:, :1]
  return case._replace(raw=type(case.raw)(*map(cut, case.raw)), parents=cut(case.parents))


def one_token_is_one_node(case):
  """`decode` and a `snapshot` of one node leave the same bits."""
  S, window, params = batched(case)
  o, new = jax.jit(ops.XLA.decode)(S, window, params)
  p, _, states = jax.jit(partial(ops.XLA.snapshot, keep=1))(S, window, params)
  same(p, o)
  for i, (slot, n) in enumerate(zip(case.slots, case.nodes, strict=True)):
    if slot >= 0:
      same(new[slot], states[i, 0] if n else S[slot])
  idle = sorted(set(range(S.shape[0])) - set(case.slots.tolist()))
  same(np.asarray(new)[idle], case.S[idle])


def one_program_of_writes_is_the_writes(case):
  """All gates and writes of a chain in one program, where XLA sees from one to the next, leave the
  bits of a program for each. The barriers around both are what makes that so."""
  S, window, params = batched(case)
  S, raw = S[: window.parents.shape[0]], window.raw

  def token(S, raw, t, gate, at):
    key = jnp.repeat(raw.k[:, t], H // raw.k.shape[2], axis=1)
    each = jax.vmap(jax.vmap(recurrence.write))
    return each(S, key, raw.v[:, t], gate.beta[:, at], gate.g[:, at])

  @jax.jit
  def together(S, raw):
    gate = ops.token_gates(raw, params)
    for t in range(window.parents.shape[1]):
      S = token(S, raw, t, gate, t)
    return S, gate

  @jax.jit
  def alone(S, raw, t):
    gate = ops.token_gates(jax.tree.map(lambda x: x[:, t][:, None], raw), params)
    return token(S, raw, t, gate, 0), gate

  got, gates = together(S, raw)
  for t in range(window.parents.shape[1]):
    S, gate = alone(S, raw, jnp.int32(t))
    jax.tree.map(lambda x, y: same(x[:, t], y[:, 0]), gates, gate)  # noqa: B023
  same(got, S)


def prefill_of_a_batch_is_the_walk(case):
  """Rows past `nodes` hold NaN and are never read; slots without a node keep every bit."""
  S, window, params = batched(case)
  o, new = jax.jit(ops.xla(chunk=4).prefill)(S, window, params)
  o, new, moved = np.asarray(o), np.asarray(new), []
  for i, (slot, n) in enumerate(zip(case.slots, case.nodes, strict=True)):
    n = n if slot >= 0 else 0
    same(o[i, n:], 0)
    if not n:
      continue
    moved.append(slot)
    raw, chain = [np.asarray(x[i, :n]) for x in case.raw], list(range(-1, n - 1))
    tokens = oracle.tokens(*raw, *case.gates)
    tokens32 = oracle.tokens(*raw, *case.gates, dtype=np.float32)
    states, want = oracle.walk(case.S[slot], tokens, chain)
    states32, want32 = oracle.walk(case.S[slot], tokens32, chain, oracle.pseudo_value)
    dS, do = oracle.solve_bound(case.S[slot].astype(np.float64), tokens, chain, EPS)
    budget.check("o", o[i, :n], want, want32, eps=EPS, bound=do)
    budget.check("S", new[slot], states[-1], states32[-1], eps=EPS, bound=dS[-1])
  idle = sorted(set(range(S.shape[0])) - set(moved))
  same(new[idle], case.S[idle])


def verify_is_snapshot_within_the_budget(case):
  """The solve and the walk differ by no more than the recurrence's own error allows."""
  S, window, params = batched(case)
  o = np.asarray(jax.jit(ops.XLA.verify)(S, window, params)[0])
  p = np.asarray(jax.jit(partial(ops.XLA.snapshot, keep=1))(S, window, params)[0])
  for i, (slot, n) in enumerate(zip(case.slots, case.nodes, strict=True)):
    if slot < 0:
      continue
    raw, parents = [np.asarray(x[i, :n]) for x in case.raw], case.parents[i, :n]
    tokens = oracle.tokens(*raw, *case.gates)
    tokens32 = oracle.tokens(*raw, *case.gates, dtype=np.float32)
    want = oracle.walk(case.S[slot], tokens, parents)[1]
    plain = oracle.walk(case.S[slot], tokens32, parents, oracle.pseudo_value)[1]
    _, do = oracle.solve_bound(case.S[slot].astype(np.float64), tokens, parents, EPS)
    budget.check("o", o[i, :n], p[i, :n], p[i, :n] + (plain - want), eps=EPS, bound=do)
