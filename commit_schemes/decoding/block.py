"""The block drafter as a drafter: one pass over the committed rows gives a chain or a tree.

    memory = model_memory(config, state, drafter=drafter_config)
    step(Pair(target, drafter), config, memory, block_drafter(drafter_config, chain(16)), ...)

The drafts are the marginals' most likely tokens, chosen and not drawn, greedy or sampled: as
published (DFlash sec. 3; SGLang's DFlash worker). So `sampled` takes them as point masses and needs
no proposal.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from commit_schemes import kv_rows
from commit_schemes.decoding.drafts import Behind, Drafter, Text, anchors
from commit_schemes.decoding.trees import Shape
from commit_schemes.model import Draft, Pair
from gdn.drafter import DrafterConfig, KeyValues, marginals
from gdn.exchange import ALONE, Exchange
from gdn.pool import take
from gdn.typing import Slots


def next_logits(
  config: DrafterConfig,
  pair: Pair,
  rows: tuple[kv_rows.Carry, ...],
  anchor: Int[Array, "B"],
  at: Int[Array, "B"],
  slots: Slots,
  exchange: Exchange = ALONE,
) -> Float[Array, "B next vocab"]:
  """Float32 logits of the D - 1 tokens after each slot's anchor, which stands at position `at` and
  is in no memory; padding's are without meaning."""
  held = jax.vmap(lambda n: kv_rows.held(n, config.window))
  length = take(rows[0].length, slots)  # of what was remembered, and the anchor is the next
  row = held(length)
  back = jnp.where((row >= 0) & (slots >= 0)[:, None], length[:, None] - row, 0)[:, None]
  context = tuple(KeyValues(take(c.k, slots), take(c.v, slots)) for c in rows)
  blocks = anchor[:, None], at[:, None], context, back
  embed, head = pair.target.embed, pair.target.head
  return marginals(pair.drafter, config, embed, *blocks, head, exchange)[:, 0]


def block_drafter(config: DrafterConfig, shape: Shape) -> Drafter:
  """Drafts windows of `shape` (`trees`). ValueError: it is deeper than the drafter's block."""
  if shape.depth >= config.block:
    raise ValueError(
      f"a draft of {shape.depth} tokens after the anchor does not fit: the drafter's block is "
      f"{config.block}, allowed: at most {config.block - 1}"
    )

  def draft(text: Text, length, behind: Behind | None = None) -> Draft:
    if behind is None or not isinstance(behind.params, Pair):
      raise ValueError("a block drafter needs memories and, as params, Pair(target, drafter)")
    rows = behind.carry[config.target.layers :]
    if len(rows) != config.layers:
      raise ValueError(
        f"the carry has rows of {len(rows)} draft layers, the drafter has {config.layers}: "
        "make it by model_memory(..., drafter=config)"
      )
    params, _, slots, exchange = behind
    first = anchors(text, length)
    logits = next_logits(config, params, rows, first, length - 1, slots, exchange)
    tokens, parents, nodes = shape.build(logits[:, : shape.depth])
    tokens = jnp.concatenate([first[:, None], tokens], axis=1)
    return Draft(tokens, parents, jnp.where(length > 0, nodes, 0))

  return draft
