"""One token beside a ring's pending rows: the reference's `step` of one node.

One body for the interpreter, with race detection, and for a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("absl")  # jax.experimental.pallas.mosaic_gpu imports it

from commit_schemes.footprint import LayerShape
from experiments import soak, soak_layer
from gdn.typing import Pending
from pallas_kernels import MOSAIC_GPU
from pallas_kernels import step as step_kernel
from pallas_kernels.decode_ring import step
from pallas_kernels.tiles import Config
from tests import h200
from tests.test_kernels import XLA, bf16, case, close, f32, i32, interpreted, poisoned
from tests.test_recurrent_kernels import EVERYWHERE, Where, existing, walks, within
from tests.test_recurrent_kernels import case as every_kind
from tests.test_step_kernel import (
  Case,
  abstract_step,
  on_h200,
  parts_of,
  pending_of,
  rows_of,
  spoiled,
)
from tests.words import lane_moves  # noqa: F401, a fixture

CASES = [
  Case(1, 16, False, (f32,)),
  Case(1, 17, False, (bf16,), bf16, share=3),
  Case(1, 9, None, (bf16, bf16), share=1),
]


@pytest.mark.parametrize(
  "c, copies, team",
  [
    pytest.param(c, 0, 1, id=f"{i}-alone", marks=[pytest.mark.slow] * (i == 0))
    for i, c in enumerate(CASES)
  ]
  + [pytest.param(CASES[0], 0, 2, id="0-two", marks=pytest.mark.warpgroups)]
  + [
    pytest.param(c, n, 0, id=f"{i}-{n}", marks=pytest.mark.gpu)
    for i, c in enumerate(CASES)
    for n in (2, 70)
  ],
)
def test_step_of_one_node_is_the_reference(c: Case, copies: int, team: int, lane_moves):  # noqa: F811
  """Slots without a token or without records, padding, NaN where nothing may be read, paths of all
  lengths; on a GPU a warpgroup to a key head, and more of them than warpgroups."""
  rng = np.random.default_rng(c.R)
  B, Hk = (4, 2 if team > 1 else 1) if not copies else (copies, 16)
  H = c.share * Hk
  S, window, params = case(4, B, 1, H, Hk, dtype=c.state)
  window = poisoned(window, [*([0] if B > 2 else []), *[1] * (B - (B > 2))])
  rows = rows_of(rng, S.shape[0], c.R, H, Hk, c.parts)
  pending, flush, at = pending_of(rng, c, window.slots)
  rows = spoiled(rows, pending)
  if B > 2:
    pending = pending._replace(row=pending.row.at[1].set(-1))
  config = Config(sms=1, ctas_per_sm=team) if not copies else Config(sms=2) if copies < 70 else None
  call = functools.partial(step, out_dtype=f32, config=config)
  known = flush if c.fold is None else c.fold
  run = jax.jit(lambda S, rows, pending, at, w: call(S, rows, pending, known, at, w, params))
  with interpreted():
    o, gates, new, left = run(S, rows, pending, at, window)
  want_o, want_gates, want, want_left = jax.jit(XLA.step)(
    S, rows, pending, flush, at, window, params
  )
  close(o, want_o)
  close(new, want, eps=2.0**-20 if c.state == f32 else 2.0**-9)
  on = existing(window)
  for got, wanted in zip(gates, want_gates, strict=True):
    close(got[on], wanted[on])
    assert not np.asarray(got)[~on].any()
  narrow = 2.0 ** {(f32,): -20, (bf16,): -8, (bf16, bf16): -15}[c.parts]
  for got, wanted in zip(parts_of(left), parts_of(want_left), strict=True):
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))  # nothing else was touched
    close(jnp.nan_to_num(got), jnp.nan_to_num(wanted), eps=narrow)


@EVERYWHERE
def test_a_token_of_every_kind(where: Where, lane_moves):  # noqa: F811
  """Total decay, no decay with beta near two, padding, no token: outputs against float64."""
  S, window, params = every_kind(where.copies, 1)
  raw = jax.tree.map(lambda x: x[:, 2:3], window.raw)  # that of the total decay
  window = window._replace(
    raw=raw, parents=window.parents[:, :1], nodes=jnp.minimum(window.nodes, 1)
  )
  N, H, Hk, R = S.shape[0], S.shape[1], window.raw.k.shape[2], 8
  rows = rows_of(np.random.default_rng(0), N, R, H, Hk, (f32,))
  nothing = Pending(window.slots, jnp.zeros((len(window.slots), R), i32), 0 * window.nodes)
  call = functools.partial(step, out_dtype=f32, **(where.config or {"config": Config(sms=4)}))
  run = jax.jit(lambda S, rows, w: call(S, rows, nothing, False, 0 * w.nodes, w, params))
  with interpreted():
    o, *_ = run(S, rows, window)
  for kind, b, n, _, exact, _, plain in walks(S, window, params):
    within(f"o of {kind}", o[b, :n], exact, plain)
  assert not np.asarray(o)[~existing(window)].any()


@on_h200
@pytest.mark.parametrize("parts, dtype, B", [
  ((f32,), f32, 64), ((f32,), f32, 512), ((bf16,), bf16, 64), ((bf16, bf16), f32, 512),
])  # fmt: skip
def test_it_compiles_without_spills_and_copies_no_pool(parts, dtype, B: int):
  args = abstract_step(B, 1, 16, parts, dtype)
  got = h200.compiled(lambda *x: step(*x[:3], False, *x[3:]), *args, donate=(0, 1))
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[:2]))
  assert (got.aliased, got.copies, got.spilled) == (size, 0, 0)
  assert got.resident(threads=512) == 1


@pytest.mark.parametrize("B, R, flush, why", [
  (1, 16, False, "16 key heads: fewer than 528 warpgroups need"), (64, 16, True, "all slots flush"),
  (1024, 16, False, "1024 slots: at most 512"), (64, 18, None, "17 pending rows, paths of 18"),
])  # fmt: skip
def test_what_it_does_not_do_is_left_to_another_kernel(B: int, R: int, flush, why: str):
  with pytest.raises(NotImplementedError, match=why):
    jax.eval_shape(lambda *x: step(*x[:3], flush, *x[3:]), *abstract_step(B, 1, R))


def test_single_tokens_are_soaked_at_a_shape_that_it_takes():
  c = soak.CONFIGS["tokens"]
  assert soak_layer.LAYERS[c.model] == (LayerShape(16, 32), MOSAIC_GPU)
  flags = jax.ShapeDtypeStruct((c.slots,), bool)
  args = abstract_step(c.slots, 1, 4)
  o, *_ = jax.eval_shape(lambda flags, *x: step(*x[:3], flags, *x[3:]), flags, *args)
  assert o.shape == (c.slots, 1, 32, 128)


@pytest.mark.gpu
def test_its_gates_are_the_bits_of_the_other_kernels():
  """What an exact ring replays of a single token was recorded here."""
  S, window, params = case(0, 70, 1, 32, 16)
  rows = rows_of(np.random.default_rng(0), 71, 16, 32, 16, (f32,))
  none = Pending(window.slots, jnp.zeros((70, 16), i32), jnp.zeros(70, i32))
  call = lambda op: jax.jit(lambda: op(S, rows, none, False, jnp.zeros(70, i32), window, params)[1])
  for got, want in zip(call(step)(), call(step_kernel.step)(), strict=True):
    np.testing.assert_array_equal(got, want)
