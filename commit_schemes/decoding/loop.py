"""The decode step over slots: draft, verify, accept, commit, append. One compiled step for all.

A slot's newest token is its anchor: known, but in no memory yet. Each step verifies the anchor and
a draft behind it, commits the accepted path, and appends the accepted tokens and a bonus token, the
next anchor. So every committed token has been verified exactly once.

Which slots run, how long their drafts may be and how much of them is accepted is data: requests of
every length share one program.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from commit_schemes.contract import narrow
from commit_schemes.decoding.accept import Verdict, greedy
from commit_schemes.decoding.drafts import Behind, Drafter
from commit_schemes.model import Draft, ModelMemory, Pair, fresh, prefill, target_of, verify
from gdn.config import Config
from gdn.hybrid import Memories, Params
from gdn.ops import XLA, Ops
from gdn.pool import along, put, take
from gdn.typing import Accepted, Slots
from gdn.window import ancestors, depth

Accept = Callable[[Array, Draft], Verdict]


class Decoding(NamedTuple):
  """The pool of decode slots. `length` counts known tokens; all but the newest are in `carry`.

  Every leaf has the leading axis N, so a slot is a row: it is saved, resumed and forked by reading
  and writing rows.
  """

  text: Int[Array, "N L"]
  length: Int[Array, "N"]
  carry: Any


class Batch(NamedTuple):
  """What a step does for each batch row.

  slots  row of the pool, each at most once; -1 is padding and touches nothing
  nodes  most nodes of its window: 1 is the anchor alone, a step without a draft; below 1 is padding
  """

  slots: Slots
  nodes: Int[Array, "B"]


class Marking(NamedTuple):
  """What a prefix cache asks of a step: memories at multiples of `block`, of up to `rows` slots."""

  block: int
  rows: int


class Marks(NamedTuple):
  """Materialised memories of slots whose text has crossed a block boundary in this step.

  row      batch row; -1 is padding
  depth    tokens in the memories: a multiple of the block
  memories each layer's, as `gdn.streaming` leaves them; zeros for padding
  """

  row: Int[Array, "M"]
  depth: Int[Array, "M"]
  memories: Memories


class Report(NamedTuple):
  """What one step did. `tokens` and the two highest logits behind each hold past `emitted` nothing
  that may be read (0 and NaN)."""

  emitted: Int[Array, "B"]
  tokens: Int[Array, "B T"]
  top: Float[Array, "B T 2"]
  marks: Marks | None


def prefilled(
  params: Params | Pair, config: Config, memory: ModelMemory,
  prompts: list[bytes] | list[list[int]], *, capacity: int, ops: Ops = XLA
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
  memories = fresh(config, memory, B, target_of(params).embed.dtype)
  ids, start = text[:, : max(longest - 1, 1)], jnp.zeros_like(length)
  memories = prefill(params, config, memory, memories, ids, start, length - 1, ops)
  return Decoding(text, length, memory.whole.init(memories))


def marked(
  memory: ModelMemory, flight: Any, accepted: Accepted, before: Int[Array, "B"], marking: Marking
) -> Marks:
  """The latest boundary that each row's committed tokens cross, by their number after the verify.

  `before` is how many tokens the memories held. Taken from the flight, so history that is pending
  in a carry is in it. Rows beyond `marking.rows` are left out: a later miss, never a wrong state.
  """
  B = before.shape[0]
  point = (before + accepted.length) // marking.block * marking.block
  crossed = (accepted.length > 0) & (point > before)
  row = jnp.nonzero(crossed, size=min(marking.rows, B), fill_value=-1)[0].astype(jnp.int32)
  prefix = Accepted(take(accepted.path, row), take(jnp.where(crossed, point - before, 0), row))
  some = lambda: memory.whole.state_at(narrow(flight, row), prefix)
  nothing = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(some))
  return Marks(row, take(point, row), jax.lax.cond((row >= 0).any(), some, nothing))


def step(
  params: Params | Pair,
  config: Config,
  memory: ModelMemory,
  drafter: Drafter,
  state: Decoding,
  batch: Batch,
  accept: Accept = greedy,
  marking: Marking | None = None,
) -> tuple[Decoding, Report]:
  """One window of every row; other slots keep every bit. Pure: jit once, donate `state`."""
  L = state.text.shape[1]
  text, length = take(state.text, batch.slots), take(state.length, batch.slots)
  draft = drafter(text, length, Behind(params, state.carry, batch.slots, memory.exchange))
  room = L - length  # the last place is for the bonus token
  nodes = jnp.minimum(jnp.minimum(draft.nodes, batch.nodes), room)
  draft = draft._replace(nodes=jnp.where(batch.slots < 0, 0, jnp.maximum(nodes, 0)))
  slots = jnp.where(draft.nodes > 0, batch.slots, -1)
  deep = jax.vmap(lambda p, n: depth(ancestors(jnp.where(jnp.arange(p.shape[0]) < n, p, -1))))
  positions = length[:, None] - 1 + deep(draft.parents, draft.nodes)
  logits, flight = verify(params, config, memory, state.carry, draft, positions, slots)
  accepted, bonus = accept(logits, draft)
  marks = None
  if marking is not None:
    marks = marked(memory, flight, accepted, length - 1, marking)
    # Rows are read before the commit writes: otherwise XLA copies the pools to be able to.
    marks, flight = jax.lax.optimization_barrier((marks, flight))
  carry = memory.whole.commit(flight, accepted)

  i = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None]
  on = i < accepted.length[:, None]
  tokens = along(draft.tokens, jnp.roll(accepted.path, -1, axis=1), on)
  tokens = jnp.where(on & (i == accepted.length[:, None] - 1), bonus[:, None], tokens)
  at = jnp.where(on, length[:, None] + i, L)
  text = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(text, at, tokens)
  top = along(jax.lax.top_k(logits, 2)[0], accepted.path, on)
  new = Decoding(
    put(state.text, slots, text), put(state.length, slots, length + accepted.length), carry
  )
  return new, Report(accepted.length, tokens, jnp.where(on[..., None], top, jnp.nan), marks)


def every(running: Bool[Array, "N"], window: int) -> Batch:
  """A batch row for each slot of the pool in order; those that do not run are padding."""
  slots = jnp.arange(running.shape[0], dtype=jnp.int32)
  return Batch(jnp.where(running, slots, -1), jnp.where(running, window, 0).astype(jnp.int32))


def decode(
  params: Params | Pair,
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
  L = state.text.shape[1]
  if until > L:
    raise ValueError(f"until={until} exceeds the capacity of {L} tokens")
  one = jax.jit(
    lambda params, state: step(
      params, config, memory, drafter, state, every(state.length < until, L), accept
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
