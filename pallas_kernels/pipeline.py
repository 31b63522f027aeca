"""The warpgroups that verify a window: one meets the state, one knows the rest.

A persistent grid walks over (slot, key head, value head). The projector reads the state by TMA in
chunks of 8 KiB, the next requested as soon as one is in registers, and makes W = S [k; q]' of them.
The preparer works out what a window is without the state, for one or two value heads at once and a
window ahead. Each then finishes its share of a head's value rows, or a third warpgroup finishes all
of them, or there are two projectors and two that finish, a team for each half of a head's value
rows: the right-hand sides beta v - e^G S k against the window's two small matrices give [u; o]. All
products are on the tensor cores, in exact bf16 parts with float32 sums; no lane waits for a chain
of nodes.

Chains and trees are one thing to it: a node meets its ancestors, given as one word of bits.

Writes that are pending reach a window in one of two ways. `fold`: each chunk of the state receives
them in registers, and leaves again. Otherwise they are met beside the state
(`history`), and the state is not written.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.finisher import complete
from pallas_kernels.launch import Launch, Plan, Shared, Turns, Window, Written
from pallas_kernels.preparer import ready
from pallas_kernels.projector import project


def run(S, x: Window, pending, o, beta, g, written: Written, shared: Shared, plan: Plan) -> None:
  """The kernel, of two, three or five warpgroups."""
  B, _, H, _ = x.v.shape
  block = Launch(S, x, pending, o, beta, g, written, shared, plan, Turns.of(plan, B, H))
  wg = lax.axis_index("wg")
  team = lax.div(wg - 1, 2) if plan.teams > 1 else 0
  roles = [lambda: ready(block), lambda: project(block, team)]
  if plan.finisher:
    roles.append(lambda: complete(block, team))
  # Two teams are one code, so that it is fetched once.
  lax.switch(jnp.where(wg > 2, wg - 2, wg) if plan.teams > 1 else wg, roles)
