"""Programs that another process compiles: for a device that is not there, loaded where it is."""

import pickle
from concurrent.futures import BrokenExecutor, Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commit_schemes.footprint import LayerShape
from experiments import ahead, step_bench, step_cases, step_programs
from experiments.processes import workers
from experiments.step_args import Case
from experiments.step_bench import Bench
from experiments.step_programs import Wanted, elsewhere
from gdn.ops import XLA
from pallas_kernels import MOSAIC_GPU
from tests import h200

FOLD = Case("fold", "float32", "gdn", 16, 64)


@pytest.mark.skipif(bool(h200.why_not()), reason=h200.why_not())
def test_a_process_without_the_device_compiles_a_kernel_for_it():
  wanted = Wanted(FOLD, LayerShape(16, 32), 288)
  with workers(1, {"JAX_PLATFORMS": "cpu"}) as others:
    program, takes, gives = others.submit(elsewhere, wanted).result()
    nothing = Wanted(FOLD._replace(kernel="verify"), LayerShape(2, 4, 64, 64), 288)
    with pytest.raises(NotImplementedError, match="there is no kernel for it"):
      others.submit(elsewhere, nothing).result()
  _, args, _ = step_programs.calling(step_cases.kinds(MOSAIC_GPU)["fold"], wanted)
  assert (takes, gives) == (jax.tree.structure((args, {})), jax.tree.structure(0))
  assert b"mosaic_gpu" in program


def test_what_is_packed_is_the_same_program_elsewhere():
  double = jax.jit(lambda x: {"twice": x["x"] * 2}, donate_argnums=0)
  made = double.lower({"x": jax.ShapeDtypeStruct((3,), jnp.float32)}).compile()
  again = ahead.unpacked(pickle.loads(pickle.dumps(ahead.packed(made))))
  x = jnp.arange(3, dtype=jnp.float32)
  np.testing.assert_array_equal(again({"x": x})["twice"], [0, 2, 4])
  assert x.is_deleted()


@pytest.fixture
def bench() -> Bench:
  """Its other process is a thread."""
  b = Bench(step_cases.kinds(XLA), LayerShape(1, 2, 8, 8), 20, 20, 0, mosaic=False)
  b.others = ThreadPoolExecutor(1)
  yield b
  b.close()


CASE = Case("verify", "float32", "gdn", 4, 2)


def test_what_others_have_compiled_is_checked_and_timed(bench, monkeypatch):
  asked = []

  def other(w: Wanted) -> ahead.Packed:
    asked.append(w)
    kind = bench.kinds[w.case.kernel]
    f, args, donated = step_programs.calling(kind, w)
    return ahead.packed(jax.jit(f, donate_argnums=donated).lower(*args).compile())

  monkeypatch.setattr(step_programs, "elsewhere", other)
  assert bench.error(CASE) < step_bench.LIMIT
  bench.time(CASE)
  assert [(w.case, w.wide) for w in asked] == [(bench.stand_in(CASE), True), (CASE, False)]
  bench.compiled(bench.wanted(Case("snapshot_commit", "float32", "gdn", 16, 2)))
  bench.compiled(bench.wanted(Case("step", "float32", "kda", 4, 2)))
  assert len(asked) == 2, "what XLA makes is compiled where it runs"


def gone(*args) -> Future:
  raise BrokenExecutor("a process is gone")


def unread(program: ahead.Packed) -> jax.stages.Compiled:
  raise jax.errors.JaxRuntimeError("of another version")


@pytest.mark.parametrize("fails", [gone, unread])
def test_where_others_fail_it_is_compiled_here_and_said(bench, monkeypatch, fails):
  of, name = (bench.others, "submit") if fails is gone else (ahead, "unpacked")
  monkeypatch.setattr(of, name, fails)
  monkeypatch.setattr(step_programs, "elsewhere", lambda w: (b"", None, None))
  with pytest.warns(UserWarning, match=r"compiled here, not beside: \w+: (a process|of another)"):
    assert bench.error(CASE) < step_bench.LIMIT
