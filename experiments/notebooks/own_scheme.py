# %% [markdown]
# # Bring your own scheme
#
# A scheme is four functions; `state_at` follows. This one is optimistic: it keeps the state after
# the *last* node only. If the whole window is accepted, that is the answer; otherwise the raw
# inputs of the accepted prefix are replayed. Then the laws of this repository are asked.

# %%
import sys

sys.path.append("../..")  # Jupyter starts in the folder of the notebook

# %%
from typing import NamedTuple

import jax.numpy as jnp

from commit_schemes import CommitScheme, Spec
from commit_schemes.contract import pending, recurrent
from gdn.pool import put
from gdn.typing import Records
from tests import laws
from tests.strategies import chain, make_case


class Flight(NamedTuple):
  S: jnp.ndarray
  end: jnp.ndarray  # [B, H, V, K] state after the last node
  last: jnp.ndarray  # [B] that node
  records: Records
  slots: jnp.ndarray


def optimistic(spec: Spec) -> CommitScheme:
  def verify(S, window, gates):
    o, gate, states = spec.ops.snapshot(S, window, gates, keep=window.parents.shape[1])
    last = window.nodes - 1
    at = jnp.maximum(last, 0)[:, None, None, None, None]
    end = jnp.take_along_axis(states, at, axis=1)[:, 0]
    return o, Flight(S, end, last, Records(window.raw.k, window.raw.v, *gate), window.slots)

  def commit(flight, accepted):
    length = accepted.length
    tip = jnp.take_along_axis(accepted.path, jnp.maximum(length - 1, 0)[:, None], axis=1)[:, 0]
    whole = (length > 0) & (tip == flight.last)
    rest = pending(accepted._replace(length=jnp.where(whole, 0, length)), flight.slots)
    S = spec.ops.fold_raw(flight.S, flight.records, rest, flight.slots)
    return put(S, jnp.where(whole, flight.slots, -1), flight.end)

  return recurrent(spec, lambda S: S.astype(spec.dtypes.checkpoint), verify, commit, lambda S: S)


# %% [markdown]
# A chain accepted in part, a tree accepted to its last node, a padding row; NaN wherever nothing
# may be read.

# %%
case = make_case(0, [(chain(6), [0, 1, 2]), ([-1, 0, 0, 2], [0, 2, 3]), (chain(3), [])])
mine = laws.jitted(optimistic(laws.spec()))
LAWS = (
  laws.state_at_is_materialize_after_commit,
  laws.rejected_nodes_leave_no_trace,
  laws.committing_nothing_changes_nothing,
  laws.other_slots_do_not_matter,
)


def ask(scheme: CommitScheme) -> dict[str, str]:
  """What each law says."""
  said = {}
  checks = {law.__name__: lambda law=law: law(scheme, case) for law in LAWS}
  checks["outputs_and_states_match_the_oracle"] = lambda: laws.outputs_and_states_match_the_oracle(
    scheme, False, case
  )
  for name, check in checks.items():
    try:
      check()
      said[name] = "holds"
    except AssertionError as e:
      said[name] = f"broken: {str(e).strip().splitlines()[0]}"
  return said


for name, verdict in (good := ask(mine)).items():
  print(f"{name:40} {verdict}")

# %% [markdown]
# Now with the fault that half of the field has had once: the accepted length counts the anchor or
# does not.

# %%
right = optimistic(laws.spec())
wrong = right._replace(
  commit=lambda f, a: right.commit(f, a._replace(length=jnp.maximum(a.length - 1, 0)))
)
for name, verdict in (bad := ask(laws.jitted(wrong))).items():
  print(f"{name:40} {verdict}")
assert set(good.values()) == {"holds"}
assert any(v.startswith("broken") for v in bad.values())

# %% [markdown]
# To have it tested by every law, counted and plotted, add one line to `SCHEMES`; the tests then ask
# for its page in `docs/schemes` and its cost in `experiments/cost.py`.
