"""The rule token by token, over a batch of slots, and in chunks: one recurrence in three forms."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn.ops import XLA, Gates
from gdn.typing import Pending, Records
from tests import arithmetic_laws as laws
from tests.strategies import HOSTILE, B, K, chain, make_case

every_decay = pytest.mark.parametrize("channels", [1, K], ids=["gdn", "kda"])
every_kind = pytest.mark.parametrize("kind", HOSTILE)


@every_decay
@every_kind
def test_the_scan_is_the_walk(kind, channels):
  laws.the_scan_is_the_walk(*laws.heads(0, 50, kind=kind, channels=channels))


@every_decay
@every_kind
def test_prefill_is_the_walk(kind, channels):
  S, tokens = laws.heads(1, 200, kind=kind, channels=channels)
  laws.prefill_is_the_walk(S, tokens, 64)


@every_decay
@pytest.mark.parametrize("T, chunk", [(1, 64), (2, 1), (63, 64), (64, 64), (65, 16), (199, 7)])
def test_prefill_takes_any_length_and_chunk(T, chunk, channels):
  S, tokens = laws.heads(T, T, channels=channels)
  laws.prefill_is_the_walk(S, tokens, chunk)


@every_decay
def test_prefill_of_a_batch_is_the_walk(channels):
  for slots in [(3, 0, -1), (1, -1, 4)]:
    forest = [(chain(), []), (chain(1), []), (chain(4), [])]
    laws.prefill_of_a_batch_is_the_walk(make_case(0, forest, channels=channels, slots=slots))
  idle = make_case(1, [(chain(0), [])] * B, channels=channels, slots=(0, 1, 2))
  laws.prefill_of_a_batch_is_the_walk(idle)


@every_decay
@every_kind
def test_one_token_is_one_node(kind, channels):
  for n in ([1, 1, 1], [0, 1, 1]):
    case = make_case(2, [(chain(m), []) for m in n], kind=kind, channels=channels)
    laws.one_token_is_one_node(laws.first_node(case))


@every_decay
def test_one_program_of_writes_is_the_writes(channels):
  case = make_case(5, [(chain(), [])] * B, channels=channels, slots=(3, 0, 1))
  laws.one_program_of_writes_is_the_writes(case)


def test_gates_and_writes_stand_between_barriers():
  """One before and one after both, in whatever advances a state by raw tokens. On a CPU the law
  above needs one of the two around a write; without those around the gates, or with either one
  around a write, no bit differed in scans, unrolled steps, and steps fused with norms, gates and
  convolutions. Other backends fuse more."""
  case = make_case(6, [(chain(), [])] * B)
  S, window, params = laws.batched(case)
  records = Records(window.raw.k, window.raw.v, *Gates(window.raw.b, window.raw.a))
  some = Pending(window.slots, window.parents, window.nodes)
  barriers = lambda f, *args: jax.jit(f).lower(*args).as_text().count("optimization_barrier")
  assert barriers(XLA.decode, S, window, params) == 4
  assert barriers(partial(XLA.snapshot, keep=1), S, window, params) == 4
  assert barriers(XLA.fold_raw, S, records, some, window.slots) == 2


@every_decay
@every_kind
def test_verify_is_snapshot_within_the_budget(kind, channels):
  forest = [([-1, 0, 0, 1, 2, 2], []), (chain(), []), ([-1, -1, 0], [])]
  laws.verify_is_snapshot_within_the_budget(
    make_case(3, forest, kind=kind, channels=channels, slots=(2, 0, -1))
  )


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_gates_are_float32_of_the_formula(dtype):
  case = make_case(4, [(chain(), [])] * B)
  laws.gates_are_float32_of_the_formula(
    np.asarray(case.raw.a, dtype), np.asarray(case.raw.b, dtype), case.gates
  )
