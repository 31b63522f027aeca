"""Whole models as transformers computes them, and the layer as flash-linear-attention does."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.model import Draft, model_memory, verify
from gdn.huggingface import load
from gdn.ops import XLA
from gdn.streaming import empty
from gdn.typing import Accepted, GateParams, Raw, Window
from gdn.window import chain
from tests import parity
from tests.budget import check
from tests.goldens import cases

pytestmark = pytest.mark.usefixtures("quick_compiles")

FLOAT32 = 1e-5  # the requirement: the largest difference over the largest number


@pytest.mark.parametrize("name", cases.CASES)
def test_logits_and_states_are_those_of_transformers(tmp_path, name):
  golden = parity.read(name)
  folder = parity.write(golden, tmp_path / "model")
  got = parity.run(*load(folder), golden.arrays["ids"])
  assert {f"float32.{key}" for key in got} == {k for k in golden.arrays if k.startswith("float32.")}
  for key, x in got.items():
    error = parity.largest(x, parity.reference(golden, "float32", key, x))
    assert error <= FLOAT32, f"{key}: {error:.1e}"
  # In bfloat16, at most SLACK times as far from the reference's float32 as the reference itself is,
  # and one rounding.
  for key, x in parity.run(*load(folder, dtype=jnp.bfloat16), golden.arrays["ids"]).items():
    exact, own = (parity.reference(golden, dtype, key, x) for dtype in ("float32", "bfloat16"))
    check(f"bfloat16 {key}", x, exact, own, eps=2.0**-8)


@pytest.mark.parametrize("scheme", ["replay_0", "ring_exact"])
def test_a_scheme_decodes_a_loaded_model(tmp_path, scheme):
  """Windows of eight of which five are right: logits and states are still the reference's."""
  golden, T, kept = parity.read("next_r2_experts"), 8, 5
  params, config = load(parity.write(golden, tmp_path / "model"))
  ids, n = golden.arrays["ids"], cases.PROMPT
  memories = empty(config, 1, jnp.float32)
  _, memories = parity.piece(params, config, ids[:, :n], jnp.int32(0), memories)
  spec = Spec(config.key_heads, T, dtypes=Dtypes(raw=jnp.float32))
  memory = model_memory(config, SCHEMES[scheme].make(spec))
  slots, path = jnp.zeros(1, jnp.int32), jnp.arange(T, dtype=jnp.int32)[None]

  @jax.jit
  def window(carry, tokens, at, accepted):
    draft = Draft(tokens, chain(T)[None], jnp.full(1, T, jnp.int32))
    logits, flight = verify(params, config, memory, carry, draft, at + path, slots)
    return logits, memory.whole.commit(flight, Accepted(path, accepted[None]))

  carry, logits, at = memory.whole.init(memories), [], n
  while at < ids.shape[1]:
    right = min(kept, ids.shape[1] - at)
    tokens = np.full((1, T), 7, np.int32)
    tokens[:, :right] = ids[:, at : at + right]
    out, carry = window(carry, tokens, jnp.int32(at), jnp.int32(right))
    logits.append(out[:, :right])
    at += right
  got = {"logits": np.concatenate(logits, axis=1)}
  got |= parity.states(config, memory.whole.materialize(carry), "decoded")
  assert any(".state." in key for key in got)
  for key, x in got.items():
    want = golden.arrays[f"float32.{key}"]
    want = want[:, n:] if key == "logits" else parity.reference(golden, "float32", key, x)
    assert parity.largest(x, want) <= FLOAT32, key


def raw_layer():
  x = parity.read("fla_gated_delta_rule").arrays
  raw = Raw(
    *(jnp.asarray(x[name]) for name in "qkv"), jnp.asarray(x["a"][..., None]), jnp.asarray(x["b"])
  )
  gates = GateParams(jnp.asarray(x["A_log"]), jnp.asarray(x["dt_bias"][:, None]), jnp.float32(1))
  return x, raw, gates, jnp.asarray(np.swapaxes(x["S"], 2, 3))


def whole(x, raw, gates, S):
  B, T = x["b"].shape[:2]
  parents = jnp.broadcast_to(chain(T)[None], (B, T))
  slots = jnp.arange(B, dtype=jnp.int32)
  return XLA.prefill(S, Window(raw, parents, jnp.full(B, T, jnp.int32), slots), gates)


def by_token(x, raw, gates, S):
  B = x["b"].shape[0]
  slots = jnp.arange(B, dtype=jnp.int32)
  root, one = jnp.full((B, 1), -1, jnp.int32), jnp.ones(B, jnp.int32)

  def step(S, x):
    o, S = XLA.decode(S, Window(jax.tree.map(lambda x: x[:, None], x), root, one, slots), gates)
    return S, o[:, 0]

  S, o = jax.lax.scan(step, S, jax.tree.map(lambda x: jnp.moveaxis(jnp.asarray(x), 1, 0), raw))
  return jnp.moveaxis(o, 0, 1), S


@pytest.mark.parametrize("ours", [whole, by_token], ids=["prefill", "decode"])
@pytest.mark.parametrize("theirs", ["recurrent", "chunked"])
def test_the_layer_is_that_of_flash_linear_attention(ours, theirs):
  x, raw, gates, S = raw_layer()
  o, S = jax.jit(partial(ours, x))(raw, gates, S)
  for name, got in (("o", o), ("S", np.swapaxes(S, 2, 3))):
    assert parity.largest(np.asarray(got), x[f"{theirs}.{name}"]) <= FLOAT32


def test_goldens_are_small_and_say_what_made_them():
  files = list(parity.GOLDENS.glob("*.safetensors"))
  assert {path.stem for path in files} == {
    *cases.CASES,
    *cases.DFLASH_CASES,
    "fla_gated_delta_rule",
  }
  assert sum(path.stat().st_size for path in files) < 1_500_000
  for path in files:
    versions = parity.read(path.stem).about["versions"]
    assert {"torch"} < set(versions) <= {"torch", "transformers", "fla-core", "dflash"}


def test_the_two_dtypes_of_a_golden_have_the_same_weights():
  dflash = parity.read("dflash")
  for golden in (*map(parity.read, cases.CASES), dflash, parity.target_of(dflash)):
    for tensor, x in parity.weights(golden).items():
      np.testing.assert_array_equal(x, x.astype(jnp.bfloat16).astype(np.float32), err_msg=tensor)
