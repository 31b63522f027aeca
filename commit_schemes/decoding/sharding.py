"""Slots on many devices: heads over one mesh axis (tensor parallel), slots over another (data).

devices = mesh(2, 4)                           # placement.py
params, config = loaded(folder, devices)       # or placed(params, config, devices)
programs = sharded(params, config, lambda c: SCHEMES["tree_wy"].make(spec(c)), drafter, devices)

Each device runs the step of `loop` on its own slots with its share of the heads, under
`jax.shard_map`; kernels and schemes do not know. Devices that share a slot's heads add up what
their mixers and MLPs contribute, twice a layer, and gather the logits of their rows of the head
(`placement.exchange`). Devices of different slots exchange a step's report and nothing else. Any
number of processes may hold the devices.

A block drafter is small, and whole on every device: those that share a slot's heads draft the same.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from commit_schemes.contract import CommitScheme
from commit_schemes.decoding import slots as one_device
from commit_schemes.decoding.accept import greedy
from commit_schemes.decoding.drafts import Drafter
from commit_schemes.decoding.loop import Accept, Batch, Decoding, Marking, Marks, Report, step
from commit_schemes.decoding.placement import (
  HEADS,
  SLOTS,
  Placed,
  divided,
  exchange,
  placed,
  share,
  weights,
)
from commit_schemes.decoding.slots import Programs
from commit_schemes.model import Pair, fresh, model_memory, prefill
from gdn.config import Config
from gdn.drafter import DrafterConfig, DrafterParams, Heads
from gdn.hybrid import Params
from gdn.ops import XLA, Ops


def place(tree: Any, specs: Any, mesh: Mesh) -> Any:
  """Arrays of a batch, which every process has whole: each device's share on it."""

  def put(x, spec):
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda at: x[at])

  return jax.tree.map(put, tree, specs)


def beside(draft: DrafterConfig, own: Config) -> DrafterConfig:
  """The drafter, its own heads undivided, of a share of its target."""
  a = draft.attention
  heads = Heads(a.query_heads, a.kv_heads, a.head_dim, a.rotary, a.rope_theta)
  return replace(draft, target=own, heads=heads)


def sharded(
  params: Params | Placed,
  config: Config,
  scheme: Callable[[Config], CommitScheme],
  drafter: Drafter,
  mesh: Mesh,
  *,
  ops: Ops = XLA,
  accept: Accept = greedy,
  marking: Marking | None = None,
  block: tuple[DrafterParams, DrafterConfig] | None = None,
) -> Programs:
  """The programs of `slots.compiled` on a mesh; `scheme(config)` is built for a share of the heads,
  and `block` is what a block drafter drafts by.

  ValueError: heads that do not divide, a number of slots that does not, weights that have been
  placed on another mesh, or a block drafter of another target.
  """
  held = params if isinstance(params, Placed) else placed(params, config, mesh)
  if held.mesh != mesh:
    raise ValueError(f"the weights lie on {held.mesh}, allowed: {mesh}")
  groups, degree = mesh.shape[SLOTS], mesh.shape[HEADS]
  own, dtype = share(config, degree), held.params.embed.dtype
  drafts, draft = (None, None) if block is None else block
  if block is not None and len(block[0].layers) != block[1].layers:
    raise ValueError(f"weights of {len(block[0].layers)} draft layers, allowed: {block[1].layers}")
  uncut = model_memory(config, scheme(config), ops, draft)
  memory = model_memory(
    own, scheme(own), ops, draft and beside(draft, own), exchange(config, degree)
  )
  smap = partial(jax.shard_map, mesh=mesh, check_vma=False)
  shape = lambda f, *args: jax.eval_shape(lambda: f(*args))
  pools = lambda config, memory: shape(one_device.vacant, config, memory, dtype, groups, 8)
  state = divided(pools(config, uncut), pools(own, memory), SLOTS)
  row = divided(pools(config, uncut), pools(own, memory))
  ones = shape(fresh, config, uncut, 1, dtype), shape(fresh, own, memory, 1, dtype)
  memories, marked = divided(*ones), divided(*ones, SLOTS)
  specs: Any = weights(config, degree)
  parameters: Any = held.params
  if drafts is not None:
    whole: Any = jax.tree.map(lambda _: P(), drafts)
    specs, parameters = Pair(specs, whole), Pair(parameters, place(drafts, whole, mesh))

  def mine(slots, state: Decoding):
    """Slots of the whole pool as rows of this device's; -1 where they are not here."""
    n = state.length.shape[0]
    here = slots - jax.lax.axis_index(SLOTS).astype(slots.dtype) * n
    return jnp.where((slots >= 0) & (here >= 0) & (here < n), here, -1)

  def local_step(params, state, batch: Batch):
    rows = batch.slots.shape[0]
    batch = batch._replace(slots=mine(batch.slots, state))
    state, report = step(params, own, memory, drafter, state, batch, accept, marking)
    marks = report.marks
    told = jax.lax.all_gather(report._replace(marks=None), SLOTS, tiled=True)
    if marks is not None:
      index = jax.lax.axis_index(SLOTS).astype(jnp.int32) * rows
      told_rows = jnp.where(marks.row < 0, -1, marks.row + index)
      gather = partial(jax.lax.all_gather, axis_name=SLOTS, tiled=True)
      marks = marks._replace(row=gather(told_rows), depth=gather(marks.depth))
    return state, told._replace(marks=marks)

  def local_save(state, slot):
    rows = one_device.save(state, mine(slot, state))
    return jax.tree.map(lambda x: jax.lax.psum(x, SLOTS), rows)

  everywhere: Any = P()
  by_slot: Any = P(SLOTS)
  marks = None if marking is None else Marks(everywhere, everywhere, marked)
  report, batch = Report(everywhere, everywhere, everywhere, marks), Batch(by_slot, by_slot)
  one_step = jax.jit(
    smap(local_step, in_specs=(specs, state, batch), out_specs=(state, report)),
    donate_argnums=1,
  )
  read = jax.jit(
    smap(
      lambda params, memories, ids, start, count: prefill(
        params, own, memory, memories, ids, start, count, ops
      ),
      in_specs=(specs, memories, P(), P(), P()),
      out_specs=memories,
    )
  )
  admit = smap(
    lambda state, slot, *args: one_device.seat(memory, state, mine(slot, state), *args),
    in_specs=(state, P(), P(), P(), memories),
    out_specs=state,
  )
  restore = smap(
    lambda state, slot, rows: one_device.restore(state, mine(slot, state), rows),
    in_specs=(state, P(), row),
    out_specs=state,
  )
  on = lambda specs: jax.tree.map(lambda s: NamedSharding(mesh, s), specs)

  def new(slots: int, capacity: int) -> Decoding:
    if slots % groups:
      raise ValueError(f"{slots} slots over {groups} groups of devices; allowed: multiples of it")
    vacant = lambda: one_device.vacant(config, uncut, dtype, slots, capacity)
    return jax.jit(vacant, out_shardings=on(state))()

  return Programs(
    new=new,
    empty=jax.jit(lambda: fresh(config, uncut, 1, dtype), out_shardings=on(memories)),
    prefill=lambda *args: read(parameters, *args),
    admit=jax.jit(admit, donate_argnums=0),
    save=jax.jit(smap(local_save, in_specs=(state, P()), out_specs=row)),
    restore=jax.jit(restore, donate_argnums=0),
    step=lambda state, rows: one_step(parameters, state, place(rows, batch, mesh)),
  )
