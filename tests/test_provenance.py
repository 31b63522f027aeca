"""What is recorded of where rows come from is true: the commit, its tree, the configuration."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from experiments import provenance, record
from experiments.command_line import caption
from experiments.record import BadInput, read_rows
from tests.toy import quiet, toy


def git(folder: Path, *args: str) -> str:
  who = ("-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false")
  return subprocess.run(
    ["git", "-C", str(folder), *who, *args], check=True, capture_output=True, text=True
  ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
  if shutil.which("git") is None:
    pytest.skip("needs git")
  git(tmp_path, "init", "--quiet")
  (tmp_path / "code.py").write_text("1\n")
  git(tmp_path, "add", "code.py")
  git(tmp_path, "commit", "--quiet", "--message", "code")
  return tmp_path


def test_a_clean_tree_is_clean_whatever_its_results(repository: Path) -> None:
  results = repository / "experiments" / "results" / "x"
  results.mkdir(parents=True)
  (results / "rows.csv").write_text("a\n1\n")
  head = git(repository, "rev-parse", "HEAD")
  assert provenance.commit(repository) == {"commit": head, "dirty": False}


def test_changed_results_that_are_read_are_dirty(repository: Path) -> None:
  results = repository / "experiments" / "results" / "x"
  results.mkdir(parents=True)
  (results / "rows.csv").write_text("a\n1\n")
  assert provenance.commit(repository, reads=("x",))["dirty"] is True
  git(repository, "add", "experiments")
  git(repository, "commit", "--quiet", "--message", "results")
  assert provenance.commit(repository, reads=("x",))["dirty"] is False
  (results / "rows.csv").write_text("a\n2\n")
  assert provenance.commit(repository, reads=("x",))["dirty"] is True
  assert provenance.commit(repository, reads=("y",))["dirty"] is False


@pytest.mark.parametrize("name", ["code.py", "new.py"])
def test_a_changed_or_new_file_is_dirty(repository: Path, name: str) -> None:
  (repository / name).write_text("2\n")
  assert provenance.commit(repository)["dirty"] is True


def test_to_ask_changes_nothing(repository: Path) -> None:
  """git would write down times that it has looked up, under a lock that outlives who is ended."""
  os.utime(repository / "code.py", (0, 0))
  index = (repository / ".git" / "index").read_bytes()
  assert provenance.commit(repository)["dirty"] is False
  assert (repository / ".git" / "index").read_bytes() == index


def test_no_repository_is_never_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.delenv("COMMIT", raising=False)
  facts = provenance.commit(tmp_path)
  assert (facts["commit"], facts["dirty"]) == (None, None)
  assert "not a git repository" in facts["git"]
  monkeypatch.setenv("COMMIT", "abc")
  facts = provenance.commit(tmp_path)
  assert (facts["commit"], facts["dirty"]) == ("abc", None)


def test_a_folder_inside_another_repository_is_not_that_commit(
  repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  monkeypatch.delenv("COMMIT", raising=False)
  inside = repository / "copy"
  inside.mkdir()
  facts = provenance.commit(inside)
  assert (facts["commit"], facts["dirty"]) == (None, None)


def test_git_that_is_missing_is_said(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv("PATH", str(repository))
  monkeypatch.delenv("COMMIT", raising=False)
  facts = provenance.commit(repository)
  assert (facts["commit"], facts["dirty"]) == (None, None)
  assert "git" in facts["git"]


@pytest.mark.parametrize("states, dirty", [
  ((True, False), True), ((False, False), False), ((None, False), None), ((None, True), True),
])  # fmt: skip
def test_one_sitting_in_a_changed_tree_is_said(
  states: tuple[bool | None, ...], dirty: bool | None, tmp_path: Path,
  monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
  sittings = iter([{"commit": str(i) * 40, "dirty": x} for i, x in enumerate(states)])
  monkeypatch.setattr(provenance, "commit", lambda reads: next(sittings))
  with pytest.raises(KeyboardInterrupt):
    quiet(toy(stop=("b", 2)), tmp_path)
  quiet(toy(), tmp_path)
  assert json.loads((tmp_path / "meta.json").read_text())["dirty"] is dirty
  said = caption(toy(), [], tmp_path)
  assert "commit 1111111111 and 1 before" in said
  assert ("changed tree" in said) is (dirty is True)


def test_meta_holds_what_a_reader_needs(tmp_path: Path) -> None:
  quiet(toy(), tmp_path)
  meta = json.loads((tmp_path / "meta.json").read_text())
  assert meta["config"] == {"parts": ["a", "b", "c"], "scale": 1 / 3}
  assert provenance.commit().items() <= meta.items()
  assert provenance.setting().items() <= meta.items()
  assert {"date", "clock", "seconds", "resumed"} <= set(meta)


def test_a_path_of_ours_is_the_same_anywhere(tmp_path: Path) -> None:
  ours = provenance.RESULTS / "drift" / "rows.csv"
  assert record.as_json(ours) == "experiments/results/drift/rows.csv"
  assert record.as_json(tmp_path) == str(tmp_path)


METAS = sorted(provenance.RESULTS.glob("**/meta.json"))


@pytest.mark.parametrize("path", METAS, ids=lambda path: path.parent.name)
def test_committed_rows_are_those_that_their_meta_speaks_of(path: Path) -> None:
  """Also where rows of several sittings were put together."""
  meta = json.loads(path.read_text())
  assert meta["rows"] == provenance.digest(path.with_name("rows.csv").read_bytes())
  states = [x["dirty"] for x in meta.get("resumed", ())]
  assert meta["dirty"] is True or True not in states
  for name, read in meta.get("read", {}).items():
    now = json.loads((provenance.RESULTS / name / "meta.json").read_text())
    if now["commit"] == read["commit"]:
      assert read["dirty"] == now["dirty"], name


def test_rows_of_another_run_beside_a_meta_are_said(tmp_path: Path) -> None:
  """A run that was ended between its two files, or rows that somebody has edited."""
  quiet(toy(), tmp_path)
  assert "not the one of" not in caption(toy(), [], tmp_path)
  with (tmp_path / "rows.csv").open("a") as file:
    file.write("1,2\n")
  assert "rows.csv is not the one of meta.json" in caption(toy(), [], tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"config": '])
def test_a_meta_that_says_nothing_is_named(text: str, tmp_path: Path) -> None:
  quiet(toy(), tmp_path)
  (tmp_path / "meta.json").write_text(text)
  with pytest.raises(BadInput, match="does not say where its rows come from"):
    caption(toy(), [], tmp_path)
  (tmp_path / "meta.json").unlink()
  assert "unknown origin" in caption(toy(), [{}], tmp_path)


@pytest.mark.parametrize("rows", [b"a,b\n1\n", b"a,b\n1,2,3\n", b"a\n\xff\xfe\n"])
def test_rows_that_are_no_table_are_named(rows: bytes, tmp_path: Path) -> None:
  (tmp_path / "rows.csv").write_bytes(rows)
  with pytest.raises(BadInput, match="is no table of rows"):
    read_rows(tmp_path / "rows.csv")
