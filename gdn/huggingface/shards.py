"""The safetensors files of a folder: what they hold, and their tensors one after the other.

A file is mapped into memory and its pages count as ours while it is open, so it is opened again and
again: never more than one tensor, or `MAPPED` bytes of small ones, is held here.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from gdn.bijection import Described
from gdn.faults import Fault, lines
from gdn.huggingface.config import read_json, there

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MAPPED = 16 << 20
DTYPES = {
  name: np.dtype(dtype)
  for name, dtype in {
    "BF16": jnp.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64,
    "I8": np.int8, "U8": np.uint8, "I32": np.int32, "I64": np.int64,
    "F8_E4M3": jnp.float8_e4m3fn, "F8_E5M2": jnp.float8_e5m2,
  }.items()
}  # fmt: skip


class Stored(NamedTuple):
  """A tensor and the file that holds it."""

  name: str
  path: Path
  described: Described


def files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
  """The shards in order, and which one the index names for each tensor (None: there is no index).

  FileNotFoundError: no weights, or shards that the index names and that are not there. ValueError:
  an index beside the one file, one that does not name files of this folder, or a file that nobody
  may look at.
  """
  if there(folder / INDEX):
    if there(folder / SINGLE):
      raise ValueError(f"{folder} has {SINGLE} and {INDEX}, allowed: one of the two")
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
      raise ValueError(f"{folder / INDEX} has no weight_map")
    for tensor, name in index.items():
      if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(
          f"{folder / INDEX}: {tensor} is in {name!r}, allowed: the name of a file in the folder"
        )
    names = sorted(set(index.values()))
    if lost := [name for name in names if not there(folder / name)]:
      raise FileNotFoundError(f"{folder / INDEX} names {', '.join(lost)}, not in the folder")
    return [folder / name for name in names], index
  if not there(folder / SINGLE):
    raise FileNotFoundError(f"{folder} has neither {SINGLE} nor {INDEX}")
  return [folder / SINGLE], None


def contents(folder: Path, ignored: Callable[[str], bool] = lambda name: False) -> list[Stored]:
  """All tensors that are not ignored, by name, shape and dtype; headers are read, no data.

  ValueError: one, with every file that is truncated and every difference between index and files.
  """
  paths, index = files(folder)
  found: list[Stored] = []
  stored: set[str] = set()
  broken: list[str] = []
  wrong: list[Fault] = []
  for path in paths:
    try:
      path.open("rb").close()  # the library calls everything that it cannot open missing
      with safe_open(path, framework="np") as file:
        for name in file.keys():  # noqa: SIM118, a handle, no dict
          stored.add(name)
          if index is not None and index.get(name) != path.name:
            says = f"is in {path.name}, the index says {index.get(name)}"
            wrong.append(Fault(name, says, whatever=True))
          if ignored(name):
            continue
          x = file.get_slice(name)
          if x.get_dtype() in DTYPES:
            described = Described(tuple(x.get_shape()), DTYPES[x.get_dtype()])
            found.append(Stored(name, path, described))
          else:
            says = f"dtype {x.get_dtype()} is none of {', '.join(DTYPES)}"
            wrong.append(Fault(name, says, whatever=True))
    except SafetensorError as error:
      broken.append(f"{path.name} is truncated or no safetensors file: {error}")
    except OSError as error:
      broken.append(f"{path.name}: {error.strerror or error}")
  if index is not None and not (broken or wrong):
    wrong = [Fault(name, f"the index says {index[name]}, which does not have it", whatever=True)
             for name in sorted(set(index) - stored)]  # fmt: skip
  if broken or wrong:
    raise ValueError("\n  ".join([f"{folder} cannot be read:", *broken, *lines(wrong)]))
  return found


def batches(stored: Iterable[Stored]) -> Iterator[list[Stored]]:
  """Neighbours of one file, of at most `MAPPED` bytes together, or one larger tensor."""
  batch: list[Stored] = []
  size = 0
  for x in stored:
    bytes_ = math.prod(x.described.shape) * x.described.dtype.itemsize
    if batch and (x.path != batch[0].path or size + bytes_ > MAPPED):
      yield batch
      batch, size = [], 0
    batch.append(x)
    size += bytes_
  if batch:
    yield batch


def entries(stored: Stored) -> Iterator[tuple[int, np.ndarray]]:
  """A tensor along its first axis, at most `MAPPED` bytes of it in memory at a time."""
  count, *shape = stored.described.shape
  each = max(1, math.prod(shape) * stored.described.dtype.itemsize)
  some = max(1, MAPPED // each)
  for first in range(0, count, some):
    with safe_open(stored.path, framework="np") as file:
      stack = file.get_slice(stored.name)[first : min(first + some, count)]
    yield from enumerate(stack, first)
    del stack


def tensors(stored: Iterable[Stored]) -> Iterator[tuple[str, np.ndarray]]:
  """Name and data of every tensor in the order given. The caller drops one before the next."""
  for batch in batches(stored):
    with safe_open(batch[0].path, framework="np") as file:
      read = [(x.name, file.get_tensor(x.name)) for x in batch]
    while read:
      yield read.pop(0)
