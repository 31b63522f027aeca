"""Keep one rank-one write per node; commit folds the accepted ones into the state at once.

SGLang PR 27658: key, pseudo-value and decay of a node in place of its state.
"""

from typing import NamedTuple

from commit_schemes.contract import CommitScheme, Spec, pending, recurrent
from gdn.typing import Accepted, Pool, Rows, Slots


class Flight(NamedTuple):
  """The state pool and, by batch row, the write of every node."""

  S: Pool
  rows: Rows
  slots: Slots


def delta_cache(spec: Spec) -> CommitScheme:
  """Chains and trees; GDN and KDA."""

  def verify(S, window, gates):
    o, _, rows = spec.ops.verify(S, window, gates, parts=spec.dtypes.rows)
    return o, Flight(S, rows, window.slots)

  def commit(flight: Flight, accepted: Accepted):
    S, rows, slots = flight
    return spec.ops.fold_rank(S, rows, pending(accepted, slots), slots)

  return recurrent(spec, lambda S: S.astype(spec.dtypes.checkpoint), verify, commit, lambda S: S)
