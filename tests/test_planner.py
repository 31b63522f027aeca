"""Plans: what fits, what is best, nested parameters, measured rows that are no input."""

import dataclasses
import itertools
import math

import pytest
from matplotlib.figure import Figure

from commit_schemes import SCHEMES
from commit_schemes.footprint import LayerShape
from experiments import kernel_time, plan_checks, planner, roofline
from experiments.command_line import BadInput, configured, main
from experiments.cost import Point
from experiments.devices import DEVICES
from experiments.models import WEIGHTS
from experiments.planner import Config, Ring
from experiments.record import measure

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


def test_predictions_hold_for_measured_steps_that_are_no_input():
  """The winner over snapshots from four slots on: of one slot no row of that kernel says how long
  token by token takes. All within a factor of two."""
  checks = plan_checks.validate(roofline.measured(whole=True))
  assert {c.what.split()[0] for c in checks} >= {"replay_0", "tree_wy", "ring_exact"}
  for c in checks:
    assert 0.5 < c.predicted / c.measured < 2, c
    assert (c.predicted > 1) == (c.measured > 1) or c.what.endswith("batch 1"), c


def picked(part: str, by: str) -> list[dict]:
  return [r for r in plan_checks.picks() if (r["part"], r["by"]) == (part, by)]


def test_the_fastest_measured_scheme_is_picked_or_one_that_is_nearly_as_fast():
  """Of all schemes, not of each against snapshots; a pick by bytes alone is the wrong one."""
  bounds = (("whole step", 5, 1.33, 1.08, 3), ("served", 21, 1.21, 1.03, 15))
  for part, count, worst, most, least in bounds:
    by_kernels, by_bytes = (picked(part, by) for by in plan_checks.BY)
    assert len(by_kernels) == len(by_bytes) == count
    mean = lambda rows: sum(r["regret"] for r in rows) / len(rows)
    assert all(r["regret"] >= 1 for r in by_kernels + by_bytes)
    assert all((r["regret"] == 1) == (r["scheme"] == r["best"]) for r in by_kernels + by_bytes)
    assert max(r["regret"] for r in by_kernels) < worst
    assert mean(by_kernels) < most < mean(by_bytes)
    right = lambda rows: sum(r["scheme"] == r["best"] for r in rows)
    assert right(by_bytes) < least <= right(by_kernels)


def test_a_regret_is_the_measured_time_of_the_pick_over_the_best():
  whole = roofline.measured(whole=True)
  for r in picked("whole step", "bytes"):
    at = {x["scheme"]: x["time_us"] for x in whole if x["batch"] == r["concurrency"]}
    assert r["best"] == min(at, key=at.get)
    assert r["regret"] == pytest.approx(at[r["scheme"]] / min(at.values()), abs=2**-12)


def forget():
  for f in (kernel_time.lines, kernel_time.span, plan_checks.envelope):
    f.cache_clear()


def test_what_validates_is_no_input(monkeypatch):
  """Whole steps and served models of ten times the time leave every prediction as it is."""
  row = roofline.measured(whole=True)[0]
  served = plan_checks.served()[0]
  before = plan_checks.whole_us(row), plan_checks.rate(served)
  rows = roofline.read_rows
  slow = lambda path: [
    r | ({"time_us": 10 * r["time_us"]} if r.get("kernel") == roofline.WHOLE else {})
    for r in rows(path)
  ]
  with monkeypatch.context() as m:
    m.setattr(roofline, "read_rows", slow)
    forget()
    assert roofline.measured(whole=True)[0]["time_us"] == 10 * row["time_us"]
    late = served | {"tokens_per_s": 0.1 * served["tokens_per_s"], "step_ms": 10.0}
    assert (plan_checks.whole_us(row), plan_checks.rate(late)) == before
  forget()


def test_a_kernel_takes_as_long_as_its_rows_say():
  """At each measured batch; between two of them, between their times."""
  for r in roofline.measured():
    of = kernel_time.lines().get(r["kernel"], {})
    if r["state_dtype"] == "float32" and r["window"] in of:
      for start, beyond in zip(*kernel_time.between(of, r["window"], r["bytes"]), strict=True):
        assert start + beyond == pytest.approx(r["time_us"], rel=2**-40)
  of = kernel_time.lines()["verify"]
  a, between, b = (sum(x[0] for x in kernel_time.between(of, T, 1e8)) for T in (4, 6, 8))
  assert min(a, b) <= between <= max(a, b)


@pytest.mark.parametrize("scheme", planner.CONFIGS["full"].schemes)
def test_a_device_of_less_bandwidth_takes_longer_for_any_scheme(scheme):
  ends = [
    kernel_time.step_range(scheme, LayerShape(16, 32), Point(4, 2.8), 64, 30, d)
    for d in ("B200", "H200", "A100 80GB")
  ]
  assert all(low <= high for low, high in ends)
  for a, b in itertools.pairwise(ends):
    assert a[1] < b[1]


def test_serving_rows_are_compared_when_they_come():
  base = {"model": "Qwen3.5-35B-A3B", "device": "NVIDIA H200", "window": 4, "concurrency": 64}
  rows = [
    base | {"scheme": s, "accept_length": 2.0, "tokens_per_s": rate}
    for s, rate in (("snapshot", 1000.0), ("ring_exact", 2500.0))
  ]
  [check] = plan_checks.validate_serving(rows)
  assert check.measured == 2.5
  assert 1.5 < check.predicted < 5
  with pytest.raises(ValueError, match=r"columns \['tokens_per_s'\] are missing"):
    plan_checks.validate_serving([{k: v for k, v in rows[0].items() if k != "tokens_per_s"}])


def test_served_models_are_predicted_too():
  """Committed rows of `concurrency`, which are no input: no factor of two anywhere."""
  checks = plan_checks.validate_serving(plan_checks.served())
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
   (["--draft-token-us", "-1"], "draft_token_us=-1.0 is not allowed; allowed: 0 to 1000000"),
   (["--device", "M1"], "memory=120.0 is not allowed; allowed: above 0, to the 16 GB of device=M1"),
   (["--memory", "1000"], "memory=1000.0 .*to the 141 GB of device=H200"),
   (["--concurrency", "10000000"], "concurrency=.*allowed: each 1 to 1000000"),
   (["--accept", "0.5"], "accept=.*allowed: probabilities, each 0 to 1, that sum to 1")],
)  # fmt: skip
def test_bad_input_is_named_with_what_is_allowed(args, message):
  with pytest.raises(BadInput, match=message):
    main(["run", "planner", *args])


NUMBERS = [
  f.name for f in dataclasses.fields(Config) if f.type in ("float", float) or f.name == "accept"
]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -1.0])
@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_that_is_not_finite_or_out_of_range_is_named_with_what_is_allowed(field, value):
  wrong = (value, 1 - value) if field == "accept" else value
  with pytest.raises(ValueError, match=rf"{field}=.* is not allowed; allowed: .*\d"):
    Config(**{field: wrong})


@pytest.mark.parametrize("device", DEVICES)
def test_no_device_holds_more_than_it_has(device):
  held = DEVICES[device].memory
  Config(device=device, memory=held)
  with pytest.raises(ValueError, match=f"memory=.*to the {held} GB of device={device}"):
    Config(device=device, memory=1.01 * held)


@pytest.mark.parametrize("device", DEVICES)
def test_no_plan_multiplies_faster_than_its_device(device):
  """Two flops a parameter and node of a window, at 1 to 4096 requests."""
  held, (_, active) = DEVICES[device].memory, WEIGHTS["Qwen3.5-35B-A3B"]
  c = dataclasses.replace(
    SMALL, device=device, memory=held, weight_bits=1.0, windows=(1, 4), ring=Ring(slots=(16,))
  )
  for concurrency in (1, 64, 4096):
    for p in planner.plans(c, concurrency):
      flops = 2e9 * active * p.window * p.running / (1e-6 * p.low_us)
      assert flops <= 1e12 * DEVICES[device].tflops[1]


def test_a_nested_parameter_out_of_range_is_one_message(capsys):
  with pytest.raises(SystemExit) as exit:
    main(["run", "planner", "--ring.slots", "0"])
  assert exit.value.code == 2
  said = " ".join(capsys.readouterr().err.replace("│", " ").split())
  assert "ring.slots=(0,) is not allowed; allowed: each 1 to 1024" in said


def test_a_report(tmp_path):
  rows = measure(planner, SMALL, tmp_path)
  assert {r["concurrency"] for r in rows if r["part"] == "plan"} == {1, 64}
  assert {r["part"] for r in rows} == {"plan", "whole step", "served"}
  assert isinstance(planner.figure(rows), Figure)


def test_defaults_are_allowed_and_a_bad_model_is_not():
  Config()
  with pytest.raises(ValueError, match="model='GPT' is not allowed"):
    Config(model="GPT")
