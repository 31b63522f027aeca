"""What the target itself writes: greedy continuations of text, thousands of sequences at a time.

Plain decoding, one token a step, in the dtype of the parameters. All sequences have one length, so
keys and values lie in one buffer by position and nothing is gathered.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8

from gdn import hybrid
from gdn.attention import attend
from gdn.config import Config
from gdn.conv import causal
from gdn.gates import gates
from gdn.hybrid import Memories, Mixers, Params
from gdn.ops import XLA, Ops
from gdn.recurrence import read, write
from gdn.streaming import Recent, empty, streaming

GROUP = 128  # sequences whose prefixes are read at once


def one_token(at: jax.Array) -> Mixers:
  """Mixers for the token at position `at` of every sequence; an attention's memory is (k, v)."""
  both = jax.vmap

  def conv(tail, x, taps):
    return causal(tail, x, taps), jnp.concatenate([tail, x], axis=1)[:, 1:]

  def recurrent(S, raw, params):
    H = S.shape[1]
    beta, g = gates(raw.a, raw.b, params)
    q, k = (jnp.repeat(x[:, 0], H // x.shape[2], axis=1) for x in (raw.q, raw.k))
    S = both(both(write))(S, k, raw.v[:, 0], beta[:, 0], g[:, 0])
    return both(both(read))(S, q)[:, None].astype(raw.v.dtype), S

  def attend_buffer(memory, q, k, v):
    store = lambda rows, x: jax.lax.dynamic_update_slice_in_dim(rows, x, at, axis=1)
    k, v = store(memory[0], k), store(memory[1], v)
    see = (jnp.arange(k.shape[1]) <= at)[None]
    return both(attend, in_axes=(0, 0, 0, None))(q, k, v, see), (k, v)

  return Mixers(conv, recurrent, attend_buffer)


@partial(jax.jit, static_argnames=("config", "tokens", "ops"))
def continued(
  params: Params, config: Config, prefix: UInt8[Array, "B P"], *, tokens: int, ops: Ops = XLA
) -> UInt8[Array, "B P_tokens"]:
  """Each prefix and the `tokens` most likely bytes after it, one after the other."""
  B, P = prefix.shape
  if P + tokens > config.window:
    raise ValueError(f"prefix {P} + tokens {tokens} exceed the model's window of {config.window}")

  def prefilled(ids) -> Memories:
    positions = jnp.broadcast_to(jnp.arange(P - 1, dtype=jnp.int32)[None], ids.shape)
    memories = empty(config, ids.shape[0], params.embed.dtype)
    return hybrid.hidden_states(params, config, ids, positions, streaming(ops), memories)[1]

  def buffers(memory):
    """Newest last becomes by position, with room for what is to come."""
    if not isinstance(memory, Recent):
      return memory
    by_position = lambda x: jnp.pad(
      x[:, x.shape[1] - (P - 1) :], ((0, 0), (0, tokens), (0, 0), (0, 0))
    )
    return by_position(memory.k), by_position(memory.v)

  def token(carry, at):
    memories, ids = carry
    positions = jnp.full((B, 1), at, jnp.int32)
    logits, memories = hybrid.forward(params, config, ids, positions, one_token(at), memories)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return (memories, best), best[:, 0].astype(jnp.uint8)

  ids, group = prefix.astype(jnp.int32), int(np.gcd(GROUP, B))
  memories = jax.lax.map(prefilled, ids[:, :-1].reshape(-1, group, P - 1))
  memories = jax.tree.map(lambda x: x.reshape(B, *x.shape[2:]), memories)
  start = tuple(map(buffers, memories)), ids[:, -1:]
  _, text = jax.lax.scan(token, start, jnp.arange(P - 1, P - 1 + tokens, dtype=jnp.int32))
  return jnp.concatenate([prefix, text.T], axis=1)
