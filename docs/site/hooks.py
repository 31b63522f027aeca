"""What mkdocs does not do itself: mathematics as MathML, notebooks, figures, tables from rows."""

import csv
import os
import re
from html import unescape
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"
NOTEBOOKS = ROOT / os.environ.get("NOTEBOOKS", "build/notebooks")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)
FIGURE = re.compile(r"!\[([^]]*)\]\((?:\.\./)+experiments/results/(\w+)/figure\.png\)")
MEMORY = re.compile(r"\{\{ memory (\w+) \}\}")
MIB = 2**20


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files, config):
  """Notebooks that `make notebooks` ran, or those of $NOTEBOOKS, and the committed figures."""
  made = {f"notebooks/{p.name}": p for p in sorted(NOTEBOOKS.glob("*.ipynb"))}
  made |= {f"figures/{p.parent.name}.png": p for p in sorted(RESULTS.glob("*/figure.png"))}
  for uri, path in made.items():
    files.append(File.generated(config, uri, abs_src_path=str(path)))
  return files


def memory(scheme: str) -> str:
  """Table of one scheme's bytes with bfloat16 records, from the committed rows."""
  with (RESULTS / "memory" / "rows.csv").open(newline="") as file:
    rows = [r for r in csv.DictReader(file) if r["scheme"] == scheme and r["records"] == "bfloat16"]
  lines = ["| MiB, carry + flight | T = 4 | T = 16 |", "|---|---|---|"]
  for model in dict.fromkeys(r["model"] for r in rows):
    cells = []
    for T in ("4", "16"):
      some = [r for r in rows if r["model"] == model and r["window"] == T]
      total = lambda c, some=some: sum(int(r[c]) for r in some) / MIB
      cells.append(f"{total('carry_bytes'):,.1f} + {total('flight_bytes'):,.1f}")
    lines.append(f"| {model} | {cells[0]} | {cells[1]} |")
  return "\n".join(lines)


def on_page_markdown(markdown, page, config, files):
  """Figures by their place in the repository become figures of the site, each a link to itself."""
  there = f"{'../' * page.file.src_uri.count('/')}figures/"
  figure = lambda m: f"[![{m[1]}]({there}{m[2]}.png)]({there}{m[2]}.png)"
  markdown = FIGURE.sub(figure, markdown)
  return MEMORY.sub(lambda m: memory(m[1]), markdown)


def on_page_content(html, page, config, files):
  """A formula is MathML: no script, no network."""

  def math(m):
    made = convert(unescape(m[2]).strip(), display="inline" if m[1] == "span" else "block")
    if left := re.search(r"\\\w+", made):
      raise PluginError(f"{page.file.src_uri}: {left[0]} is not understood in the formula {m[2]}")
    return made

  return FORMULA.sub(math, html)
