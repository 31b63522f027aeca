"""The model that an experiment runs, and how it reads text: `--model PATH`.

PATH is a file of `gdn.checkpoint` (the bundled model where there is none) or a folder in Hugging
Face layout. Text is tokenised where the folder says how; otherwise its bytes are the tokens.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.record import BadInput
from experiments.score import BUNDLED, saved_model
from gdn import huggingface
from gdn.config import Config
from gdn.huggingface.tokenizer import tokenizer
from gdn.hybrid import Params

BYTES = 256


class Text(NamedTuple):
  """Tokens of a text, int32 [T], and how many bytes each stands for."""

  ids: np.ndarray
  bytes: np.ndarray


class Reader(NamedTuple):
  """Tokens of a text, and how many bytes some tokens stand for."""

  read: Callable[[bytes], Text]
  bytes: Callable[[np.ndarray], int]


class Target(NamedTuple):
  """A model and how it reads text."""

  params: Params
  config: Config
  read: Callable[[bytes], Text]
  bytes: Callable[[np.ndarray], int]


def as_bytes(text: bytes) -> Text:
  ids = np.frombuffer(text, np.uint8).astype(np.int32)
  return Text(ids, np.ones(len(ids), np.int64))


def tokenised(tokenizer: Any, vocab: int, text: bytes) -> Text:
  """Tokens of UTF-8, and how many bytes of `text` each stands for: the first token of a character
  counts all of it, and what none covers (a normaliser composes, a model drops what it does not
  know) counts with the next token, at the end with the last. A byte that is no UTF-8 is read as
  U+FFFD. BadInput: the tokenizer cannot read it; a token that the model does not have."""
  decoded = text.decode("utf-8", "surrogateescape")
  readable = re.sub("[\udc80-\udcff]", "\ufffd", decoded)
  try:
    encoded = tokenizer.encode(readable, add_special_tokens=False)
  except Exception as error:  # the package raises nothing narrower
    raise BadInput(f"tokenizer.json cannot read the text: {error}") from error
  sizes = [len(c.encode("utf-8", "surrogateescape")) for c in decoded]
  before = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
  between = [end for _, end in encoded.offsets[:-1]]
  ends = before[[0, *between, -1]] if encoded.ids else before[:1]
  if (largest := max(encoded.ids, default=0)) >= vocab:
    raise BadInput(f"tokenizer.json makes token {largest}, allowed: below {vocab}, the vocabulary")
  return Text(np.array(encoded.ids, np.int32), np.diff(ends))


def decoded_bytes(tokenizer: Any, ids: np.ndarray) -> int:
  """What is left of a character counts as three: it is shown as U+FFFD."""
  return len(tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False).encode())


def reader(path: Path, config: Config) -> Reader:
  """BadInput: bytes are no tokens of this vocabulary, or the tokenizer cannot be used."""
  try:
    made = tokenizer(path) if is_folder(path) else None
  except ImportError as error:  # an optional dependency
    raise BadInput(
      f"{path}/tokenizer.json needs the package tokenizers, the extra `tokenizer`: {error}"
    ) from error
  except ValueError as error:
    raise BadInput(str(error)) from error
  if made is not None:
    read = functools.partial(tokenised, made, config.vocab)
    return Reader(read, functools.partial(decoded_bytes, made))
  if config.vocab < BYTES:
    raise BadInput(
      f"{path} has no tokenizer.json, and its vocabulary of {config.vocab} cannot hold bytes"
    )
  return Reader(as_bytes, len)


def is_folder(path: Path) -> bool:
  """BadInput: nobody may look."""
  try:
    return path.is_dir()
  except OSError as error:
    raise BadInput(f"{path}: {error.strerror}") from error


def config_of(path: Path | None) -> Config:
  """The model's shape; of a folder no weights are read. BadInput: it cannot be, or no layer is
  recurrent, and there is nothing to measure."""
  if path is None or not is_folder(path):
    config = saved_model(path or BUNDLED)[1]
  else:
    try:
      config = huggingface.read_config(path).config
    except (OSError, ValueError) as error:
      raise BadInput(str(error)) from error
  if config.attention_every == 1:
    raise BadInput(f"{path}: all layers are attention, allowed: a model with recurrent layers")
  return config


def within(context: int, window: int, path: Path) -> None:
  """BadInput: the model or drafter at `path` cannot hold texts of `context` tokens."""
  if context > window:
    raise BadInput(f"{context} tokens, allowed: {window}, the longest context of {path}")


def described(path: Path | None, *, context: int) -> tuple[Config, Reader]:
  """The model at `path` for texts of up to `context` tokens, without its weights.

  A folder's attention keeps that many rows and no more. BadInput: it cannot be read, or its
  longest context is shorter.
  """
  config, path = config_of(path), path or BUNDLED
  reads = reader(path, config)
  if not is_folder(path):
    return config, reads
  within(context, config.window, path)
  return dataclasses.replace(config, window=context), reads


def target(path: Path | None, *, context: int, dtype: Any = None) -> Target:
  """The model at `path` as `described`. BadInput: it cannot be read."""
  config, reads = described(path, context=context)
  if path is None or not is_folder(path):
    return Target(*saved_model(path or BUNDLED), *reads)
  try:
    params, _ = huggingface.load(path, dtype=dtype)
  except (OSError, ValueError) as error:
    raise BadInput(str(error)) from error
  return Target(params, config, *reads)
