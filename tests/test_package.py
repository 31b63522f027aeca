"""The wheel holds the three packages and nothing else; the lock holds versions and no address."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ["gdn", "commit_schemes", "pallas_kernels"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()


def normal(name: str) -> str:
  return re.sub(r"[-_.]+", "-", name).lower()


def test_the_wheel_names_three_packages() -> None:
  assert PROJECT["project"]["name"] == "deferred-commit"
  assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == PACKAGES


def test_the_wheel_holds_every_file_of_them_and_no_other(tmp_path: Path) -> None:
  pytest.importorskip("hatchling")
  pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
  subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
  (wheel,) = tmp_path.glob("deferred_commit-*.whl")
  inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
  wanted = {
    path.relative_to(ROOT).as_posix()
    for package in PACKAGES
    for kind in ("*.py", "configs/*.json", "py.typed")
    for path in (ROOT / package).rglob(kind)
  }
  assert inside == wanted


def test_the_lock_is_exact_and_covers_what_is_declared() -> None:
  assert not [line for line in LOCK if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line)]
  locked = {normal(name): version for name, version in (line.split("==") for line in LOCK)}
  project = PROJECT["project"]
  extras = dict(project["optional-dependencies"])
  del extras["docs"]  # the site is built in an environment of its own, held to the same versions
  declared = sum(extras.values(), project["dependencies"])
  assert {normal(re.split(r"[<>=!~\[ ]", need)[0]) for need in declared} <= set(locked)
  assert locked["jax"] == locked["jaxlib"] == "0.11.2"


def test_the_lock_of_the_site_is_exact_and_agrees_with_the_other() -> None:
  lines = (ROOT / "requirements-docs.lock").read_text(encoding="utf-8").splitlines()
  assert not [x for x in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", x)]
  site, other = (
    {normal(name): version for name, version in (line.split("==") for line in some)}
    for some in (lines, LOCK)
  )
  declared = PROJECT["project"]["optional-dependencies"]["docs"]
  assert {normal(re.split(r"[<>=!~\[ ]", need)[0]) for need in declared} <= set(site)
  assert {k: v for k, v in site.items() if k in other} == {k: other[k] for k in site if k in other}
  assert not {"jax", "jaxlib", "flax"} & set(site), "the check of the site imports no package"


def test_python_versions_agree() -> None:
  assert PROJECT["project"]["requires-python"] == ">=3.12"
  assert (ROOT / ".python-version").read_text().strip() == "3.12"
  assert sys.version_info >= (3, 12)
