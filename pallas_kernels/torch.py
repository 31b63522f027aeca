"""The kernels on PyTorch tensors, in SGLang's layouts, without a JAX array in sight.

    state    [slots, HV, V, K] float32 or bfloat16, updated in place
    q, k     [tokens, H, K], v [tokens, HV, V], a and b [tokens, HV] bfloat16, after the convolution
    A_log    [HV], dt_bias [HV] float32                      KDA: a [tokens, HV, K], dt_bias [HV, K]
    indices  [B] int32 rows of the state; -1 is padding

Tokens of a window stand together, so a uniform `cu_seqlens` is a number, T. Tensors are contiguous
and on one GPU; a kernel runs on the current stream. A new shape compiles once.
"""

import functools
from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn.typing import GateParams, Pending, Raw, Records, Window
from pallas_kernels import decode as _decode
from pallas_kernels import fold as _fold
from pallas_kernels import prefill as _prefill
from pallas_kernels import recurrent_verify as _verify

Tensor = Any


@functools.cache
def _on_torch(op: Callable, **static) -> Callable:
  """One program per op and static arguments; `as_torch_kernel` keeps one per shape of it."""
  try:
    import torch  # noqa: F401
  except ImportError as error:
    raise ImportError("pallas_kernels.torch needs PyTorch with CUDA: pip install torch") from error
  return plgpu.as_torch_kernel(functools.partial(op, **static))


def _contiguous(**tensors: Tensor) -> None:
  for name, x in tensors.items():
    if not (x.is_cuda and x.is_contiguous()):
      raise ValueError(
        f"{name} must be contiguous and on a GPU, not {tuple(x.shape)} on {x.device}"
      )


def _window(q, k, v, a, b, A_log, dt_bias, indices, T: int, nodes, parents, beta_max: float):
  """The kernels' arguments; every one is a view, except what is as small as `indices`.

  `as_torch_kernel` takes no tensor that a kernel leaves unread, so `parents` may be None.
  """
  import torch

  _contiguous(q=q, k=k, v=v, a=a, b=b, A_log=A_log, dt_bias=dt_bias, indices=indices)
  B, (HV, _) = indices.shape[0], v.shape[1:]
  if q.shape[0] != B * T:
    raise ValueError(f"{q.shape[0]} tokens are not {B} windows of {T=}")
  windows = lambda x: x.view(B, T, *x.shape[1:])
  int32 = functools.partial(torch.full, dtype=torch.int32, device=v.device)
  nodes = int32((B,), T) if nodes is None else nodes
  raw = Raw(*(windows(x) for x in (q, k, v, a.view(B * T, HV, -1), b)))
  top = torch.full((1,), beta_max, dtype=torch.float32, device=v.device)
  return Window(raw, parents, nodes, indices), GateParams(A_log, dt_bias.view(HV, -1), top)


def decode(state, q, k, v, a, b, A_log, dt_bias, indices, *, beta_max: float = 1.0) -> Tensor:
  """One token per row of `indices`: outputs [B, HV, V]; the state advances in place."""
  _contiguous(state=state)
  window, params = _window(q, k, v, a, b, A_log, dt_bias, indices, 1, None, None, beta_max)
  o, _ = _on_torch(_decode.decode)(state, window, params)
  return o.view(v.shape)


def verify(
  state, q, k, v, a, b, A_log, dt_bias, indices, *, T: int, nodes=None, parents=None,
  beta_max: float = 1.0,
) -> Tensor:  # fmt: skip
  """Outputs [B T, HV, V] of windows of T nodes; the state is read and not written.

  nodes [B] int32, by default T; parents [B, T] int32, -1 the state, by default a chain.
  """
  import torch

  _contiguous(state=state)
  if parents is None:
    chain = torch.arange(-1, T - 1, dtype=torch.int32, device=v.device)
    parents = chain.expand(indices.shape[0], T).contiguous()
  window, params = _window(q, k, v, a, b, A_log, dt_bias, indices, T, nodes, parents, beta_max)
  o, _, _ = _on_torch(_verify.verify, parts=())(state, window, params)
  return o.view(v.shape)


def fold(state, k, v, beta, g, path, length, indices) -> None:
  """Replays accepted raw tokens into the state: bit for bit what `decode` leaves.

  k [B, T, H, K], v [B, T, HV, V] raw, beta [B, T, HV] and g [B, T, HV, 1 or K] float32; the first
  `length` [B] entries of `path` [B, P] int32 of each row are accepted.
  """
  import torch

  _contiguous(state=state, k=k, v=v, beta=beta, g=g, path=path, length=length, indices=indices)
  row = torch.arange(indices.shape[0], dtype=torch.int32, device=state.device)
  _on_torch(_fold.fold_raw)(state, Records(k, v, beta, g), Pending(row, path, length), indices)


def prefill(
  state, q, k, v, a, b, A_log, dt_bias, indices, *, T: int, nodes=None, beta_max: float = 1.0
) -> Tensor:
  """Outputs [B T, HV, V] of B prompts padded to T tokens, a multiple of 32; the state in place."""
  if T % _prefill.CHUNK:
    raise ValueError(f"{T=} must be a multiple of {_prefill.CHUNK}")
  _contiguous(state=state)
  window, params = _window(q, k, v, a, b, A_log, dt_bias, indices, T, nodes, None, beta_max)
  o, _ = _on_torch(_prefill.prefill)(state, window, params)
  return o.view(v.shape)
