"""Every experiment keeps one protocol, and its committed rows draw."""

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from experiments import figures, provenance, record
from experiments.command_line import experiments, load, preset
from experiments.record import read_rows

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_keeps_the_protocol(name: str) -> None:
  experiment = load(name)
  assert experiments()[name].endswith("."), "its docstring's first line is what `list` shows"
  assert callable(experiment.run)
  assert callable(experiment.figure)
  assert {"config", "out"}.isdisjoint(experiment.Config.__dataclass_fields__)
  for config in experiment.CONFIGS.values():
    assert type(config) is experiment.Config
    with pytest.raises(dataclasses.FrozenInstanceError):
      setattr(config, dataclasses.fields(config)[0].name, None)
    json.dumps(dataclasses.asdict(config), default=record.as_json)


def test_no_experiment_needs_the_plugin_of_a_gpu_to_be_imported() -> None:
  """As after `make setup`: the committed rows of every experiment must draw there."""
  code = "import sys; sys.modules['jax._src.lib.mosaic_gpu'] = None\n" + "".join(
    f"import experiments.{name}\n" for name in experiments()
  )
  done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr


COMMITTED = [n for n in experiments() if (provenance.RESULTS / n / "rows.csv").exists()]


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_results_name_no_folder_of_who_measured(name: str) -> None:
  meta = json.loads((provenance.RESULTS / name / "meta.json").read_text())
  names = [x for x in meta["config"].values() if isinstance(x, str)]
  assert not [x for x in names if Path(x).is_absolute()]


# Limits, processes and kinds of kernels that are of the machine, and a field that has been renamed.
OTHERWISE = {"heldout_bpb", "model_step", "parity", "soak", "step_time"}


@pytest.mark.parametrize("name", sorted({*COMMITTED} - OTHERWISE))
def test_committed_rows_are_of_a_preset(name: str) -> None:
  """So `run NAME --config PRESET` measures them again, and the figure's foot names it."""
  meta = json.loads((provenance.RESULTS / name / "meta.json").read_text())
  assert preset(load(name), meta) in load(name).CONFIGS


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_rows_draw(name: str, tmp_path: Path) -> None:
  rows = read_rows(provenance.RESULTS / name / "rows.csv")
  experiment = load(name)
  assert isinstance(experiment.figure(rows), Figure)
  figures.draw(experiment.figure, rows, tmp_path)
  assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
  assert (tmp_path / "figure.pdf").read_bytes().startswith(b"%PDF")
  if hasattr(experiment, "table"):
    Console(file=io.StringIO()).print(experiment.table(rows))
