"""Bits that a model spends on each byte of a text."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from experiments.record import BadInput
from gdn import checkpoint, hybrid
from gdn.config import Config
from gdn.hybrid import Memories, Params
from gdn.ops import XLA, Ops
from gdn.streaming import empty, streaming

BUNDLED = Path(__file__).parent / "models" / "python-bytes.safetensors"


def saved_model(weights: Path = BUNDLED) -> tuple[Params, Config]:
  """Weights and config of a file. BadInput: it is not there or not whole."""
  try:
    return checkpoint.load(weights)
  except (OSError, ValueError) as e:
    raise BadInput(e) from e


def piece_bits(
  params: Params,
  config: Config,
  text: UInt8[Array, "B T1"],
  memories: Memories,
  start: Int[Array, ""],
  ops: Ops = XLA,
) -> tuple[Float[Array, "B T"], Memories]:
  """-log2 p of bytes 1 to T of each row, given those before; `start` is the position of byte 0."""
  ids, targets = text[:, :-1].astype(jnp.int32), text[:, 1:].astype(jnp.int32)
  positions = jnp.broadcast_to(start + jnp.arange(ids.shape[1], dtype=jnp.int32)[None], ids.shape)
  logits, memories = hybrid.forward(params, config, ids, positions, streaming(ops), memories)
  log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, :, None], axis=2)[:, :, 0]
  return -log_p / jnp.log(jnp.float32(2.0)), memories


def fresh(params: Params, config: Config, B: int) -> Memories:
  """Empty memories in the dtype of the parameters."""
  return empty(config, B, params.embed.dtype)


def stream_bits(
  params: Params, config: Config, text: np.ndarray, *, piece: int = 4096, ops: Ops = XLA
) -> Iterator[np.ndarray]:
  """Yields bits float32 [B, <= piece] for one piece of text uint8 [B, n] after the other.

  The first byte is given and not scored. Memories pass from piece to piece, so n may be long.
  """
  score = jax.jit(partial(piece_bits, config=config, ops=ops))
  memories = fresh(params, config, text.shape[0])
  for at in range(0, text.shape[1] - 1, piece):
    rows = jnp.asarray(text[:, at : at + piece + 1])
    bits, memories = score(params, text=rows, memories=memories, start=jnp.int32(at))
    yield np.asarray(bits)
