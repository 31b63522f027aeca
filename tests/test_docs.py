"""The documentation: links lead somewhere, every scheme has its page, the site builds clean."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from commit_schemes import SCHEMES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "LOG.md"])
LINK = re.compile(r"(?<!\\)\]\(([^)\s]+)\)")
HEADINGS = ("Idea", "Equations", "Memory", "Cost", "Source", "What can go wrong", "Code")


def anchors(path: Path) -> set[str]:
  """Of the headings, as both GitHub and mkdocs make them."""
  titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
  return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def broken(path: Path) -> list[str]:
  """Relative links of a page that lead nowhere."""
  found = []
  for link in LINK.findall(path.read_text(encoding="utf-8")):
    if re.match(r"[a-z]+:", link):
      continue
    target, _, anchor = link.partition("#")
    to = (path.parent / target).resolve() if target else path
    if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
      found.append(f"{path.relative_to(ROOT)}: {link}")
  return found


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
  assert not broken(path)


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
  page, other = tmp_path / "page.md", tmp_path / "other.md"
  other.write_text("# A title, here\n")
  page.write_text("[a](other.md) [b](other.md#a-title-here) [c](none.md) [d](other.md#none)\n")
  assert broken(page) == ["page.md: none.md", "page.md: other.md#none"]


def test_links_of_a_built_site_are_looked_up(tmp_path: Path) -> None:
  """Anchors and files, from the root and from a page; other hosts are left alone."""
  (tmp_path / "a").mkdir()
  good = '<h1 id="top"></h1><a href="../b.html#x">b</a><a href="#top">up</a><img src="/c.png">'
  (tmp_path / "a" / "index.html").write_text(good)
  (tmp_path / "b.html").write_text('<p id="x"></p><a href="a/#top">a</a><a href="https://e.x/#y">')
  (tmp_path / "c.png").write_bytes(b"")
  look = [sys.executable, str(DOCS / "site" / "links.py"), str(tmp_path)]
  run = lambda: subprocess.run(look, capture_output=True, text=True, check=False)
  assert (run().returncode, run().stderr.strip()) == (0, "")
  bad = '<a href="#none">1</a><a href="../d.html">2</a><a href="../b.html#top">3</a>'
  (tmp_path / "a" / "index.html").write_text(good + bad)
  assert run().returncode == 1
  assert run().stderr.split("\n")[:3] == [
    f"{Path('a/index.html')}: {link}" for link in ("#none", "../d.html", "../b.html#top")
  ]


def test_ci_checks_the_site() -> None:
  assert "make docs-check" in (ROOT / ".ci" / "run").read_text()


def nav(items) -> list[str]:
  """Every page that the site lists."""
  found = []
  for item in items:
    value = next(iter(item.values())) if isinstance(item, dict) else item
    found += nav(value) if isinstance(value, list) else [value]
  return found


def test_every_page_is_listed_and_every_listed_page_is_there() -> None:
  listed = nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
  written = {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")}
  books = {f"notebooks/{p.stem}.ipynb" for p in (ROOT / "experiments/notebooks").glob("*.py")}
  assert len(listed) == len(set(listed))
  assert set(listed) == written | books


def test_every_scheme_has_its_page() -> None:
  pages = {p: p.read_text(encoding="utf-8") for p in (DOCS / "schemes").glob("*.md")}
  for name in SCHEMES:
    [_] = [p for p, text in pages.items() if f"`{name}`" in text.split("## Idea")[0]]
  for p, text in pages.items():
    sections = re.split(r"^## (.+)$", text, flags=re.M)[1:]
    assert tuple(sections[::2]) == HEADINGS, p.name
    assert all(body.strip() for body in sections[1::2]), p.name


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
  """With the notebooks as they stand; `make docs` shows them with their outputs."""
  need = ("mkdocs", "material", "mkdocstrings", "mkdocs_jupyter", "latex2mathml")
  if missing := [n for n in need if importlib.util.find_spec(n) is None]:
    pytest.skip(f"the extra `docs` is not installed: {', '.join(missing)} missing")
  if not list((ROOT / "build" / "notebooks").glob("*.ipynb")):
    pytest.skip("`make notebooks` has not run")
  command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
  env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
  run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
  assert run.returncode == 0, run.stdout + run.stderr
  page = (tmp_path / "amplification" / "index.html").read_text()
  assert "<math" in page
  assert "arithmatex" not in page
