"""The convolution's memory: the last W - 1 inputs. Commit slides it over the accepted path.

The same contract as a recurrent state. A chain could share columns between nodes (SGLang PR 28302
stores T + W - 1 of them); here the inputs of the window are in flight once, for chains and trees.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from commit_schemes.contract import CommitScheme, scheme
from gdn.ops import XLA, Ops
from gdn.pool import along, put, take
from gdn.typing import Accepted, Slots


class Flight(NamedTuple):
  """The pool of tails and, by batch row, the inputs of every node."""

  tail: Float[Array, "N tail C"]
  x: Float[Array, "B T C"]
  slots: Slots


def conv_window(ops: Ops = XLA) -> CommitScheme:
  """`init` takes the tails [N, W-1, C]; verify takes the inputs and taps in place of raw tokens."""

  def verify(tail, x, taps, parents, nodes, slots):
    return ops.conv(tail, x, taps, parents, nodes, slots), Flight(tail, x, slots)

  def commit(flight: Flight, accepted: Accepted):
    tail, x, slots = flight
    back, P = tail.shape[1], accepted.path.shape[1]
    on = jnp.arange(P)[None] < accepted.length[:, None]
    rows = jnp.concatenate(
      [take(tail, slots), along(x, accepted.path, on).astype(tail.dtype)], axis=1
    )
    slide = jax.vmap(lambda r, n: jax.lax.dynamic_slice_in_dim(r, n, back))
    return put(tail, slots, slide(rows, accepted.length))

  return scheme(lambda tail: tail, verify, commit, lambda tail: tail)
