"""Errors before rounding, beside the forward bound: of made-up streams, and of planted errors."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from commit_schemes.footprint import LayerShape
from experiments import accuracy, target
from experiments.accuracy import Part
from experiments.record import measure
from experiments.step_args import RING
from experiments.step_inputs import HOSTILE, float64, sample
from experiments.streams import Streams
from gdn.ops import xla
from gdn.typing import GateParams, Raw
from tests import oracle

pytestmark = pytest.mark.usefixtures("quick_compiles")

C = accuracy.CONFIGS["smoke"]
WIDE = xla(out=jnp.float32)
OPS = {"verify": jax.jit(WIDE.verify), "step": jax.jit(RING.call(WIDE.step))}


@pytest.fixture
def streams() -> Streams:
  rng = np.random.default_rng(0)
  x = lambda *shape: jnp.asarray(rng.standard_normal((40, *shape)), jnp.bfloat16)
  raw = Raw(x(1, 8), x(1, 8), x(2, 8), x(2, 1), x(2))
  return Streams(raw, GateParams(jnp.zeros(2), jnp.zeros((2, 1)), jnp.float32(1)), (0,))


def columns(ops, x):
  return dict(accuracy.measured(C, ops, x))


def test_windows_of_a_stream_continue_it(streams):
  """verify from a later state, and step from an earlier one with what lies between as history."""
  x = accuracy.captured(C, streams, Part(4, "float32"))
  o = OPS["verify"](x.S, x.window, x.params)[0]
  p = OPS["step"](x.step[0], *x.step[1])[0]
  assert np.linalg.norm(o - p) <= 8 * accuracy.EPS * np.linalg.norm(o)
  found = columns(OPS, x)
  for name in ("verify", "step"):
    assert 0 < found[name]["relative_error"] < 1e-6
    assert found[name]["within"]
  off = {n: lambda *a, f=f: (f(*a)[0] * jnp.float32(1 + 1e-5),) for n, f in OPS.items()}
  for name, row in columns(off, x).items():
    assert row["relative_error"] == pytest.approx(1e-5, rel=0.1), name
    assert not row["within"], name


def test_hostile_rows_and_their_figure(monkeypatch):
  monkeypatch.setattr(accuracy, "LayerShape", lambda Hk, H: LayerShape(Hk, H, 8, 8))
  rows = []
  for kind, top in (("identical", 2.0), ("lost_branch", 1.0), ("padding", 1.0)):
    x = accuracy.hostile(C, kind, top, Part(4, "float32"))
    for op, row in columns(OPS, x).items():
      assert row["within"], (kind, op, row)
      assert row["allowed"] == 1e-6 + (row["forward_bound"] if top > 1 else 0)
      rows.append({"op": op, "inputs": x.name, "window": 4, "state_dtype": "float32", **row})
  assert isinstance(accuracy.figure(rows), Figure)


def test_a_run_has_a_row_of_every_operation_and_input(monkeypatch, tmp_path, streams):
  monkeypatch.setattr(accuracy, "LayerShape", lambda Hk, H, *_: LayerShape(Hk, H, 8, 8))
  monkeypatch.setattr(accuracy, "target", lambda *_, **__: (None, None, target.as_bytes, None))
  monkeypatch.setattr(accuracy, "capture", lambda *_: streams)
  rows = measure(accuracy, C, tmp_path, Console(file=io.StringIO()))
  assert len(rows) == len({(r["op"], r["inputs"]) for r in rows}) == 2 * (1 + 2 * len(HOSTILE))
  assert all(r["within"] for r in rows)
  assert {r["device"] for r in rows} == {jax.devices()[0].device_kind}


def test_the_bound_is_the_oracles(monkeypatch):
  monkeypatch.setattr(accuracy, "LayerShape", lambda Hk, H: LayerShape(Hk, H, 8, 8))
  x = accuracy.hostile(dataclasses.replace(C, slots=2), "tree", 2.0, Part(6, "float32"))
  some = sample(np.random.default_rng(0), x.layer, 2, 2, 2)
  roots = some.states(x.S, x.window.slots)
  got, longest = accuracy.forward_bound(float64(roots, x.window, x.params, some), x.window)
  for b in range(2):
    parents = np.asarray(x.window.parents[b])
    raw = [np.asarray(y[b].astype(jnp.float32), np.float64) for y in x.window.raw]
    _, want = oracle.solve_bound(roots[b], oracle.tokens(*raw, *x.params), parents, accuracy.EPS)
    np.testing.assert_allclose(got[b], want, rtol=2.0**-30)
  depth = [[0]]  # of the root, then of each node
  for p in np.asarray(x.window.parents):
    at = [0]
    for parent in p:
      at.append(1 + at[parent + 1])
    depth.append(at)
  assert longest == max(map(max, depth))


@pytest.mark.parametrize("field, value", [("windows", (65,)), ("tokens", 9), ("heads", 3)])
def test_a_bad_field_is_named_with_what_is_allowed(field, value):
  with pytest.raises(ValueError, match=f"{field} = .*, allowed: "):
    dataclasses.replace(C, **{field: value})
