"""Dtypes of what is stored, and what a caller is told who hands in something else."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commit_schemes import SCHEMES, Accepted, Dtypes, check_chain
from commit_schemes.replay import replay
from commit_schemes.ring import ring
from tests import laws
from tests.slow import each
from tests.strategies import HK, B, H, K, N, T, V, chain, make_case, path_to

TREE = [-1, 0, 0, 1, 1, 2]
CASE = make_case(1, [(TREE, path_to(TREE, 5)), (chain(), chain()[1:]), (chain(5), [0, 1])])
RECORDING = ["delta_cache", "tree_wy"]

# Kept states are themselves rounded, so a replay from one of them rounds twice.
ROUNDING_ONCE = [n for n in SCHEMES if not n.startswith("replay") or n == "replay_0"]


@pytest.mark.parametrize("name", each(ROUNDING_ONCE, "ring_open_loop"))
def test_a_narrow_checkpoint_is_rounded_once(name):
  laws.a_narrow_checkpoint_is_rounded_once(name, CASE)


@pytest.mark.parametrize("name", each(SCHEMES, "ring_open_loop", "replay_4"))
def test_everything_stored_may_be_narrow(name):
  """Two steps; the state keeps the checkpoint's dtype and is right to its precision."""
  dtypes = Dtypes(checkpoint=jnp.bfloat16, rows=(jnp.bfloat16,), raw=jnp.bfloat16)
  scheme = laws.jitted(SCHEMES[name].make(laws.spec(dtypes=dtypes)))
  carry = scheme.init(jnp.asarray(CASE.S))
  assert scheme.materialize(carry).dtype == jnp.bfloat16
  for _ in range(2):
    _, flight = scheme.verify(carry, CASE.window(), CASE.gates)
    carry = scheme.commit(flight, CASE.accepted())
    assert scheme.materialize(carry).dtype == jnp.bfloat16
    assert scheme.state_at(flight, CASE.accepted()).dtype == jnp.bfloat16
  wide = laws.build(name)
  full = wide.init(jnp.asarray(CASE.S))
  for _ in range(2):
    _, flight = wide.verify(full, CASE.window(), CASE.gates)
    full = wide.commit(flight, CASE.accepted())
  want = np.asarray(wide.materialize(full))
  got = np.asarray(scheme.materialize(carry), np.float32)
  assert 0 < laws.budget.rms(got - want) < 2**-5 * laws.budget.rms(want)


@pytest.mark.parametrize("name", RECORDING)
def test_records_lose_what_their_dtype_rounds(name):
  laws.records_lose_what_their_dtype_rounds(name, CASE)


def test_outputs_have_the_dtype_of_the_activations():
  raw = type(CASE.raw)(*(np.asarray(x, jnp.bfloat16) for x in CASE.raw))
  case = CASE._replace(raw=raw)
  for made in SCHEMES.values():
    scheme = made.make(laws.spec())
    carry = jax.eval_shape(scheme.init, jnp.asarray(case.S))
    o, _ = jax.eval_shape(scheme.verify, carry, case.window(), case.gates)
    assert o.dtype == jnp.bfloat16


# Without the types that tests switch on: a user has only the message.
plain_replay, plain_ring = inspect.unwrap(replay), inspect.unwrap(ring)


@pytest.mark.parametrize(
  "make, message",
  [
    (lambda s: plain_replay(s, keep=-1), "keep=-1 must be at least 0"),
    (
      lambda s: plain_replay(s, keep=2, tail="sparse"),
      r"tail='sparse' must be one of .*compact.*dense",
    ),
    (lambda s: plain_ring(s, slots=24, fold="closed"), r"fold='closed' must be one of .*'exact'"),
    (
      lambda s: plain_ring(s, slots=24, fold="exact", flush="late"),
      r"flush='late' must be one of .*full",
    ),
    (lambda s: plain_ring(s, slots=T - 1, fold="exact"), rf"ring of {T - 1} slots .* at least {T}"),
    (
      lambda s: plain_ring(s, slots=2 * T - 1, fold="exact", flush="early"),
      rf"ring of {2 * T - 1} slots .* at least {2 * T}",
    ),
  ],
)
def test_a_scheme_that_cannot_be(make, message):
  with pytest.raises(ValueError, match=message):
    make(laws.spec())


def altered(**changes):
  """The window with some of its arrays replaced by functions of them."""
  window = CASE.window()
  for name, f in changes.items():
    if name in window.raw._fields:
      window = window._replace(raw=window.raw._replace(**{name: f(getattr(window.raw, name))}))
    else:
      window = window._replace(**{name: f(getattr(window, name))})
  return window


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
  "changes, message",
  [
    ({"k": lambda x: x[:, :-1]}, rf"raw.k is .*{T - 1}.*, not .*\[{B}, {T}, {HK}, {K}\]"),
    ({"q": lambda x: x[:, :, :1]}, rf"raw.q is .*, not .*\[{B}, {T}, {HK}, {K}\]"),
    ({"a": lambda x: x[..., 0]}, rf"raw.a is .*, not .*\[{B}, {T}, {H}, 1\]"),
    ({"b": lambda x: x.astype(jnp.int32)}, r"raw.b is int32.*, not floating"),
    ({"slots": lambda x: x.astype(jnp.float32)}, r"window.slots is float32.*, not int32"),
    ({"nodes": lambda x: x[:1]}, rf"window.nodes is int32\[1\], not int32\[{B}\]"),
    ({"parents": lambda x: x[0]}, r"window.parents has shape \[6\], which is not \[B, T\]"),
    ({"v": lambda x: x[:, :, :2]}, rf"raw.v is .*, not .*\[{B}, {T}, {H}, {V}\]"),
    ({"k": lambda x: x[..., :8]}, rf"raw.k is .*, not .*\[{B}, {T}, {HK}, {K}\]"),
  ],
)
def test_a_window_that_does_not_fit(name, changes, message):
  scheme = SCHEMES[name].make(laws.spec())
  carry = jax.eval_shape(scheme.init, jnp.asarray(CASE.S))
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(scheme.verify, carry, altered(**changes), CASE.gates)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
  "gates, message",
  [
    ({"A_log": jnp.zeros(2)}, rf"gates.A_log is float32\[2\], not float32\[{H}\]"),
    ({"A_log": jnp.zeros(H, jnp.bfloat16)}, r"gates.A_log is bfloat16\[4\], not float32"),
    ({"dt_bias": jnp.zeros(H)}, rf"gates.dt_bias is float32\[4\], not float32\[{H}, 1\]"),
    ({"dt_bias": jnp.zeros((H, K))}, rf"gates.dt_bias is .*16\], not float32\[{H}, 1\]"),
    ({"beta_max": jnp.ones(H)}, r"gates.beta_max is float32\[4\], not float32\[\]"),
    ({"beta_max": jnp.int32(1)}, r"gates.beta_max is int32\[\], not float32\[\]"),
  ],
)
def test_gate_parameters_that_do_not_fit(name, gates, message):
  scheme = SCHEMES[name].make(laws.spec())
  carry = jax.eval_shape(scheme.init, jnp.asarray(CASE.S))
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(scheme.verify, carry, CASE.window(), CASE.gates._replace(**gates))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
  "path, length, message",
  [
    (jnp.zeros(B, jnp.int32), jnp.zeros(B, jnp.int32), r"accepted.path has shape \[3\]"),
    (jnp.zeros((1, T), jnp.int32), jnp.zeros(B, jnp.int32), r"accepted.path is int32\[1, 6\]"),
    (jnp.zeros((B, T)), jnp.zeros(B, jnp.int32), r"accepted.path is float32.*, not int32"),
    (jnp.zeros((B, T), jnp.int32), jnp.int32(1), rf"accepted.length is int32\[\].*\[{B}\]"),
  ],
)
def test_an_acceptance_that_does_not_fit(name, path, length, message):
  scheme = SCHEMES[name].make(laws.spec())
  carry = jax.eval_shape(scheme.init, jnp.asarray(CASE.S))
  _, flight = jax.eval_shape(scheme.verify, carry, CASE.window(), CASE.gates)
  for f in (scheme.commit, scheme.state_at):
    with pytest.raises(ValueError, match=message):
      jax.eval_shape(f, flight, inspect.unwrap(Accepted)(path, length))


def limited(**limits):
  return SCHEMES["delta_cache"]._replace(**limits)


def test_a_decay_that_a_scheme_does_not_take():
  with pytest.raises(ValueError, match=r"spec.channels=16 is kda, and this scheme takes gdn"):
    limited(decays=("gdn",)).make(laws.spec(K))
  with pytest.raises(ValueError, match=r"spec.channels=1 is gdn, and this scheme takes kda"):
    limited(decays=("kda",)).make(laws.spec())


def test_a_tree_given_to_a_scheme_of_chains():
  """Where the parents can be seen: in a call that is not compiled, or by `check_chain` before."""
  scheme = limited(topologies=("chain",)).make(laws.spec())
  carry = jax.eval_shape(scheme.init, jnp.asarray(CASE.S))
  seen = lambda window: jax.eval_shape(lambda c: scheme.verify(c, window, CASE.gates), carry)
  message = r"parents\[0, 2\] = 0 makes a tree, .* chains alone: 1 is allowed"
  with pytest.raises(ValueError, match=message):
    seen(CASE.window())
  with pytest.raises(ValueError, match=message):
    check_chain(CASE.window())
  chains = make_case(1, [(chain(n), []) for n in (T, 2, 0)]).window()  # the rest is garbage
  padding = CASE.window()._replace(slots=jnp.asarray([-1, 0, 1], jnp.int32))
  for window in (chains, padding):
    seen(window)
  jax.eval_shape(scheme.verify, carry, CASE.window(), CASE.gates)  # nothing to see


@pytest.mark.parametrize("name", SCHEMES)
def test_a_tree_where_chains_were_promised(name):
  scheme = SCHEMES[name].make(laws.spec()._replace(topology="chain"))
  carry = jax.eval_shape(scheme.init, jnp.asarray(CASE.S))
  verify = lambda window: jax.eval_shape(lambda c: scheme.verify(c, window, CASE.gates), carry)
  with pytest.raises(ValueError, match=r"parents\[0, 2\] = 0 makes a tree"):
    verify(CASE.window())
  _, flight = verify(make_case(1, [(chain(n), []) for n in (T, 2, 0)]).window())

  def commit(*path):
    accepted = Accepted(jnp.asarray([path] * B), jnp.full(B, 2))
    jax.eval_shape(lambda flight: scheme.commit(flight, accepted), flight)

  commit(0, 1, -7)
  with pytest.raises(ValueError, match=r"accepted.path\[0, 1\] = 2, and of a chain it is 1"):
    commit(0, 2, 3)


def test_padding_and_unknown_slots_break_no_promise_of_chains():
  scheme = SCHEMES["tree_wy"].make(laws.spec()._replace(topology="chain"))
  carry = scheme.init(jnp.asarray(CASE.S))
  window = make_case(1, [(chain(T), [])] * B).window()
  jax.eval_shape(
    lambda slots: scheme.verify(carry, window._replace(slots=slots), CASE.gates), window.slots
  )
  padding = window._replace(slots=window.slots.at[0].set(-1))
  path = jnp.asarray([[7, 7], *[[0, 1]] * (B - 1)])
  scheme.commit(scheme.verify(carry, padding, CASE.gates)[1], Accepted(path, jnp.full(B, 2)))


@pytest.mark.parametrize("name", SCHEMES)
def test_a_window_longer_than_was_said(name):
  scheme = SCHEMES[name].make(laws.spec()._replace(window=T - 1))
  carry = jax.eval_shape(scheme.init, jnp.asarray(CASE.S))
  with pytest.raises(ValueError, match=rf"window of {T} nodes does not fit: spec.window={T - 1}"):
    jax.eval_shape(scheme.verify, carry, CASE.window(), CASE.gates)


def test_channels_that_are_neither_gdn_nor_kda():
  with pytest.raises(ValueError, match=r"spec.channels=2 must be 1 \(GDN\) or .* 16 \(KDA\)"):
    SCHEMES["snapshot"].make(laws.spec(2)).init(jnp.asarray(CASE.S))


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize(
  "S, message",
  [
    (np.zeros((H, V, K), np.float32), r"S is float32\[4, 8, 16\]; a pool is floating \[N, H"),
    (np.zeros((N, H, V, K), np.int32), r"S is int32\[.*; a pool is floating"),
    (np.zeros((N, 3, V, K), np.float32), r"S has 3 value heads.*spec.key_heads=2"),
  ],
)
def test_a_pool_that_does_not_fit(name, S, message):
  with pytest.raises(ValueError, match=message):
    SCHEMES[name].make(laws.spec()).init(jnp.asarray(S))
