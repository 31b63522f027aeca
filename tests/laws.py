"""The laws of a commit scheme, as functions that raise. Tests draw; mutants must break them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes import SCHEMES, CommitScheme, Dtypes, Spec, admit
from experiments.step_cases import widened
from experiments.witness import PROMISED
from gdn import ops
from gdn.typing import Accepted, Raw
from pallas_kernels import MOSAIC_GPU
from tests import budget, oracle
from tests.strategies import (
  HK,
  LAWS_OPS,
  RAW,
  B,
  Case,
  H,
  K,
  N,
  T,
  V,
  chain,
  draw_gates,
  draw_raw,
  make_case,
  path_to,
)

EPS = float(np.finfo(np.float32).eps)
# One rounding of an answer, where plain float32 happens to be right. Tensor cores cut off
# sums of sixteen products; what kernels promise is a part in a million before outputs are rounded.
ROUNDING = PROMISED if LAWS_OPS == "mosaic_gpu" else EPS
# Outputs before they are rounded to the inputs' bfloat16.
KERNELS = {"mosaic_gpu": widened(MOSAIC_GPU), "xla": widened(ops.XLA)}
same = np.testing.assert_array_equal


def spec(channels: int = 1, **kw) -> Spec:
  """A spec of the drawn shapes. `ops` is looked up at each call, so a planted bug is in it."""
  kw = {"dtypes": Dtypes(raw=RAW), "ops": KERNELS.get(LAWS_OPS, ops.XLA), **kw}
  return Spec(key_heads=HK, window=T, channels=channels, **kw)


def jitted(scheme: CommitScheme) -> CommitScheme:
  return CommitScheme(*map(jax.jit, scheme))


@functools.cache
def build(name: str, channels: int = 1) -> CommitScheme:
  """Compiled once per scheme and decay; every law of every example runs the same programs."""
  return jitted(SCHEMES[name].make(spec(channels)))


def truth(case: Case, i: int, dtype=np.float64, rule=oracle.householder):
  """States and outputs of batch row i's real nodes; rows that are not its own do not exist."""
  n, slot = case.nodes[i], case.slots[i]
  raw = [np.asarray(x[i, :n]) for x in case.raw]
  tokens = oracle.tokens(*raw, *case.gates, dtype=dtype)
  root = case.S[slot].astype(dtype)
  return oracle.walk(root, tokens, case.parents[i, :n], rule), (root, tokens)


def outputs_and_states_match_the_oracle(scheme: CommitScheme, solves: bool, case: Case):
  """Verify and commit against float64; padding gives zeros; other slots keep every bit."""
  o, flight = scheme.verify(scheme.init(jnp.asarray(case.S)), case.window(), case.gates)
  got = np.asarray(scheme.materialize(scheme.commit(flight, case.accepted())))
  o = np.asarray(o)
  untouched = sorted(
    set(range(N)) - {s for s, n in zip(case.slots, case.length, strict=True) if n > 0}
  )
  same(got[untouched], case.S[untouched])
  for i, (slot, n) in enumerate(zip(case.slots, case.nodes, strict=True)):
    same(o[i, n:], 0)
    if slot < 0:
      same(o[i], 0)
      continue
    (S, want), (root, tokens) = truth(case, i)
    (S32, o32), _ = truth(case, i, np.float32, oracle.pseudo_value)
    dS, do = oracle.solve_bound(root, tokens, case.parents[i, :n], EPS) if solves else (S * 0, 0)
    budget.check("o", o[i, :n], want, o32, eps=ROUNDING, bound=do)
    if case.length[i]:
      last = case.path[i, case.length[i] - 1]
      bound = dS[last] if solves else 0
      budget.check("S", got[slot], S[last], S32[last], eps=ROUNDING, bound=bound)


def state_at_is_materialize_after_commit(scheme: CommitScheme, case: Case):
  """For every prefix of the accepted path, and equal to what the oracle's order says."""
  _, flight = scheme.verify(scheme.init(jnp.asarray(case.S)), case.window(), case.gates)
  for n in range(int(case.length.max()) + 1):
    prefix = Accepted(jnp.asarray(case.path), jnp.asarray(np.minimum(case.length, n)))
    same(scheme.state_at(flight, prefix), scheme.materialize(scheme.commit(flight, prefix)))


def rejected_nodes_leave_no_trace(scheme: CommitScheme, case: Case):
  """NaN in every rejected node's inputs changes no accepted output and no committed bit."""
  keep = np.zeros((B, T), bool)
  for i, n in enumerate(case.length):
    keep[i, case.path[i, :n]] = True
  poison = lambda x: np.where(keep.reshape(B, T, *(1,) * (x.ndim - 2)), x, x.dtype.type(np.nan))
  dirty = case._replace(raw=Raw(*map(poison, case.raw)))
  carry = scheme.init(jnp.asarray(case.S))
  (o, f), (p, g) = (scheme.verify(carry, c.window(), c.gates) for c in (case, dirty))
  same(np.asarray(p)[keep], np.asarray(o)[keep])
  clean, spoiled = (scheme.commit(x, case.accepted()) for x in (f, g))
  same(scheme.materialize(spoiled), scheme.materialize(clean))
  follow = make_case(1, [(chain(), [])] * B, channels=case.raw.a.shape[-1])
  q, _ = scheme.verify(spoiled, follow.window(), case.gates)
  r, _ = scheme.verify(clean, follow.window(), case.gates)
  same(q, r)


def committing_nothing_changes_nothing(scheme: CommitScheme, case: Case, *, exact: bool = True):
  """With tokens pending from the window before. Bitwise, but where the verify that follows folds
  them in another arithmetic than `materialize` does."""
  _, flight = scheme.verify(scheme.init(jnp.asarray(case.S)), case.window(), case.gates)
  carry = scheme.commit(flight, case.accepted())
  before = scheme.materialize(carry)
  assert np.isfinite(np.asarray(before, np.float32)).all()
  _, flight = scheme.verify(carry, case.window(), case.gates)
  nothing = Accepted(jnp.asarray(case.path), jnp.zeros(B, jnp.int32))
  after = scheme.materialize(scheme.commit(flight, nothing))
  if exact:
    same(after, before)
  else:
    np.testing.assert_allclose(after, before, rtol=0, atol=ROUNDING * np.abs(before).max())


def permuting_slots_commutes(scheme: CommitScheme, case: Case, order):
  """Batch rows in another order: the same outputs in that order, the same pool."""
  order = list(order)
  turn = lambda x: np.asarray(x)[order]
  turned = Case(case.S, Raw(*map(turn, case.raw)), case.gates, *map(turn, case[3:]))
  carry = scheme.init(jnp.asarray(case.S))
  o, f = scheme.verify(carry, case.window(), case.gates)
  p, g = scheme.verify(carry, turned.window(), case.gates)
  same(p, turn(o))
  a, b = (scheme.materialize(scheme.commit(x, c.accepted())) for x, c in ((f, case), (g, turned)))
  same(a, b)


def other_slots_do_not_matter(scheme: CommitScheme, case: Case):
  """NaN in every slot outside the window, as a former tenant may leave it, reaches nobody."""
  mine = np.isin(np.arange(N), case.slots)
  carry = scheme.init(jnp.asarray(case.S))
  spoil = lambda x: (
    jnp.where(mine.reshape(N, *(1,) * (x.ndim - 1)), x, jnp.nan)
    if jnp.issubdtype(x.dtype, jnp.floating)
    else x
  )
  o, f = scheme.verify(carry, case.window(), case.gates)
  p, g = scheme.verify(jax.tree.map(spoil, carry), case.window(), case.gates)
  same(p, o)
  a, b = (np.asarray(scheme.materialize(scheme.commit(x, case.accepted()))) for x in (f, g))
  same(a[mine], b[mine])


def admitting_forgets_the_former_tenant(scheme: CommitScheme, case: Case):
  """A slot full of NaN with live cursors, then given away, is a fresh slot bit for bit."""
  _, flight = scheme.verify(scheme.init(jnp.asarray(case.S)), case.window(), case.gates)
  used = scheme.commit(flight, case.accepted())
  spoil = lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x
  slots = jnp.arange(N, dtype=jnp.int32)
  fresh = scheme.init(jnp.asarray(case.S))
  again = admit(scheme, jax.tree.map(spoil, used), slots, jnp.asarray(case.S))
  jax.tree.map(same, again, fresh)


def stream(seed: int, windows: int, *, channels: int = 1, kind: str = "random", tree: bool = False):
  """Windows for all N slots, of random draft length, cut off at a random accepted node."""
  rng = np.random.default_rng(seed)
  gates = draw_gates(rng, kind=kind, channels=channels)
  for _ in range(windows):
    nodes = rng.integers(1, T + 1, size=N).astype(np.int32)
    parents = np.tile(np.asarray(chain(), np.int32), (N, 1))
    if tree:
      parents = np.stack([rng.integers(-1, t, size=N, dtype=np.int32) for t in range(T)], 1)
    path, length = np.full((N, T), -(2**30), np.int32), np.zeros(N, np.int32)
    for i, last in enumerate(rng.integers(-1, nodes)):
      accepted = path_to(parents[i], last)
      path[i, : len(accepted)], length[i] = accepted, len(accepted)
    raw = draw_raw(rng, kind=kind, channels=channels, B=N)
    S = np.zeros((N, H, V, K), np.float32)
    yield Case(S, raw, gates, parents, nodes, np.arange(N, dtype=np.int32), path, length)


class Stream(NamedTuple):
  """A stream of windows and what is true of it, for every scheme alike.

  outputs and states (after the last window) are float64; plain_ is the recurrence in float32; the
  bounds are those of a solve in every window.
  """

  cases: list[Case]
  outputs: list[np.ndarray]
  plain_outputs: list[np.ndarray]
  output_bounds: list[np.ndarray]
  state: np.ndarray
  plain_state: np.ndarray
  state_bound: float


def brimful(*, channels: int = 1):
  """Chains with every node real that leave 3 T + 1, ... 3 T + N tokens behind the checkpoint."""
  for i, case in enumerate(stream(8, 9, channels=channels)):
    length = np.arange(1, N + 1) if i == 3 else np.full(N, T)
    path = np.tile(np.arange(T), (N, 1))
    yield case._replace(
      raw=draw_raw(np.random.default_rng(i), channels=channels, B=N),
      nodes=np.full(N, T, np.int32),
      path=path.astype(np.int32),
      length=length.astype(np.int32),
    )


def told(cases) -> Stream:
  """The oracle's walk through a stream."""
  S, S32 = np.zeros((N, H, V, K)), np.zeros((N, H, V, K), np.float32)
  cases, o, o32, do, dS = list(cases), [], [], [], 0.0
  for case in cases:
    for i, (n, length) in enumerate(zip(case.nodes, case.length, strict=True)):
      raw, parents = [np.asarray(x[i, :n]) for x in case.raw], case.parents[i, :n]
      tokens = oracle.tokens(*raw, *case.gates)
      states, outputs = oracle.walk(S[i], tokens, parents)
      tokens32 = oracle.tokens(*raw, *case.gates, dtype=np.float32)
      states32, outputs32 = oracle.walk(S32[i], tokens32, parents, oracle.pseudo_value)
      state_bound, output_bound = oracle.solve_bound(S[i], tokens, parents, EPS)
      o.append(outputs), o32.append(outputs32), do.append(output_bound)
      if length:
        last = case.path[i, length - 1]
        S[i], S32[i], dS = states[last], states32[last], max(dS, budget.rms(state_bound[last]))
  return Stream(cases, o, o32, do, S, S32, dS)


def a_long_stream_is_the_plain_recurrence(scheme: CommitScheme, stream: Stream, *, solves: bool):
  """Rings wrap, flush and wrap again: every output, and the state after all of it.

  |q| = 1/sqrt(K), so an error of the state reaches an output no larger than it is.
  """
  carry, got = scheme.init(jnp.zeros((N, H, V, K), jnp.float32)), []
  for case in stream.cases:
    o, flight = scheme.verify(carry, case.window(), case.gates)
    carry = scheme.commit(flight, case.accepted())
    got += [np.asarray(o[i, :n]) for i, n in enumerate(case.nodes)]
  bound = stream.state_bound if solves else 0.0
  budget.check(
    "S", scheme.materialize(carry), stream.state, stream.plain_state, eps=ROUNDING, bound=bound
  )
  flat = np.concatenate
  bound += budget.rms(flat(stream.output_bounds)) if solves else 0.0
  want, plain = flat(stream.outputs), flat(stream.plain_outputs)
  budget.check("o", flat(got), want, plain, eps=ROUNDING, bound=bound)


def exact_folds_are_decode_bitwise(scheme: CommitScheme, cases):
  """After every commit the materialised state is what one-token steps of the same Ops leave."""
  decode = jax.jit(spec().ops.decode)
  plain = jnp.zeros((N, H, V, K), jnp.float32)
  carry = scheme.init(plain)
  for case in cases:
    window = case.window()
    _, flight = scheme.verify(carry, window, case.gates)
    carry = scheme.commit(flight, case.accepted())
    for t in range(int(case.length.max())):
      live = t < case.length
      at = np.where(live, case.path[:, t], 0)
      raw = jax.tree.map(lambda x: x[np.arange(N), at][:, None], window.raw)  # noqa: B023
      root = jnp.full((N, 1), -1, jnp.int32)
      one = window._replace(raw=raw, parents=root, nodes=jnp.asarray(live.astype(np.int32)))
      _, plain = decode(plain, one, case.gates)
    same(scheme.materialize(carry), plain)


def two_schemes_are_one(a: CommitScheme, b: CommitScheme, cases):
  """Every output, and the materialised state after every commit, bit for bit."""
  S = jnp.zeros((N, H, V, K), jnp.float32)
  first, second = a.init(S), b.init(S)
  for case in cases:
    (o, f), (p, g) = (s.verify(c, case.window(), case.gates) for s, c in ((a, first), (b, second)))
    same(p, o)
    first, second = a.commit(f, case.accepted()), b.commit(g, case.accepted())
    same(b.materialize(second), a.materialize(first))


def one_trace_for_every_acceptance(make):
  """Acceptance, draft length, topology and slots are data."""
  scheme, traces = make(), []
  counted = lambda f: jax.jit(lambda *a: (traces.append(1), f(*a))[1])
  verify, commit = counted(scheme.verify), counted(scheme.commit)
  carry = scheme.init(jnp.zeros((N, H, V, K), jnp.float32))
  for i in range(4):
    case = make_case(i, [(chain(n), list(range(n - 1))) for n in (1 + i, T, 2)], slots=(i, -1, 4))
    _, flight = verify(carry, case.window(), case.gates)
    carry = commit(flight, case.accepted())
  assert len(traces) == 2, f"{len(traces)} traces of verify and commit"


def committed(name: str, dtypes: Dtypes, case: Case):
  """Outputs and the state after one commit, from the case's pool, compiled anew."""
  scheme = jitted(SCHEMES[name].make(spec(case.raw.a.shape[-1], dtypes=dtypes)))
  o, flight = scheme.verify(scheme.init(jnp.asarray(case.S)), case.window(), case.gates)
  return np.asarray(o), scheme.materialize(scheme.commit(flight, case.accepted()))


def a_narrow_checkpoint_is_rounded_once(name: str, case: Case):
  """From a state that bfloat16 can hold: float32 arithmetic throughout, then one rounding."""
  narrow = np.asarray(jnp.asarray(case.S).astype(jnp.bfloat16).astype(jnp.float32))
  case = case._replace(S=narrow)
  o, wide = committed(name, Dtypes(raw=jnp.float32), case)
  p, got = committed(name, Dtypes(checkpoint=jnp.bfloat16, raw=jnp.float32), case)
  assert got.dtype == jnp.bfloat16
  same(p, o)
  same(got.astype(jnp.float32), wide.astype(jnp.bfloat16).astype(jnp.float32))


def record_errors(name: str, case: Case) -> list[float]:
  """Error of the committed state with rows of bfloat16, of hi + lo, and of float32."""
  b, f = jnp.bfloat16, jnp.float32
  errors = []
  for rows in ((b,), (b, b), (f,)):
    _, got = committed(name, Dtypes(rows=rows, raw=f), case)
    wrong = []
    for i, slot in enumerate(case.slots):
      if slot >= 0 and case.length[i]:
        (S, _), _ = truth(case, i)
        wrong.append(np.asarray(got[slot], np.float64) - S[case.path[i, case.length[i] - 1]])
    errors.append(budget.rms(np.stack(wrong)))
  return errors


def records_lose_what_their_dtype_rounds(name: str, case: Case):
  """bfloat16 keeps 8 bits and hi + lo 16 of them, which is 256 times the accuracy in the mean."""
  single, pair, full = record_errors(name, case)
  assert 2**-13 < single < 2**-6
  assert 50 * pair < single
  assert full < pair
