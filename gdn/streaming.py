"""Mixers for text that is known: training, scoring, prefill of a prompt in pieces of any length.

The memory of a layer is what the next piece needs and no more: the last W - 1 inputs of the
convolution, the recurrent state, the keys and values of the last `window` tokens. A whole sequence
is one piece that begins with empty memories. Attention runs over blocks of queries, so memory
grows with the length of a piece and not with its square.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn.attention import attend
from gdn.config import Config
from gdn.conv import causal
from gdn.hybrid import Memories, Mixers
from gdn.layer import GDNMemory
from gdn.ops import Ops
from gdn.typing import Lengths, Window
from gdn.window import chain

QUERY_BLOCK = 512  # rows of queries whose scores exist at once


class Recent(NamedTuple):
  """Rotated keys and values of the last `window` tokens, newest last, and how many are real."""

  k: Float[Array, "B window Hkv D"]
  v: Float[Array, "B window Hkv D"]
  length: Int[Array, "B"]


def empty(config: Config, B: int, dtype: Any) -> Memories:
  """Memories before the first token: zeros; states in float32, the rest in `dtype`."""
  c = config
  state = jnp.zeros((B, c.value_heads, c.value_dim, c.key_dim), jnp.float32)
  tail = jnp.zeros((B, c.conv_taps - 1, c.channels), dtype)
  rows = jnp.zeros((B, c.window, c.kv_heads, c.head_dim), dtype)
  recent = Recent(rows, rows, jnp.zeros((B,), jnp.int32))
  return tuple(recent if c.is_attention(i) else GDNMemory(tail, state) for i in range(c.layers))


def last(rows: Array, new: Array, nodes: Lengths | None) -> tuple[Array, Array]:
  """[rows; new], and its end, as many rows as before; what follows `nodes` new ones is no row."""
  both, n = jnp.concatenate([rows, new.astype(rows.dtype)], axis=1), rows.shape[1]
  if nodes is None:
    return both, both[:, both.shape[1] - n :]
  cut = jax.vmap(lambda x, at: jax.lax.dynamic_slice_in_dim(x, at, n))
  return both, cut(both, nodes)


def windowed(q: Array, k: Array, v: Array, length: Lengths) -> Array:
  """Causal attention of T queries to `window` earlier rows and their own.

  q [B, T, Hq, D]; k, v [B, window + T, Hkv, D], of whose first `window` rows the last `length` are
  real. A query sees itself and window - 1 rows before it.
  """
  T, window = q.shape[1], k.shape[1] - q.shape[1]
  Q = min(T, QUERY_BLOCK)
  pad = -T % Q
  q, k, v = (jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in (q, k, v))
  s, t = jnp.arange(window + Q)[None, :], jnp.arange(Q)[:, None]
  near = (s > t) & (s <= t + window)

  @jax.checkpoint
  def rows(start):
    cut = lambda x, n: jax.lax.dynamic_slice_in_dim(x, start, n, axis=1)
    real = start + s >= window - length[:, None]
    one = lambda q, k, v, real: attend(q, k, v, near & real[None])
    return jax.vmap(one)(cut(q, Q), cut(k, window + Q), cut(v, window + Q), real)

  o = jax.lax.map(rows, jnp.arange(0, T + pad, Q))  # [blocks, B, Q, Hq, D]
  return jnp.moveaxis(o, 0, 1).reshape(q.shape)[:, :T]


def streaming(ops: Ops, nodes: Lengths | None = None) -> Mixers:
  """Mixers over memories from `empty` or from the previous piece.

  `nodes` int [B] is how many rows of each sequence are real, None for all of them: prompts of
  unequal length are padded at the end, and padding leaves no trace in a memory. Outputs of padding
  are without meaning.
  """

  def conv(tail, x, taps):
    _, new = last(tail, x, nodes)
    return causal(tail, x, taps), new

  def recurrent(S, raw, gates):
    B, T = raw.b.shape[:2]
    every = jnp.full((B,), T, jnp.int32)
    parents = jnp.broadcast_to(chain(T)[None], (B, T))
    slots = jnp.arange(B, dtype=jnp.int32)
    window = Window(raw, parents, every if nodes is None else nodes, slots)
    return ops.prefill(S, window, gates)

  def attend_recent(memory: Recent, q, k, v):
    T, n = q.shape[1], memory.k.shape[1]
    keys, new_k = last(memory.k, k, nodes)
    values, new_v = last(memory.v, v, nodes)
    length = jnp.minimum(memory.length + (T if nodes is None else nodes), n)
    return windowed(q, keys, values, memory.length), Recent(new_k, new_v, length)

  return Mixers(conv, recurrent, attend_recent)
