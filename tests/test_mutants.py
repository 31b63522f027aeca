"""Each planted bug is noticed, by laws that hold without it."""

import functools
from collections.abc import Callable

import pytest

from commit_schemes import SCHEMES
from tests import arithmetic_laws, laws
from tests.mutants import MUTANTS, planted
from tests.strategies import B, T, chain, make_case, path_to
from tests.test_conv import draw as conv_inputs

TREE = [-1, 0, 0, 1, 1, 2]
FOREST = [(TREE, path_to(TREE, 5)), (chain(), chain()[1:]), (chain(5), [0, 1])]
WIDE = [(TREE, path_to(TREE, 4)), (chain(), chain(T + 1)[1:]), (TREE, path_to(TREE, 5))]
NOTHING = [(TREE, []), (chain(), [0, 1, 2]), (chain(3), [])]


def fresh(name: str):
  """Compiled anew, so that what is planted is in it."""
  return laws.jitted(SCHEMES[name].make(laws.spec()))


def oracle(name: str):
  scheme = fresh(name)
  for forest, slots, kind in [
    (FOREST, (3, 0, -1), "random"),
    (WIDE, (1, 4, 2), "random"),
    (WIDE, (1, 4, 2), "total_decay"),
    (WIDE, (1, 4, 2), "one_great_decay"),
    (NOTHING, (0, -1, 4), "beta_near_two"),
  ]:
    case = make_case(0, forest, kind=kind, slots=slots)
    laws.outputs_and_states_match_the_oracle(scheme, SCHEMES[name].solves, case)


def one_case(law, forest=FOREST, slots=(3, 0, -1)):
  return lambda name: law(fresh(name), make_case(1, forest, slots=slots))


@functools.cache
def trees():
  return laws.told(laws.stream(7, 20, tree=True))


@functools.cache
def brimful():
  return laws.told(laws.brimful())


def streamed(stream):
  return lambda name: laws.a_long_stream_is_the_plain_recurrence(
    fresh(name), stream(), solves=SCHEMES[name].solves
  )


def decoded(name: str):
  laws.exact_folds_are_decode_bitwise(fresh(name), trees().cases)


def permuted(name: str):
  laws.permuting_slots_commutes(fresh(name), make_case(1, WIDE, slots=(1, 4, 2)), (2, 0, 1))


def window():
  for kind in ("random", "total_decay", "one_great_decay", "identical_keys_beta_near_two_no_decay"):
    arithmetic_laws.a_window_is_the_walk(*arithmetic_laws.heads(0, 40, kind=kind), chain(40))


def short_way():
  tokens = arithmetic_laws.heads(0, T, kind="one_great_decay")[1]
  arithmetic_laws.keys_carry_the_decay_behind_them(tokens)


def prefill():
  arithmetic_laws.prefill_is_the_walk(*arithmetic_laws.heads(2, 20), 8)
  great = arithmetic_laws.heads(2, 20, kind="one_great_decay")
  arithmetic_laws.prefill_is_the_walk(*great, 20)


def one_token():
  case = make_case(2, [(chain(1), [])] * B)
  arithmetic_laws.one_token_is_one_node(arithmetic_laws.first_node(case))


def one_program():
  case = make_case(5, [(chain(), [])] * B, slots=(3, 0, 1))
  arithmetic_laws.one_program_of_writes_is_the_writes(case)


def gates():
  case = make_case(2, FOREST)
  arithmetic_laws.gates_are_float32_of_the_formula(case.raw.a[1], case.raw.b[1], case.gates)


SCHEME_CHECKS: dict[str, Callable[[str], None]] = {
  "oracle": oracle,
  "stream": streamed(trees),
  "brimful": streamed(brimful),
  "decode": decoded,
  "permuted": permuted,
  "nothing": one_case(laws.committing_nothing_changes_nothing, NOTHING, (3, 0, 2)),
  "rejected": one_case(laws.rejected_nodes_leave_no_trace),
  "former tenant": one_case(laws.other_slots_do_not_matter),
  "admitted": one_case(laws.admitting_forgets_the_former_tenant),
  "rounded once": lambda name: laws.a_narrow_checkpoint_is_rounded_once(name, make_case(1, FOREST)),
  "records": lambda name: laws.records_lose_what_their_dtype_rounds(name, make_case(1, FOREST)),
}
CHECKS: dict[str, Callable[[], None]] = {
  "pool": arithmetic_laws.slot_minus_one_reads_zeros_and_writes_nothing,
  "ancestors": lambda: arithmetic_laws.ancestors_are_the_path(TREE),
  "window": window,
  "short way": short_way,
  "spoiled node": lambda: arithmetic_laws.a_spoiled_node_reaches_its_descendants_only(
    *arithmetic_laws.heads(1, T), TREE, 1
  ),
  "gates": gates,
  "one token": one_token,
  "one program": one_program,
  "conv": lambda: arithmetic_laws.the_conv_is_the_loop(*conv_inputs(0, WIDE, (3, 0, -1))[0]),
  "conv commit": lambda: arithmetic_laws.a_commit_slides_the_conv_window(
    *conv_inputs(0, FOREST, (3, 0, -1))
  ),
  "prefill": prefill,
}


def check(name: str) -> None:
  if name in CHECKS:
    return CHECKS[name]()
  law, _, scheme = name.rpartition(" ")
  return SCHEME_CHECKS[law](scheme)


@pytest.mark.parametrize("name", sorted({c for m in MUTANTS.values() for c in m.noticed_by}))
def test_a_check_holds_without_a_bug(name):
  check(name)


@pytest.mark.parametrize("bug", MUTANTS)
def test_a_planted_bug_is_noticed(bug):
  mutant = MUTANTS[bug]
  assert mutant.noticed_by
  for name in mutant.noticed_by:
    with planted(mutant), pytest.raises(AssertionError):
      check(name)
