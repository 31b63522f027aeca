"""Keep the last window's writes; commit records the path, and the next verify folds it first.

TreeWY (arXiv 2608.20961; vLLM `reconstruct`): one pass over the state per step reads it, folds,
writes it and verifies. A commit moves no state at all.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from commit_schemes.contract import CommitScheme, Spec, prefixes, recurrent
from gdn.pool import put, take
from gdn.typing import Accepted, Pending, Pool, Rows, Slots


class Carry(NamedTuple):
  """`S` is `length` tokens behind the stream: the first `length` entries of `path` among `rows`.

  No path is kept of chains: it is the first `length` rows.
  """

  S: Pool
  rows: Rows
  path: Int[Array, "N R"] | None
  length: Int[Array, "N"]


class Flight(NamedTuple):
  """The carry with the new window's writes in `rows`, those of before in `S`.

  Of the window's slots `path` and `length` are out of date, until commit writes them.
  """

  carry: Carry
  slots: Slots


def empty_rows(spec: Spec, S: Pool, R: int) -> Rows:
  """R zero rows per slot of the pool."""
  N, H, V, K = S.shape
  parts = lambda *shape: tuple(jnp.zeros((N, R, *shape), d) for d in spec.dtypes.rows)
  return Rows(
    parts(spec.key_heads, K), parts(H, V), jnp.zeros((N, R, H, spec.channels), jnp.float32)
  )


def tree_wy(spec: Spec) -> CommitScheme:
  """Chains and trees; GDN and KDA. Windows of at most `spec.window` nodes."""
  ops, R = spec.ops, spec.window

  def init(S) -> Carry:
    N = S.shape[0]
    return Carry(
      S.astype(spec.dtypes.checkpoint),
      empty_rows(spec, S, R),
      None if spec.topology == "chain" else jnp.zeros((N, R), jnp.int32),
      jnp.zeros(N, jnp.int32),
    )

  def last(carry: Carry, slots: Slots) -> Pending:
    """What each slot's state has not received."""
    path = prefixes(slots.shape[0], R) if carry.path is None else take(carry.path, slots)
    return Pending(slots, path, take(carry.length, slots))

  def verify(carry: Carry, window, gates):
    slots = window.slots
    zero, pending = jnp.zeros_like(slots), last(carry, slots)
    o, _, S, rows = ops.step(carry.S, carry.rows, pending, True, zero, window, gates)
    return o, Flight(carry._replace(S=S, rows=rows), slots)

  def commit(flight: Flight, accepted: Accepted) -> Carry:
    carry, slots = flight
    path = carry.path
    if path is not None:
      new = jnp.pad(accepted.path, ((0, 0), (0, max(R - accepted.path.shape[1], 0))))[:, :R]
      path = put(path, slots, new)
    return carry._replace(path=path, length=put(carry.length, slots, accepted.length))

  def materialize(carry: Carry):
    slots = jnp.arange(carry.S.shape[0], dtype=jnp.int32)
    return ops.fold_rank(carry.S, carry.rows, last(carry, slots), slots)

  return recurrent(spec, init, verify, commit, materialize)
