"""Drift on synthetic keys: the streams, published scales, and the square root of m."""

import dataclasses

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import cycles, cycles_report
from experiments.record import measure

SMALL = dataclasses.replace(
  cycles.CONFIGS["full"], inputs=("b",), every=(1, 4), cycles=200, probes=20, dim=32, draws=2
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
  return measure(cycles, SMALL, tmp_path_factory.mktemp("cycles"))


def late(rows, line, every=1, column="state_error"):
  return cycles_report.late(rows, 0.5, column, line=line, every=every)


def test_about_three_of_five_are_kept():
  plan = cycles.plan(cycles.CONFIGS["full"])
  assert set(plan.accepted) == {1, 2, 3, 4, 5}
  assert plan.accepted.mean() == pytest.approx(sum(0.75**i for i in range(5)), rel=0.05)
  assert (plan.start[1:] == np.cumsum(plan.accepted)[:-1]).all()
  assert plan.last[-1] == 600


def test_keys_are_as_correlated_as_was_asked_for():
  _, k, *_ = cycles.streams(SMALL, cycles.SETTINGS["b"], 400)
  assert np.linalg.norm(k, axis=-1) == pytest.approx(1.0, abs=2.0**-8)
  pairs = np.einsum("thd,shd->hts", k, k)[:, *np.triu_indices(400, 1)]
  assert pairs.mean() == pytest.approx(0.9, abs=0.05)


def test_what_is_lowered_is_seen_at_its_own_scale(rows):
  assert late(rows, "window solve and fold") < 4e-6
  assert late(rows, "one-token steps") < 2e-5
  assert 1e-4 < late(rows, "all dots tf32") < 2e-3
  for line in ("all dots bf16", "fold dots bf16", "records bf16"):
    assert 1e-3 < late(rows, line) < 1e-2, line
  assert late(rows, "checkpoint bf16") > 2 * late(rows, "records bf16")


def test_deferred_rounding_gains_about_the_square_root(rows):
  gain = late(rows, "checkpoint bf16") / late(rows, "checkpoint bf16", 4)
  assert 1.5 < gain < 2.5


def test_the_last_rounding_is_part_of_a_state(rows):
  """1.7e-3 and the rest, as if independent."""
  with_it, without = (
    late(rows, "checkpoint bf16", 4, x) for x in ("state_error", "unrounded_error")
  )
  assert with_it == pytest.approx((without**2 + 1.7e-3**2) ** 0.5, rel=0.05)
  exact = [r for r in rows if r["line"] == "window solve and fold"]
  assert all(r["state_error"] == r["unrounded_error"] for r in exact)


def test_a_figure_and_a_table(rows):
  assert isinstance(cycles.figure(rows), Figure)
  assert cycles.table(rows).row_count == 9
  with pytest.raises(KeyError, match="no rows with"):
    late(rows, "nothing")


@pytest.mark.parametrize(
  ("field", "value"),
  [("inputs", ("z",)), ("every", (0,)), ("cycles", 1), ("probes", 0), ("window", 1), ("keep", 2.0),
   ("dim", 1), ("draws", 0)],
)  # fmt: skip
def test_a_bad_field_is_named_with_what_is_allowed(field, value):
  with pytest.raises(ValueError, match=rf"{field}=.*allowed: "):
    cycles.Config(**{field: value})
