"""Keep the state after every node; commit picks one. The baseline of every engine.

SGLang and vLLM (`store_all`) do this by default: no arithmetic at commit, T states in flight.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from commit_schemes.contract import CommitScheme, Spec, recurrent
from gdn.pool import put
from gdn.typing import Accepted, Pool, Slots


class Flight(NamedTuple):
  """The state pool and, by batch row, the state after every node."""

  S: Pool
  states: Float[Array, "B T H V K"]
  slots: Slots


def pick(S: Pool, states: Float[Array, "B keep H V K"], accepted: Accepted, slots: Slots) -> Pool:
  """The pool with each row's last accepted node's state; nothing accepted touches nothing."""
  B = slots.shape[0]
  last = jnp.take_along_axis(accepted.path, jnp.maximum(accepted.length - 1, 0)[:, None], axis=1)[
    :, 0
  ]
  return put(
    S, jnp.where(accepted.length > 0, slots, -1), states.at[jnp.arange(B), last].get(mode="clip")
  )


def snapshot(spec: Spec) -> CommitScheme:
  """Chains and trees; GDN and KDA."""

  def verify(S, window, gates):
    o, _, states = spec.ops.snapshot(S, window, gates, keep=window.parents.shape[1])
    return o, Flight(S, states, window.slots)

  def commit(flight: Flight, accepted: Accepted):
    return pick(flight.S, flight.states, accepted, flight.slots)

  return recurrent(spec, lambda S: S.astype(spec.dtypes.checkpoint), verify, commit, lambda S: S)
