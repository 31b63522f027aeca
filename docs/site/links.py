"""Links inside a built site: every page, file and anchor that one names is there.

    python docs/site/links.py FOLDER

mkdocs looks at Markdown alone; docstrings, notebooks and the theme make links as well.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
  """`links` that a page names and `anchors` that others may name."""

  def __init__(self, path: Path):
    super().__init__()
    self.links: list[str] = []
    self.anchors: set[str] = {""}
    self.feed(path.read_text(encoding="utf-8"))

  def handle_starttag(self, tag, attrs):
    for name, value in attrs:
      if name in ("href", "src") and value:
        self.links.append(value)
      elif value and (name == "id" or (name, tag) == ("name", "a")):
        self.anchors.add(value)


def broken(site: Path) -> list[str]:
  """Page and link, for each that leads nowhere inside the site; other hosts are not asked."""
  site = site.resolve()
  pages = {p: Page(p) for p in sorted(site.rglob("*.html"))}
  found = []
  for path, page in pages.items():
    for link in dict.fromkeys(page.links):
      parts = urlsplit(link)
      if parts.scheme or parts.netloc:
        continue
      where = unquote(parts.path)
      to = site / where.lstrip("/") if where.startswith("/") else path.parent / where
      to = path if not where else to.resolve()
      to = to / "index.html" if to.is_dir() else to
      known = pages.get(to)
      if not to.exists() or (known and unquote(parts.fragment) not in known.anchors):
        found.append(f"{path.relative_to(site)}: {link}")
  return found


if __name__ == "__main__":
  wrong = broken(Path(sys.argv[1]))
  print("\n".join(wrong), file=sys.stderr)
  sys.exit(bool(wrong))
