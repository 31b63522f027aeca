"""The mixture of experts against its formula in float64; rows that hear of nobody else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdn import checkpoint, experts, hybrid
from gdn.config import Config
from tests.budget import check

CONFIG = Config(
  vocab=32, width=24, inner=20, layers=2, attention_every=2, key_heads=1, value_heads=2, key_dim=8,
  value_dim=8, query_heads=2, kv_heads=1, head_dim=8, rotary=4, window=8, tied=False, experts=7,
  experts_per_token=3, expert_inner=10, shared_inner=12, dense_layers=(1,),
)  # fmt: skip
EPS = 2.0**-24


def silu(x):
  return x / (1 + np.exp(-x))


def formula(weights, config, rows):
  """Expert by expert, as it is written, for rows [n, width] of the dtype that is asked for."""
  mlp = lambda gate, up, down, x: (silu(x @ gate) * (x @ up)) @ down
  out = []
  for x in rows:
    score = x @ weights.router
    p = np.exp(score - score.max())
    p /= p.sum()
    best = np.argsort(-p)[: config.experts_per_token]
    share = p[best] / (p[best].sum() if config.route_normalised else 1)
    y = sum(
      s * mlp(weights.gate[:, e], weights.up[:, e], weights.down[e], x)
      for s, e in zip(share, best, strict=True)
    )
    gate = 1 / (1 + np.exp(-x @ weights.shared_gate))
    out.append(y + gate * mlp(*weights.shared, x))
  return np.stack(out)


@pytest.mark.parametrize("normalised", [True, False])
def test_the_mixture_is_its_formula(normalised):
  config = dataclasses.replace(CONFIG, route_normalised=normalised)
  weights = experts.init(config, jax.random.key(0), jnp.float32)
  x = jax.random.normal(jax.random.key(1), (3, 5, config.width))
  got = jax.jit(experts.mixture, static_argnums=1)(weights, config, x)
  in_dtype = lambda dtype: formula(
    jax.tree.map(lambda w: np.asarray(w, dtype), weights), config,
    np.asarray(x, dtype).reshape(-1, config.width),
  )  # fmt: skip
  want = in_dtype(np.float64)
  check("mixture", np.asarray(got).reshape(want.shape), want, in_dtype(np.float32), eps=EPS)


def test_a_row_hears_of_no_other():
  weights = experts.init(CONFIG, jax.random.key(0), jnp.float32)
  mixture = jax.jit(experts.mixture, static_argnums=1)
  x = jax.random.normal(jax.random.key(1), (2, 6, CONFIG.width))
  spoiled = x.at[1, 2].set(jnp.nan)
  clean, got = mixture(weights, CONFIG, x), mixture(weights, CONFIG, spoiled)
  assert bool(jnp.isnan(got[1, 2]).all())
  keep = np.ones((2, 6), bool)
  keep[1, 2] = False
  check("other rows", np.asarray(got)[keep], np.asarray(clean)[keep], clean[keep], eps=4 * EPS)


def test_a_model_has_experts_where_its_config_says(tmp_path):
  params = hybrid.init(CONFIG, jax.random.key(0), jnp.bfloat16)
  kinds = [type(block.mlp).__name__ for block in params.layers]
  assert kinds == ["Experts", "MLP"]
  assert params.head is not None
  checkpoint.save(tmp_path / "m.safetensors", params, CONFIG)
  loaded, config = checkpoint.load(tmp_path / "m.safetensors")
  assert config == CONFIG
  assert hash(config) == hash(CONFIG)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize(
  "wrong, says",
  [
    ({"experts": 2}, "experts_per_token = 3, allowed: at most experts = 2"),
    ({"expert_inner": 0}, "expert_inner = 0, allowed: an integer of at least 1"),
    ({"dense_layers": (2,)}, r"dense_layers = \(2,\), allowed: some of 0 to 1"),
    ({"experts": 0}, "dense_layers = .* in a model with experts"),
  ],
)
def test_sizes_of_experts_are_checked(wrong, says):
  with pytest.raises(ValueError, match=says):
    dataclasses.replace(CONFIG, **wrong)
