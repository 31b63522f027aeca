"""What `step_time` times: every kernel at any shape, the bytes that it cannot avoid, its check.

Bytes are those of experiments/cost.py: each input read once, each output written once.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp

from commit_schemes.footprint import LayerShape
from experiments import cost, step_checks
from experiments.step_args import (
  EVERY_STEP,
  FULL,
  RING,
  Args,
  Case,
  Given,
  bf16,
  f32,
  fill,
  pick,
  plain,
  to_append,
  to_convolve,
  to_fill,
  to_fold,
  to_fold_rank,
  to_pick,
  tree,
)
from experiments.step_inputs import HOSTILE
from gdn.ops import XLA, Ops, xla


class Kind(NamedTuple):
  """A kernel at any shape.

  call     (S, *args) -> out
  args     (given) -> what follows S; traceable
  bytes    (layer, case) -> compulsory, of one decode slot
  check    of experiments/step_checks.py
  wide     the same with outputs in float32, by default `call`
  carry    (args, out) -> the next call's, where `donated` arguments are taken over
  hostile  kinds of rows that it is checked on
  rounds   what the timed program rounds to bfloat16
  last     0 is the most wanted
  mosaic   a kernel of ours, whose time alone counts; else all that XLA launches
  xla_too  decays for which XLA does a part of it, which counts
  """

  call: Callable[..., Any]
  args: Callable[[Given], Args]
  bytes: Callable[[LayerShape, Case], float]
  check: Callable[..., step_checks.Pairs]
  wide: Callable[..., Any] | None = None
  windows: tuple[int, ...] = (4, 16)
  states: tuple[str, ...] = ("float32", "bfloat16")
  decays: tuple[str, ...] = ("gdn", "kda")
  most: int = 256  # decode slots
  donated: int = 0
  carry: Callable[[Args, Any], Args] = lambda args, out: args
  hostile: tuple[str, ...] = HOSTILE
  rounds: tuple[str, ...] = ("o",)
  last: int = 0
  mosaic: bool = True
  xla_too: tuple[str, ...] = ()


def widened(ops: Ops) -> Ops:
  """The same with outputs in float32."""
  if ops is XLA:
    return xla(out=f32)
  wide = lambda op: partial(op, out_dtype=f32)
  outs = {name: wide(getattr(ops, name)) for name in ("verify", "snapshot", "decode", "prefill")}
  step = xla(out=f32).step if ops.step is XLA.step else wide(ops.step)
  return ops._replace(**outs, step=step)


def kinds(ops: Ops) -> Mapping[str, Kind]:
  """Every kernel by name. `verify` is outputs only; with rows, what a ring or a cache needs."""
  wide = widened(ops)
  verify_bytes = lambda out: lambda s, c: cost.verify(s, c.point, out(s, c)).bytes
  rows = lambda width: lambda s, c: cost.rows(s, c.point._replace(row=width), c.window)
  fold = lambda read: lambda s, c: 2 * cost.state(s, c.point) + read(s, c)
  kept = lambda s, c: cost.snapshots(s, c.point, c.window).bytes
  advanced = fold(lambda s, c: cost.inputs(s, c.window))

  verify = Kind(
    lambda S, w, p: ops.verify(S, w, p, parts=())[0], plain, verify_bytes(lambda s, c: 0.0),
    step_checks.window_out, lambda S, w, p: wide.verify(S, w, p, parts=(f32,)),
    windows=(1, 4, 8, 16),
  )  # fmt: skip
  with_rows = lambda dtype: verify._replace(
    call=lambda S, w, p: ops.verify(S, w, p, parts=(dtype,)), last=2, windows=(16,),
    bytes=verify_bytes(rows(jnp.dtype(dtype).itemsize)),
    rounds=("o", "u", "k") if dtype == bf16 else ("o",),
  )  # fmt: skip
  states = lambda ops: lambda S, w, p: ops.snapshot(S, w, p, keep=w.parents.shape[1])
  snapshot = Kind(states(ops), plain, kept, step_checks.window_out, states(wide))
  of_tree: dict[str, Any] = {"windows": (64,), "most": 64, "last": 1, "args": tree}
  step = lambda ring: Kind(
    ring.call(ops.step), ring.args, ring.bytes, partial(step_checks.stepped, ring.flush),
    ring.call(wide.step), windows=(4, 8, 16), donated=2, xla_too=("kda",),
    carry=lambda args, out: (*out[2:], *args[2:]),
  )  # fmt: skip
  pool: dict[str, Any] = {"donated": 1, "carry": lambda args, out: (out, *args[1:])}
  and_pool: dict[str, Any] = {"donated": 1, "carry": lambda args, out: (out[1], *args[1:])}
  return {
    "verify": verify,
    "step": step(EVERY_STEP),
    "step_ring": step(RING),
    "step_ring_flush": step(FULL),
    "decode_ring": step(RING)._replace(windows=(1,)),
    "snapshot": snapshot,
    "snapshot_commit": Kind(
      pick, to_pick, fold(lambda s, c: 0.0), step_checks.picked, windows=(16,), decays=("gdn",),
      rounds=(), mosaic=False, **pool,
    ),
    "fill": Kind(
      fill, to_fill, lambda s, c: c.window * cost.state(s, c.point), step_checks.filled,
      windows=(16,), states=("float32",), decays=("gdn",), rounds=(), mosaic=False,
    ),
    "fold": Kind(
      ops.fold_raw, to_fold, fold(lambda s, c: cost.raw(s, c.point.accepted)), step_checks.folded,
      windows=(16,), rounds=(), **pool,
    ),
    "fold_rank": Kind(
      ops.fold_rank, to_fold_rank, fold(lambda s, c: cost.rows(s, c.point, c.point.accepted)),
      step_checks.folded, windows=(16,), rounds=(), last=2, **pool,
    ),
    "decode": Kind(
      ops.decode, plain, advanced, step_checks.advanced, wide.decode, windows=(1,), **and_pool
    ),
    "verify_tree": verify._replace(**of_tree),
    "snapshot_tree": snapshot._replace(**of_tree, states=("float32",)),
    "verify_rows_fp32": with_rows(f32),
    "verify_rows_bf16": with_rows(bf16),
    "conv": Kind(
      lambda S, *args: ops.conv(*args), to_convolve,
      lambda s, c: 2 * s.conv_channels * (2 * c.window + s.taps - 1), step_checks.convolved,
      lambda S, tail, x, taps, *rest: ops.conv(*(y.astype(f32) for y in (tail, x, taps)), *rest),
      states=("bfloat16",), decays=("gdn",), rounds=("y",), last=3,
    ),
    "append": Kind(
      lambda S, *args: ops.append(*args), to_append,
      lambda s, c: 2 * (cost.raw(s, c.window) - 4 * c.window * s.value_heads * s.channels),
      step_checks.appended, windows=(16,), states=("float32",), decays=("gdn",), rounds=(), last=1,
      donated=2, carry=lambda args, out: (args[0], out, *args[2:]),
    ),
    "prefill": Kind(
      ops.prefill, plain, advanced, step_checks.advanced, wide.prefill, windows=(4096,), most=4,
      hostile=("random", "total_decay", "short", "padding"), states=("float32",), last=3,
      **and_pool,
    ),
  }  # fmt: skip


def cases(
  known: Mapping[str, Kind], names: Iterable[str], batches: Iterable[int], windows: Iterable[int],
  states: Iterable[str], decays: Iterable[str],
) -> list[Case]:  # fmt: skip
  """Every shape of these kernels; a kernel of one window has it whatever `windows` are."""
  return [
    Case(name, state, decay, T, B)
    for name in names
    for kind in [known[name]]
    for state in kind.states if state in states
    for decay in kind.decays if decay in decays
    if state == "float32" or decay == "gdn" or name == "verify"
    for T in kind.windows if T in windows or len(kind.windows) == 1
    for B in batches if B <= kind.most
  ]  # fmt: skip


def late(kind: Kind, c: Case) -> int:
  """The higher, the less it is wanted: small batches (one slot before others: launches are read off
  it), narrow states, a decay per channel."""
  few, short = {1: 1, 64: 0, 256: 0}.get(c.batch, 2), c.window < 4 <= max(kind.windows)
  return kind.last + few + short + (c.state != "float32") + 4 * (c.decay == "kda")
