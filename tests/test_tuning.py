"""Kernels run with what was measured for their shape, or with a default that fits the device."""

import dataclasses
import functools
import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from matplotlib.figure import Figure
from rich.console import Console

pytest.importorskip("absl")  # jax.experimental.pallas.mosaic_gpu imports it

from commit_schemes.footprint import LayerShape, zero_window
from experiments import ahead, step_bench, step_cases, tune
from experiments.clock import Timing
from experiments.record import measure
from experiments.step_args import Case, Given
from gdn.ops import XLA
from pallas_kernels import MOSAIC_GPU, tiles, tuning
from pallas_kernels.tuning import Device, Shape
from tests import h200

KIND = "NVIDIA H200"
chosen = functools.partial(tuning.chosen, state=jnp.dtype(jnp.float32), channels=1)
DEFAULT = tiles.Config()
on_h200 = pytest.mark.skipif(bool(h200.why_not()), reason=h200.why_not() or "compiles")


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
  """A folder in place of the package's, and a GPU of its own kind."""
  caches = (tuning.entries, tuning._found)
  for f in caches:
    f.cache_clear()
  monkeypatch.setattr(tuning, "CONFIGS", tmp_path)
  monkeypatch.setattr(tuning, "device", lambda: Device(KIND, 100))
  yield tmp_path
  for f in caches:
    f.cache_clear()


def entry(kernel: str, tokens: int, heads: int, state: str = "float32", **config: int) -> dict:
  shape = {"state": state, "decay": "gdn", "tokens": tokens, "heads": heads}
  return {"kernel": kernel, "shape": shape, "config": config, "time_us": 1.0, "default_us": 2.0}


def test_the_nearest_measured_shape_is_taken(configs: Path):
  found = [
    entry("fold", 4, 32, ctas_per_sm=1), entry("fold", 16, 32, ctas_per_sm=3),
    entry("fold", 16, 2048, ctas_per_sm=4), entry("decode", 1, 32, "bfloat16", ctas_per_sm=1),
  ]  # fmt: skip
  (configs / "NVIDIA_H200.json").write_text(json.dumps({"entries": found}))
  ctas = lambda kernel, T, heads: chosen(kernel, DEFAULT, tokens=T, heads=heads).ctas_per_sm
  assert ctas("fold", 4, 32) == 1
  assert ctas("fold", 5, 32) == 3, "the next longer window"
  assert ctas("fold", 64, 32) == 3, "or the longest"
  assert [ctas("fold", 16, n) for n in (1, 200, 300, 8192)] == [3, 3, 4, 4], "by their ratio"
  assert ctas("decode", 1, 32) == DEFAULT.ctas_per_sm, "measured for another state"
  assert chosen("fold", DEFAULT, tokens=4, heads=32).sms == 100


def test_without_a_file_the_default_fits_the_device(configs: Path, monkeypatch):
  assert chosen("fold", DEFAULT, tokens=4, heads=32) == dataclasses.replace(DEFAULT, sms=100)
  monkeypatch.setattr(tuning, "device", Device)
  assert chosen("fold", DEFAULT, tokens=4, heads=32) == DEFAULT


def test_an_entry_is_validated_where_every_configuration_is(configs: Path):
  wrong = [entry("fold", 4, 32, ctas_per_sm=9)]
  (configs / "NVIDIA_H200.json").write_text(json.dumps({"entries": wrong}))
  with pytest.raises(ValueError, match=r"ctas_per_sm=9 must be in 1\.\.4"):
    chosen("fold", DEFAULT, tokens=4, heads=32)


def test_the_device_is_that_of_the_mesh():
  assert tuning.device() == Device() or jax.default_backend() == "gpu"
  device = jax.sharding.AbstractDevice("NVIDIA B200", 148, "gpu")
  with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
    assert tuning.device() == Device("NVIDIA B200", 148)
    assert chosen("fold", DEFAULT, tokens=4, heads=32).sms == 148


KERNELS = {"verify": "verify", "fold": "fold", "decode": "decode", "snapshot": "snapshot"}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_asks_for_its_configuration(name: str):
  kind = step_cases.kinds(MOSAIC_GPU)[name]
  case = Case(name, "float32", "gdn", kind.windows[0], 4)
  with tuning.trial({"ctas_per_sm": 1}) as asked:
    traced(case, kind)
  assert [(x.kernel, x.shape) for x in asked] == [
    (KERNELS[name], Shape("float32", "gdn", case.window, 4 * 32))
  ]


def traced(case: Case, kind: step_cases.Kind):
  s = case.layer(LayerShape(16, 32))
  given = jax.eval_shape(lambda: zero_window(s, case.batch, case.window, jnp.bfloat16))
  args = jax.eval_shape(lambda w, p: kind.args(Given(s, case, w, p, 8)), *given)
  S = jax.ShapeDtypeStruct((8, 32, 128, 128), jnp.dtype(case.state))
  return jax.jit(lambda S, *args: kind.call(S, *args)).trace(S, *args)


FILES = sorted(tuning.CONFIGS.glob("*.json"))


@on_h200
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_tuned_configuration_lowers(path: Path):
  """Of the files that are there; none is there before an H200 has measured one."""
  kinds = step_cases.kinds(MOSAIC_GPU)
  for e in json.loads(path.read_text())["entries"]:
    shape, kind = Shape(**e["shape"]), kinds[e["case"]]
    case = Case(e["case"], shape.state, shape.decay, shape.tokens, shape.heads // 32)
    with jax.sharding.use_abstract_mesh(ahead.mesh().abstract_mesh), tuning.trial(e["config"]):
      traced(case, kind).lower(lowering_platforms=("cuda",))


@dataclasses.dataclass(frozen=True)
class Two:
  ctas_per_sm: int = 2
  split: int = 1
  sms: int = 132


def test_tune_writes_what_the_kernels_then_take(configs: Path, monkeypatch, tmp_path: Path):
  """Times are made up. Of one field a value is faster than the default, one fastest and wrong, and
  one cannot be compiled; of another one is faster than the default, and both together are best."""
  real, Bench = step_cases.kinds(XLA)["decode"], step_bench.Bench

  def call(S, window, params):
    heads = window.raw.v.shape[0] * window.raw.v.shape[2]
    if chosen("decode", Two(), tokens=1, heads=heads).ctas_per_sm == 4:
      raise RuntimeError("too many registers")
    return real.call(S, window, params)

  def compiled(self, w):
    programs = compile(self, w)
    fields = dataclasses.replace(Two(), **dict(w.fields or ()))
    took[id(programs)] = fields.ctas_per_sm, fields.split
    return programs

  def check(self, case, programs):
    if took[id(programs)] == (3, 1):
      raise step_bench.Off("not the same each time")
    checked.append(took[id(programs)])

  compile, took, checked = Bench.compiled, {}, []
  monkeypatch.setattr(step_cases, "kinds", lambda ops: {"decode": real._replace(call=call)})
  times = {(2, 1): 40.0, (1, 1): 30.0, (3, 1): 20.0, (2, 2): 35.0, (1, 2): 25.0}
  clock = lambda self, case, programs: Timing(*(times[took[id(programs)]],) * 3, 20, 1)
  monkeypatch.setattr(Bench, "compiled", compiled)
  monkeypatch.setattr(Bench, "check", check)
  monkeypatch.setattr(Bench, "clock", clock)
  monkeypatch.setattr(tune, "LayerShape", lambda *_: LayerShape(1, 2, 8, 8))
  config = tune.Config(
    kernels=("decode",), batches=(2,), state_dtypes=("float32",), ops="xla",
    to=configs / "NVIDIA_H200.json",
  )  # fmt: skip
  out = io.StringIO()
  rows = measure(tune, config, tmp_path / "rows", Console(file=out, width=200))
  assert [(r["config"], r["time_us"]) for r in rows] == [
    ("{}", 40), ('{"ctas_per_sm": 1}', 30), ('{"ctas_per_sm": 1, "split": 2}', 25),
  ]  # fmt: skip
  assert checked == [(2, 1), (1, 1), (1, 2)], "what is slower is no row"
  assert "{'ctas_per_sm': 3}: Off: not the same each time" in out.getvalue()
  assert "{'ctas_per_sm': 4}: RuntimeError: too many registers" in out.getvalue()
  assert isinstance(tune.figure(rows), Figure)
  tuning.entries.cache_clear()
  tuning._found.cache_clear()
  assert chosen("decode", Two(), tokens=1, heads=4) == Two(1, 2, 100)
  tune.save(config.to, [r | {"time_us": 39.9} for r in rows[:2]])
  [kept] = json.loads(config.to.read_text())["entries"]
  assert kept["config"] == {}, "a quarter of a per cent is noise"
  other = [r | {"heads": 64} for r in rows]
  tune.save(config.to, other)
  assert [e["shape"]["heads"] for e in json.loads(config.to.read_text())["entries"]] == [4, 64]


def test_without_a_row_there_is_no_file(configs: Path, tmp_path: Path):
  """XLA's programs have no configuration."""
  config = tune.Config(
    kernels=("decode",), batches=(2,), state_dtypes=("float32",), ops="xla", to=configs / "cpu.json"
  )
  out = io.StringIO()
  assert measure(tune, config, tmp_path / "rows", Console(file=out, width=200)) == []
  assert "it has no configuration" in out.getvalue()
  assert not config.to.exists()


@pytest.mark.parametrize(
  "field, value", [("batches", ()), ("batches", (0,)), ("calls", 3), ("limit", float("nan"))]
)
def test_a_bad_field_of_tune_is_named_with_what_is_allowed(field, value):
  with pytest.raises(ValueError, match=f"{field} = .*, allowed: .*at least"):
    tune.Config(**{field: value})
