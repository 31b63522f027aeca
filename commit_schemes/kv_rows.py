"""The attention's memory: keys and values of the last `window` tokens. Commit appends the path.

The same contract as a recurrent state. Rows of rejected nodes never enter the pool: they stay in
flight, and a query of the window sees the committed rows, its ancestors and itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from commit_schemes.contract import CommitScheme, scheme
from gdn.attention import attend
from gdn.pool import along, bcast, put, put_at, take
from gdn.streaming import Recent
from gdn.typing import Accepted, Slots
from gdn.window import ancestors, depth


class Carry(NamedTuple):
  """A ring: the token at position p lies in row p modulo L; `length` counts tokens, not rows."""

  k: Float[Array, "N L Hkv D"]
  v: Float[Array, "N L Hkv D"]
  length: Int[Array, "N"]


class Flight(NamedTuple):
  """The pool and, by batch row, the keys and values of every node."""

  carry: Carry
  k: Float[Array, "B T Hkv D"]
  v: Float[Array, "B T Hkv D"]
  slots: Slots


def in_flight(carry: Carry, k, v, nodes, slots) -> Flight:
  """A window's new rows [B, T, Hkv, D] beside the pool; nodes that do not exist have zeros."""
  on = (jnp.arange(k.shape[1])[None] < nodes[:, None]) & (slots >= 0)[:, None]
  real = lambda x: jnp.where(bcast(on, x), x, jnp.zeros((), x.dtype))
  return Flight(carry, real(k), real(v), slots)


def turn(x, by):
  return jax.vmap(lambda row, n: jnp.roll(row, n, axis=0))(x, by)


def held(length, L: int):
  """Position of the token in each of a slot's L rows, negative where there is none."""
  row = jnp.arange(L, dtype=jnp.int32)
  return length - 1 - (length - 1 - row) % L  # the newest that the row can hold


def visible(length, parents, nodes, L: int):
  """[T, L + T] of one slot: which committed rows and which nodes each node's query sees."""
  T = parents.shape[0]
  M = ancestors(parents)
  at = length + depth(M)
  position = held(length, L)
  old = (position >= 0)[None] & (position[None] > at[:, None] - L)
  own = M | jnp.eye(T, dtype=bool)
  near = at[None] > at[:, None] - L
  return jnp.concatenate([old, own & near], axis=1) & (jnp.arange(T) < nodes)[:, None]


def kv_rows() -> CommitScheme:
  """`init` takes and `materialize` gives a `Recent`: rows in order, newest last.

  The attention window L is the number of its rows. verify takes rotated queries, keys, values.
  """

  def init(recent: Recent) -> Carry:
    missing = recent.k.shape[1] - recent.length
    return Carry(turn(recent.k, -missing), turn(recent.v, -missing), recent.length)

  def verify(carry: Carry, q, k, v, parents, nodes, slots):
    L, T = carry.k.shape[1], parents.shape[1]
    on = (jnp.arange(T)[None] < nodes[:, None]) & (slots >= 0)[:, None]
    flight = in_flight(carry, k, v, nodes, slots)
    q = jnp.where(bcast(on, q), q, jnp.zeros((), q.dtype))
    rows = lambda pool, new: jnp.concatenate([take(pool, slots).astype(new.dtype), new], axis=1)
    see = jax.vmap(visible, in_axes=(0, 0, 0, None))(
      take(carry.length, slots), jnp.where(on, parents, -1), jnp.where(slots < 0, 0, nodes), L
    )
    o = jax.vmap(attend)(q, rows(carry.k, flight.k), rows(carry.v, flight.v), see)
    return o, flight

  def commit(flight: Flight, accepted: Accepted) -> Carry:
    carry, k, v, slots = flight
    i = jnp.arange(accepted.path.shape[1], dtype=jnp.int32)[None]
    on = i < accepted.length[:, None]
    length = take(carry.length, slots)
    at = jnp.where(on, (length[:, None] + i) % carry.k.shape[1], -1)
    store = lambda pool, x: put_at(pool, slots, at, along(x, accepted.path, on))
    return Carry(
      store(carry.k, k), store(carry.v, v), put(carry.length, slots, length + accepted.length)
    )

  def materialize(carry: Carry) -> Recent:
    L = carry.k.shape[1]
    newest_last = lambda x: turn(x, -carry.length)
    return Recent(newest_last(carry.k), newest_last(carry.v), jnp.minimum(carry.length, L))

  return scheme(init, verify, commit, materialize)
