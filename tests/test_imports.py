"""Imports point one way, and the files speak only of this project."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
  "gdn": set(),
  "commit_schemes": {"gdn"},
  "pallas_kernels": {"gdn"},
  "experiments": {"gdn", "commit_schemes", "pallas_kernels"},
}
OURS = {*MAY_IMPORT, "tests"}
WHEEL = ("gdn", "commit_schemes", "pallas_kernels")
# A bridge to another package imports it in one file; it is no dependency of the library.
BRIDGES = {
  "pallas_kernels/torch.py": {"torch"},
  "gdn/huggingface/tokenizer.py": {"tokenizers"},
}


def python_files(*packages: str) -> list[Path]:
  """Below experiments only its own modules: models and saved training runs hold Python as text."""
  return sorted(
    path
    for package in packages
    for path in (ROOT / package).glob("*.py" if package == "experiments" else "**/*.py")
  )


def imported(path: Path) -> Iterator[tuple[int, str]]:
  """Line and top-level package of every absolute import, wherever in the file it stands."""
  for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
    if isinstance(node, ast.Import):
      yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
      yield node.lineno, (node.module or "").split(".")[0]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_arrow_points_back(package: str) -> None:
  allowed = MAY_IMPORT[package] | {package}
  assert not [
    f"{path.relative_to(ROOT)}:{line} imports {name}"
    for path in python_files(package)
    for line, name in imported(path)
    if name in OURS - allowed
  ]


def test_the_library_imports_only_what_it_declares() -> None:
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  declared = {re.split(r"[^\w-]", need)[0].replace("-", "_") for need in project["dependencies"]}
  known = declared | set(WHEEL) | sys.stdlib_module_names
  assert not [
    f"{path.relative_to(ROOT)}:{line} imports {name}"
    for path in python_files(*WHEEL)
    for line, name in imported(path)
    if name not in known | BRIDGES.get(path.relative_to(ROOT).as_posix(), set())
  ]


def tracked() -> list[Path]:
  git = ["git", "-C", str(ROOT), "ls-files", "-z"]
  try:
    listed = subprocess.run(git, capture_output=True, check=True, text=True).stdout
  except (OSError, subprocess.CalledProcessError):
    pytest.skip("not a git checkout")
  return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


# Spelled in pieces, so that this file does not find itself.
REGISTRIES = ("pypi" + ".org", "pythonhosted" + ".org", "anaconda" + ".org", "npmjs" + ".com")
MACHINE_PATHS = (
  r"(?<![\w.-])/" + "work/",
  r"\." + r"library\b",
  r"/" + "opt/pypi",
  r"(?<![\w.])/" + "root/",
)
ELSEWHERE = re.compile("|".join((*map(re.escape, REGISTRIES), *MACHINE_PATHS)))


def test_no_file_names_a_registry_or_a_machine() -> None:
  found = []
  for path in tracked():
    content = path.read_bytes()
    if b"\0" in content:
      continue
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
      if hit := ELSEWHERE.search(line):
        found.append(f"{path.relative_to(ROOT)}:{number} names {hit[0]}")
  assert not found


def test_tolerances_are_derived_never_typed() -> None:
  """`atol=1e-3` is a wish. `900 * 2.0**-22` says where it comes from; a budget says it better."""
  assert not [
    f"{path.relative_to(ROOT)}:{node.value.lineno} {node.arg}={ast.unparse(node.value)}"
    for path in python_files("tests")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.keyword) and node.arg in {"atol", "rtol"}
    if isinstance(node.value, ast.Constant) and node.value.value != 0
  ]
