"""The short convolution and its memory, on chains and trees, against a loop in float64."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commit_schemes.conv_window import conv_window
from gdn.typing import Accepted
from tests import arithmetic_laws as laws
from tests.strategies import chain, trees

N, B, T, W, C = 5, 3, 6, 4, 10


def draw(seed, forest, slots, dtype=np.float32, W=W):
  """tail, x, taps, parents, nodes, slots, and the accepted path; unused positions hold garbage."""
  rng = np.random.default_rng(seed)
  x = lambda *s: np.asarray(rng.normal(size=s), dtype)
  tail, inputs, taps = x(N, W - 1, C), x(B, T, C), x(W, C)
  parents = rng.integers(-(2**30), 2**30, size=(B, T)).astype(np.int32)
  path = rng.integers(-(2**30), 2**30, size=(B, T)).astype(np.int32)
  nodes, length = np.zeros(B, np.int32), np.zeros(B, np.int32)
  for i, (p, a) in enumerate(forest):
    parents[i, : len(p)], path[i, : len(a)] = p, a
    nodes[i], length[i] = len(p), len(a)
    inputs[i, len(p) :] = np.nan
  return (tail, inputs, taps, parents, nodes, np.asarray(slots, np.int32)), (path, length)


forests = st.lists(st.integers(1, T).flatmap(lambda n: trees(n)), min_size=B, max_size=B)
some_slots = st.sampled_from([(0, 1, 2), (4, 0, -1), (-1, 3, 0), (2, -1, 4)])


@given(forest=forests, slots=some_slots, seed=st.integers(0, 99), W=st.integers(2, 5))
def test_the_conv_is_the_loop(forest, slots, seed, W):
  laws.the_conv_is_the_loop(*draw(seed, forest, slots, W=W)[0])


def test_the_conv_is_the_loop_in_bfloat16():
  forest = [(chain(), []), ([-1, 0, 0, 1, 1, 2], []), (chain(2), [])]
  laws.the_conv_is_the_loop(*draw(0, forest, (0, 4, 2), jnp.bfloat16)[0])


@pytest.mark.parametrize("T", [1, 2, 9])
def test_the_long_conv_is_the_loop(T):
  rng = np.random.default_rng(T)
  x = lambda *s: rng.normal(size=s).astype(np.float32)
  laws.the_long_conv_is_the_loop(x(B, W - 1, C), x(B, T, C), x(W, C))


@given(forest=forests, slots=some_slots, seed=st.integers(0, 99))
def test_a_commit_slides_over_the_accepted_path(forest, slots, seed):
  laws.a_commit_slides_the_conv_window(*draw(seed, forest, slots))


@given(forest=forests, slots=some_slots, seed=st.integers(0, 99))
def test_rejected_inputs_leave_no_trace(forest, slots, seed):
  laws.rejected_inputs_leave_no_trace_in_the_conv_window(*draw(seed, forest, slots))


def test_two_windows_are_one_sequence():
  """Outputs after a commit meet the inputs that were accepted, whatever else was drafted."""
  memory = conv_window()
  first = [([-1, 0, 0, 2, 2], [0, 2, 4])] * B
  (tail, x, taps, parents, nodes, slots), (path, length) = draw(1, first, (3, 0, 1))
  _, flight = memory.verify(*map(jnp.asarray, (tail, x, taps, parents, nodes, slots)))
  after = memory.commit(flight, Accepted(jnp.asarray(path), jnp.asarray(length)))
  (_, y, *_), _ = draw(2, [(chain(), [])] * B, (3, 0, 1))
  parents, nodes = np.tile(np.asarray(chain(), np.int32), (B, 1)), np.full(B, T, np.int32)
  got, _ = memory.verify(after, *map(jnp.asarray, (y, taps, parents, nodes, slots)))
  for i, slot in enumerate(slots):
    whole = np.concatenate([x[i, [0, 2, 4]], y[i]])
    want, size = laws.walked_conv(tail[slot], whole, taps, chain(len(whole)))
    laws.the_same_conv(np.asarray(got[i]), want[3:], size[3:], taps=len(taps))
