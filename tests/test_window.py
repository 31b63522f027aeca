"""The window form of the rule against the walk from node to node, on random trees."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import arithmetic_laws as laws
from tests.strategies import HOSTILE, K, chain, trees

every_decay = pytest.mark.parametrize("channels", [1, K], ids=["gdn", "kda"])
every_kind = pytest.mark.parametrize("kind", HOSTILE)


def random_tree(seed, T):
  rng = np.random.default_rng(seed)
  return [int(rng.integers(-1, t)) for t in range(T)]


def test_slot_minus_one_reads_zeros_and_writes_nothing():
  laws.slot_minus_one_reads_zeros_and_writes_nothing()


@given(drawn=st.integers(1, 9).flatmap(lambda n: trees(n)))
def test_ancestors_are_the_path(drawn):
  laws.ancestors_are_the_path(drawn[0])


@every_decay
@every_kind
@pytest.mark.parametrize("T", [1, 7, 16])
def test_a_tree_is_the_walk(T, kind, channels):
  S, tokens = laws.heads(T, T, kind=kind, channels=channels)
  laws.a_window_is_the_walk(S, tokens, random_tree(T, T))


@every_decay
@every_kind
def test_a_long_chain_is_the_walk(kind, channels):
  S, tokens = laws.heads(3, 64, kind=kind, channels=channels)
  laws.a_window_is_the_walk(S, tokens, chain(64))


@every_decay
@every_kind
def test_history_is_the_state_it_leads_to(kind, channels):
  S, tokens = laws.heads(4, 20, kind=kind, channels=channels)
  laws.history_is_the_state_it_leads_to(S, tokens, 13)


@every_decay
@pytest.mark.parametrize("node", [0, 2, 8])
def test_a_spoiled_node_reaches_its_descendants_only(node, channels):
  S, tokens = laws.heads(5, 9, channels=channels)
  laws.a_spoiled_node_reaches_its_descendants_only(S, tokens, [-1, 0, 0, 1, 2, 2, 4, -1, 3], node)


@every_decay
def test_decays_of_minus_180_overflow_nowhere(channels):
  """Sixteen of them take e^(-G) far past float32; each way's own log decay does not."""
  S, tokens = laws.heads(6, 16, channels=channels)
  tokens[4][:] = -180
  laws.a_window_is_the_walk(S, tokens, random_tree(1, 16))
  laws.a_window_is_the_walk(S, tokens, chain(16))


@every_decay
@every_kind
def test_keys_carry_the_decay_behind_them(kind, channels):
  laws.keys_carry_the_decay_behind_them(laws.heads(7, 16, kind=kind, channels=channels)[1])
