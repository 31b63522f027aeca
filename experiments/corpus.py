"""The text: Python's standard library for training, eight of its modules held out and committed.

A stream is a NUL byte and then the bytes of a file, for each file in order. No Python source holds
a NUL, so the byte is both the beginning of a text and the end of the one before.
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

HELDOUT_FOLDER = Path(__file__).parent / "models" / "heldout"
# In the order of the stream; written in many hands and styles, 610 KB.
HELDOUT = (
  "heapq.py",
  "statistics.py",
  "dataclasses.py",
  "configparser.py",
  "argparse.py",
  "subprocess.py",
  "tarfile.py",
  "inspect.py",
)
# Installed by others, tables in place of code, and text that is not Python.
SKIP = ("site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data")


class File(NamedTuple):
  name: str  # relative to the library, with forward slashes
  text: bytes

  @property
  def sha256(self) -> str:
    return hashlib.sha256(self.text).hexdigest()


def training_files(root: Path | None = None) -> list[File]:
  """Python files of a standard library (by default the running Python's), sorted by name.

  Without the held-out modules, whatever their content here; each text once; UTF-8 without NUL.
  FileNotFoundError: the folder has no Python file.
  """
  root = Path(root or sysconfig.get_path("stdlib"))
  kept: dict[str, File] = {}
  for path in sorted(root.rglob("*.py")):
    name = path.relative_to(root).as_posix()
    if name in HELDOUT or set(path.relative_to(root).parts) & set(SKIP):
      continue
    file = File(name, path.read_bytes())
    if file.text.strip() and is_text(file.text):
      kept.setdefault(file.sha256, file)
  if not kept:
    raise FileNotFoundError(f"no Python file under {root}")
  held = {file.sha256 for file in heldout_files()}
  return sorted((f for h, f in kept.items() if h not in held), key=lambda f: f.name)


def is_text(text: bytes) -> bool:
  try:
    return "\0" not in text.decode("utf-8")
  except UnicodeDecodeError:
    return False


def heldout_files(folder: Path = HELDOUT_FOLDER) -> list[File]:
  """The committed modules in stream order. ValueError: one differs from its committed sha256."""
  lines = (folder / "SHA256SUMS").read_text().splitlines()
  sums = {name: digest for digest, name in (line.split("  ") for line in lines)}
  files = [File(name, (folder / f"{name}.txt").read_bytes()) for name in HELDOUT]
  wrong = [f.name for f in files if sums.get(f"{f.name}.txt") != f.sha256]
  if wrong:
    raise ValueError(f"held-out files differ from {folder / 'SHA256SUMS'}: {', '.join(wrong)}")
  return files


def stream(files: Iterable[File]) -> np.ndarray:
  """uint8: a NUL and the bytes of each file, in order."""
  return np.frombuffer(b"".join(b"\0" + file.text for file in files), np.uint8)


def heldout() -> np.ndarray:
  """The held-out stream, uint8, about 610,000 bytes."""
  return stream(heldout_files())


def manifest(files: Iterable[File]) -> str:
  """Lines that `sha256sum -c` reads, from the library's folder."""
  return "".join(f"{file.sha256}  {file.name}\n" for file in files)


def batches(
  files: Sequence[File], context: int, batch: int, *, seed: int, start: int = 0
) -> Iterator[np.ndarray]:
  """uint8 [batch, context + 1] for step start, start + 1, ...: a function of the step alone.

  Each epoch shuffles the files, turns their stream by a random number of bytes, cuts it in windows
  that share one byte, and shuffles those. ValueError: the text is shorter than one batch.
  """
  size = sum(len(f.text) + 1 for f in files)
  per_epoch = (size - 1) // context // batch
  if per_epoch == 0:
    raise ValueError(
      f"context {context} x batch {batch} needs more than {context * batch} bytes, text has {size}"
    )
  step = start
  while True:
    epoch = step // per_epoch
    random = np.random.default_rng([seed, epoch])
    text = stream(files[i] for i in random.permutation(len(files)))
    text = np.roll(text, random.integers(size))
    order = random.permutation(per_epoch * batch).reshape(per_epoch, batch)
    for windows in order[step - epoch * per_epoch :]:
      yield text[windows[:, None] * context + np.arange(context + 1)]
      step += 1
