"""Published memory and traffic, derived from the types of our schemes and the cost model.

Every function gives a value in the unit of its row in published.csv. Where it can be told, GB in
the sources is 2^30 bytes like GiB.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import jax.numpy as jnp

from commit_schemes import SCHEMES, Dtypes, Spec, replay, ring, snapshot
from commit_schemes.footprint import (
  LayerShape,
  ModelFootprint,
  ModelShape,
  abstract,
  model_footprint,
  nbytes,
)
from experiments import cost
from experiments.cost import Point
from experiments.models import MODELS

BF16, F32 = jnp.bfloat16, jnp.float32
MIB, GIB = 2**20, 2**30


def printed(value: float, like: str) -> str:
  """`value` with as many decimals as the published text has."""
  return f"{value:.{len(like.partition('.')[2])}f}"


def states(name: str, window: int, *, keep: int, degree: int = 1) -> int:
  """Bytes of the states alone that one running request keeps, on one rank."""
  model = MODELS[name]
  layer = model.layer.shard(degree)
  _, flight = abstract(replay(Spec(layer.key_heads, window), keep=keep), layer, window)
  return model.layers * nbytes(flight.states)


def stored(name: str, window: int, *, degree: int = 1, checkpoint=F32) -> ModelFootprint:
  return model_footprint(
    snapshot, MODELS[name], window, degree=degree, dtypes=Dtypes(checkpoint=checkpoint)
  )


def conv_windows(name: str, window: int, degree: int = 1) -> float:
  """Windows that share columns: the new inputs, and all but one column of the tail once more."""
  carry, flight = stored(name, window, degree=degree).conv
  return flight + carry * 2 / 3


def verify_cache(keep: int, degree: int = 1) -> float:
  """48 running requests and one padding row; replayed inputs are not counted by the source."""
  next80 = "Qwen3-Next-80B-A3B"
  row = states(next80, 16, keep=keep, degree=degree) + conv_windows(next80, 16, degree)
  return 49 * row / GIB


def slot() -> int:
  whole = stored("Qwen3-Next-80B-A3B", 16)
  return whole.state.carry + whole.conv.carry


def ring_layer(slots: int, fold: Literal["open_loop", "exact"]) -> int:
  """Bytes of bf16 records alone, a slot and layer, of 16 key and 32 value heads."""
  layer = LayerShape(16, 32)
  scheme = ring(Spec(16, 4, dtypes=Dtypes(rows=(BF16,))), slots=slots, fold=fold)
  carry, _ = abstract(scheme, layer, 4)
  return nbytes((carry.rows, carry.inputs))


def raw_record(value_heads: int) -> float:
  """Bytes of a token's raw record, by value head."""
  layer = LayerShape(4, value_heads)
  _, flight = abstract(SCHEMES["replay_0"].make(Spec(4, 1)), layer, 1)
  return (nbytes(flight) - 4 - nbytes(flight.S)) / value_heads


def tree_blocks(width: int) -> int:
  """States of a tree of three levels, every node with `width` children, and its anchor."""
  return sum(width**level for level in range(4))


def branch_cache(keep: int) -> float:
  return 17 * states("Qwen3.5-27B", 16, keep=keep, degree=2) / GIB


def q38(window: int) -> float:
  """Bytes of bf16 states of one row."""
  model = ModelShape(48, LayerShape(16, 48))
  return model_footprint(snapshot, model, window, dtypes=Dtypes(checkpoint=BF16)).state.flight


# Value in the unit of its row.
FOLLOWS: Mapping[str, Callable[[], float]] = {
  "mem-norm-slot": lambda: slot() / MIB,
  "mem-inter-slot": lambda: states("Qwen3-Next-80B-A3B", 16, keep=16) / MIB,
  "mem-inter-conv-slot": lambda: conv_windows("Qwen3-Next-80B-A3B", 16) / MIB,
  "mem-ratio": lambda: verify_cache(16) * GIB / 49 / slot(),
  "mem-tp1": lambda: verify_cache(16),
  "mem-tp2": lambda: verify_cache(16, degree=2),
  "mem-tp4": lambda: verify_cache(16, degree=4),
  "mem-tp8": lambda: verify_cache(16, degree=8),
  "mem-k4": lambda: verify_cache(4),
  "mem-k1": lambda: verify_cache(1),
  "mem-k0": lambda: verify_cache(0),
  # 48 slots at 5 a request admit 9 requests, and one padding row; at K = 1 all 16.
  "replay-cache-k16": lambda: 10 * states("Qwen3.5-27B", 16, keep=16, degree=2) / GIB,
  "replay-cache-k1": lambda: 17 * states("Qwen3.5-27B", 16, keep=1, degree=2) / GIB,
  "replay-cache-k0": lambda: 17 * states("Qwen3.5-27B", 16, keep=0, degree=2) / GIB,
  # 32 running requests and one padding row, 4 tokens.
  "delta-alloc-old": lambda: 33 * states("Qwen3-Next-80B-A3B", 4, keep=4, degree=4) / GIB,
  "ring-mem-old": lambda: 49 * states("Qwen3.5-35B-A3B", 4, keep=4) / GIB,
  # k + 1 states in bf16: the window is the anchor and k drafts.
  "treewy-35b": lambda: stored("Qwen3.5-35B-A3B", 4, checkpoint=BF16).state.flight / MIB,
  "treewy-397b": lambda: stored("Qwen3.5-397B-A17B", 4, checkpoint=BF16).state.flight / MIB,
  "ring-slot-layer": lambda: ring_layer(16, "exact") / 1024,
  **{f"branch-cache-k{k}": partial(branch_cache, k) for k in (1, 4, 8, 16)},
  # Three columns for each of 16 nodes.
  "branch-conv": lambda: 17 * 16 * stored("Qwen3.5-27B", 16, degree=2).conv.carry / GIB,
  "q38-slot": lambda: q38(1) / MIB,
  "q38-scratch": lambda: 2 * q38(12) / GIB,
  "raw-record": lambda: raw_record(8),
  "raw-record-h": lambda: raw_record(4),
  "replayssm-slot": lambda: (2 * MIB + ring_layer(32, "open_loop")) / MIB,
  **{f"treewy-blocks-{w}": partial(tree_blocks, w) for w in (1, 2, 3)},
  "treewy-pseudo": lambda: 128 * 128 / 128,
  "atom-snapshots": lambda: 64 * 8 * 57.81 / 1024,
}

SHAPE = LayerShape(16, 32)
HEAD = LayerShape(1, 1)


def step_mib(scheme: str, T: int) -> float:
  """State traffic of a step as the planning study counts it: fp32 rows, everything accepted."""
  p = Point(T, T, row=4)
  extra = cost.inputs(SHAPE, T)
  if scheme == "snapshot":  # the commit picks a column and copies nothing
    return (cost.snapshots(SHAPE, p, T).bytes - extra) / MIB
  return (cost.STEPS[scheme](SHAPE, p).bytes - extra) / MIB


def step_ratio(T: int) -> float:
  return step_mib("snapshot", T) / step_mib("tree_wy", T)


def head_bytes(scheme: str, p: Point) -> float:
  """Bytes of a value head in a step, key heads shared by two; inputs and outputs left out."""
  two = LayerShape(1, 2)
  if scheme == "snapshot":
    return (cost.snapshots(two, p, p.window).bytes - cost.inputs(two, p.window)) / 2
  return (cost.STEPS[scheme](two, p).bytes - cost.inputs(two, p.window)) / 2


def over(scheme: str, p: Point) -> float:
  return head_bytes("snapshot", p) / head_bytes(scheme, p)


STEP = Point(4, 2.5, row=2)
TRAFFIC: Mapping[str, Callable[[], float]] = {
  **{f"bytes-snapshot-t{T}": partial(step_mib, "snapshot", T) for T in (4, 8, 16)},
  **{f"bytes-fused-t{T}": partial(step_mib, "tree_wy", T) for T in (4, 8, 16)},
  **{f"bytes-ratio-t{T}": partial(step_ratio, T) for T in (4, 8, 16)},
  "bytes-commit": lambda: over("delta_cache", STEP),
  "bytes-absorb": lambda: over("tree_wy", STEP),
  # A flush one step in five.
  "bytes-ring": lambda: over("ring_open_loop", STEP._replace(ring=16, accepted=3.0)),
  "flops-step": lambda: cost.token_steps(HEAD, 16) / 1e6,
  "flops-verify": lambda: cost.window_flops(HEAD, 16) / 1e6,
  "flops-commit": lambda: cost.fold_flops(HEAD, 16) / 1e6,
}
