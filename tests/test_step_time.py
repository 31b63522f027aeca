"""What is timed is checked first, output by output; a failing kernel loses no other's rows."""

import dataclasses
import io
import itertools
import sys
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from commit_schemes import SCHEMES
from commit_schemes.footprint import LayerShape
from experiments import bandwidth_gate, cost, peers, step_cases, step_time, targets
from experiments.record import measure, read_rows, rows_csv
from experiments.step_args import Case
from experiments.step_bench import BF16, LIMIT, SEVERAL, Bench, later
from experiments.step_checks import Off
from experiments.step_programs import Wanted, calling
from gdn.ops import XLA

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMOKE = step_time.CONFIGS["smoke"]
KINDS = step_cases.kinds(XLA)
TINY = LayerShape(1, 2, 8, 8)


@pytest.fixture(scope="module")
def bench() -> Bench:
  return Bench(KINDS, TINY, slots=SEVERAL, calls=20, seed=0, mosaic=False)


CHECKED = [
  Case("verify", "float32", "kda", 4, SEVERAL), Case("verify", "bfloat16", "gdn", 5, 1),
  Case("step_ring_flush", "float32", "gdn", 4, SEVERAL), Case("step_ring", "float32", "kda", 4, 1),
  Case("snapshot", "bfloat16", "gdn", 4, SEVERAL), Case("fold", "float32", "kda", 16, 1),
  Case("fold_rank", "float32", "gdn", 16, SEVERAL), Case("decode", "float32", "gdn", 1, SEVERAL),
  Case("conv", "bfloat16", "gdn", 4, SEVERAL), Case("snapshot_commit", "float32", "gdn", 16, 1),
  Case("append", "float32", "gdn", 16, SEVERAL), Case("fill", "float32", "gdn", 16, 1),
]  # fmt: skip


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_every_output_of_a_kernel_is_looked_at(bench: Bench, case: Case):
  """Each is noticed when it is one part in a hundred off; as they come, none is."""
  assert bench.error(case) <= LIMIT + BF16 * (case.state != "float32")
  make, call = bench.program(case, wide=True).result()
  for i in range(call.out_tree.num_leaves):

    def wrong(*args, i=i):
      out, tree = jax.tree.flatten(call(*args))
      out[i] = out[i] * jnp.asarray(1.01, out[i].dtype)
      return jax.tree.unflatten(tree, out)

    bench._programs[case, True] = Future()
    bench._programs[case, True].set_result((make, wrong))
    bench._errors.clear()
    with pytest.raises(Off):
      bench.error(case)


@pytest.mark.parametrize("name", KINDS)
def test_a_call_gets_what_the_call_before_has_left(name: str):
  """Of every kernel, in the shapes that it was compiled for."""
  kind = KINDS[name]
  case = Case(name, kind.states[0], kind.decays[0], kind.windows[0], 2)
  call, args, _ = calling(kind, Wanted(case, TINY, SEVERAL, False))
  again = kind.carry(later(args, kind.donated), jax.eval_shape(call, *args))
  shapes = lambda x: jax.tree.map(lambda y: (y.shape, y.dtype), x)
  assert shapes(again) == shapes(args)


ROUNDED = {"time_us": 0.005, "ceiling_gb_s": 0.05}  # half a unit of the last digit of a row


def test_a_kernel_that_fails_loses_no_other(tmp_path, monkeypatch):
  """A wrong one is named and has no row; so has one that raises."""
  off = KINDS["fold"]
  wrong = off._replace(call=lambda S, *args: off.call(S, *args) * 1.01)

  def broken(*args):
    raise NotImplementedError("no such shape")

  kinds = {**KINDS, "fold": wrong, "step_ring": KINDS["step_ring"]._replace(call=broken)}
  monkeypatch.setattr(step_cases, "kinds", lambda ops: kinds)
  out = io.StringIO()
  monkeypatch.setitem(sys.modules, "torch", None)
  config = dataclasses.replace(SMOKE, peers=("fla",))
  rows = measure(step_time, config, tmp_path, Console(file=out, width=200))
  assert sorted((r["kernel"], r["scheme"]) for r in rows) == [
    ("verify", None), ("whole_step", "replay_0"),
  ]  # fmt: skip
  for r in rows:
    assert 0 < r["low_us"] <= r["time_us"] <= r["high_us"]
    assert 0 <= r["relative_error"] < 1e-6
    us, ceiling = (np.asarray([r[c] - half, r[c] + half]) for c, half in ROUNDED.items())
    low, high = r["bytes"] / 1e3 / (us * ceiling)[::-1]
    assert low - 5e-5 <= r["ceiling_share"] <= high + 5e-5, "as far as rounding lets it be seen"
  assert "fold float32 gdn T = 16, batch 2: Off: S: " in out.getvalue()
  assert "fla fused_recurrent T = 16, batch 2: ModuleNotFoundError: " in out.getvalue()
  assert "step_ring float32 gdn T = 4, batch 2: NotImplementedError: no such" in out.getvalue()
  assert isinstance(step_time.figure(rows), Figure)
  Console(file=io.StringIO()).print(step_time.table(rows))


def at_the_ceiling() -> list[dict]:
  """Every shape as if it ran at 4300 GB/s: to see what is made of rows, and measured nowhere."""
  c, s, rows = step_time.CONFIGS["full"], LayerShape(16, 32), []

  def add(case, moved, scheme=None, peer=None):
    us = moved / 4.3e6
    rows.append(
      {"kernel": case.kernel, "scheme": scheme, "peer": peer, "state_dtype": case.state,
       "decay": case.decay, "batch": case.batch, "window": case.window, "time_us": us,
       "low_us": us, "high_us": us, "ceiling_share": 1.0, "relative_error": 4e-7,
       "device": "NVIDIA H200", "bytes": moved, "calls": 24, "kernels": 1.0, "ceiling_gb_s": 4300}
    )  # fmt: skip

  for part in step_time.wanted(c, KINDS):
    if isinstance(part, Case):
      add(part, part.batch * KINDS[part.kernel].bytes(part.layer(s), part))
    elif isinstance(part, step_time.Whole):
      point = cost.Point(part.window, 5, ring=4 * part.window, row=4)
      for B in c.batches:
        case = Case("whole_step", "float32", "gdn", part.window, B)
        add(case, B * cost.STEPS[part.scheme](s, point).bytes, scheme=part.scheme)
    else:
      kernel = peers.PEERS[part.peer][part.kernel]
      case = Case(kernel.like, kernel.state, "gdn", part.window, part.batch)
      moved = 7 * part.batch * KINDS[kernel.like].bytes(s, case)
      add(case._replace(kernel=part.kernel), moved, peer=f"{part.peer} 1.0")
  return rows


def test_the_most_wanted_come_first():
  parts = step_time.wanted(step_time.CONFIGS["full"], KINDS)
  assert len(set(map(str, parts))) == len(parts)
  first = [p for p in parts[:20] if isinstance(p, Case)]
  assert {p.batch for p in first} <= {64, 256}
  assert {p.kernel for p in first} >= {"verify", "step"}
  kda = [i for i, p in enumerate(parts) if isinstance(p, Case) and p.decay == "kda"]
  whole = [i for i, p in enumerate(parts) if isinstance(p, step_time.Whole)]
  assert max(whole) < min(kda)


def test_compulsory_bytes_are_those_of_the_targets():
  """77,888 bytes a value head, T = 16 and a float32 state; the state is written once more."""
  s = LayerShape(16, 32)
  moved = lambda name: KINDS[name].bytes(s, Case(name, "float32", "gdn", 16, 1)) / 32
  assert moved("verify") == 77_888
  rows = 16 * (128 * 4 / 2 + 128 * 4 + 4)  # k by key head, u, g
  assert moved("verify_rows_fp32") == 77_888 + rows
  assert moved("step") == 77_888 + rows + 65_536 + 5 / 16 * rows
  assert moved("snapshot") == 77_888 + 16 * 65_536
  assert moved("snapshot_commit") == 2 * 65_536


def test_the_gate_and_the_targets_of_rows(tmp_path):
  rows = at_the_ceiling()
  (tmp_path / "rows.csv").write_bytes(rows_csv(rows))
  gate = measure(
    bandwidth_gate, bandwidth_gate.Config(rows=tmp_path / "rows.csv"), tmp_path / "gate",
    Console(file=io.StringIO()),
  )  # fmt: skip
  assert {r["batch"] for r in gate} == {1, 16, 64, 256}
  assert {r["scheme"] for r in gate} == {None, *SCHEMES}
  [verify] = [
    r for r in gate
    if (r["kernel"], r["window"], r["batch"], r["state_dtype"], r["decay"])
    == ("verify", 16, 256, "float32", "gdn")
  ]  # fmt: skip
  assert (verify["copy_percent"], verify["published_percent"]) == (100.0, 79.4)
  assert verify["peak_percent"] == round(100 * 4300 / 4800, 1)
  assert verify["passes"]
  assert isinstance(bandwidth_gate.figure(gate), Figure)
  Console(file=io.StringIO()).print(bandwidth_gate.table(gate))

  found = {r["what"]: r for r in targets.derived_rows(read_rows(tmp_path / "rows.csv"))}
  share = found["verify, T = 16, batch 256: share"]
  assert (share["measured"], share["met"]) == (pytest.approx(1.0), True)
  fla = found["verify, T = 16, batch 64: times as fast as flash-linear-attention"]
  assert fla["measured"] == pytest.approx(7 * (2 * 65_536 + 12_352) / 77_888)
  assert all(r["met"] is not None for r in found.values())
  slow = [r | {"time_us": 2 * r["time_us"]} if r["kernel"] == "verify" else r for r in rows]
  again = {r["what"]: r["met"] for r in targets.derived_rows(slow)}
  assert again["verify, T = 16, batch 256: share"] is False
  assert again["fold, T = 16, batch 256: share"] is True
  assert isinstance(targets.figure(list(found.values())), Figure)
  assert isinstance(step_time.figure(rows), Figure)


def test_at_best_only_the_kernel_in_question_is_at_the_ceiling():
  """Everything of ours takes twice as long as its bytes: it would gain two, and not what it is
  compared with."""
  rows = at_the_ceiling()
  slow = [r if r["peer"] else r | {"time_us": 2 * r["time_us"]} for r in rows]
  for fast, r in zip(targets.derived_rows(rows), targets.derived_rows(slow), strict=True):
    of_bytes, gained = fast["measured"], 2.0 if r["least"] else 0.5
    if "error" in r["what"]:
      assert r["at_best"] == r["measured"] == of_bytes
    elif "share" in r["what"] or "FlashInfer" in r["what"] or "flash-linear" in r["what"]:
      assert r["at_best"] == pytest.approx(of_bytes)
      assert r["at_best"] == pytest.approx(gained * r["measured"])
    elif "over" in r["what"] or "snapshot" in r["what"]:
      assert r["at_best"] == pytest.approx(gained * of_bytes)
      assert r["measured"] == pytest.approx(of_bytes)
    else:
      assert "microseconds" in r["what"]
      assert r["at_best"] == pytest.approx(of_bytes)


def test_committed_targets_are_worked_out_from_committed_rows():
  found = targets.derived_rows()
  assert any(r["met"] for r in found)
  Console(file=io.StringIO()).print(targets.table(found))


@pytest.mark.parametrize(
  ("field", "value", "says"),
  [
    ("kernels", ("verfy",), "kernels = .*verfy.*, allowed: some of verify, "),
    ("peers", ("vllm",), "peers = .*vllm.*, allowed: some of fla, "),
    ("calls", 3, "calls = 3, allowed: at least 20"),
    ("batches", (0,), "batches = .*0.*, allowed: each at least 1"),
    ("ops", "triton", "ops = triton, allowed: mosaic_gpu, xla"),
  ],
)
def test_a_bad_field_is_named_with_what_is_allowed(field, value, says):
  with pytest.raises(ValueError, match=says):
    dataclasses.replace(SMOKE, **{field: value})


def test_plain_rows_are_random_rows_of_their_own(bench: Bench):
  """Full chains of standard normals, each element another, in slots that no two rows share."""
  case = Case("verify", "float32", "kda", 5, SEVERAL)
  w, again = bench.window(case), bench.window(case)
  hostile = bench.window(case, ["random"] * SEVERAL)
  like = lambda w: jax.tree.map(lambda x: (x.shape, x.dtype), w)
  assert like(w) == like(hostile)
  for name in ("parents", "nodes"):
    np.testing.assert_array_equal(getattr(w, name), getattr(hostile, name))
  assert sorted(np.asarray(w.slots)) == list(range(SEVERAL))
  drawn = [np.asarray(x, np.float32).ravel() for x in (*w.raw, *again.raw)]
  for x in drawn:
    assert abs(x.mean()) < 5 * len(x) ** -0.5
    assert abs(x.std() - 1) < 5 * len(x) ** -0.5
  for x, y in itertools.combinations(drawn, 2):
    n = min(len(x), len(y))
    assert np.mean(x[:n] == y[:n]) < 0.05  # by chance one in a hundred, in eight bits
