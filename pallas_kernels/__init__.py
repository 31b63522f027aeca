"""Mosaic GPU kernels for Hopper behind the signatures of `gdn.ops.Ops`.

    verify    chains and trees of up to 16 nodes    verify.py
              of up to 64                           tree_verify.py
              KDA; up to 64                         recurrent_verify.py
    step      one node beside 16 pending rows       decode_ring.py
              up to 16 nodes, 64 pending rows       step.py
              KDA; up to 64 nodes                   recurrent_verify.py
    fold_raw  exact replay of any length            fold.py
    fold_rank paths of any length                   fold_rank.py
    snapshot  chains; trees with keep = T           snapshot.py
    decode    T = 1                                 decode.py
    prefill   chains of any length                  prefill.py
    conv      chains and trees of up to 64 nodes    conv.py
    append    records of heads and dims, and gates  append.py

for K = V = 128, GDN and KDA, fp32 or bf16 states and bf16 inputs. `fold_raw`, `snapshot` and
(on a fp32 state) `decode` leave the same bits. A shape that no kernel takes goes to XLA, with one
warning.
"""

import functools
import warnings
from collections.abc import Callable

from gdn.ops import XLA, Ops
from pallas_kernels import (
  append,
  conv,
  decode,
  decode_ring,
  fold,
  fold_rank,
  prefill,
  recurrent_verify,
  snapshot,
  step,
  tree_verify,
  verify,
)

__all__ = ["MOSAIC_GPU"]


@functools.cache
def _warn_once(name: str, reason: str) -> None:
  warnings.warn(f"{name} runs on XLA here: {reason}", stacklevel=3)


def _or_xla(name: str, reference: Callable, *kernels: Callable) -> Callable:
  """The first kernel that takes the shape, or the reference."""

  @functools.wraps(reference)
  def op(*args, **kwargs):
    reasons = []
    for kernel in kernels:
      try:
        return kernel(*args, **kwargs)
      except NotImplementedError as reason:
        reasons.append(str(reason))
    _warn_once(name, "; ".join(dict.fromkeys(reasons)))
    return reference(*args, **kwargs)

  return op


MOSAIC_GPU: Ops = XLA._replace(
  verify=_or_xla("verify", XLA.verify, verify.verify, tree_verify.verify, recurrent_verify.verify),
  step=_or_xla("step", XLA.step, decode_ring.step, step.step, recurrent_verify.step),
  fold_raw=_or_xla("fold_raw", XLA.fold_raw, fold.fold_raw),
  fold_rank=_or_xla("fold_rank", XLA.fold_rank, fold_rank.fold_rank),
  snapshot=_or_xla("snapshot", XLA.snapshot, snapshot.snapshot),
  decode=_or_xla("decode", XLA.decode, decode.decode),
  prefill=_or_xla("prefill", XLA.prefill, prefill.prefill),
  conv=_or_xla("conv", XLA.conv, conv.conv),
  append=_or_xla("append", XLA.append, append.append),
)
