"""The soak passes under every scheme, and does not when something is wrong."""

import dataclasses
import functools
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

from commit_schemes import SCHEMES
from commit_schemes.decoding import loop
from experiments import record, soak, soak_layer, watched, witness
from experiments.witness import bitwise
from gdn.ops import XLA
from gdn.typing import GateParams, Raw
from pallas_kernels import MOSAIC_GPU
from tests import oracle, tiny
from tests.mutants import Mutant, edit, planted

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.parametrize("name", SCHEMES)
def test_five_hundred_random_steps(name):
  run = soak.Soak(tiny.world(), name)
  steps(run, tiny.C.steps)
  seen = run.seen
  assert seen["steps"] == 500
  assert seen["states_compared"] > 500
  for what in ("forks", "retracted", "resumed", "evicted", "prefix_hits", "marks"):
    assert seen[what] >= 10, what
  assert seen["texts_compared"] > 50
  assert seen["texts_differing"] <= seen["texts_compared"] / 10
  assert seen["emitted"] > 1.5 * sum(r is not None for r in run.engine.schedule.running) * 500
  assert run.worst <= 1
  assert 0 < tiny.world().noise < 1e-4, "float32: a wrong token is no close call"
  assert (run.worst == 0) == SCHEMES[name].exact


def steps(run, n):
  for _ in range(n):
    run.step()


def until_wrong(run):
  with pytest.raises(watched.Wrong):
    steps(run, 300)


def test_a_mark_of_another_depth_than_its_text_is_noticed():
  """The state of the last accepted token under the key of the boundary before it."""
  bug = Mutant(
    loop.marked, edit("jnp.where(crossed, point - before, 0)", "accepted.length"), ("soak",)
  )
  with planted(bug):
    until_wrong(soak.Soak(tiny.world(), "replay_0"))


@functools.cache
def sound():
  return soak.Soak(tiny.world(), "ring_exact")._inner


def broken(**programs):
  run = soak.Soak(tiny.world(), "ring_exact")
  run._inner = sound()._replace(**{k: v(sound()) for k, v in programs.items()})
  run.engine.programs = run.programs._replace(save=run._inner.save, restore=run._inner.restore)
  return run


def without_history(programs):
  """A retraction that leaves the ring behind: SGLang issue 38485."""

  def save(state, slot):
    rows = programs.save(state, slot)
    strip = lambda path, x: x * 0 if path[-1].name == "cursor" else x
    return jax.tree_util.tree_map_with_path(
      lambda path, x: strip(path, x) if hasattr(path[-1], "name") else x, rows
    )

  return save


def into_another_slot(programs):
  """A resumed request's rows land one slot further."""
  return lambda state, slot, rows: programs.restore(state, (slot + 1) % tiny.C.slots, rows)


def without_the_convolution(programs):
  """A prefix hit that brings the state and no conv window: SGLang PR 34043."""

  def admit(state, slot, text, length, memories):
    first = memories[0]._replace(conv=memories[0].conv * 0)
    return programs.admit(state, slot, text, length, (first, *memories[1:]))

  return admit


def test_what_was_compared_is_a_row_and_draws():
  run = broken()
  steps(run, 2 * tiny.C.every)
  row = {"scheme": "ring_exact", **run.row()}
  assert (row["compared"], row["error_over_budget"]) == ("bitwise", 0)
  assert row["states_compared"] > 100
  assert isinstance(soak.figure([row]), Figure)


@functools.cache
def layer():
  return soak_layer.Layer(
    dataclasses.replace(
      soak.CONFIGS["layer"], model="one tiny layer", steps=16, every=8, window=4, slots=3
    )
  )


def test_a_scheme_that_has_had_its_time_ends_with_a_check():
  begin = functools.partial(soak_layer.LayerSoak, layer())
  row = soak.soaked(begin, dataclasses.replace(layer().c, limit=0.0), "replay_0")
  assert (row["steps"], row["states_compared"]) == (8, layer().slots)
  with pytest.raises(ValueError, match="limit = -1"):
    soak.Config(limit=-1)


@pytest.mark.parametrize("name", ["ring_open_loop", "replay_0"])
def test_a_layer_is_soaked_without_an_engine(name):
  run = soak_layer.LayerSoak(layer(), name)
  steps(run, 2)
  assert (run.seen["steps"], run.seen["states_compared"]) == (16, 2 * layer().slots)
  assert run.seen["emitted"] > 16
  assert (run.worst == 0) == SCHEMES[name].exact
  assert run.worst <= 1
  assert isinstance(soak.figure([{"scheme": name, **run.row()}]), Figure)
  moved = [layer().truth(i).wide for i in range(3)]
  assert all((a != b).any() for a, b in itertools.pairwise(moved))
  run.seen["steps"] -= 8  # as if a block had been lost
  with pytest.raises(watched.Wrong, match=r"slot 0 after 16 steps: "):
    run.step()


@pytest.mark.parametrize("name", ["ring_exact", "tree_wy"])
def test_a_layer_is_soaked_in_windows_of_one_token(name):
  tokens = soak.CONFIGS["tokens"]
  tiny = dataclasses.replace(tokens, model="one tiny layer", steps=16, every=8, slots=3)
  assert tiny.window == 1
  run = soak_layer.LayerSoak(soak_layer.Layer(tiny), name)
  steps(run, 2)
  assert run.seen["states_compared"] == 2 * 5
  with pytest.raises(ValueError, match="window = 1, allowed: 2 to 16"):
    dataclasses.replace(soak.CONFIGS["smoke"], window=1)


def test_a_root_path_ends_in_its_node():
  parents, node = np.array([[-1, 0, 0, 1, 2], [-1, 0, 1, 2, 3]]), np.array([[3, 4], [2, -1]]).T
  path, length = soak_layer.root_paths(np.stack([parents] * 2, 1), node.T)
  found = [[p[:n].tolist() for p, n in zip(*row, strict=True)]
           for row in zip(path, length, strict=True)]  # fmt: skip
  assert found == [[[0, 1, 3], [0, 2, 4]], [[0, 1, 2], []]]


def test_bits_are_promised_only_where_one_implementation_makes_them():
  """An exact ring replays gates that `step` has made."""
  exact = {name for name, scheme in SCHEMES.items() if scheme.exact}
  mixed = MOSAIC_GPU._replace(step=XLA.step)
  for ops, promised in ((XLA, exact), (MOSAIC_GPU, exact), (mixed, exact - {"ring_exact"})):
    assert {name for name in SCHEMES if bitwise(SCHEMES[name], ops)} == promised


@pytest.mark.parametrize(
  ("program", "bug"),
  [("save", without_history), ("restore", into_another_slot), ("admit", without_the_convolution)],
)
def test_a_broken_program_is_noticed(program, bug):
  until_wrong(broken(**{program: bug}))


@pytest.mark.parametrize(
  ("field", "value", "says"),
  [
    ("schemes", ("snap",), "schemes = .*snap.*, allowed: snapshot, "),
    ("model", "huge", "model = 'huge', allowed: tiny float32, "),
    ("steps", 0, "steps = 0, allowed: at least 1"),
    ("window", 17, "window = 17, allowed: 2 to 16"),
    ("capacity", 10, "capacity = 10, allowed: at least 80"),
    ("block", 97, "block = 97, allowed: 1 to 96"),
  ],
)
def test_a_soak_names_what_is_not_allowed(field, value, says):
  with pytest.raises(ValueError, match=says):
    dataclasses.replace(tiny.C, **{field: value})


@pytest.mark.slow
def test_schemes_in_processes_of_their_own_leave_the_same_rows(tmp_path):
  """But for last bits: the other processes compile with all optimisations."""
  c = dataclasses.replace(
    soak.CONFIGS["smoke"], steps=30, every=10, schemes=("replay_0", "tree_wy"), prompts=2
  )
  rows = [
    record.measure(soak, dataclasses.replace(c, workers=n), tmp_path / str(n)) for n in (1, 2)
  ]
  for together, by_itself in zip(*rows, strict=True):
    differ = {k for k in together if together[k] != by_itself[k]}
    assert differ <= {"logit_noise", "error_over_budget"}
  assert [row["scheme"] for row in rows[0]] == list(c.schemes)


def test_the_bound_of_a_window_is_the_oracles_and_decays_as_its_error_does():
  """Sixteen equal keys with beta near two, no decay; then windows that forget."""
  rng = np.random.default_rng(0)
  normal = lambda *s: rng.standard_normal(s).astype(np.float32)
  S = normal(1, 1, 8, 8)
  params = GateParams(np.zeros(1, np.float32), np.zeros((1, 1), np.float32), np.float32(2.0))
  raw = lambda k, a: Raw(k, k, normal(len(k), 1, 8), np.full((len(k), 1, 1), a, np.float32),
                         np.full((len(k), 1), 8.0, np.float32))  # fmt: skip
  hard = raw(np.repeat(normal(1, 1, 8), 16, 0), -20.0)
  replica = witness.Replica(S)
  replica.add(hard)
  replica.catch_up(XLA, params, wide=True)
  tokens = oracle.tokens(*hard, *params, dtype=np.float64)
  bound, _ = oracle.solve_bound(S[0].astype(np.float64), tokens, np.arange(16) - 1, 1 / 16)
  cond = (2 * 16) ** 2  # of M: it and its inverse are 16 across, entries of at most two
  expected = np.linalg.norm(bound[-1], axis=(1, 2))
  np.testing.assert_allclose(replica.solve, expected, rtol=cond * 2.0**-52)
  both, apart = witness.Replica(S), replica.copy()
  for window in (hard, hard):
    both.add(window)
  apart.add(hard)
  for r in (both, apart):
    r.catch_up(XLA, params, wide=True)
  decay = 16 * np.exp(-20.0)
  np.testing.assert_allclose(both.solve, apart.solve, rtol=decay)  # two of 16 are none of 32
  before = replica.solve
  easy = [raw(normal(4, 1, 8), 3.0) for _ in range(3)]
  for window in easy:
    replica.add(window)
  replica.catch_up(XLA, params, wide=True)
  left = np.exp(sum(oracle.tokens(*w, *params, dtype=np.float64)[-1].sum() for w in easy))
  assert (left * before < replica.solve).all()
  assert (replica.solve < 1e-2 * before).all()
  solves = SCHEMES["delta_cache"]
  kernels, plain = (witness.budget(replica, solves, ops, 16) for ops in (MOSAIC_GPU, XLA))
  more = (witness.PROMISED - 2.0**-23) * np.sqrt(np.mean(replica.wide**2))
  np.testing.assert_allclose(kernels - plain, more, rtol=4 * kernels / more * 2.0**-52)


def after(_, seconds):
  """In place of a soak; what it is given that is no number is the file for its process."""
  if seconds == "wrong":
    raise watched.Wrong("a state")
  try:
    time.sleep(float(seconds))
  except ValueError:
    with Path(seconds).open("x") as file:
      print(os.getpid(), file=file, flush=True)
      time.sleep(60)
  return {"slept": seconds}


def two(seconds=60.0):
  return dataclasses.replace(tiny.C, workers=2, seconds=seconds)


def test_a_scheme_is_recorded_when_it_is_done_whoever_is_slow():
  began, rows = time.monotonic(), soak.beside(two(), ["60", "0.1", "0"], after)
  assert [next(rows), next(rows)] == [(x, {"slept": x}) for x in ("0.1", "0")]
  rows.close()
  assert time.monotonic() - began < 45, "who is slow is ended"


def test_no_scheme_is_begun_when_time_is_up_and_what_was_begun_is_kept():
  assert {name for name, _ in soak.beside(two(0.0), ["0.1", "0.2", "0"], after)} == {"0.1", "0.2"}


def test_a_scheme_that_fails_ends_the_others(tmp_path):
  began = time.monotonic()
  with pytest.raises(OSError, match="nowhere"):
    list(soak.beside(two(), ["60", str(tmp_path / "nowhere" / "pid")], after))
  assert time.monotonic() - began < 45


@pytest.mark.parametrize("workers", [1, 2])
def test_a_scheme_that_is_wrong_leaves_the_others_their_rows(workers, monkeypatch):
  monkeypatch.setattr(soak, "beginner", lambda c: None)
  monkeypatch.setattr(soak, "soaked", lambda begin, c, name, advance: after(c, name))
  names = ["0", "wrong", "0.1"]
  one_by_one = soak.one_by_one(two(), names, lambda what: None)
  rows = soak.right(one_by_one if workers == 1 else soak.beside(two(), names, after))
  assert {next(rows)[0], next(rows)[0]} == {"0", "0.1"}
  with pytest.raises(watched.Wrong, match="wrong: a state"):
    next(rows)


def test_what_works_for_a_process_that_has_ended_ends(tmp_path):
  """An interrupt ends `experiments run` at once: no soak may stay behind on the device."""
  told = tmp_path / "pid"
  code = f"from tests.test_soak import *; list(soak.beside(two(), [{str(told)!r}], after))"
  parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1])

  def until(done):
    for _ in range(600):
      if done():
        return
      time.sleep(0.1)

  until(lambda: told.exists() and told.read_text().endswith("\n"))
  child = Path("/proc", told.read_text().strip())
  assert child.exists()
  parent.kill()
  parent.wait()
  gone = lambda: not child.exists() or (child / "stat").read_text().rsplit(")", 1)[1][1] == "Z"
  began = time.monotonic()
  until(gone)
  assert time.monotonic() - began < 20, "at once, not when it is done"


def test_what_does_not_come_of_parts_beside_each_other_is_left(tmp_path):
  class Some:
    @staticmethod
    def run(_, r):
      for part in r.parts(("a", "b", "c"), arrange=lambda left: left[:0:-1]):
        r(part=part)

  rows = record.measure(Some, tiny.C, tmp_path)
  assert [row["part"] for row in rows] == ["c", "b"]
  assert '"left": [\n    "a"\n  ]' in (tmp_path / "meta.json").read_text()
  assert [row["part"] for row in record.measure(Some, tiny.C, tmp_path)] == ["c", "b"]
