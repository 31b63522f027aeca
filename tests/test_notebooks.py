"""Every notebook runs from its first cell to its last, at a small size."""

import runpy
from pathlib import Path

import jax
import pytest
from matplotlib.figure import Figure

from experiments import figures

FOLDER = Path(__file__).parents[1] / "experiments" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))


def test_there_are_notebooks() -> None:
  assert {p.stem for p in NOTEBOOKS} == {"tour", "drift", "open_loop", "own_scheme", "own_kernel"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
  """As a reader would: with jax's own rules of promotion, and something to see."""
  monkeypatch.setenv("TOKENS", "32")
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    runpy.run_path(str(path))
  assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_py_percent_with_a_title(path: Path) -> None:
  first, *cells = path.read_text(encoding="utf-8").split("# %%")[1:]
  assert first.startswith(" [markdown]\n# # ")
  assert len(cells) >= 4


def test_a_picture_is_what_jupyter_shows() -> None:
  shown = figures.picture(lambda rows: Figure(figsize=(1, 1)), [])
  assert shown._repr_png_().startswith(b"\x89PNG")
