"""The tokenizer of a checkpoint folder, through the package `tokenizers`, which is optional."""

from pathlib import Path

from tokenizers import Tokenizer


def tokenizer(folder: str | Path) -> Tokenizer:
  """What `folder`/tokenizer.json describes. ValueError: it is no tokenizer."""
  path = Path(folder) / "tokenizer.json"
  try:
    return Tokenizer.from_file(str(path))
  except Exception as error:  # the package raises nothing narrower
    raise ValueError(f"{path} is no tokenizer: {error}") from error
