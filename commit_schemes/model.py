"""A whole model behind one acceptance: every layer's convolution, state and KV rows commit as one.

memory = model_memory(config, spec, SCHEMES["ring_exact"])
carry = memory.init(memories)               # what `gdn.streaming` left after the prompt
logits, flight = verify(params, config, memory, carry, draft, positions, slots)
carry = memory.commit(flight, accepted)     # one Accepted for all layers
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from commit_schemes.contract import CommitScheme, together
from commit_schemes.conv_window import conv_window
from commit_schemes.kv_rows import kv_rows
from gdn.config import Config
from gdn.hybrid import Logits, Mixers, Params, forward
from gdn.layer import GDNMemory
from gdn.ops import XLA, Ops
from gdn.typing import Slots, Window


class Draft(NamedTuple):
  """A tree of tokens per slot. Node 0 is the anchor: the newest known token, in no memory yet."""

  tokens: Int[Array, "B T"]
  parents: Int[Array, "B T"]
  nodes: Int[Array, "B"]


class ModelMemory(NamedTuple):
  """The scheme of each kind of memory and, over all layers, what they do together.

  `join` is that of `Mixers`: where heads lie on several devices, a sum over them.
  """

  conv: CommitScheme
  state: CommitScheme
  rows: CommitScheme
  whole: CommitScheme
  join: Callable[[Array], Array]


def model_memory(
  config: Config,
  state: CommitScheme,
  ops: Ops = XLA,
  join: Callable[[Array], Array] = lambda x: x,
) -> ModelMemory:
  """Memories of a hybrid model whose recurrent layers use the scheme `state`."""
  conv, rows = conv_window(ops), kv_rows()
  layer = lambda i: rows if config.is_attention(i) else GDNMemory(conv, state)
  return ModelMemory(conv, state, rows, together(tuple(map(layer, range(config.layers)))), join)


def verify(
  params: Params,
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
    join=memory.join,
  )
  real = jnp.arange(draft.tokens.shape[1])[None] < nodes[:, None]
  ids = jnp.where(real, draft.tokens, 0)
  return forward(params, config, ids, positions, mixers, carry)
