"""Lines told apart without colours, and published values on the axes of the figures about them."""

import importlib
import itertools

import pytest

from commit_schemes import SCHEMES
from experiments import figures, provenance, record
from experiments.command_line import derived

ABOUT = (
  "amplification", "bandwidth_gate", "cycles", "drift", "fold_ablation", "memory", "planner",
  "published", "step_time",
)  # fmt: skip


def drawn(name: str):
  module = importlib.import_module(f"experiments.{name}")
  if name in derived():
    return module.figure(module.derived_rows())
  return module.figure(record.read_rows(provenance.RESULTS / name / "rows.csv"))


def test_every_scheme_has_a_colour_and_a_marker_of_its_own():
  looks = [figures.scheme_look(name) for name in SCHEMES]
  for what in ("color", "marker"):
    assert len({look[what] for look in looks}) == len(looks), what


def test_dashes_and_markers_tell_lines_apart():
  pairs = {(str(x["linestyle"]), x["marker"]) for x in map(figures.look, range(84))}
  assert len(pairs) == 84


def test_no_two_lines_of_a_drift_panel_share_a_marker():
  for ax in drawn("drift").axes:
    markers = [x.get_marker() for x in ax.lines if not x.get_label().startswith("_")]
    assert len(set(markers)) == len(markers), ax.get_title(loc="left")


@pytest.mark.parametrize("name", ABOUT)
def test_published_values_are_hollow(name: str):
  lines = itertools.chain.from_iterable(ax.lines for ax in drawn(name).axes)
  hollow = [x for x in lines if x.get_fillstyle() == "none" and len(x.get_xdata())]
  assert hollow
  assert all(x.get_linestyle() == "None" for x in hollow)


def test_a_published_value_by_its_id():
  assert figures.value_of("treewy-35b-c256") == 1.40
  with pytest.raises(StopIteration):
    figures.value_of("nothing")
