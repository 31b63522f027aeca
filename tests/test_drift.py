"""The drift experiment's own parts: its truth, schedule, emulated precisions, verdicts."""

import dataclasses
import io
import time

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from commit_schemes import SCHEMES, Spec
from experiments import drift, drift_report, forced, free
from experiments.ablation import SITES, bf16x3, lowered, neumann, round_bits
from experiments.record import Record, measure
from experiments.streams import Streams
from experiments.truth import truth
from gdn import ops
from gdn.dots import EXACT, exact
from gdn.typing import Raw
from gdn.window import substitute
from tests import budget, oracle
from tests.strategies import H, K, V, chain, draw_gates, draw_raw

EPS = float(np.finfo(np.float32).eps)
TOKENS, WINDOW = 60, 5
TEXT = np.frombuffer(b"the state and the slate and the state of the art" * 2, np.uint8)[:TOKENS]
PROBES = (5, 17, 40, TOKENS)


def streams(layers=(0,)):
  rng = np.random.default_rng(0)
  raw = draw_raw(rng, B=1, T=TOKENS)
  return Streams(Raw(*(jnp.asarray(x[0]) for x in raw)), draw_gates(rng), layers)


def test_truth_is_the_oracle():
  s = streams()
  got = truth(s, PROBES)
  x = oracle.tokens(*map(np.asarray, s.raw), *s.gates)
  states, outputs = oracle.walk(np.zeros((H, V, K)), x, chain(TOKENS))
  at = np.asarray(PROBES) - 1
  f64 = float(np.finfo(np.float64).eps)
  for x, want in ((got.states, states[at]), (got.outputs, outputs[at])):
    assert budget.rms(x - want) <= TOKENS * f64 * budget.rms(want)


def test_truth_refuses_a_probe_outside_the_text():
  with pytest.raises(ValueError, match=r"must lie in 1\.\.60"):
    truth(streams(), (1, 61))


def test_a_schedule_covers_the_text_once_and_stops_at_probes():
  plan = forced.schedule(TEXT, WINDOW, PROBES)
  ends = plan.start + plan.accepted
  np.testing.assert_array_equal(plan.start[1:], ends[:-1])
  np.testing.assert_array_equal(ends[plan.last - 1], PROBES)
  assert plan.start[0] == 0
  assert (plan.accepted >= 1).all()
  assert (plan.accepted <= plan.nodes).all()
  assert plan.accepted.max() > 1  # this text repeats itself


@pytest.mark.parametrize("name", ["snapshot", "ring_open_loop", "tree_wy"])
def test_forced_runs_end_at_the_oracle(name):
  s, plan = streams(), forced.schedule(TEXT, WINDOW, PROBES)
  spec = Spec(2, WINDOW, ops.xla(out=jnp.float32))
  probes = list(forced.run(SCHEMES[name].make(spec), s, plan, WINDOW))
  x = oracle.tokens(*map(np.asarray, s.raw), *s.gates)
  states, outputs = oracle.walk(np.zeros((H, V, K)), x, chain(TOKENS))
  x32 = oracle.tokens(*map(np.asarray, s.raw), *s.gates, dtype=np.float32)
  plain, plain_o = oracle.walk(np.zeros((H, V, K)), x32, chain(TOKENS), oracle.pseudo_value)
  dS, do = oracle.solve_bound(np.zeros((H, V, K)), x, chain(TOKENS), EPS)
  assert [p.token for p in probes] == list(PROBES)
  for p in probes:
    t = p.token - 1
    budget.check("S", p.state, states[t], plain[t], eps=EPS, bound=dS[t])
    budget.check("o", p.output, outputs[t], plain_o[t], eps=EPS, bound=do[t])


def test_layers_are_cut_out_of_the_streams():
  s = streams(layers=(0, 1))  # two layers of one key head and two value heads each
  second = s.only((1,))
  np.testing.assert_array_equal(second.raw.k, s.raw.k[:, 1:])
  np.testing.assert_array_equal(second.raw.v, s.raw.v[:, 2:])
  np.testing.assert_array_equal(second.gates.A_log, s.gates.A_log[2:])
  with pytest.raises(ValueError, match="not recurrent"):
    s.only((3,))


def test_emulated_roundings_are_the_formats_own():
  x = np.random.default_rng(0).normal(size=1000).astype(np.float32) * np.float32(2.0) ** 20
  np.testing.assert_array_equal(
    round_bits(jnp.asarray(x), 7), jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32)
  )
  tf32 = np.asarray(round_bits(jnp.asarray(x), 10))
  assert (tf32.view(np.uint32) & 0x1FFF == 0).all()
  assert np.abs(tf32 / x - 1).max() <= 2.0**-11
  special = jnp.asarray([0.0, -0.0, np.inf, np.nan], jnp.float32)
  np.testing.assert_array_equal(round_bits(special, 7), special)


def test_three_bf16_products_are_nearly_float32():
  rng = np.random.default_rng(0)
  a, b = (jnp.asarray(rng.normal(size=(32, 32)), jnp.float32) for _ in range(2))
  want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
  error = lambda dot: budget.rms(np.asarray(dot(a, b), np.float64) - want)
  bf16 = error(lowered("bf16").gram)
  assert error(exact) < error(bf16x3) < bf16 * 2.0**-6


def test_only_the_named_site_is_lowered():
  for site in SITES:
    dots = lowered("tf32", (site,))
    assert [f for f in SITES if getattr(dots, f) is not getattr(EXACT, f)] == [site]
  with pytest.raises(ValueError, match="precision 'fp8'"):
    lowered("fp8")
  with pytest.raises(ValueError, match="'folds'"):
    lowered("tf32", ("folds",))


@pytest.mark.parametrize("T", [1, 2, 5, 16])
def test_neumann_doubling_is_exact_in_exact_arithmetic(T):
  """Small integers: every power of A and every sum is exact, so both inverses are the same."""
  rng = np.random.default_rng(T)
  A = jnp.asarray(np.tril(rng.integers(-1, 2, size=(T, T)), -1), jnp.float32)
  rhs = jnp.asarray(rng.integers(-3, 4, size=(T, 2)), jnp.float32)
  np.testing.assert_array_equal(neumann(A, rhs, EXACT), substitute(A, rhs, EXACT))


def test_neumann_doubling_fails_on_identical_keys():
  T = 64
  A = jnp.tril(jnp.ones((T, T), jnp.float32), -1)
  rhs = jnp.asarray(np.random.default_rng(0).normal(size=(T, 1)), jnp.float32)
  want = np.linalg.solve(np.eye(T) + np.asarray(A, np.float64), np.asarray(rhs, np.float64))
  error = lambda solve: budget.rms(np.asarray(solve(A, rhs, EXACT)) - want) / budget.rms(want)
  assert error(substitute) < T * EPS
  assert not error(neumann) < 1


def test_repeats_counts_copies_that_follow_one_another():
  count = lambda text: free.repeats(np.frombuffer(text, np.uint8))
  assert count(b"abcdefg") == 1
  assert count(b"xx yabcabcabcz") == 3
  assert count(b"aaaaaaa") == 7
  assert count(b"line one\n" * 12) == 12
  assert count(b"z") == 1


def text(tokens, margins):
  top = np.stack([np.asarray(margins, np.float32), np.zeros(len(margins), np.float32)], 1)
  return free.Text(np.asarray(tokens), top, 1.0)


def test_the_margin_rule():
  plain = text([1, 2, 3], [1.0, 2.0, 0.5])
  assert free.within_margin(free.compare(plain, plain))
  near = free.compare(text([1, 2, 4], [1.0, 1.25, 0.5]), plain)
  assert near == {"first_difference": 2, "margin": 0.5, "logit_error": 0.75}
  assert free.within_margin(near)
  assert not free.within_margin(free.compare(text([1, 2, 4], [1.0, 2.0, 0.5]), plain))


def forced_rows(scheme, ablation, errors, window=16):
  for i, e in enumerate(errors):
    yield drift.row(
      part="forced", scheme=scheme, ablation=ablation, window=window, layer=0,
      token=256 * 2**i, state_error=float(e), output_error=float(e),
    )  # fmt: skip


def verdicts(open_loop, exact_fold, bf16):
  flat = np.ones(8)
  rows = [
    *forced_rows("snapshot", "none", 1e-7 * flat),
    *forced_rows("ring_open_loop", "none", open_loop),
    *forced_rows("ring_exact", "none", exact_fold),
    *forced_rows("ring_open_loop", "records bf16", bf16),
    *forced_rows("ring_open_loop", "checkpoint bf16", 1e-3 * flat),
  ]
  return [c.verdict for c in drift_report.claims(rows, "ring_open_loop")]


def test_each_claim_can_be_supported_and_contradicted():
  flat, growing = np.ones(8), 2.0 ** np.arange(8)
  assert verdicts(2e-7 * flat, 1e-7 * flat, 1e-3 * flat) == ["contradicts"] * 2 + ["supports"]
  assert verdicts(1e-3 * flat, 2e-7 * flat, 1e-3 * growing) == ["supports"] * 2 + ["contradicts"]
  assert verdicts(5e-6 * flat, 1e-7 * flat, 1e-3 * growing**0.2)[:2] == ["open", "open"]


def test_a_claim_whose_lines_were_not_run_is_open():
  rows = list(forced_rows("snapshot", "none", np.ones(4)))
  assert {c.verdict for c in drift_report.claims(rows, "ring_open_loop")} == {"open"}


@pytest.mark.parametrize(
  ("field", "value"),
  [("tokens", 3), ("window", 1), ("probes", 1), ("schemes", ("best",)), ("factors", ("luck",)),
   ("prompt", 0), ("free_tokens", -1), ("windows", (4, 100)), ("prompt_at", -1)],
)  # fmt: skip
def test_a_bad_field_is_named_with_what_is_allowed(field, value):
  with pytest.raises(ValueError, match=rf"{field}=.*allowed: "):
    dataclasses.replace(drift.CONFIGS["smoke"], **{field: value})


def test_an_interrupt_ends_every_line_at_its_next_probe(monkeypatch, tmp_path):
  """The command must not wait for minutes of a line whose rows nobody will read."""

  until, at_work, ended = time.monotonic() + 60, [], []

  def endless(progress):
    at_work.append(progress)
    try:
      while time.monotonic() < until:
        progress(0.5)
        time.sleep(0.01)
    finally:
      ended.append(progress)

  def lines(config, record):
    yield drift.Part("short", 1.0, lambda progress: [drift.row(part="free")])
    yield drift.Part("first", 1.0, endless)
    yield drift.Part("second", 1.0, endless)

  def interrupt(record, fraction):
    if len(at_work) == 2:
      raise KeyboardInterrupt

  monkeypatch.setattr(drift, "parts", lines)
  monkeypatch.setattr(Record, "advance", interrupt)
  with pytest.raises(KeyboardInterrupt):
    measure(drift, drift.CONFIGS["smoke"], tmp_path, Console(file=io.StringIO()))
  assert time.monotonic() < until, "the lines went on to their own end"
  assert len(ended) == len(at_work) == 2
  [journal] = (tmp_path / "partial").iterdir()
  assert '"name": "short"' in journal.read_text()
  assert [p.name for p in tmp_path.iterdir()] == ["partial"]


def test_the_full_preset_is_long():
  full = drift.CONFIGS["full"]
  assert full.tokens >= 65_536
  assert full.free_tokens >= 16_384
  assert set(full.schemes) == set(SCHEMES)
