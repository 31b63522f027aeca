"""A kernel leaves the same bits however often it runs.

A copy that overtakes a read, or a store that nothing waits for, is wrong in a few of a thousand
calls and right in the others: one comparison with a reference says little about it. At these shapes
every block of a launch goes through several heads, so every buffer is used again.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("absl")  # jax.experimental.pallas.mosaic_gpu imports it

from commit_schemes.footprint import LayerShape
from experiments import step_bench, step_cases
from experiments.step_args import Case
from gdn.ops import XLA
from pallas_kernels import MOSAIC_GPU

KERNELS = step_cases.kinds(MOSAIC_GPU)
CASES = [
  Case(name, state, decay, T, {"prefill": 4, "verify_tree": 16, "snapshot_tree": 16}.get(name, 40))
  for name, kind in KERNELS.items() if kind.mosaic
  for state in kind.states
  for decay in kind.decays
  for T in ((96,) if name == "prefill" else kind.windows)
  if T > 1 or name.startswith("decode")
]  # fmt: skip


def bench_of(
  kinds, shape: LayerShape, slots: int, *, mosaic: bool, monkeypatch
) -> step_bench.Bench:
  monkeypatch.setattr(step_bench, "copy_ceiling", lambda megabytes: 1.0)  # nothing is timed
  return step_bench.Bench(kinds, shape, slots, 20, 0, mosaic=mosaic)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_call_leaves_the_same_bits(case: Case, monkeypatch):
  shape = LayerShape(16, 32, 128, 128)
  bench = bench_of(KERNELS, shape, case.batch + 8, mosaic=True, monkeypatch=monkeypatch)
  bench.repeat(case, times=400)


@pytest.mark.parametrize("donated", [False, True])
def test_a_call_that_sometimes_differs_is_found(donated: bool, monkeypatch):
  """One element of one of many calls; nothing is said of a NaN that is always there."""
  calls = []

  def late(x):
    calls.append(0)
    return np.float32(len(calls) == 9)

  def racing(S, *args):
    o, S = XLA.decode(S, *args)
    wrong = jax.pure_callback(late, jax.ShapeDtypeStruct((), jnp.float32), o[0, 0, 0, 0])
    return o.at[0].set(jnp.nan), S.at[1, 0, 0, 0].add(wrong)

  name = "decode"
  kinds = dict(step_cases.kinds(XLA))
  kinds[name] = kinds[name]._replace(donated=int(donated))
  bench = bench_of(kinds, LayerShape(1, 2, 8, 8), 6, mosaic=False, monkeypatch=monkeypatch)
  bench.repeat(Case(name, "float32", "gdn", 1, 4), times=12)
  kinds[name] = kinds[name]._replace(call=racing)
  other = Case(name, "float32", "gdn", 1, 3)
  with pytest.raises(step_bench.Off, match="1 elements in 12 repetitions"):
    bench.repeat(other, times=12)
