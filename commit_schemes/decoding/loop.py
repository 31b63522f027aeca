"""The decode loop over slots: draft, verify, accept, commit, append. One compiled step for all.

A slot's newest token is its anchor: known, but in no memory yet. Each step verifies the anchor and
a draft behind it, commits the accepted path, and appends the accepted tokens and a bonus token, the
next anchor. So every committed token has been verified exactly once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from commit_schemes.decoding.accept import Verdict, greedy
from commit_schemes.decoding.drafts import Drafter, Text
from commit_schemes.model import Draft, ModelMemory, verify
from gdn.config import Config
from gdn.hybrid import Params, forward
from gdn.ops import XLA, Ops
from gdn.pool import along
from gdn.streaming import empty, streaming
from gdn.window import ancestors, depth

Accept = Callable[[Array, Draft], Verdict]


class Decoding(NamedTuple):
  """All slots. `length` counts known tokens; all but the newest are in `carry`."""

  text: Text
  length: Int[Array, "B"]
  carry: Any


class Report(NamedTuple):
  """What one step did: how many tokens it appended, and the two highest logits behind each."""

  emitted: Int[Array, "B"]
  top: Float[Array, "B T 2"]  # NaN past `emitted`


def prefilled(
  params: Params, config: Config, memory: ModelMemory, prompts: list[bytes] | list[list[int]],
  *, capacity: int, ops: Ops = XLA
) -> Decoding:  # fmt: skip
  """Slots that have read their prompts, all but the last token of each.

  ValueError: no prompt, an empty one, a token outside the vocabulary, or one that leaves no room in
  `capacity`.
  """
  if not prompts:
    raise ValueError("no prompt given; one per slot is needed")
  for i, p in enumerate(prompts):
    if not 0 < len(p) < capacity:
      raise ValueError(f"prompt {i} has {len(p)} tokens; allowed: 1 to {capacity - 1}")
    if not all(0 <= t < config.vocab for t in p):
      raise ValueError(f"prompt {i} has a token outside 0 to {config.vocab - 1}")
  B, longest = len(prompts), max(map(len, prompts))
  length = jnp.asarray([len(p) for p in prompts], jnp.int32)
  rows = [list(p) + [0] * (capacity - len(p)) for p in prompts]
  text = jnp.asarray(rows, jnp.int32)
  memories = empty(config, B, params.embed.dtype)
  read = max(longest - 1, 1)
  positions = jnp.broadcast_to(jnp.arange(read, dtype=jnp.int32)[None], (B, read))
  mixers = streaming(ops, length - 1)
  _, memories = forward(params, config, text[:, :read], positions, mixers, memories)
  return Decoding(text, length, memory.whole.init(memories))


def step(
  params: Params,
  config: Config,
  memory: ModelMemory,
  drafter: Drafter,
  state: Decoding,
  running: Bool[Array, "B"],
  accept: Accept = greedy,
) -> tuple[Decoding, Report]:
  """One window of every running slot; the others keep every bit. Pure: jit once, donate `state`."""
  text, length, carry = state
  B, L = text.shape
  running &= length < L
  draft = drafter(text, length)
  room = L - length  # the last place is for the bonus token
  draft = draft._replace(nodes=jnp.where(running, jnp.minimum(draft.nodes, room), 0))
  slots = jnp.where(running, jnp.arange(B, dtype=jnp.int32), -1)
  deep = jax.vmap(lambda p, n: depth(ancestors(jnp.where(jnp.arange(p.shape[0]) < n, p, -1))))
  positions = length[:, None] - 1 + deep(draft.parents, draft.nodes)
  logits, flight = verify(params, config, memory, carry, draft, positions, slots)
  accepted, bonus = accept(logits, draft)
  carry = memory.whole.commit(flight, accepted)

  i = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
  on = i < accepted.length[:, None]
  tokens = along(draft.tokens, jnp.roll(accepted.path, -1, axis=1), on)
  tokens = jnp.where(i == accepted.length[:, None] - 1, bonus[:, None], tokens)
  at = jnp.where(on, length[:, None] + i, L)
  text = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(text, at, tokens)
  top = along(jax.lax.top_k(logits, 2)[0], accepted.path, on)
  report = Report(accepted.length, jnp.where(on[..., None], top, jnp.nan))
  return Decoding(text, length + accepted.length, carry), report


def decode(
  params: Params,
  config: Config,
  memory: ModelMemory,
  drafter: Drafter,
  state: Decoding,
  *,
  until: int,
  accept: Accept = greedy,
  progress: Callable[[int], None] = lambda known: None,
) -> tuple[Decoding, list[Report]]:
  """Decode until every slot knows `until` tokens. ValueError: `until` beyond the capacity."""
  if until > state.text.shape[1]:
    raise ValueError(f"until={until} exceeds the capacity of {state.text.shape[1]} tokens")
  one = jax.jit(
    lambda params, state: step(
      params, config, memory, drafter, state, state.length < until, accept
    ),
    donate_argnums=1,
  )
  reports = []
  while (known := int(state.length.min())) < until:
    progress(known)
    state, report = one(params, state)
    reports.append(report)
  progress(until)
  return state, reports
