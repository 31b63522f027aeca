"""The nnx modules are the pure functions with their weights held."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from gdn import attention, hybrid, layer, streaming
from gdn.modules import GatedAttention, GatedDeltaNet, Hybrid
from gdn.ops import XLA
from tests.strategies import TINY

pytestmark = pytest.mark.usefixtures("quick_compiles")


def test_a_layer_is_its_function():
  x = jax.random.normal(jax.random.key(0), (1, 12, TINY.width))
  positions = jnp.arange(12, dtype=jnp.int32)[None]
  mixers, (gdn, kv) = streaming.streaming(XLA), streaming.empty(TINY, 1, jnp.float32)
  recurrent = GatedDeltaNet(TINY, rngs=nnx.Rngs(1))
  wanted, _ = layer.gated_delta_net(recurrent.params, TINY, x, mixers.conv, mixers.recurrent, gdn)
  np.testing.assert_array_equal(recurrent(x, mixers, gdn)[0], wanted)
  gated = GatedAttention(TINY, rngs=nnx.Rngs(1))
  wanted, _ = attention.attention(gated.params, TINY, x, positions, mixers.attend, kv)
  np.testing.assert_array_equal(gated(x, positions, mixers, kv)[0], wanted)


def test_a_module_trains_with_optax_and_splits_to_the_pure_parameters():
  model = Hybrid(TINY, rngs=nnx.Rngs(0))
  optimiser = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
  text = jnp.tile(jnp.arange(8, dtype=jnp.int32)[None], (2, 4))

  def loss(model):
    log_p = jax.nn.log_softmax(model(text[:, :-1]))
    return -jnp.mean(jnp.take_along_axis(log_p, text[:, 1:, None], axis=2))

  @nnx.jit
  def update(model, optimiser):
    value, gradient = nnx.value_and_grad(loss)(model)
    optimiser.update(model, gradient)
    return value

  with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an integer power
    values = [float(update(model, optimiser)) for _ in range(8)]
  assert values[-1] < values[0] - 0.5
  params = model.params
  assert isinstance(params, hybrid.Params)
  other = Hybrid(TINY, rngs=nnx.Rngs(7))
  other.update(params)
  np.testing.assert_array_equal(other(text), model(text))


def test_weights_of_another_shape_are_refused():
  model = Hybrid(TINY, rngs=nnx.Rngs(0))
  with pytest.raises(ValueError, match="wanted"):
    model.update(model.params._replace(norm=jnp.zeros((3,))))
