"""Plans: what fits, what is best, nested parameters, measured rows that nothing was fitted on."""

import dataclasses

import pytest
from matplotlib.figure import Figure

from commit_schemes import SCHEMES
from experiments import planner, provenance, roofline
from experiments.command_line import BadInput, configured, main
from experiments.models import WEIGHTS
from experiments.planner import Config, Ring
from experiments.record import measure, read_rows

SMALL = dataclasses.replace(planner.CONFIGS["smoke"], ring=Ring(slots=(8, 16)))


def test_accept_lengths_are_cut_at_the_window():
  assert planner.accepted((0.5, 0.25, 0.25), 2) == 1.5
  assert planner.accepted((0.5, 0.25, 0.25), 16) == 1.75
  assert planner.accepted((1.0,), 8) == 1.0


def test_the_best_plan_is_first_and_everything_fits():
  found = planner.plans(SMALL, 64)
  rates = [low * high for low, high in (p.tokens_per_s() for p in found)]
  assert rates == sorted(rates, reverse=True)
  room = SMALL.memory * 1e3 - WEIGHTS[SMALL.model][0] * SMALL.weight_bits / 8 * 1e3
  assert all(p.running * p.request_mb <= room for p in found)
  assert {p.ring for p in found if p.scheme == "ring_exact"} == {8, 16}
  assert found[0].scheme == "ring_exact", "it writes no state per node"


def test_a_short_memory_runs_fewer_requests_of_the_larger_scheme():
  tight = dataclasses.replace(SMALL, memory=45.0)
  running = {p.scheme: p.running for p in planner.plans(tight, 256)}
  assert running["snapshot"] < running["ring_exact"] < 256
  with pytest.raises(BadInput, match=r"memory=35\.0 GB does not hold Qwen3.5-35B-A3B"):
    planner.plans(dataclasses.replace(SMALL, memory=35.0), 1)


LONG, SHORT = (*[0.0] * 15, 1.0), (0.85, 0.15)
GEOMETRIC = (*(0.3 * 0.7**i for i in range(15)), 0.7**15)
DENSE = dataclasses.replace(
  SMALL, model="Qwen3.5-27B", windows=(1, 2, 3, 4, 8, 16), accept=GEOMETRIC
)


def test_long_accept_lengths_want_more_drafts_than_short_ones():
  """K = window - 1, searched at every concurrency, best over all schemes and rings."""
  base = dataclasses.replace(SMALL, windows=(1, 2, 3, 4, 8, 16), schemes=("ring_exact", "snapshot"))
  best = lambda accept, n: planner.plans(dataclasses.replace(base, accept=accept), n)[0].window - 1
  for concurrency in (1, 64):
    assert best(LONG, concurrency) == 15
    assert best(SHORT, concurrency) <= 1
  assert best((1.0,), 64) == 0, "where nothing is ever accepted, nothing is drafted"


def test_drafts_that_cost_time_are_fewer():
  """One by one, at a fifth of a step each; a block drafter costs the same for any number."""
  free = planner.plans(DENSE, 1)[0]
  best = lambda **cost: planner.plans(dataclasses.replace(DENSE, **cost), 1)[0].window
  assert best(draft_token_us=0.2 * free.low_us) < free.window
  assert best(draft_us=free.high_us) >= free.window


def test_products_bound_how_many_drafts_many_requests_share():
  """At 256 requests a window's weights are multiplied, not read: fewer drafts than at one."""
  best = lambda n: planner.plans(DENSE, n)[0].window
  assert best(256) < best(1)


def test_exact_schemes_only():
  c = dataclasses.replace(SMALL, exact=True, schemes=("ring_open_loop", "ring_exact", "snapshot"))
  assert {s for s, _, _ in planner.candidates(c)} == {"ring_exact", "snapshot"}
  assert set(planner.EXACT) <= {name for name, s in SCHEMES.items() if s.lossless}


def test_predictions_hold_for_measured_steps_that_were_not_fitted():
  """Never the wrong winner; within a factor of two where the scheme's own kernel was fitted."""
  checks = planner.validate(roofline.measured(whole=True))
  fitted = {kernel for kernel, *_ in roofline.fit(roofline.measured())}
  assert {c.what.split()[0] for c in checks} >= {"replay_0", "tree_wy", "ring_exact"}
  for c in checks:
    assert (c.predicted > 1) == (c.measured > 1), c
    own = roofline.OWN.get(c.what.split()[0])
    most = 2 if own is None or own in fitted else 4  # of what bytes alone say
    assert 0.5 < c.predicted / c.measured < most, c


def test_serving_rows_are_compared_when_they_come():
  base = {"model": "Qwen3.5-35B-A3B", "device": "NVIDIA H200", "window": 4, "concurrency": 64}
  rows = [
    base | {"scheme": s, "accept_length": 2.0, "tokens_per_s": rate}
    for s, rate in (("snapshot", 1000.0), ("ring_exact", 2500.0))
  ]
  [check] = planner.validate_serving(rows)
  assert check.measured == 2.5
  assert 1.5 < check.predicted < 5
  with pytest.raises(ValueError, match=r"columns \['tokens_per_s'\] are missing"):
    planner.validate_serving([{k: v for k, v in rows[0].items() if k != "tokens_per_s"}])


def test_served_models_are_predicted_too():
  """Committed rows of `concurrency`, of which nothing was fitted: no factor of two anywhere."""
  path = provenance.RESULTS / "concurrency" / "rows.csv"
  checks = planner.validate_serving(read_rows(path))
  assert len(checks) > 50
  off = [c.predicted / c.measured for c in checks]
  assert 0.5 < min(off) < max(off) < 2
  assert sum(0.8 < x < 1.25 for x in off) > len(off) / 2


def test_a_nested_parameter_from_the_command_line():
  config, _ = configured(planner, "planner", ["--ring.slots", "32", "--concurrency", "8"])
  assert config.ring.slots == (32,)
  assert config.concurrency == (8,)


@pytest.mark.parametrize(
  ("args", "message"),
  [(["--ring.slot", "3"], r"--ring.slot 3, allowed: .*--ring"),
   (["--device", "abacus"], "device='abacus' is not allowed; allowed: M1, "),
   (["--ring.slots", "8", "--windows", "16", "--schemes", "ring_exact"],
    r"windows=\(16,\), ring.slots=\(8,\).* leave no candidate"),
   (["--draft-token-us", "-1"], "draft_token_us=-1.0 is not allowed; allowed: at least 0"),
   (["--accept", "0.5"], "accept=.*allowed: probabilities that sum to 1")],
)  # fmt: skip
def test_bad_input_is_named_with_what_is_allowed(args, message):
  with pytest.raises(BadInput, match=message):
    main(["run", "planner", *args])


def test_a_nested_parameter_out_of_range_is_one_message(capsys):
  with pytest.raises(SystemExit) as exit:
    main(["run", "planner", "--ring.slots", "0"])
  assert exit.value.code == 2
  said = " ".join(capsys.readouterr().err.replace("│", " ").split())
  assert "ring.slots=(0,) is not allowed; allowed: each 1 to 1024" in said


def test_a_report(tmp_path):
  rows = measure(planner, SMALL, tmp_path)
  assert {r["concurrency"] for r in rows} == {1, 64}
  assert isinstance(planner.figure(rows), Figure)


def test_defaults_are_allowed_and_a_bad_model_is_not():
  Config()
  with pytest.raises(ValueError, match="model='GPT' is not allowed"):
    Config(model="GPT")
