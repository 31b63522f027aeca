"""What each place of a block should say, and how near a drafter comes to it.

The label of every place is the target's own argmax, not the text: greedy verification accepts
nothing else. It is right only while the text before it is what the target would have written, so a
block counts up to and including the first byte where text and target part; in a continuation that
is the whole block, in its prefix, real text, a part. One forward pass of the target gives the
features and the labels of a whole sequence.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from experiments.training import OPS
from gdn import drafter, hybrid
from gdn.drafter import DrafterConfig, DrafterParams
from gdn.hybrid import Params
from gdn.streaming import empty, streaming


class Labels(NamedTuple):
  """What each place of each block should say, and whether it counts."""

  tokens: Int[Array, "B A next"]
  valid: Bool[Array, "B A next"]


def labels(text: Int[Array, "B S"], best: Int[Array, "B S"], anchors: Array, n: int) -> Labels:
  """The target's `n` tokens after each anchor. `best` [b, t] is its argmax after text[b, :t + 1].

  The i-th counts if it exists and the text agrees with the target on the i - 1 before it.
  """
  S = text.shape[1]
  agrees = jnp.concatenate([jnp.zeros_like(text[:, :1], bool), text[:, 1:] == best[:, :-1]], axis=1)
  at = anchors[:, :, None] + jnp.arange(n, dtype=jnp.int32)[None, None]  # whose argmax it is
  pick = lambda x: jax.vmap(lambda row, at: row[at])(x, jnp.minimum(at, S - 1))
  before = pick(agrees).at[:, :, 0].set(True)
  return Labels(pick(best), (at < S) & jnp.cumprod(before, axis=2).astype(bool))


class Read(NamedTuple):
  """Sequences and what the target makes of them: features, and its argmax after every byte."""

  text: Int[Array, "B S"]
  features: Float[Array, "B S features"]
  best: Int[Array, "B S"]


@partial(jax.jit, static_argnames="config")
def read(target: Params, text: Array, config: DrafterConfig) -> Read:
  """One forward pass of the target over whole sequences, uint8 [B, S]."""
  text, model = text.astype(jnp.int32), config.target
  at = jnp.broadcast_to(jnp.arange(text.shape[1], dtype=jnp.int32)[None], text.shape)
  memories = empty(model, text.shape[0], target.embed.dtype)
  logits, features, _ = hybrid.featured(
    target, model, text, at, streaming(OPS), memories, config.taps
  )
  return Read(text, features, jnp.argmax(logits, axis=-1).astype(jnp.int32))


def loss(
  params: DrafterParams,
  config: DrafterConfig,
  gamma: float,
  embed: Array,
  rows: Read,
  anchors: Int[Array, "B A"],
) -> tuple[Float[Array, ""], Int[Array, "B A"]]:
  """Cross entropy in nats, weighted by exp(-(i - 1) / gamma), and how many of each block's first
  tokens are right.

  Activations are bfloat16; the weights that it differentiates are float32.
  """
  low, c = hybrid.cast(params, jnp.bfloat16), config
  wanted = labels(rows.text, rows.best, anchors, c.block - 1)
  at = jnp.broadcast_to(jnp.arange(rows.text.shape[1], dtype=jnp.int32)[None], rows.text.shape)
  context = drafter.context_rows(low, c, rows.features, at)
  back = anchors[:, :, None] - at[:, None]
  back = jnp.where(back <= c.window, back, 0)
  first = jnp.take_along_axis(rows.text, anchors, axis=1)
  logits = drafter.marginals(low, c, embed, first, anchors, context, back)
  nats = optax.softmax_cross_entropy_with_integer_labels(logits, wanted.tokens)
  i = jnp.arange(c.block - 1, dtype=jnp.float32)
  weight = jnp.where(wanted.valid, jnp.exp(-i / gamma)[None, None], 0.0)
  right = wanted.valid & (jnp.argmax(logits, axis=-1) == wanted.tokens)
  return jnp.sum(nats * weight) / jnp.sum(weight), jnp.cumprod(right, axis=2).sum(2)


evaluate = jax.jit(loss, static_argnames=("config", "gamma"))


def accept_length(hits: Int[np.ndarray, "B A"], window: int) -> float:
  """Tokens a step of greedy decoding in windows of `window`, by the hits of blocks at every place.

  It walks from block to block, so hard places count more often than in a mean over places.
  """
  tokens = steps = 0
  for row in hits:
    at = 0
    while at < len(row):
      at += 1 + min(int(row[at]), window - 1)
      steps += 1
    tokens += at
  return tokens / steps
