"""Keep the first K states and every raw input; commit replays the accepted tail from the last kept.

`keep=0` keeps no state and replays the whole prefix (SGLang PR 26520, mode none; with raw records
also PR 32692, a fold at every commit). `keep >= T` never replays: it is `snapshot`, bit for bit.
In between it is SGLang PR 28010, which takes chains; the rule here is the path's, so trees work.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from commit_schemes.contract import CommitScheme, Spec, pending, recurrent
from commit_schemes.snapshot import pick
from gdn.ops import Ops
from gdn.typing import Accepted, Pending, Pool, Records, Slots


class Flight(NamedTuple):
  """The state pool and, by batch row, the first K states and the raw inputs of every node."""

  S: Pool
  states: Float[Array, "B keep H V K"]
  records: Records
  slots: Slots


def tail_dense(ops: Ops, S: Pool, records: Records, tail: Pending, slots: Slots) -> Pool:
  """All rows in lockstep, those without a tail masked."""
  return ops.fold_raw(S, records, tail, slots)


def tail_compact(ops: Ops, S: Pool, records: Records, tail: Pending, slots: Slots) -> Pool:
  """Only the rows with a tail, one after another; their number is data, not a shape."""
  some = tail.length > 0
  rows = jnp.nonzero(some, size=some.shape[0], fill_value=-1)[0]

  def one(i, S):
    at = lambda x: jax.lax.dynamic_slice_in_dim(x, jnp.maximum(rows[i], 0), 1)
    return ops.fold_raw(S, records, jax.tree.map(at, tail), at(slots))

  return jax.lax.fori_loop(0, jnp.sum(some), one, S)


TAILS = {"dense": tail_dense, "compact": tail_compact}


def replay(spec: Spec, *, keep: int, tail: Literal["dense", "compact"] = "dense") -> CommitScheme:
  """Chains and trees; GDN and KDA. ValueError: `keep` below 0 or an unknown `tail`."""
  if keep < 0:
    raise ValueError(f"keep={keep} must be at least 0")
  if tail not in TAILS:
    raise ValueError(f"tail={tail!r} must be one of {sorted(TAILS)}")
  ops = spec.ops

  def verify(S, window, gates):
    T = window.parents.shape[1]
    if keep == 0:
      o, gate, _ = ops.verify(S, window, gates, parts=())  # a replay needs no writes
      states = jnp.zeros((window.slots.shape[0], 0, *S.shape[1:]), S.dtype)
    else:
      o, gate, states = ops.snapshot(S, window, gates, keep=min(keep, T))
    raw = window.raw
    return o, Flight(S, states, Records(raw.k, raw.v, *gate), window.slots)

  def commit(flight: Flight, accepted: Accepted):
    S, states, records, slots = flight
    if keep == 0:
      return TAILS[tail](ops, S, records, pending(accepted, slots), slots)
    P, T = accepted.path.shape[1], records.g.shape[1]
    on = jnp.arange(P)[None] < accepted.length[:, None]
    kept = jnp.sum(on & (accepted.path < keep), axis=1, dtype=jnp.int32)  # parents come first
    S = pick(S, states, Accepted(accepted.path, kept), slots)
    if keep >= T:
      return S
    at = jnp.minimum(kept[:, None] + jnp.arange(P)[None], P - 1)
    rest = Accepted(jnp.take_along_axis(accepted.path, at, axis=1), accepted.length - kept)
    return TAILS[tail](ops, S, records, pending(rest, slots), slots)

  return recurrent(spec, lambda S: S.astype(spec.dtypes.checkpoint), verify, commit, lambda S: S)
