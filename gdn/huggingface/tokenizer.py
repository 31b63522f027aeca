"""The tokenizer of a checkpoint folder, through the package `tokenizers`, which is optional."""

from pathlib import Path

from tokenizers import Tokenizer


def tokenizer(folder: str | Path) -> Tokenizer:
  """What `folder`/tokenizer.json describes. ValueError: it is no tokenizer."""
  path = Path(folder) / "tokenizer.json"
  try:
    made = Tokenizer.from_file(str(path))
  except Exception as error:  # the package raises nothing narrower
    raise ValueError(f"{path} is no tokenizer: {error}") from error
  # What a file says of lengths is for batches of prompts; a text is read whole.
  made.no_truncation()
  made.no_padding()
  return made
