"""The hybrid model: one forward pass whatever the memory, and each part against its formula."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn import attention, hybrid, streaming
from gdn.attention import attend
from gdn.block_inverse import block_substitute
from gdn.config import Config
from gdn.dots import EXACT
from gdn.norms import gated_rms_norm, rms_norm
from gdn.ops import XLA
from tests.strategies import TINY

pytestmark = pytest.mark.usefixtures("quick_compiles")

GDN = Config(
  width=48,
  inner=64,
  layers=4,
  key_heads=2,
  value_heads=4,
  key_dim=16,
  value_dim=24,
  query_heads=4,
  kv_heads=2,
  head_dim=16,
  rotary=8,
  window=20,
)
KDA = Config(
  width=32,
  inner=32,
  layers=2,
  attention_every=2,
  key_heads=1,
  value_heads=2,
  key_dim=16,
  value_dim=16,
  decay_channels=16,
  beta_max=2.0,
  query_heads=2,
  kv_heads=1,
  head_dim=16,
  rotary=16,
  window=8,
)
CONFIGS = pytest.mark.parametrize("config", [GDN, KDA], ids=["gdn", "kda"])
B, T = 2, 70


def model(config, T=T):
  params = hybrid.init(config, jax.random.key(1))
  ids = jax.random.randint(jax.random.key(2), (B, T), 0, config.vocab)
  return params, ids


@partial(jax.jit, static_argnames="config")
def piece(params, config, ids, start, memories, nodes):
  positions = start + jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
  positions = jnp.broadcast_to(positions, ids.shape)
  mixers = streaming.streaming(XLA, nodes)
  return hybrid.forward(params, config, ids, positions, mixers, memories)


def in_pieces(params, config, ids, sizes):
  memories, out, at = streaming.empty(config, B, params.embed.dtype), [], 0
  for n in sizes:
    logits, memories = piece(params, config, ids[:, at : at + n], jnp.int32(at), memories, None)
    out.append(logits)
    at += n
  return jnp.concatenate(out, axis=1), memories


EPS = 2.0**-24  # of float32


def noise(params, config, ids, exact):
  """How far weights one rounding away move logits and memories: what float32 leaves undecided."""
  ulp = lambda x: x * (1 + 2 * EPS)
  return gap(in_pieces(jax.tree.map(ulp, params), config, ids, [ids.shape[1]]), exact)


def gap(a, b):
  """Largest difference of logits, and of memories."""
  most = lambda x, y: max(float(jnp.abs(p - q).max()) for p, q in zip(x, y, strict=True))
  return most(a[:1], b[:1]), most(jax.tree.leaves(a[1]), jax.tree.leaves(b[1]))


@CONFIGS
@pytest.mark.parametrize("sizes", [[1] * T, [33, 1, 36]], ids=["tokens", "pieces"])
def test_any_cut_gives_the_same_logits(config, sizes):
  params, ids = model(config)
  whole = in_pieces(params, config, ids, [T])
  found = gap(in_pieces(params, config, ids, sizes), whole)
  for difference, one_rounding in zip(found, noise(params, config, ids, whole), strict=True):
    assert difference <= 16 * one_rounding < 1e-3


@CONFIGS
def test_a_later_byte_changes_no_earlier_logit(config):
  params, ids = model(config)
  changed = ids.at[:, 40].set((ids[:, 40] + 1) % config.vocab)
  whole = in_pieces(params, config, ids, [T])
  moved = jnp.abs(whole[0] - in_pieces(params, config, changed, [T])[0])
  budget = 16 * noise(params, config, ids, whole)[0]
  assert float(moved[:, :40].max()) <= budget < 1e-3 < float(moved[:, 40:].max())


def test_padding_leaves_no_trace():
  params, ids = model(GDN)
  real = [50, 13]
  nodes = jnp.array(real, jnp.int32)
  memories = streaming.empty(GDN, B, jnp.float32)
  _, padded = piece(params, GDN, ids, jnp.int32(0), memories, nodes)
  for slot, n in enumerate(real):
    alone = in_pieces(params, GDN, ids[:, :n], [n])
    budget = 16 * noise(params, GDN, ids[:, :n], alone)[1]
    for a, b in zip(jax.tree.leaves(padded), jax.tree.leaves(alone[1]), strict=True):
      np.testing.assert_allclose(a[slot], b[slot], rtol=0, atol=budget)


def test_bfloat16_follows_the_parameters():
  params, ids = model(GDN)
  exact, _ = in_pieces(params, GDN, ids, [T])
  low = hybrid.cast(params, jnp.bfloat16)
  assert low.embed.dtype == jnp.bfloat16
  assert low.layers[0].mixer.A_log.dtype == low.norm.dtype == jnp.float32
  logits, memories = in_pieces(low, GDN, ids, [T])
  assert logits.dtype == jnp.float32
  assert memories[0].recurrent.dtype == jnp.float32
  assert memories[0].conv.dtype == memories[3].k.dtype == jnp.bfloat16
  assert 0 < float(jnp.abs(logits - exact).max()) < 0.5


def test_hidden_states_end_in_the_logits():
  params, ids = model(KDA)
  positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32)[None], ids.shape)
  memories = streaming.empty(KDA, B, jnp.float32)

  @jax.jit
  def both(params):
    args = params, KDA, ids, positions, streaming.streaming(XLA), memories
    hidden, _ = hybrid.hidden_states(*args)
    return hidden, hybrid.logits(params, hidden[-1]), hybrid.forward(*args)[0]

  hidden, logits, wanted = both(params)
  assert len(hidden) == KDA.layers
  np.testing.assert_array_equal(logits, wanted)


def test_norms_against_their_formulas():
  x, z = np.random.default_rng(0).normal(size=(2, 5, 3, 16))
  w = np.random.default_rng(1).normal(size=16)
  unit = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
  f32 = partial(jnp.asarray, dtype=jnp.float32)
  np.testing.assert_allclose(rms_norm(f32(x), f32(w)), unit * (1 + w), rtol=32 * EPS, atol=32 * EPS)
  gated = w * unit * z / (1 + np.exp(-z))
  np.testing.assert_allclose(
    gated_rms_norm(f32(x), f32(z), f32(w)), gated, rtol=32 * EPS, atol=32 * EPS
  )


def test_gated_norm_rounds_the_unit_vector_before_its_weight():
  x, z = (jax.random.normal(jax.random.key(i), (64, 16)).astype(jnp.bfloat16) for i in (0, 1))
  w = jnp.full((16,), 1.125, jnp.float32)
  x64 = np.asarray(x, np.float64)
  unit = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6)
  low = lambda v: np.asarray(jnp.asarray(v, jnp.float32).astype(jnp.bfloat16), np.float64)
  z64 = np.asarray(z, np.float64)
  wanted = low(low(1.125 * low(unit)) * z64 / (1 + np.exp(-z64)))
  got = np.asarray(gated_rms_norm(x, z, w), np.float64)
  assert (got == wanted).mean() > 0.99  # a tie may fall either way


def numpy_attention(weights, config, x, positions):
  """The layer in float64, one query at a time."""
  w = jax.tree.map(lambda a: np.asarray(a, np.float64), weights)
  D, r, half = config.head_dim, config.query_heads // config.kv_heads, config.rotary // 2

  def norm(y, scale):
    return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)

  def rotate(y):
    angle = positions[:, None, None] * config.rope_theta ** (-np.arange(half) / half)
    a, b = y[..., :half], y[..., half : 2 * half]
    turned = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return np.concatenate([*turned, y[..., 2 * half :]], -1)

  T = len(x)
  packed = (x @ w.q).reshape(T, config.query_heads, 2 * D)
  q, gate = packed[..., :D], packed[..., D:]
  k, v = ((x @ m).reshape(T, config.kv_heads, D) for m in (w.k, w.v))
  q, k = rotate(norm(q, w.q_norm)), rotate(norm(k, w.k_norm))
  o = np.zeros_like(q)
  for t in range(T):
    seen = slice(max(0, t - config.window + 1), t + 1)
    for h in range(config.query_heads):
      score = k[seen, h // r] @ q[t, h] / np.sqrt(D)
      weight = np.exp(score - score.max())
      o[t, h] = weight / weight.sum() @ v[seen, h // r]
  return (o / (1 + np.exp(-gate))).reshape(T, -1) @ w.out


def test_attention_against_its_formula(monkeypatch):
  monkeypatch.setattr(streaming, "QUERY_BLOCK", 16)  # several blocks, the last one padded
  weights = attention.init(GDN, jax.random.key(3), jnp.float32)
  weights = weights._replace(q_norm=0.3 + weights.q_norm, k_norm=weights.k_norm - 0.2)
  x = jax.random.normal(jax.random.key(4), (1, 57, GDN.width))
  positions = 900 + jnp.arange(57, dtype=jnp.int32)[None]
  mixers, memories = streaming.streaming(XLA), streaming.empty(GDN, 1, jnp.float32)
  y, _ = attention.attention(weights, GDN, x, positions, mixers.attend, memories[3])
  wanted = numpy_attention(weights, GDN, np.asarray(x[0], np.float64), np.asarray(positions[0]))
  # angles are float32: at position 900 one is off by up to 900 x 2^-24
  np.testing.assert_allclose(y[0], wanted, atol=900 * 2.0**-22)


def test_a_spoiled_row_reaches_only_the_queries_that_see_it():
  q, k, v = (jax.random.normal(jax.random.key(i), (6, 2, 8)) for i in range(3))
  visible = jnp.tril(jnp.ones((6, 6), bool)).at[5, 3].set(False).at[0].set(False)
  clean = attend(q, k, v, visible)
  for spoil in (k, v):
    bad = spoil.at[3, 1, 2].set(jnp.nan)
    o = attend(q, bad if spoil is k else k, bad if spoil is v else v, visible)
    sees = jnp.array([3, 4])
    assert bool(jnp.isnan(o[sees]).all())
    rest = jnp.array([0, 1, 2, 5])
    np.testing.assert_array_equal(o[rest], clean[rest])
  np.testing.assert_array_equal(clean[0], 0.0)


def test_block_inverse_is_a_solve_and_has_its_gradient():
  T = 50
  A = jnp.tril(jax.random.normal(jax.random.key(0), (T, T)), -1) / 7
  rhs = jax.random.normal(jax.random.key(1), (T, 9))
  M = np.eye(T) + np.asarray(A, np.float64)
  X, wanted = np.linalg.inv(M), np.linalg.solve(M, np.asarray(rhs, np.float64))
  # forward bound of substitution, once for the inverse and once for its product
  bound = 2 * T * EPS * np.abs(X) @ np.abs(M) @ np.abs(X) @ np.abs(rhs)
  assert (np.abs(block_substitute(A, rhs, EXACT) - wanted) <= bound).all()

  gradient = jax.grad(lambda A: jnp.sum(jnp.sin(block_substitute(A, rhs, EXACT))))(A)
  wanted_gradient = np.tril(-X.T @ np.cos(wanted) @ wanted.T, -1)
  lost = 2 * T * EPS * np.linalg.cond(M) ** 2 * np.abs(wanted_gradient).max()
  np.testing.assert_allclose(np.tril(gradient, -1), wanted_gradient, rtol=0, atol=lost)


def test_gradient_agrees_with_finite_differences():
  params, ids = model(TINY, T=20)
  params = params._replace(embed=50 * params.embed)  # of unit size: rounding is far below the slope

  @jax.jit
  def loss(params):
    memories = streaming.empty(TINY, B, jnp.float32)
    logits, _ = piece(params, TINY, ids, jnp.int32(0), memories, None)
    return jnp.mean(jax.nn.log_softmax(logits)[:, :, 0])

  gradient = jax.grad(loss)(params)
  inner = lambda a, b: sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)))
  slope = float(inner(gradient, gradient)) ** 0.5
  h = 0.005
  at = lambda h: float(loss(jax.tree.map(lambda p, g: p + h / slope * g, params, gradient)))
  assert abs((at(h) - at(-h)) / (2 * h) - slope) <= 1e-3 * slope


@pytest.mark.parametrize(
  "wrong",
  [
    {"value_heads": 3},
    {"decay_channels": 2},
    {"rotary": 7},
    {"beta_max": 1.5},
    {"window": 0},
    {"query_heads": 3},
  ],
  ids=lambda w: next(iter(w)),
)
def test_config_names_the_value_and_what_is_allowed(wrong):
  [(name, value)] = wrong.items()
  with pytest.raises(ValueError, match=rf"{name} = {value}, allowed: "):
    Config(**wrong)


def test_config_names_every_wrong_value_at_once():
  with pytest.raises(ValueError, match=r"(?s)value_heads = 5, allowed: .*rotary = 3, allowed: "):
    Config(value_heads=5, rotary=3)


def test_layers_of_a_kind_are_traced_once():
  """A kernel is long to trace and to lower: 24 layers must not cost 24 times one."""
  params, ids = model(GDN, 8)
  plain, traced = streaming.streaming(XLA), []

  def recurrent(*args):
    traced.append(1)
    return plain.recurrent(*args)

  at = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32)[None], (B, 8))
  mixers = plain._replace(recurrent=recurrent)
  run = lambda *args: hybrid.forward(args[0], GDN, ids, at, mixers, args[1])
  jax.eval_shape(run, params, streaming.empty(GDN, B, jnp.float32))
  assert len(traced) == 1  # of three layers


def test_a_layer_without_a_mixer_is_its_mlp():
  params, ids = model(GDN, 8)
  block = params.layers[0]
  x = params.embed[ids]
  at = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32)[None], (B, 8))
  cut = block._replace(mixer=None)
  y, memory = hybrid.block(cut, GDN, x, at, streaming.streaming(XLA), "as it was")
  assert memory == "as it was"
  np.testing.assert_array_equal(y, hybrid.behind(block, GDN, x))
