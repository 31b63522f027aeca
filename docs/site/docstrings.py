"""Docstrings here align tables by hand: such blocks are shown as they stand."""

import re
import textwrap

import griffe

ALIGNED = re.compile(r"\S {2,}\S|^  ", re.M)


def shown(text: str) -> str:
  """Blocks between blank lines become code where a line is indented or has columns."""
  blocks = re.split(r"\n\s*\n", text)
  code = lambda b: textwrap.indent(textwrap.dedent(b), "    ")
  return "\n\n".join(code(b) if ALIGNED.search(b) else b for b in blocks)


class AsTheyStand(griffe.Extension):
  """Rewrites every docstring as it is read."""

  def on_instance(self, *, obj: griffe.Object, **kwargs) -> None:
    if obj.docstring:
      obj.docstring.value = shown(obj.docstring.value)
