"""What is done to decode slots, compiled once each: read a prompt, write and read rows, decode.

programs = compiled(params, config, memory, drafter)
memories = programs.prefill(memories, ids, start, count)      # up to `block` tokens of one prompt
state = programs.admit(state, slot, text, length, memories)   # a new tenant: every leaf of its row
state, report = programs.step(state, batch)                   # donates the pools
rows = programs.save(state, slot)                             # bit for bit, pending history and all
state = programs.restore(state, slot, rows)                   # resume there, or fork into another

A tenant that is retracted takes its ring, cursors and conv window along as they are, so what is
resumed decodes on as if nothing had happened. Only a prefix cache needs materialised states.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from commit_schemes.contract import admit
from commit_schemes.decoding.accept import greedy
from commit_schemes.decoding.drafts import Drafter
from commit_schemes.decoding.loop import Accept, Batch, Decoding, Marking, Report, step
from commit_schemes.model import ModelMemory, Pair, fresh, prefill, target_of
from gdn.config import Config
from gdn.hybrid import Memories, Params
from gdn.ops import XLA, Ops
from gdn.pool import put, take


class Programs(NamedTuple):
  """Jitted; `admit`, `restore` and `step` donate the pools. Slots are int32[1] except in a Batch.

  new      slots, capacity -> Decoding
  empty    () -> memories of one sequence before its first token
  prefill  memories, ids [1, block], start int32[1], count int32[1] -> memories; donates nothing
  admit    state, slot, text [1, L], length [1], memories -> state
  save     state, slot -> Decoding of one row
  restore  state, slot, rows -> state
  step     state, batch -> state, Report
  """

  new: Callable[[int, int], Decoding]
  empty: Callable[[], Memories]
  prefill: Callable[..., Memories]
  admit: Callable[..., Decoding]
  save: Callable[..., Decoding]
  restore: Callable[..., Decoding]
  step: Callable[..., tuple[Decoding, Report]]


def vacant(config: Config, memory: ModelMemory, dtype: Any, slots: int, capacity: int) -> Decoding:
  """A pool of slots without tenants, for texts of up to `capacity` tokens."""
  text, length = jnp.zeros((slots, capacity), jnp.int32), jnp.zeros(slots, jnp.int32)
  return Decoding(text, length, memory.whole.init(fresh(config, memory, slots, dtype)))


def seat(memory: ModelMemory, state: Decoding, slot, text, length, memories) -> Decoding:
  """The pools with `slot` given to a text whose first length - 1 tokens are in `memories`."""
  carry = admit(memory.whole, state.carry, slot, memories)
  return Decoding(put(state.text, slot, text), put(state.length, slot, length), carry)


def save(state: Decoding, slot) -> Decoding:
  """The rows of a slot, bit for bit."""
  return jax.tree.map(lambda x: take(x, slot), state)


def restore(state: Decoding, slot, rows: Decoding) -> Decoding:
  """The pools with `slot` given to saved rows."""
  return jax.tree.map(lambda pool, x: put(pool, slot, x), state, rows)


SAVE, RESTORE = jax.jit(save), jax.jit(restore, donate_argnums=0)


def compiled(
  params: Params | Pair,
  config: Config,
  memory: ModelMemory,
  drafter: Drafter,
  *,
  ops: Ops = XLA,
  accept: Accept = greedy,
  marking: Marking | None = None,
) -> Programs:
  """The programs of one device."""
  dtype = target_of(params).embed.dtype
  one_step = jax.jit(
    lambda params, state, batch: step(
      params, config, memory, drafter, state, batch, accept, marking
    ),
    donate_argnums=1,
  )
  read = jax.jit(
    lambda params, memories, ids, start, count: prefill(
      params, config, memory, memories, ids, start, count, ops
    )
  )
  return Programs(
    # Compiled, or layers would share one buffer of zeros, which cannot be donated twice.
    new=jax.jit(partial(vacant, config, memory, dtype), static_argnums=(0, 1)),
    empty=lambda: fresh(config, memory, 1, dtype),
    prefill=lambda *args: read(params, *args),
    admit=jax.jit(lambda *args: seat(memory, *args), donate_argnums=0),
    save=SAVE,
    restore=RESTORE,
    step=lambda state, batch: one_step(params, state, batch),
  )


def batch_of(nodes: list[int]) -> Batch:
  """A batch row for each slot in order; `nodes` below 1 is a slot that does not run."""
  slots = [slot if n > 0 else -1 for slot, n in enumerate(nodes)]
  return Batch(jnp.asarray(slots, jnp.int32), jnp.asarray(nodes, jnp.int32))
