"""Docstrings here align tables by hand: blocks that are indented are shown as they stand."""

import griffe


def block(text: str) -> str:
  lines = text.split("\n")
  indented = all(line.startswith("  ") for line in lines if line.strip())
  return "\n".join("    " + line for line in lines) if indented else text


class AsTheyStand(griffe.Extension):
  """Every block of lines that begin with two spaces becomes a block of code."""

  def on_instance(self, *, obj: griffe.Object, **kwargs) -> None:
    if obj.docstring:
      value = re_blank(obj.docstring.value)
      obj.docstring.value = "\n\n".join(block(b) for b in value.split("\n\n"))


def re_blank(text: str) -> str:
  """A line that begins an indented table is set apart from the sentence before it."""
  out: list[str] = []
  for line in text.split("\n"):
    table = line.startswith("  ")
    if out and out[-1].strip() and line.strip() and table != out[-1].startswith("  "):
      out.append("")
    out.append(line)
  return "\n".join(out)
