"""verify and commit may overwrite what they are given: the pools are updated in place."""

import warnings

import jax
import jax.numpy as jnp
import pytest

from commit_schemes import SCHEMES, Accepted, CommitScheme, Dtypes, Spec
from commit_schemes.footprint import LayerShape, nbytes, zero_window
from commit_schemes.model import model_memory
from experiments.layer_step import LayerStep
from pallas_kernels import MOSAIC_GPU
from tests import h200, laws
from tests.slow import each, slow
from tests.strategies import H, K, V, chain, make_case, path_to

TREE = [-1, 0, 0, 1, 1, 2]
CASES = [
  make_case(i, [(TREE, path_to(TREE, 5)), (chain(), chain()[1:]), (chain(5), [0, 1])])
  for i in range(6)
]
every_scheme = pytest.mark.parametrize("name", each(SCHEMES))


def donating(scheme: CommitScheme) -> CommitScheme:
  return scheme._replace(
    verify=jax.jit(scheme.verify, donate_argnums=0), commit=jax.jit(scheme.commit, donate_argnums=0)
  )


@pytest.mark.parametrize(
  "name", each(SCHEMES, "replay_4", "delta_cache", "ring_open_loop", "ring_compensated")
)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donating_changes_no_result(name):
  """What only a flight holds cannot be reused, which is all that jax has to say."""
  give, keep = donating(SCHEMES[name].make(laws.spec())), laws.build(name)
  a, b = (s.init(jnp.array(CASES[0].S)) for s in (give, keep))
  for case in CASES:
    (o, f), (p, g) = (s.verify(c, case.window(), case.gates) for s, c in ((give, a), (keep, b)))
    a, b = give.commit(f, case.accepted()), keep.commit(g, case.accepted())
    laws.same(o, p)
    jax.tree.map(laws.same, a, b)


@every_scheme
def test_pools_are_updated_in_place(name):
  """Every leaf of the carry is the donated buffer, and no copy of one is made on the way."""
  scheme, case = SCHEMES[name].make(laws.spec()), CASES[0]
  S = jax.ShapeDtypeStruct((512, H, V, K), jnp.float32)
  carry = jax.eval_shape(scheme.init, S)
  _, flight = jax.eval_shape(scheme.verify, carry, case.window(), case.gates)
  for f, args in (
    (scheme.verify, (carry, case.window(), case.gates)),
    (scheme.commit, (flight, case.accepted())),
  ):
    with warnings.catch_warnings():
      warnings.filterwarnings("ignore", "Some donated buffers were not usable")
      memory = jax.jit(f, donate_argnums=0).lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= nbytes(carry)
    assert memory.temp_size_in_bytes < nbytes(S) / 8


@pytest.mark.parametrize("name", ["ring_open_loop", "ring_exact", "ring_compensated", "tree_wy"])
def test_a_commit_of_chains_moves_no_row(name):
  """A prefix of the window's rows is where it belongs: commit hands every pool on as it is."""
  scheme, case = SCHEMES[name].make(laws.spec()._replace(topology="chain")), CASES[0]
  carry = jax.eval_shape(scheme.init, jnp.asarray(case.S))
  _, flight = jax.eval_shape(scheme.verify, carry, case.window(), case.gates)
  program = jax.make_jaxpr(scheme.commit)(flight, case.accepted()).jaxpr
  pools = [x for x in program.outvars if jnp.issubdtype(x.aval.dtype, jnp.floating)]
  assert len(pools) >= 4
  assert set(pools) <= set(program.invars)


# With the kernels of verify, fold and pick, and of an exact ring the one that keeps raw inputs.
@pytest.mark.skipif(bool(h200.why_not()), reason=h200.why_not() or "compiles")
@pytest.mark.parametrize("name, launches", [
  ("tree_wy", 5), ("ring_exact", 8),
  slow("ring_open_loop", 7), slow("snapshot", 2), slow("replay_0", 4),
])  # fmt: skip
def test_a_whole_step_of_chains_launches_little(name, launches):
  layer = LayerStep(name, LayerShape(16, 32), 16, MOSAIC_GPU, {5: 1.0}, pool=65)
  carry = jax.eval_shape(layer.made.init, jax.ShapeDtypeStruct((65, 32, 128, 128), jnp.float32))
  window, gates = zero_window(layer.shape, 64, 16, jnp.bfloat16)
  accepted = Accepted(window.parents, window.nodes)
  got = h200.compiled(layer.step, carry, window, gates, accepted, donate=(0,))
  assert got.copies == 0
  assert got.aliased == nbytes(carry)
  assert got.launches <= launches


@pytest.mark.parametrize("name", ["ring_exact", "tree_wy"])
@pytest.mark.parametrize("program", ["step", "admit", "restore"])
def test_the_slots_of_an_engine_are_updated_in_place(name, program):
  """The whole decode step, with marks for a prefix cache, an admission and a resumption.

  A pool of 512 slots of which four run: a copy of any of its large leaves would show.
  """
  from commit_schemes.decoding import slots as programs
  from commit_schemes.decoding.drafts import prompt_lookup
  from commit_schemes.decoding.loop import Batch, Marking, step
  from experiments.soak_world import TINY
  from gdn import hybrid
  from gdn.streaming import empty

  N, L, W = 512, 64, 4
  spec = Spec(TINY.key_heads, W, dtypes=Dtypes(raw=jnp.float32))
  memory = model_memory(TINY, SCHEMES[name].make(spec))
  params = jax.eval_shape(lambda: hybrid.init(TINY, jax.random.key(0)))
  vacant = lambda N: programs.vacant(TINY, memory, jnp.float32, N, L)
  state, i32 = jax.eval_shape(lambda: vacant(N)), lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)
  if program == "step":
    one = lambda state, params, batch: step(
      params, TINY, memory, prompt_lookup(W), state, batch, marking=Marking(8, 2)
    )
    args = state, params, Batch(i32(4), i32(4))
  elif program == "admit":
    one = lambda *args: programs.seat(memory, *args)
    memories = jax.eval_shape(lambda: empty(TINY, 1, jnp.float32))
    args = state, i32(1), i32(1, L), i32(1), memories
  else:
    one, args = programs.restore, (state, i32(1), jax.eval_shape(lambda: vacant(1)))
  compiled = jax.jit(one, donate_argnums=0).lower(*args).compile().memory_analysis()
  assert compiled.alias_size_in_bytes >= nbytes(state)
  largest = max(nbytes(x) for x in jax.tree.leaves(state))
  assert compiled.temp_size_in_bytes < largest / 4
