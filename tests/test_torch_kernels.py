"""The bridge to PyTorch: on a GPU against JAX; without one, that a program is one kernel."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("absl")  # jax.experimental.pallas.mosaic_gpu imports it

from experiments import ahead
from gdn.typing import Pending, Records
from pallas_kernels import decode, fold, prefill, recurrent_verify
from pallas_kernels import torch as bridge
from tests.test_recurrent_kernels import K, V, abstract, bf16, case, f32, i32, on_h200


@on_h200
def test_programs_are_one_kernel_and_nothing_else():
  """Which is all that `as_torch_kernel` takes, as it takes no argument that is not read."""
  sd, top = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((1,), f32)

  def arguments(T):
    S, window, params = abstract(4, T, f32, 1)
    return S, window._replace(parents=None), params._replace(beta_max=top)

  def of_tree(T):
    S, window, params = arguments(T)
    return S, window._replace(parents=sd(window.raw.v.shape[:2], i32)), params

  S, window, _ = arguments(16)
  records = Records(
    sd((4, 16, 16, K), bf16), sd((4, 16, 32, V), bf16), sd((4, 16, 32), f32),
    sd((4, 16, 32, 1), f32),
  )  # fmt: skip
  pending = Pending(sd((4,), i32), sd((4, 16), i32), sd((4,), i32))
  verify = functools.partial(recurrent_verify.verify, parts=())
  for f, args in (
    (decode.decode, arguments(1)),
    (verify, of_tree(16)),
    (prefill.prefill, arguments(64)),
    (fold.fold_raw, (S, records, pending, window.slots)),
  ):
    with jax.sharding.use_abstract_mesh(ahead.mesh().abstract_mesh):
      module = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"= ([\w.]+ @?\w+)", module) == ["stablehlo.custom_call @mosaic_gpu_v2"]
    main = re.search(r"@main\((.*?)\) ->", module, re.DOTALL)
    assert main
    assert len(re.findall(r"%arg\d+", main[1])) == len(jax.tree.leaves(args))


def test_without_torch_the_error_says_so(monkeypatch):
  monkeypatch.setitem(sys.modules, "torch", None)
  bridge._on_torch.cache_clear()
  with pytest.raises(ImportError, match="needs PyTorch"):
    bridge._on_torch(decode.decode)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, K], ids=["gdn", "kda"])
def test_torch_tensors_get_what_jax_arrays_get(channels: int):
  torch = pytest.importorskip("torch")
  copies, T = 2, 4
  S, window, params = case(copies, channels, T=T)
  window = window._replace(raw=jax.tree.map(jnp.nan_to_num, window.raw))
  nodes = window.nodes

  def tensor(x, *shape):
    wide = x.astype(f32) if jnp.issubdtype(x.dtype, jnp.floating) else x
    out = torch.from_numpy(np.array(wide)).cuda()
    return (out.bfloat16() if x.dtype == bf16 else out).reshape(shape or x.shape).contiguous()

  def given(window):
    q, k, v, a, b = (tensor(x, -1, *x.shape[2:]) for x in window.raw)
    a = a.squeeze(-1) if channels == 1 else a
    gate = tensor(params.A_log), tensor(params.dt_bias).squeeze(-1)
    return q, k, v, a, b, *gate, tensor(window.slots)

  same = lambda got, want: np.testing.assert_array_equal(
    got.float().cpu().numpy(), np.asarray(want.astype(f32)).reshape(got.shape)
  )
  state, top = tensor(S), float(params.beta_max)
  rest = {"T": T, "nodes": tensor(nodes), "parents": tensor(window.parents), "beta_max": top}
  verify = functools.partial(recurrent_verify.verify, parts=())
  want, gates, _ = jax.jit(verify)(S, window, params)
  same(bridge.verify(state, *given(window), **rest), want)
  same(state, S)

  one = window._replace(
    raw=jax.tree.map(lambda x: x[:, :1], window.raw),
    parents=window.parents[:, :1],
    nodes=jnp.ones_like(nodes),
  )
  want, new = jax.jit(decode.decode)(S, one, params)
  same(bridge.decode(state, *given(one), beta_max=top), want)
  same(state, new)

  B = nodes.shape[0]
  path = jnp.broadcast_to(jnp.arange(T, dtype=i32), (B, T))
  pending = Pending(jnp.arange(B, dtype=i32), path, jnp.minimum(nodes, 2))
  records = Records(window.raw.k, window.raw.v, *gates)
  want = jax.jit(fold.fold_raw)(new, records, pending, window.slots)
  bridge.fold(state, *map(tensor, (*records, path, pending.length, window.slots)))
  same(state, want)
