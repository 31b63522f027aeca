"""The tokenizer of a checkpoint folder, through the package `tokenizers`, which is optional."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from tokenizers import Tokenizer

NAME = "tokenizer.json"
OTHERS = ("vocab.json", "merges.txt", "tokenizer.model", "tokenizer_config.json")


def tokenizer(folder: str | Path) -> "Tokenizer | None":
  """What `folder`/tokenizer.json describes, or None: nothing in the folder is of a tokenizer.
  ValueError: it is none, cannot be read, or is missing beside others. ImportError: no package."""
  # Names, not files: the target of a link may be gone.
  has = [name for name in (NAME, *OTHERS) if os.path.lexists(Path(folder) / name)]
  if not has:
    return None
  if NAME not in has:
    raise ValueError(f"{folder} has {' and '.join(has)} without {NAME}, which alone is read")
  from tokenizers import Tokenizer

  path = Path(folder) / NAME
  try:
    made = Tokenizer.from_file(str(path))
  except Exception as error:  # the package raises nothing narrower
    raise ValueError(f"{path} is no tokenizer: {error}") from error
  # What a file says of lengths is for batches of prompts; a text is read whole.
  made.no_truncation()
  made.no_padding()
  return made
