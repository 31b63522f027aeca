"""The cost model: against the schemes' own types, XLA's count, a walked ring, measured kernels."""

import itertools
import math
import statistics

import pytest
from matplotlib.figure import Figure

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.footprint import LayerShape, footprint
from experiments import cost, counted, roofline, roofline_report
from experiments.cost import Point
from experiments.devices import DEVICES
from experiments.record import measure
from tests.slow import slow

SHAPE = LayerShape(16, 32)
SLOT = 4  # a flight knows its slot


def test_every_scheme_has_a_cost():
  assert set(cost.STEPS) == set(SCHEMES)


@pytest.mark.parametrize("T", [4, 16])
@pytest.mark.parametrize("name", ["delta_cache", "replay_0", "snapshot", "replay_4"])
def test_a_verify_writes_what_its_flight_holds(name, T):
  spec = Spec(SHAPE.key_heads, T, dtypes=Dtypes(rows=("float32",)))
  p = Point(T, 1, row=4)
  held = footprint(SCHEMES[name].make(spec), SHAPE, T).flight - SLOT
  read = cost.state(SHAPE, p) + cost.inputs(SHAPE, T)
  wrote = {
    "delta_cache": cost.verify(SHAPE, p, cost.rows(SHAPE, p, T)),
    "replay_0": cost.verify(SHAPE, p, cost.raw(SHAPE, T)),
    "snapshot": cost.snapshots(SHAPE, p, T),
    "replay_4": cost.snapshots(SHAPE, p, 4).plus(cost.Cost(cost.raw(SHAPE, T))),
  }[name].bytes - read
  # The snapshot scheme keeps no raw inputs; a partial cache keeps those of the whole window.
  assert wrote == held


@pytest.mark.parametrize("T, n, R", list(itertools.product((2, 4, 8), (1, 2), (8, 16, 61))))
def test_a_ring_flushes_as_often_as_it_does(T, n, R):
  """Walked with the rule of `ring` for 50 flushes: fold first if h + T > R."""
  p = Point(T, n, ring=R)
  h, flushes, history, steps = R, 0, 0, 50 * round(1 / p.flushes)
  for _ in range(steps):
    if h and h + T > R:
      h, flushes = 0, flushes + 1
    history += h
    h += n
  assert flushes == 50
  assert history / steps == p.history


NARROW = SHAPE._replace(key_heads=2, value_heads=4)


@pytest.mark.parametrize("T", [4, slow(16)])
def test_xla_counts_the_same_bytes_and_flops_of_every_kernel_and_every_step(T):
  """Both ways. XLA counts integers of a window's tree as bytes; and as flops the masks of slots
  that are not there, on every state that is read or written, with norms and gates of every node."""
  elements = NARROW.value_heads * NARROW.value_dim * NARROW.key_dim
  whole = set()
  for scheme, kernel, ours, xla in counted.counted(NARROW, T):
    assert xla.bytes == pytest.approx(ours.bytes, rel=2**-7), (scheme, kernel)
    masks, small = 4 * elements, 2**-4 * ours.flops
    assert ours.flops <= xla.flops <= ours.flops + masks + small, (scheme, kernel)
    whole |= {scheme} if kernel is None else set()
  assert whole == {"decode", *SCHEMES}


@pytest.mark.parametrize("what, wrong", list(itertools.product(("bytes", "flops"), (0.9, 1.1))))
def test_a_cost_that_is_off_by_a_tenth_is_seen(what, wrong):
  """Of the kernels whose masks are the smallest share: a wrong model does not pass."""
  ours, xla = next((a, b) for s, k, a, b in counted.counted(NARROW, 16) if k == "snapshot")
  off = ours._replace(**{what: wrong * getattr(ours, what)})
  small = 2**-7 if what == "bytes" else 2**-4
  assert getattr(xla, what) != pytest.approx(getattr(off, what), rel=small)


def test_a_step_is_the_sum_of_its_kernels():
  for name, of in cost.PARTS.items():
    p = Point(4, 2.8, ring=16)
    some = of(SHAPE, p)
    assert cost.STEPS[name](SHAPE, p) == cost.whole(some)
    assert all(0 <= x.share <= 1 for x in some)


def test_kernel_bytes_are_those_of_the_measured_rows():
  """Of the rows on an H200: all inputs and outputs; rows of earlier days left the gates out."""
  rows = roofline_report.only(roofline.measured(), kernel="verify")
  assert rows
  for r in rows:
    p = Point(r["window"], 1, state={"float32": 4, "bfloat16": 2}[r["state_dtype"]])
    gates = 2 * 2 * SHAPE.value_heads * r["window"]
    moved = cost.verify(SHAPE, p, 0).bytes
    assert r["bytes"] / r["batch"] in (moved, moved - gates)


def test_unseen_batches_are_predicted():
  """Every measured one of every kernel and window that was fitted; of verify those are all."""
  rows = [r for r in roofline.kernel_rows() if r["part"] == "predicted"]
  measured, fitted = roofline.measured(), roofline.fit(roofline.measured())
  keys = [(*(r[k] for k in roofline.KEY), r["batch"]) for r in measured]
  unseen = [key for key in keys if key[:-1] in fitted and key[-1] not in roofline.FITTED]
  columns = ("scheme", "state_dtype", "window", "batch")
  assert [tuple(r[k] for k in columns) for r in rows] == unseen
  assert {("verify", "float32", T) for T in (4, 8, 16)} <= set(fitted)
  assert not {r["batch"] for r in rows} & set(roofline.FITTED)
  assert statistics.median(abs(roofline_report.off(r)) for r in rows) < 0.1


def test_a_roof_goes_through_the_fitted_batches():
  for r in roofline.kernel_rows():
    if r["part"] == "fitted":
      assert r["low_us"] == pytest.approx(r["measured_us"], rel=1e-12)


def test_what_an_exact_fold_adds_is_said_beside_what_was_measured():
  """The model's extra, and how many times it the measured one is: bytes alone say too little."""
  rows = list(roofline.whole_rows())
  at = {(r["scheme"], r["batch"]): r for r in rows}
  assert len(at) == len(rows) == len(roofline.measured(whole=True))
  *_, extra = roofline_report.misses(rows)
  low, high = (float(x) for x in extra.split("took ")[1].split(" times")[0].split(" to "))
  one = at["ring_exact", 1]["measured_us"] - at["ring_open_loop", 1]["measured_us"]
  told = [roofline_report.middle(at[x, 1]) for x in ("ring_exact", "ring_open_loop")]
  assert 1 < low <= round(one / (told[0] - told[1]), 1) <= high


def test_more_bandwidth_or_fewer_bytes_is_never_slower():
  e = roofline.envelope(roofline.measured())
  c = cost.STEPS["ring_exact"](SHAPE, Point(4, 2))
  time = lambda c, d: roofline.time_range(c, 8, 30, d, e)
  slow, fast = DEVICES["A100 80GB"], DEVICES["B200"]
  assert all(a > b for a, b in zip(time(c, slow), time(c, fast), strict=True))
  half = c._replace(bytes=c.bytes / 2)
  assert all(a > b for a, b in zip(time(c, slow), time(half, slow), strict=True))


def test_exact_fold_costs_more_than_open_loop_and_less_than_folding_at_every_commit():
  for T, n in ((4, 1), (4, 3.5), (8, 5), (16, 6)):
    at = {name: step(SHAPE, Point(T, n, ring=2 * T)).bytes for name, step in cost.STEPS.items()}
    assert at["ring_open_loop"] < at["ring_exact"] < at["replay_0"] < at["snapshot"]


def test_a_report(tmp_path):
  rows = measure(roofline, roofline.CONFIGS["smoke"], tmp_path)
  assert {r["part"] for r in rows} == {"xla", "xla kernel", "fitted", "predicted", "whole", "step"}
  assert isinstance(roofline.figure(rows), Figure)
  for r in rows:
    if r["part"] == "step":
      assert 0 < r["share_low"] < r["share_high"] < 1
      assert 0 < r["low_us"] < r["high_us"]


@pytest.mark.parametrize(
  ("field", "value"),
  [("batches", (10**9,)), ("accepted", (1.0, math.nan)), ("weight_bits", (1.0, math.inf)),
   ("weight_bits", (math.nan, 4.0)), ("accepted", (-math.inf, 2.0)), ("devices", ("abacus",)),
   ("models", ()), ("schemes", ("best",)), ("batches", (0,)),
   ("counted_windows", (5,)), ("window", 0), ("accepted", (2.0, 9.0)), ("ring", 1),
   ("weight_bits", (0.0, 4.0))],
)  # fmt: skip
def test_a_bad_field_is_named_with_what_is_allowed(field, value):
  with pytest.raises(ValueError, match=rf"{field}=.*allowed: "):
    roofline.Config(**{field: value})


def test_many_tokens_are_bound_by_their_products():
  """Of 27 G parameters an A100 multiplies 256 tokens in 44 ms at its peak; reading takes 26."""
  e = roofline.envelope(roofline.measured())
  at = lambda tokens, d: roofline.weights_range((27, 27), tokens, (16, 16), DEVICES[d], e)
  low, high = at(256, "A100 80GB")
  assert low == pytest.approx(2 * 27e9 * 256 / 312e12 * 1e6)
  assert high == pytest.approx(2 * low)
  assert at(1, "A100 80GB")[0] == pytest.approx(54e9 / 2039e3 / e.share[1])
  assert at(4096, "M4 Max")[0] == pytest.approx(2 * 27e9 * 4096 / (40 * 128 * 2 * 1.8e9) * 1e6)


def test_every_device_says_what_it_multiplies_and_holds():
  """So that on none of them products or memory are taken to be free."""
  for name, d in DEVICES.items():
    assert 0 < d.tflops[0] <= d.tflops[1] < 5000, name
    assert 0 < d.memory < 1000, name
    assert d.source, name
  e = roofline.envelope(roofline.measured())
  for d in DEVICES.values():
    few, many = (roofline.weights_range((27, 27), n, (4, 4), d, e) for n in (1, 4096))
    assert many[0] > 4 * few[0]
