"""A whole model behind one acceptance: every layer's convolution, state and KV rows commit as one.

memory = model_memory(config, spec, SCHEMES["ring_exact"])
carry = memory.whole.init(prefill(params, config, memory, fresh(...), ids, 0, lengths))
logits, flight = verify(params, config, memory, carry, draft, positions, slots)
carry = memory.whole.commit(flight, accepted)       # one Accepted for all layers

A block drafter's rows are one more memory of this kind: its layers follow the target's in a carry,
the verify that gives the logits gives their new rows too, and the same `Accepted` commits them.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from commit_schemes.contract import CommitScheme, together
from commit_schemes.conv_window import conv_window
from commit_schemes.kv_rows import in_flight, kv_rows
from gdn.config import Config
from gdn.drafter import DrafterConfig, DrafterParams, context_rows
from gdn.exchange import ALONE, Exchange
from gdn.hybrid import Logits, Memories, Mixers, Params, featured, forward
from gdn.layer import GDNMemory
from gdn.ops import XLA, Ops
from gdn.streaming import Recent, empty, last, streaming
from gdn.typing import Lengths, Slots, Window


class Pair(NamedTuple):
  """Weights of a target and of the block drafter that reads its features."""

  target: Params
  drafter: DrafterParams


def target_of(params: Params | Pair) -> Params:
  return params.target if isinstance(params, Pair) else params


class Draft(NamedTuple):
  """A tree of tokens per slot. Node 0 is the anchor: the newest known token, in no memory yet."""

  tokens: Int[Array, "B T"]
  parents: Int[Array, "B T"]
  nodes: Int[Array, "B"]


class ModelMemory(NamedTuple):
  """The scheme of each kind of memory and, over all layers, what they do together.

  With a `drafter` its layers' rows are part of `whole`, and `params` below is a Pair.
  `exchange` is with the devices that hold the other heads.
  """

  conv: CommitScheme
  state: CommitScheme
  rows: CommitScheme
  whole: CommitScheme
  drafter: DrafterConfig | None = None
  exchange: Exchange = ALONE


def model_memory(
  config: Config,
  state: CommitScheme,
  ops: Ops = XLA,
  drafter: DrafterConfig | None = None,
  exchange: Exchange = ALONE,
) -> ModelMemory:
  """Memories of a hybrid model whose recurrent layers use the scheme `state`.

  ValueError: the drafter is for a model of other sizes.
  """
  if drafter is not None and drafter.target != config:
    raise ValueError(f"the drafter is for a {drafter.target}, the model is a {config}")
  conv, rows = conv_window(ops), kv_rows()
  layer = lambda i: rows if config.is_attention(i) else GDNMemory(conv, state)
  layers = *map(layer, range(config.layers)), *((rows,) * (drafter.layers if drafter else 0))
  return ModelMemory(conv, state, rows, together(layers), drafter, exchange)


def fresh(config: Config, memory: ModelMemory, B: int, dtype: Any) -> Memories:
  """Memories before the first token, for `prefill`; keys, values and tails in `dtype`."""
  memories = empty(config, B, dtype)
  if memory.drafter is None:
    return memories
  of = memory.drafter.attention
  rows = jnp.zeros((B, memory.drafter.window, of.kv_heads, of.head_dim), dtype)
  none = Recent(rows, rows, jnp.zeros((B,), jnp.int32))
  return memories + (none,) * memory.drafter.layers


def prefill(
  params: Params | Pair,
  config: Config,
  memory: ModelMemory,
  memories: Memories,
  ids: Int[Array, "B T"],
  start: Int[Array, "B"],
  nodes: Lengths,
  ops: Ops = XLA,
) -> Memories:
  """Memories after the first `nodes` of `ids`, the next tokens of texts of `start` tokens."""
  at = start[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
  mixers, n = streaming(ops, nodes)._replace(exchange=memory.exchange), config.layers
  if not isinstance(params, Pair) or memory.drafter is None:
    return forward(target_of(params), config, ids, at, mixers, memories)[1]
  target, drafter = params
  _, features, new = featured(target, config, ids, at, mixers, memories[:n], memory.drafter.taps)
  rows = context_rows(drafter, memory.drafter, features, at)
  append = lambda m, kv: Recent(
    last(m.k, kv.k.astype(m.k.dtype), nodes)[1],
    last(m.v, kv.v.astype(m.v.dtype), nodes)[1],
    jnp.minimum(m.length + nodes, m.k.shape[1]),
  )
  return new + tuple(map(append, memories[n:], rows))


def verify(
  params: Params | Pair,
  config: Config,
  memory: ModelMemory,
  carry: Any,
  draft: Draft,
  positions: Int[Array, "B T"],
  slots: Slots,
) -> tuple[Logits, Any]:
  """Next-token logits [B, T, vocab] of every node, and the flight of every layer."""
  _, parents, nodes = draft
  mixers = Mixers(
    conv=lambda m, x, taps: memory.conv.verify(m, x, taps, parents, nodes, slots),
    recurrent=lambda m, raw, gates: memory.state.verify(
      m, Window(raw, parents, nodes, slots), gates
    ),
    attend=lambda m, q, k, v: memory.rows.verify(m, q, k, v, parents, nodes, slots),
    exchange=memory.exchange,
  )
  real = jnp.arange(draft.tokens.shape[1])[None] < nodes[:, None]
  ids, n = jnp.where(real, draft.tokens, 0), config.layers
  if not isinstance(params, Pair) or memory.drafter is None:
    return forward(target_of(params), config, ids, positions, mixers, carry)
  target, drafter = params
  logits, features, flight = featured(
    target, config, ids, positions, mixers, carry[:n], memory.drafter.taps
  )
  rows = context_rows(drafter, memory.drafter, features, positions)
  return logits, flight + tuple(
    in_flight(c, *kv, nodes, slots) for c, kv in zip(carry[n:], rows, strict=True)
  )
