"""The hybrid model: three Gated DeltaNet layers, then one of attention, each with a SwiGLU MLP.

There is one forward pass. How a layer's memory is used (a whole sequence, one token, a window that
is verified and not yet committed) is a value, `Mixers`; memories go in and what the mixers make of
them comes out. The logits of a token depend on nothing else.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn import attention, layer
from gdn.attention import Attend, Attention
from gdn.config import Config
from gdn.dots import exact
from gdn.layer import GDN, Conv, GDNMemory, Recurrent
from gdn.norms import rms_norm

Ids = Int[Array, "B T"]
Hidden = Float[Array, "B T width"]
Logits = Float[Array, "B T vocab"]
Memories = tuple[Any, ...]


class Mixers(NamedTuple):
  """How memory is used. Each takes its layer's memory first and returns the new one last.

  conv       (memory, x [B, T, C], taps [W, C]) -> (y [B, T, C], memory)
  recurrent  (memory, raw: Raw, gates: GateParams) -> (o [B, T, H, V], memory)
  attend     (memory, q [B, T, Hq, D], k, v [B, T, Hkv, D]) -> (o [B, T, Hq, D], memory)
             q and k already normed and rotated
  join       what a mixer or MLP adds to the residual stream -> the same summed over the devices
             that hold the other heads; on one device it is all there

  The memory of a GDN layer is a GDNMemory(conv, recurrent), that of an attention layer anything.
  """

  conv: Conv
  recurrent: Recurrent
  attend: Attend
  join: Callable[[Array], Array] = lambda x: x


class MLP(NamedTuple):
  """SwiGLU: (silu(x gate) * (x up)) down."""

  gate: Float[Array, "width inner"]
  up: Float[Array, "width inner"]
  down: Float[Array, "inner width"]


class Block(NamedTuple):
  """One layer: its mixer and its MLP, each behind a zero-centred norm in float32."""

  norm: Float[Array, "width"]
  mixer: GDN | Attention
  mlp_norm: Float[Array, "width"]
  mlp: MLP


class Params(NamedTuple):
  """All weights; the embedding is also the output projection."""

  embed: Float[Array, "vocab width"]
  layers: tuple[Block, ...]
  norm: Float[Array, "width"]


FLOAT32 = ("norm", "mlp_norm", "q_norm", "k_norm", "A_log", "dt_bias")  # in every dtype of weights


def init(config: Config, key: Array, dtype: Any = jnp.float32) -> Params:
  """Random weights of a model; matrices in `dtype`."""
  embed_key, *keys = jax.random.split(key, config.layers + 1)
  d, n = config.width, config.inner
  zero = lambda: jnp.zeros((d,), jnp.float32)  # a buffer each: a donated one cannot be shared

  def block(i: int) -> Block:
    mix, *mlp = jax.random.split(keys[i], 4)
    kind = attention if config.is_attention(i) else layer
    normal = lambda key, n, m, scale: (jax.random.normal(key, (n, m)) * scale).astype(dtype)
    return Block(
      zero(),
      kind.init(config, mix, dtype),
      zero(),
      MLP(
        normal(mlp[0], d, n, d**-0.5),
        normal(mlp[1], d, n, d**-0.5),
        normal(mlp[2], n, d, (2 * config.layers * n) ** -0.5),
      ),
    )

  embed = (0.02 * jax.random.normal(embed_key, (config.vocab, d))).astype(dtype)
  return Params(embed, tuple(block(i) for i in range(config.layers)), zero())


def cast(params: Params, dtype: Any) -> Params:
  """The same model with its matrices, and so its activations, in `dtype`; norms and gates stay."""

  def leaf(path, x):
    return x.astype(jnp.float32 if path[-1].name in FLOAT32 else dtype)

  return jax.tree_util.tree_map_with_path(leaf, params)


def mlp(weights: MLP, x: Hidden) -> Hidden:
  return exact(jax.nn.silu(exact(x, weights.gate)) * exact(x, weights.up), weights.down)


def block(
  weights: Block, config: Config, x: Hidden, positions: Ids, mixers: Mixers, memory: Any
) -> tuple[Hidden, Any]:
  """One layer of the model."""
  y = rms_norm(x, weights.norm)
  if isinstance(weights.mixer, Attention):
    y, memory = attention.attention(weights.mixer, config, y, positions, mixers.attend, memory)
  else:
    y, memory = layer.gated_delta_net(
      weights.mixer, config, y, mixers.conv, mixers.recurrent, memory
    )
  x = x + mixers.join(y)
  return x + mixers.join(mlp(weights.mlp, rms_norm(x, weights.mlp_norm))), memory


def hidden_states(
  params: Params, config: Config, ids: Ids, positions: Ids, mixers: Mixers, memories: Memories
) -> tuple[tuple[Hidden, ...], Memories]:
  """The residual stream after every layer, and the memories. A drafter reads some of them.

  Differentiating recomputes each layer from its input: a long sequence fits, values are the same.
  """
  x, hidden, new = params.embed[ids], [], []
  for weights, memory in zip(params.layers, memories, strict=True):
    run = jax.checkpoint(lambda w, x, p, m: block(w, config, x, p, mixers, m))
    x, memory = run(weights, x, positions, memory)
    hidden.append(x)
    new.append(memory)
  return tuple(hidden), tuple(new)


def logits(params: Params, x: Hidden) -> Logits:
  """Float32 logits of the last layer's residual stream."""
  return jnp.matmul(
    rms_norm(x, params.norm),
    params.embed.T,
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def forward(
  params: Params, config: Config, ids: Ids, positions: Ids, mixers: Mixers, memories: Memories
) -> tuple[Logits, Memories]:
  """Next-token logits [B, T, vocab] in float32, and what the mixers left of each layer's memory.

  ids, positions  int [B, T]; positions count from the start of the sequence (rotary embedding)
  memories        one entry per layer, `GDNMemory` or what `mixers.attend` takes
  """
  hidden, memories = hidden_states(params, config, ids, positions, mixers, memories)
  return logits(params, hidden[-1]), memories


__all__ = [
  "MLP",
  "Block",
  "Config",
  "GDNMemory",
  "Memories",
  "Mixers",
  "Params",
  "block",
  "cast",
  "forward",
  "hidden_states",
  "init",
  "logits",
]
