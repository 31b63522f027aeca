"""Drafters: from the known text of each slot to a window of tokens for the target to verify."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from commit_schemes.model import Draft
from gdn.exchange import ALONE, Exchange
from gdn.typing import Slots
from gdn.window import chain

Text = Int[Array, "B L"]


class Behind(NamedTuple):
  """What stands behind the text of a batch: the weights, the memories, each row's slot, and where
  other devices hold a part of the weights, what is exchanged with them."""

  params: Any
  carry: Any
  slots: Slots
  exchange: Exchange = ALONE


# (text [B, L], lengths [B], behind=None) -> a window; only a drafter with a memory looks behind.
Drafter = Callable[..., Draft]


def anchors(text: Text, length: Int[Array, "B"]) -> Int[Array, "B"]:
  """The newest known token of each slot; 0 where there is none."""
  last = jnp.take_along_axis(text, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]
  return jnp.where(length > 0, last, 0)


def nothing(text: Text, length: Int[Array, "B"], behind: Behind | None = None) -> Draft:
  """A window of the anchor alone: plain decoding."""
  del behind
  root = jnp.full((text.shape[0], 1), -1, jnp.int32)
  return Draft(anchors(text, length)[:, None], root, jnp.minimum(length, 1))


def prompt_lookup(window: int, *, longest: int = 3) -> Drafter:
  """Copy what followed the latest earlier occurrence of the last `longest` to 1 tokens.

  The longest match wins, among those the latest; no match drafts nothing. The window is the anchor
  and up to `window - 1` copied tokens, fewer where the known text ends. ValueError: either below 1.
  """
  if window < 1 or longest < 1:
    raise ValueError(f"window={window} and longest={longest} must be at least 1")

  def slot(text, length):
    L = text.shape[0]
    at = jnp.arange(L, dtype=jnp.int32)
    start = jnp.int32(L)
    for n in range(1, longest + 1):  # a longer match overwrites a shorter one
      tail = [text[jnp.maximum(length - n + j, 0)] for j in range(n)]
      equal = [jnp.roll(text, -j) == tail[j] for j in range(n)]
      found = jnp.stack(equal).all(0) & (at + n < length) & (length > n)
      latest = jnp.max(jnp.where(found, at, -1))
      start = jnp.where(latest >= 0, latest + n, start)
    count = jnp.clip(length - start, 0, window - 1)
    copied = text[jnp.minimum(start + jnp.arange(window - 1), L - 1)]
    return copied, count

  def draft(text: Text, length, behind: Behind | None = None) -> Draft:
    del behind
    copied, count = jax.vmap(slot)(text, length)
    tokens = jnp.concatenate([anchors(text, length)[:, None], copied], axis=1)
    parents = jnp.broadcast_to(chain(window)[None], tokens.shape)
    return Draft(tokens, parents, jnp.where(length > 0, 1 + count, 0))

  return draft
