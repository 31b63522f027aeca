"""The block drafter: one pass for many blocks, nothing from rows it may not see, its own target."""

import dataclasses
import os
import signal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import block_loss, greedy_text, train_drafter, training
from experiments.record import read_rows
from experiments.score import BUNDLED
from experiments.train_drafter import TINY_DRAFTER
from gdn import checkpoint, drafter, hybrid
from gdn.drafter import DrafterConfig, KeyValues
from gdn.modules import BlockDrafter
from gdn.ops import XLA
from gdn.streaming import empty, streaming

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = TINY_DRAFTER.drafter
B, S = 2, 24


@pytest.fixture(scope="module")
def target():
  return hybrid.init(SMALL.target, jax.random.key(3), jnp.bfloat16)


@pytest.fixture(scope="module")
def params():
  return drafter.init(SMALL, jax.random.key(4))


EPS = 2.0**-24  # of float32


def features(seed=0):
  return jax.random.normal(jax.random.key(seed), (B, S, SMALL.features))


POSITIONS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32)[None], (B, S))


@jax.jit
def run(params, embed, ids, positions, rows, back):
  return drafter.marginals(params, SMALL, embed, ids, positions, rows, back)


def test_attention_of_a_block_is_softmax_over_what_it_sees_of_its_context_and_itself():
  A, D, Hq, Hkv, h = 2, 3, 4, 2, 8
  draw = lambda i, *shape: np.asarray(jax.random.normal(jax.random.key(i), shape))
  q, k, v = draw(0, A, D, Hq, h), draw(1, A, D, Hkv, h), draw(2, A, D, Hkv, h)
  ck, cv = draw(3, S, Hkv, h), draw(4, S, Hkv, h)
  see = np.random.default_rng(0).random((A, D, S)) < 0.4
  see[1] = False  # nothing before the anchor
  near = np.array([[1, 0, 0], [1, 1, 1], [0, 1, 1]], bool)
  args = q, KeyValues(k, v), KeyValues(ck, cv), see, near
  o = drafter.joint_attend(*jax.tree.map(jnp.asarray, args))
  for a in range(A):
    for d in range(D):
      for head in range(Hq):
        g = head // (Hq // Hkv)
        keys = np.concatenate([ck[see[a, d], g], k[a, near[d], g]]).astype(np.float64)
        values = np.concatenate([cv[see[a, d], g], v[a, near[d], g]]).astype(np.float64)
        scores = keys @ q[a, d, head] / np.sqrt(h)
        w = np.exp(scores)
        # a score is off by h roundings and an exponential by as much; then sums of S + D terms
        off = (h * np.abs(scores).max() + S + D) * EPS * np.abs(values).max()
        np.testing.assert_allclose(o[a, d, head], w / w.sum() @ values, rtol=0, atol=2 * off)


def test_blocks_of_one_sequence_are_what_each_is_alone(params, target):
  rows = drafter.context_rows(params, SMALL, features(), POSITIONS)
  at = jnp.asarray([[0, 5, 11], [3, 4, 20]], jnp.int32)
  ids = jnp.asarray([[1, 2, 3], [4, 5, 6]], jnp.int32)
  back = at[:, :, None] - POSITIONS[:, None]
  back = jnp.where(back <= SMALL.window, back, 0)
  together = run(params, target.embed, ids, at, rows, back)
  moved = jax.tree.map(lambda x: x * (1 + 2 * EPS), params)  # what one rounding of the weights does
  noise = float(np.abs(run(moved, target.embed, ids, at, rows, back) - together).max())
  assert together.shape == (B, 3, SMALL.block - 1, SMALL.target.vocab)
  for a in range(3):
    one = slice(a, a + 1)
    alone = run(params, target.embed, ids[:, one], at[:, one], rows, back[:, one])
    np.testing.assert_allclose(together[:, one], alone, rtol=0, atol=16 * noise)
  assert noise < 1e-3 < np.abs(np.diff(together, axis=1)).max()


def test_rows_that_a_block_does_not_see_leave_no_trace(params, target):
  """Later tokens, rejected ones and rows never written hold anything, NaN as well."""
  at, ids = jnp.full((B, 1), 10, jnp.int32), jnp.zeros((B, 1), jnp.int32)
  back = jnp.where(POSITIONS >= 2, 10 - POSITIONS, 0)[:, None]
  seen = (back > 0)[:, 0, :, None]
  poison, clean = (jnp.where(seen, features(), x) for x in (jnp.nan, 0.0))
  out = [
    run(params, target.embed, ids, at, drafter.context_rows(params, SMALL, f, POSITIONS), back)
    for f in (clean, poison)
  ]
  assert np.isfinite(out[1]).all()
  np.testing.assert_array_equal(*out)
  other = clean.at[:, 5].add(1.0)  # what it does see, matters
  rows = drafter.context_rows(params, SMALL, other, POSITIONS)
  assert np.abs(run(params, target.embed, ids, at, rows, back) - out[0]).max() > 1e-4


def test_module_and_functions_are_one(target):
  module = BlockDrafter(SMALL, rngs=nnx.Rngs(0))
  rows = module.context_rows(features(), POSITIONS)
  at, back = jnp.full((B, 1), S, jnp.int32), (S - POSITIONS)[:, None]
  ids = jnp.zeros((B, 1), jnp.int32)
  np.testing.assert_array_equal(
    module(target.embed, ids, at, rows, back),
    drafter.marginals(module.params, SMALL, target.embed, ids, at, rows, back),
  )


def test_features_come_with_the_logits(target):
  config, ids = SMALL.target, jnp.asarray([[1, 2, 3, 4]], jnp.int32)
  at, memories = POSITIONS[:1, :4], empty(SMALL.target, 1, jnp.bfloat16)
  args = target, config, ids, at, streaming(XLA), memories
  logits, found, _ = hybrid.featured(*args, (0, 1))
  np.testing.assert_array_equal(logits, hybrid.forward(*args)[0])
  by_hand = np.concatenate(hybrid.hidden_states(*args)[0], axis=-1)
  np.testing.assert_array_equal(found, by_hand)
  with pytest.raises(ValueError, match=r"features are 5 wide, wanted 64 from layers \(0, 1\)"):
    drafter.context_rows(drafter.init(SMALL, jax.random.key(0)), SMALL, found[..., :5], at)


@pytest.mark.parametrize(
  "wrong, says",
  [
    ({"block": 1}, "block = 1, allowed: an integer of at least 2"),
    ({"taps": (3, 1)}, r"taps = \(3, 1\), allowed: rising, 0 to 7"),
    ({"taps": (8,)}, r"taps = \(8,\), allowed: rising, 0 to 7"),
    ({"taps": ()}, r"taps = \(\), allowed"),
    ({"window": 0}, "window = 0, allowed: an integer of at least 1"),
    (
      {"sliding": 0, "sliding_layers": (0,)},
      "sliding = 0, allowed: an integer of at least 1",
    ),
    ({"sliding_layers": (0,)}, "sliding = None, allowed: an integer of at least 1"),
    ({"sliding": 4}, "sliding = 4, allowed: None without sliding_layers"),
    (
      {"sliding": 4, "sliding_layers": (5,)},
      r"sliding_layers = \(5,\), allowed: rising, 0 to 4",
    ),
    ({"causal_layers": (2, 1)}, r"causal_layers = \(2, 1\), allowed: rising, 0 to 4"),
  ],
)
def test_drafter_config_names_the_value_and_what_is_allowed(wrong, says):
  with pytest.raises(ValueError, match=says):
    DrafterConfig(**wrong)


def test_a_drafter_is_loaded_bit_for_bit_for_its_target_alone(tmp_path, params, target):
  path = tmp_path / "d.safetensors"
  low = hybrid.cast(params, jnp.bfloat16)
  less = dataclasses.replace(SMALL, sliding=5, sliding_layers=(1,), causal_layers=(0, 1))
  checkpoint.save_drafter(path, low, less, target)
  assert checkpoint.load_drafter(path, target)[1] == less
  checkpoint.save_drafter(path, low, SMALL, target)
  first = path.read_bytes()
  for same in (target, hybrid.cast(target, jnp.float32)):  # a target is itself in every dtype
    loaded, config = checkpoint.load_drafter(path, same)
    assert config == SMALL
    assert jax.tree.structure(loaded) == jax.tree.structure(low)
    for a, b in zip(jax.tree.leaves(low), jax.tree.leaves(loaded), strict=True):
      assert a.dtype == b.dtype
      np.testing.assert_array_equal(a, b)
  checkpoint.save_drafter(path, low, SMALL, target)
  assert path.read_bytes() == first
  other = target._replace(embed=target.embed.at[0, 0].add(1))
  names = [checkpoint.fingerprint(x)[:12] for x in (target, other)]
  with pytest.raises(
    ValueError, match=f"is a drafter for the target {names[0]}, not for {names[1]}"
  ):
    checkpoint.load_drafter(path, other)
  for n in (len(first) // 2, 4, 0):
    path.write_bytes(first[:n])
    with pytest.raises(ValueError, match=r"d\.safetensors is truncated or no safetensors file"):
      checkpoint.load_drafter(path, target)
  with pytest.raises(ValueError, match=r"was not written by .*save_drafter.*wanted drafter"):
    checkpoint.load_drafter(BUNDLED, target)
  with pytest.raises(FileNotFoundError):
    checkpoint.load_drafter(tmp_path / "none", target)


def test_the_default_drafter_fits_in_eight_megabytes():
  shapes = jax.eval_shape(lambda: drafter.init(DrafterConfig(), jax.random.key(0), jnp.bfloat16))
  assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) < 8e6 - 50_000


def test_labels_are_the_targets_and_end_where_the_text_leaves_them():
  random = np.random.default_rng(1)
  text, best = random.integers(0, 3, (2, 12)), random.integers(0, 3, (2, 12))
  best[1, :-1] = text[1, 1:]  # a row that the target wrote itself
  at = np.asarray([[0, 4, 10], [0, 7, 11]])
  args = (jnp.asarray(x, jnp.int32) for x in (text, best, at))
  tokens, valid = block_loss.labels(*args, 5)
  for b in range(2):
    for a, anchor in enumerate(at[b]):
      for i in range(5):
        exists = anchor + i < 12
        own = all(text[b, t + 1] == best[b, t] for t in range(anchor, min(anchor + i, 11)))
        assert valid[b, a, i] == (exists and own)
        if exists:
          assert tokens[b, a, i] == best[b, anchor + i]
  assert valid[1, 0].all()
  assert not valid[0].all()


def test_a_continuation_is_the_argmax_at_every_place(target):
  config, P, n = SMALL.target, 9, 12
  weights = hybrid.cast(target, jnp.float32)
  prefix = np.random.default_rng(2).integers(0, 256, (3, P)).astype(np.uint8)
  text = np.asarray(greedy_text.continued(weights, config, prefix, tokens=n))
  np.testing.assert_array_equal(text[:, :P], prefix)
  at = jnp.broadcast_to(jnp.arange(P + n, dtype=jnp.int32)[None], text.shape)
  forward = jax.jit(partial(hybrid.forward, config=config, mixers=streaming(XLA)))
  memories = empty(config, 3, jnp.float32)
  logits, _ = forward(weights, ids=jnp.asarray(text, jnp.int32), positions=at, memories=memories)
  assert np.unique(text[:, P:]).size > 3
  np.testing.assert_array_equal(jnp.argmax(logits[:, P - 1 : -1], axis=-1), text[:, P:])
  with pytest.raises(ValueError, match="prefix 9 \\+ tokens 40 exceed the model's window of 48"):
    greedy_text.continued(weights, config, prefix, tokens=40)


def test_an_interrupted_training_ends_with_the_same_drafter(tmp_path, monkeypatch, target):
  (tmp_path / "lib").mkdir()
  for i in range(6):
    (tmp_path / "lib" / f"m{i}.py").write_text(f"def f{i}(x):\n  return x + {i}\n" * 60)
  checkpoint.save(tmp_path / "target.safetensors", target, SMALL.target)
  places = {"stdlib": tmp_path / "lib", "target": tmp_path / "target.safetensors"}
  config = dataclasses.replace(TINY_DRAFTER, **places)
  with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
    whole = train_drafter.run(config, tmp_path / "whole")
    measure, calls = train_drafter.measure, []

    def interrupted(*args):
      calls.append(args)
      if len(calls) == 2:
        raise KeyboardInterrupt
      return measure(*args)

    monkeypatch.setattr(train_drafter, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
      train_drafter.run(config, tmp_path / "half")
    assert not (tmp_path / "half" / "drafter.safetensors").exists()
    resumed = train_drafter.run(config, tmp_path / "half")
  assert int(whole.step) == int(resumed.step) == config.steps
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
    np.testing.assert_array_equal(a, b)
  a, b = ((tmp_path / way / "drafter.safetensors").read_bytes() for way in ("whole", "half"))
  assert a == b
  log = read_rows(tmp_path / "whole" / "log.csv")
  assert [row["step"] for row in log] == [4, 8, 12]
  assert log[-1]["loss_nats"] < log[0]["loss_nats"] < 6
  assert 1 <= log[-1]["heldout_accept_length_2"] <= 2
  assert 1 <= log[-1]["heldout_accept_length_4"] <= SMALL.block
  checkpoint.load_drafter(tmp_path / "whole" / "drafter.safetensors", target)


def test_training_refuses_a_target_of_other_sizes(tmp_path, target):
  path = tmp_path / "t.safetensors"
  checkpoint.save(path, target, SMALL.target)
  config = dataclasses.replace(train_drafter.FULL, target=path)
  with pytest.raises(
    ValueError, match=r"t\.safetensors is a Config.*, the drafter is for a Config"
  ):
    train_drafter.run(config, tmp_path)


@pytest.mark.parametrize(
  "wrong, says",
  [
    ({"anchors": 0}, "anchors = 0, allowed: at least 1"),
    ({"cooldown": 2.0}, "cooldown = 2.0, allowed: a fraction"),
    ({"prefix": 800}, "prefix = 800, allowed: at least 2 and, with greedy = 256, at most 768"),
    ({"heldout_rows": 4096}, "heldout_rows = 4096, allowed: at most 2048"),
    ({"heldout_rows": 100}, "heldout_rows = 100, allowed: a multiple of batch = 64"),
    ({"greedy": 15}, "greedy = 15, allowed: at least a block, 16"),
    ({"context": 512}, "context = 512, allowed: at least 0, below prefix = 512"),
  ],
)
def test_train_config_names_the_value_and_what_is_allowed(wrong, says):
  with pytest.raises(ValueError, match=says):
    dataclasses.replace(train_drafter.FULL, **wrong)


def test_the_rate_rises_by_steps_and_falls_by_whatever_ends_first():
  c = train_drafter.FULL
  rates = lambda seconds: np.asarray([
    train_drafter.rate(c, step, seconds * step / c.steps) for step in range(c.steps + 1)
  ])  # fmt: skip
  for seconds in (0, 60 * c.minutes):
    got = rates(seconds)
    assert 0 < got[0] < got.max() == c.rate
    assert got[-1] == 0
    peak = int(np.argmax(got))
    assert (np.diff(got[: peak + 1]) > 0).all()
    assert (np.diff(got[peak:]) <= 0).all()
  np.testing.assert_allclose(rates(0), rates(60 * c.minutes))
  late = rates(120 * c.minutes)  # over after half of the steps
  assert late[c.steps // 2 - 1] > late[c.steps // 2] == late[-1] == 0
  # a long first step, in which all is compiled, leaves the warm-up
  assert train_drafter.rate(c, 1, 0.2 * 60 * c.minutes) == train_drafter.rate(c, 1, 0.0)


def test_an_accept_length_is_a_walk_over_blocks():
  hits = np.asarray([[0, 3, 9, 9, 9, 1, 9], [2, 9, 9, 0, 0, 15, 0]])
  # windows of 4: 0, 1, 5, 7 of the first row; 0, 3, 4, 5, 9 of the second
  assert block_loss.accept_length(hits, 4) == (7 + 9) / (3 + 4)
  assert block_loss.accept_length(hits, 1) == 1
  assert block_loss.accept_length(hits, 16) == (7 + 21) / (3 + 4)


def test_a_run_that_is_told_to_terminate_is_saved(tmp_path):
  """SIGTERM, as a scheduler sends it before it takes a machine back."""
  config = dataclasses.replace(TINY_DRAFTER, steps=9, save_every=100, log_every=100)
  state = training.State(jnp.zeros(3), (), jnp.int32(0))

  def update(state, batch, rate):
    if batch == 5:
      os.kill(os.getpid(), signal.SIGTERM)
    return state._replace(step=state.step + 1), jnp.float32(0)

  def job(first):
    quiet = lambda state, loss, pace: {"pace": pace > 0}
    export = lambda path, params: path.write_bytes(b"")
    return training.Job(
      "w", iter(range(first, 99)), update, lambda step, seconds: 0.0, quiet, export
    )

  train_on = lambda run, job: training.train(
    config, job, run, tmp_path, until=1e9, progress=training.bar()
  )
  before = signal.getsignal(signal.SIGTERM)
  (tmp_path / "partial").mkdir()
  with pytest.raises(KeyboardInterrupt):
    train_on(training.Run(state, [], 0.0), job(0))
  assert signal.getsignal(signal.SIGTERM) is before
  now = training.resume(tmp_path, state)
  assert int(now.state.step) == 5
  assert (tmp_path / "partial" / "w").exists()
  assert int(train_on(now, job(6)).step) == 9
  assert (tmp_path / "w").exists()
  assert not (tmp_path / "partial" / "w").exists()
