"""Keep a checkpoint and a ring of recent writes; the state is written only when the ring is full.

    open_loop    a fold adds the pseudo-values as they were stored (ReplaySSM, first revision)
    compensated  the same, with each stored as hi + lo bfloat16 (SGLang PR 35544)
    exact        the ring also keeps raw k, v, beta; a fold replays them (SGLang PR 28695 as merged)

The checkpoint is written at one place: a verify first folds a slot's h committed rows when the
window would not fit behind them. Published engines set the flag at commit and so fold one window
earlier, at h + 2T > R: `flush="early"`.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from commit_schemes.contract import CommitScheme, Spec, recurrent
from commit_schemes.tree_wy import empty_rows
from gdn.pool import along, put, put_at, take
from gdn.typing import Accepted, Pending, Pool, Records, Rows, Slots

FOLDS = ("open_loop", "exact", "compensated")
FLUSHES = {"full": 1, "early": 2}


class Inputs(NamedTuple):
  """What replays the ring, with the g of its rows: k before its norm, beta in float32."""

  k: Float[Array, "N R Hk K"]
  v: Float[Array, "N R H V"]
  beta: Float[Array, "N R H"]


class Carry(NamedTuple):
  """`S` is `h` tokens behind the stream: rows base, base + 1, ... base + h - 1 modulo R."""

  S: Pool
  rows: Rows
  inputs: Inputs | None
  cursor: Int[Array, "N 2"]  # base, h

  @property
  def base(self) -> Any:
    return self.cursor[:, 0]

  @property
  def h(self) -> Any:
    return self.cursor[:, 1]


class Flight(NamedTuple):
  """The carry with the window's rows past the cursor, where they are not yet part of it.

  `cursor` is that of each batch row since verify; the pool's is of before, until commit writes it.
  """

  carry: Carry
  cursor: Int[Array, "B 2"]
  slots: Slots


def ring(
  spec: Spec,
  *,
  slots: int,
  fold: Literal["open_loop", "exact", "compensated"],
  flush: Literal["full", "early"] = "full",
) -> CommitScheme:
  """Chains and trees (a tree moves its path's rows); GDN and KDA.

  ValueError: `slots` below spec.window (twice that with flush="early"), unknown fold or flush.
  """
  if fold not in FOLDS:
    raise ValueError(f"fold={fold!r} must be one of {FOLDS}")
  if flush not in FLUSHES:
    raise ValueError(f"flush={flush!r} must be one of {tuple(FLUSHES)}")
  if slots < FLUSHES[flush] * spec.window:
    raise ValueError(
      f"a ring of {slots} slots is too short: a window of {spec.window} nodes with "
      f"flush={flush!r} needs at least {FLUSHES[flush] * spec.window}"
    )
  if fold == "compensated":
    spec = spec._replace(dtypes=spec.dtypes._replace(rows=(jnp.bfloat16, jnp.bfloat16)))
  ops, R = spec.ops, slots

  def init(S) -> Carry:
    N, H, V, K = S.shape
    inputs = Inputs(
      jnp.zeros((N, R, spec.key_heads, K), spec.dtypes.raw),
      jnp.zeros((N, R, H, V), spec.dtypes.raw),
      jnp.zeros((N, R, H), jnp.float32),
    )
    return Carry(
      S.astype(spec.dtypes.checkpoint),
      empty_rows(spec, S, R),
      inputs if fold == "exact" else None,
      jnp.zeros((N, 2), jnp.int32),
    )

  def live(carry: Carry, slots: Slots) -> Pending:
    """Every committed row of each slot, oldest first."""
    base, h = take(carry.cursor, slots).T
    return Pending(slots, (base[:, None] + jnp.arange(R, dtype=jnp.int32)[None]) % R, h)

  def folded(carry: Carry, rows: Pending, slots: Slots) -> Pool:
    if carry.inputs is not None:
      return ops.fold_raw(carry.S, Records(*carry.inputs, carry.rows.g), rows, slots)
    return ops.fold_rank(carry.S, carry.rows, rows, slots)

  def verify(carry: Carry, window, gates):
    T, slots = window.parents.shape[1], window.slots
    rows = live(carry, slots)
    base, h = rows.path[:, 0], rows.length
    full = (h > 0) & (h + FLUSHES[flush] * T > R)
    at = (base + h) % R
    S, pending, now = carry.S, rows, full
    if fold == "exact":
      S = folded(carry, rows._replace(length=jnp.where(full, h, 0)), slots)
      pending = rows._replace(length=jnp.where(full, 0, h))
      now = False
    o, gate, S, written = ops.step(S, carry.rows, pending, now, at, window, gates)
    inputs = carry.inputs
    if inputs is not None:
      new = Inputs(window.raw.k, window.raw.v, gate.beta)
      # After the fold has read them: otherwise XLA copies the pools to store into.
      S, new = jax.lax.optimization_barrier((S, new))
      inputs = ops.append(inputs, slots, at, window.nodes, new)
    cursor = jnp.stack([jnp.where(full, at, base), jnp.where(full, 0, h)], axis=1)
    return o, Flight(Carry(S, written, inputs, carry.cursor), cursor, slots)

  def commit(flight: Flight, accepted: Accepted) -> Carry:
    carry, (base, h), slots = flight.carry, flight.cursor.T, flight.slots
    i = jnp.arange(accepted.path.shape[1], dtype=jnp.int32)[None]
    moves = (i < accepted.length[:, None]) & (accepted.path != i)
    here = lambda t: ((base + h)[:, None] + t) % R

    def compact(pool):
      path = along(take(pool, slots), here(jnp.where(moves, accepted.path, 0)), moves)
      return put_at(pool, slots, jnp.where(moves, here(i), -1), path)

    rows, inputs = carry.rows, carry.inputs
    if spec.topology == "tree":
      rows, inputs = jax.tree.map(compact, (rows, inputs))
    cursor = put(carry.cursor, slots, jnp.stack([base, h + accepted.length], axis=1))
    return Carry(carry.S, rows, inputs, cursor)

  def materialize(carry: Carry):
    slots = jnp.arange(carry.S.shape[0], dtype=jnp.int32)
    return folded(carry, live(carry, slots), slots)

  return recurrent(spec, init, verify, commit, materialize)
