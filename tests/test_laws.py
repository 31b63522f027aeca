"""Every law over every scheme in the registry, GDN and KDA, trees and hostile values."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commit_schemes import SCHEMES
from commit_schemes.replay import replay
from commit_schemes.ring import ring
from experiments.witness import bitwise
from tests import laws
from tests.slow import each, slow
from tests.strategies import HOSTILE, LAWS_OPS, B, H, K, N, T, V, cases, chain, make_case, trees

DECAYS = {"gdn": 1, "kda": K}
every_scheme = pytest.mark.parametrize("name", each(SCHEMES))
every_decay = pytest.mark.parametrize("decay", DECAYS)
gdn_first = pytest.mark.parametrize("decay", ["gdn", slow("kda")])
lossless = pytest.mark.parametrize("name", each(n for n, s in SCHEMES.items() if s.lossless))


def drawn(law):
  """Run a law on drawn cases, for each scheme and decay."""

  @every_scheme
  @every_decay
  @given(data=st.data())
  def test(name, decay, data):
    law(laws.build(name, DECAYS[decay]), data.draw(cases(channels=DECAYS[decay])))

  return test


@lossless
@every_decay
@given(data=st.data())
def test_outputs_and_states_match_the_oracle(name, decay, data):
  case = data.draw(cases(channels=DECAYS[decay]))
  scheme = laws.build(name, DECAYS[decay])
  laws.outputs_and_states_match_the_oracle(scheme, SCHEMES[name].solves, case)


test_state_at_is_materialize_after_commit = drawn(laws.state_at_is_materialize_after_commit)
test_rejected_nodes_leave_no_trace = drawn(laws.rejected_nodes_leave_no_trace)
test_other_slots_do_not_matter = drawn(laws.other_slots_do_not_matter)
test_admitting_forgets_the_former_tenant = drawn(laws.admitting_forgets_the_former_tenant)


@every_scheme
@every_decay
@given(data=st.data())
def test_committing_nothing_changes_nothing(name, decay, data):
  """The step that folds one decay a head does so on the tensor cores, `fold_rank` does not."""
  exact = not (LAWS_OPS == "mosaic_gpu" and name == "tree_wy" and decay == "gdn")
  case = data.draw(cases(channels=DECAYS[decay]))
  laws.committing_nothing_changes_nothing(laws.build(name, DECAYS[decay]), case, exact=exact)


@every_scheme
@given(case=cases(), order=st.permutations(range(B)))
def test_permuting_slots_commutes(name, case, order):
  laws.permuting_slots_commutes(laws.build(name), case, order)


@functools.cache
def long_stream(kind, channels, tree):
  return laws.told(laws.stream(7, 30, channels=channels, kind=kind, tree=tree))


@lossless
@gdn_first
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["random", "identical_keys_beta_near_two_no_decay"])
def test_a_long_stream_is_the_plain_recurrence(name, decay, tree, kind):
  laws.a_long_stream_is_the_plain_recurrence(
    laws.build(name, DECAYS[decay]),
    long_stream(kind, DECAYS[decay], tree),
    solves=SCHEMES[name].solves,
  )


@functools.cache
def brimful(channels):
  return laws.told(laws.brimful(channels=channels))


@lossless
@gdn_first
def test_a_window_may_end_anywhere_in_a_ring(name, decay):
  laws.a_long_stream_is_the_plain_recurrence(
    laws.build(name, DECAYS[decay]), brimful(DECAYS[decay]), solves=SCHEMES[name].solves
  )


@every_decay
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("name", each(n for n, s in SCHEMES.items() if bitwise(s, laws.spec().ops)))
def test_exact_folds_are_decode_bitwise(name, decay, tree):
  laws.exact_folds_are_decode_bitwise(
    laws.build(name, DECAYS[decay]), long_stream("random", DECAYS[decay], tree).cases
  )


@functools.cache
def keep_all():
  return laws.jitted(replay(laws.spec(), keep=T))


@given(case=cases(forests=trees))
def test_keeping_every_state_is_snapshot_bitwise(case):
  a, b = keep_all(), laws.build("snapshot")
  (o, f), (p, g) = (
    s.verify(s.init(jnp.asarray(case.S)), case.window(), case.gates) for s in (a, b)
  )
  laws.same(o, p)
  laws.same(f.states, g.states)
  laws.same(a.commit(f, case.accepted()), b.commit(g, case.accepted()))


@pytest.mark.parametrize("fold", ["open_loop", "exact", "compensated"])
def test_a_ring_as_long_as_the_window_folds_at_every_step(fold):
  scheme = laws.jitted(ring(laws.spec(), slots=T, fold=fold))
  case = make_case(0, [(chain(), list(range(3)))] * B, slots=(0, 1, 2))
  carry = scheme.init(jnp.asarray(case.S))
  _, flight = scheme.verify(carry, case.window(), case.gates)
  carry = scheme.commit(flight, case.accepted())
  laws.same(carry.S, case.S)
  want = scheme.materialize(carry)
  _, flight = scheme.verify(carry, case.window(), case.gates)
  laws.same(flight.carry.S[:3], want[:3])
  _, h = flight.cursor.T
  assert not np.any(h)


def test_the_early_flush_folds_one_window_sooner():
  steps = {}
  for flush in ("full", "early"):
    scheme = laws.jitted(ring(laws.spec(), slots=3 * T, fold="open_loop", flush=flush))
    carry, steps[flush] = scheme.init(jnp.zeros((N, H, V, K))), []
    for i in range(6):
      case = make_case(i, [(chain(), list(range(T)))] * B, slots=(0, 1, 2))
      before = carry.S
      _, flight = scheme.verify(carry, case.window(), case.gates)
      carry = scheme.commit(flight, case.accepted())
      steps[flush].append(bool(np.any(carry.S != before)))
  assert steps["full"] == [False, False, False, True, False, False]
  assert steps["early"] == [False, False, True, False, True, False]


@functools.cache
def of_chains(name, channels):
  return laws.jitted(SCHEMES[name].make(laws.spec(channels)._replace(topology="chain")))


@every_scheme
@gdn_first
def test_a_promise_of_chains_changes_no_result(name, decay):
  laws.two_schemes_are_one(
    laws.build(name, DECAYS[decay]),
    of_chains(name, DECAYS[decay]),
    long_stream("random", DECAYS[decay], False).cases,
  )


@every_scheme
def test_one_trace_for_every_acceptance(name):
  laws.one_trace_for_every_acceptance(lambda: SCHEMES[name].make(laws.spec()))


def test_every_hostile_kind_is_really_hostile():
  """The draws reach what their names promise: the gates they lead to."""
  from tests import oracle

  for kind in HOSTILE:
    case = make_case(0, [(chain(), [])] * B, kind=kind)
    _, k, _, beta, g = oracle.tokens(*(x[0] for x in case.raw), *case.gates)
    if "beta_zero" in kind:
      assert beta.max() < 1e-30
    if "beta_one" in kind:
      assert beta.min() == pytest.approx(1)
    if "beta_near_two" in kind:
      assert 1.99 < beta.min() < 2
    if "no_decay" in kind:
      assert g.min() > -1e-30
    if "total_decay" in kind:
      assert g.max() < -50
    if "identical" in kind:
      np.testing.assert_array_equal(k[:, 0], k[:, -1])
