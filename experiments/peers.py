"""Kernels of other projects beside ours: same clock, same windows, same pool, same check.

They are called where they are installed, or lie in folders that $PEER_SITE, $FI and $SGLANG_SITE
name; nothing of theirs is here. A window's arrays and the pool go to PyTorch without a copy. What
they round to bfloat16 inside is theirs, so the check only tells a wrong call from a right one, and
the row has their error.

    fla         flash-linear-attention: the recurrence, state read and written
    flashinfer  WY outputs from a bf16 state, and its u-cache ring, read and flushed
    sglang      recurrent verify with snapshots or ring rows, chunked verify, fold
"""

import functools
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from experiments.clock import Timing, device_time
from experiments.step_args import FULL, RING, Case, Given, accepted, to_fold
from experiments.step_bench import Bench
from experiments.step_checks import after, largest, outputs
from experiments.step_inputs import float64, sample
from gdn.gates import gates as reference_gates
from gdn.typing import GateParams, Window

Tensor = Any
ROUGH = 0.03  # a transposed head or a forgotten norm is off by more


class Peer(NamedTuple):
  """A kernel of theirs at one shape; `like` is ours that has to move the same bytes."""

  peer: str
  kernel: str
  window: int
  batch: int

  def __str__(self) -> str:
    return f"{self.peer} {self.kernel} T = {self.window}, batch {self.batch}"


class Tensors(NamedTuple):
  """A window and the pool as PyTorch tensors: q [B, T, H, K] and so on, S [N, HV, V, K]."""

  q: Tensor
  k: Tensor
  v: Tensor
  a: Tensor
  b: Tensor
  A_log: Tensor
  dt_bias: Tensor
  beta: Tensor
  g: Tensor
  S: Tensor
  slots: Tensor

  @property
  def flat(self) -> tuple[Tensor, ...]:
    """q, k and v as one sequence [1, B T, ...], a and b [B T, HV]."""
    one = (x.reshape(1, -1, *x.shape[2:]) for x in (self.q, self.k, self.v))
    return (*one, *(x.reshape(-1, x.shape[2]) for x in (self.a, self.b)))

  @property
  def ends(self) -> Tensor:
    B, T = self.q.shape[:2]
    return self.slots.new_tensor(range(0, (B + 1) * T, T))

  def ring(self, heads: int, length: int, width: int | None, dtype: Any) -> Tensor:
    """Zeros [N, heads, length, width]."""
    last = () if width is None else (width,)
    return self.S.new_zeros(self.S.shape[0], heads, length, *last, dtype=dtype)


def tensors(w: Window, p: GateParams, S: jax.Array) -> Tensors:
  import torch

  beta, g = reference_gates(w.raw.a, w.raw.b, p)
  q, k, v, a, b = w.raw
  arrays = (q, k, v, a[..., 0], b, p.A_log, p.dt_bias[:, 0], beta, g[..., 0], S, w.slots)
  return Tensors(*(torch.from_dlpack(jax.block_until_ready(x)) for x in arrays))


class Kernel(NamedTuple):
  """build(tensors) -> a call without arguments, which gives outputs [B, T, HV, V], or the pool."""

  build: Callable[[Tensors], Callable[[], Tensor]]
  like: str
  windows: tuple[int, ...] = (16,)
  state: str = "float32"
  most: int = 256
  folds: bool = False


@functools.cache
def module(name: str) -> Any:
  """ImportError: it is not on this machine."""
  for variable in ("PEER_SITE", "FI", "SGLANG_SITE"):
    if (site := os.environ.get(variable)) and site not in sys.path:
      sys.path += [site, os.path.join(site, "nvidia_cutlass_dsl", "dsl_packages")]
  return importlib.import_module(name)


def fla_recurrent(x: Tensors) -> Callable[[], Tensor]:
  op = module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
  S = x.S[x.slots.long()].transpose(-1, -2).contiguous()
  return lambda: op(
    x.q, x.k, x.v, g=x.g, beta=x.beta, initial_state=S, output_final_state=True,
    use_qk_l2norm_in_kernel=True,
  )[0]  # fmt: skip


def flashinfer_wy(x: Tensors) -> Callable[[], Tensor]:
  op = module("flashinfer.gdn_kernels.gdn_decode_bf16_wy_output_only").gated_delta_rule_mtp
  return lambda: op(
    x.A_log, x.a, x.dt_bias, q=x.q, k=x.k, v=x.v, b=x.b, initial_state_source=x.S,
    initial_state_indices=x.slots, disable_state_update=True, scale=x.q.shape[-1] ** -0.5,
  )  # fmt: skip


def flashinfer_ring(x: Tensors, *, history: Callable[[int], int]) -> Callable[[], Tensor]:
  """Its history is of zeros, so outputs are those of the pool alone."""
  name = "flashinfer.gdn_kernels.gdn_decode_bf16_wy_ucache_flush"
  op = module(name).gated_delta_rule_mtp_ucache_flush
  (_, T, H, K), (HV, V), R, bf16 = x.q.shape, x.v.shape[2:], 32, x.q.dtype
  rest = {
    "k_cache": x.ring(H, R, K, bf16), "u_cache": x.ring(HV, R, V, bf16),
    "g_cache": x.ring(HV, R, None, x.beta.dtype), "cache_base": x.slots * 0,
    "hist_len": x.slots * 0 + history(T),
  }  # fmt: skip
  return lambda: op(
    x.A_log, x.a, x.dt_bias, q=x.q, k=x.k, v=x.v, b=x.b, initial_state_source=x.S,
    initial_state_indices=x.slots, scale=K**-0.5, restart_hist_on_flush=False, **rest,
  )  # fmt: skip


SGLANG = "sglang.kernels.ops.attention.linear."


def sglang_recurrent(x: Tensors, *, snapshots: bool) -> Callable[[], Tensor]:
  op = module(SGLANG + "fused_sigmoid_gating_recurrent").fused_sigmoid_gating_delta_rule_update
  (B, T, H, K), (HV, V), f32 = x.q.shape, x.v.shape[2:], x.beta.dtype
  q, k, v, a, b = x.flat
  if snapshots:
    kept = {
      "intermediate_states_buffer": x.S.new_empty(B, T, HV, V, K),
      "intermediate_state_indices": x.slots.new_tensor(range(B)), "cache_steps": T,
    }  # fmt: skip
  else:
    kept = {
      "cache_ring": True, "replayssm_rawv": x.ring(HV, T, V, x.q.dtype),
      "replayssm_rawk": x.ring(H, T, K, x.q.dtype), "replayssm_g": x.ring(HV, T, None, f32),
      "replayssm_beta": x.ring(HV, T, None, f32),
    }  # fmt: skip
  ends = x.ends
  return lambda: op(
    x.A_log, a, x.dt_bias, 1.0, 20.0, q, k, v, b, x.S, x.slots, use_qk_l2norm_in_kernel=True,
    cu_seqlens=ends, disable_state_update=True, **kept,
  )  # fmt: skip


def sglang_chunked(x: Tensors, *, precision: str) -> Callable[[], Tensor]:
  op = module(SGLANG + "gdn_replayssm_spec_decode").gdn_replayssm_spec_decode
  (_, T, H, K), (HV, V), R = x.q.shape, x.v.shape[2:], 32
  (q, k, v), (a, b), bf16, f32 = (y[0] for y in x.flat[:3]), x.flat[3:], x.q.dtype, x.beta.dtype
  caches = [
    ring for _ in range(2)
    for ring in (x.ring(HV, R, V, bf16), x.ring(H, R, K, bf16), x.ring(HV, R, None, f32))
  ]  # fmt: skip
  zero, ends, o = x.slots.new_zeros(x.S.shape[0]), x.ends, v.clone()
  flags = zero.char()

  def call() -> Tensor:
    op(
      q, k, v, a, b, x.A_log, x.dt_bias, x.S, *caches, o, ends, x.slots, x.slots, zero, zero,
      flags, R, T, block_v=64, num_warps=4, nk=2, launch_mode="verify", dot_precision=precision,
    )  # fmt: skip
    return o

  return call


def sglang_fold(x: Tensors) -> Callable[[], Tensor]:
  """Of raw rows that a window has left, into a pool of its own."""
  op = module(SGLANG + "gdn_replayssm_spec_fold").commit_gdn_replayssm_fold_all_layers
  (_, T, H, K), (HV, V), at = x.q.shape, x.v.shape[2:], x.slots.long()
  rings = []
  for heads, width, rows in ((HV, V, x.v), (H, K, x.k), (HV, None, x.g), (HV, None, x.beta)):
    ring = x.ring(heads, T, width, rows.dtype)
    ring[at] = rows.transpose(1, 2)
    rings.append(ring[None])
  S, length = x.S.clone(), x.slots * 0 + accepted(T)

  def call() -> Tensor:
    op(S[None], *rings, x.slots, length, T, H)
    return S

  return call


PEERS: Mapping[str, Mapping[str, Kernel]] = MappingProxyType(
  {
    "fla": {"fused_recurrent": Kernel(fla_recurrent, "prefill")},
    "flashinfer": {
      "verify": Kernel(flashinfer_wy, "verify", (4, 8, 16), "bfloat16"),
      "step_ring": Kernel(
        functools.partial(flashinfer_ring, history=RING.history), "step_ring", (8,), "bfloat16"
      ),
      "step_ring_flush": Kernel(
        functools.partial(flashinfer_ring, history=FULL.history), "step_ring_flush", (8,),
        "bfloat16",
      ),
    },
    "sglang": {
      "snapshot": Kernel(
        functools.partial(sglang_recurrent, snapshots=True), "snapshot", most=64
      ),
      "verify_ring_rows": Kernel(
        functools.partial(sglang_recurrent, snapshots=False), "verify_rows_bf16"
      ),
      "verify_tf32": Kernel(
        functools.partial(sglang_chunked, precision="tf32"), "verify_rows_bf16"
      ),
      "verify_ieee": Kernel(
        functools.partial(sglang_chunked, precision="ieee"), "verify_rows_bf16"
      ),
      "fold": Kernel(sglang_fold, "fold", folds=True),
    },
  }
)  # fmt: skip
PACKAGES = {"fla": "fla-core", "flashinfer": "flashinfer-python", "sglang": "sglang"}


def named(peer: str) -> str:
  """With its version, where the installation knows it."""
  try:
    return f"{peer} {importlib.metadata.version(PACKAGES[peer])}"
  except importlib.metadata.PackageNotFoundError:
    return peer


def every(names: tuple[str, ...], batches: tuple[int, ...]) -> list[Peer]:
  return [
    Peer(name, kernel, T, B)
    for name in names
    for kernel, k in PEERS[name].items()
    for T in k.windows
    for B in batches
    if B <= k.most
  ]


def measured(bench: Bench, peer: Peer) -> tuple[Case, Timing, float]:
  """Our case that moves the same bytes, time, and error to float64. ImportError: it is not here."""
  import torch

  kernel = PEERS[peer.peer][peer.kernel]
  case = Case(kernel.like, kernel.state, "gdn", peer.window, peer.batch)
  p, S = bench.params("gdn"), bench.states(kernel.state)
  windows = [bench.window(case) for _ in range(bench.turns(case))]
  calls = [kernel.build(tensors(w, p, S)) for w in windows]

  w, some = windows[0], sample(bench.rng, bench.shape, peer.batch, 2, 2)
  roots = some.states(S, w.slots)
  out = calls[0]().float().cpu().numpy()
  if kernel.folds:
    x = Given(bench.shape, case, w, p, bench.slots)
    raw, pending, _ = to_fold(x)
    pairs = [("S", some.states(out, w.slots), after(roots, raw, pending, some))]
  else:
    B, T, HV, V = w.raw.v.shape
    pairs = list(outputs(float64(roots, w, p, some), out.reshape(B, T, HV, V), some))
  error = largest(iter(pairs), lambda name: ROUGH)
  wait = lambda out: torch.cuda.synchronize()
  timing = device_time(lambda f: f(), [(f,) for f in calls], calls=bench.calls, wait=wait)
  return case, timing, error
