"""The hybrid model: three Gated DeltaNet layers, then one of attention, each with an MLP behind it,
dense or a mixture of experts.

There is one forward pass. How a layer's memory is used (a whole sequence, one token, a window that
is verified and not yet committed) is a value, `Mixers`; memories go in and what the mixers make of
them comes out. The logits of a token depend on nothing else.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn import attention, experts, layer, swiglu
from gdn.attention import Attend, Attention
from gdn.config import Config
from gdn.exchange import ALONE, Exchange
from gdn.experts import Experts
from gdn.layer import GDN, Conv, GDNMemory, Recurrent
from gdn.norms import rms_norm
from gdn.swiglu import MLP, mlp

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
  exchange   with the devices that hold the other heads; on one device everything is there

  The memory of a GDN layer is a GDNMemory(conv, recurrent), that of an attention layer anything.
  """

  conv: Conv
  recurrent: Recurrent
  attend: Attend
  exchange: Exchange = ALONE


class Block(NamedTuple):
  """One layer: its mixer and its MLP, each behind a zero-centred norm in float32.

  Without a mixer it is its MLP alone, and its memory stays as it is: an ablation.
  """

  norm: Float[Array, "width"]
  mixer: GDN | Attention | None
  mlp_norm: Float[Array, "width"]
  mlp: MLP | Experts


class Params(NamedTuple):
  """All weights. Without a head of its own the embedding is also the output projection."""

  embed: Float[Array, "vocab width"]
  layers: tuple[Block, ...]
  norm: Float[Array, "width"]
  head: Float[Array, "vocab width"] | None = None


FLOAT32 = ("norm", "mlp_norm", "q_norm", "k_norm", "A_log", "dt_bias")  # in every dtype of weights


def init(config: Config, key: Array, dtype: Any = jnp.float32) -> Params:
  """Random weights of a model; matrices in `dtype`."""
  embed_key, *keys = jax.random.split(key, config.layers + 1)
  d = config.width
  zero = lambda: jnp.zeros((d,), jnp.float32)  # a buffer each: a donated one cannot be shared

  def block(i: int) -> Block:
    mix, *rest = jax.random.split(keys[i], 4)
    kind = attention if config.is_attention(i) else layer
    behind = (
      experts.init(config, rest[0], dtype)
      if config.is_sparse(i)
      else swiglu.init(config, jnp.stack(rest), dtype, config.inner)
    )
    return Block(zero(), kind.init(config, mix, dtype), zero(), behind)

  table = lambda key: (0.02 * jax.random.normal(key, (config.vocab, d))).astype(dtype)
  head = None if config.tied else table(jax.random.fold_in(embed_key, 1))
  return Params(table(embed_key), tuple(block(i) for i in range(config.layers)), zero(), head)


def cast[Weights: tuple](params: Weights, dtype: Any) -> Weights:
  """Weights of a model or a drafter with matrices, and so activations, in `dtype`; norms and gates
  stay."""

  leaf = lambda path, x: x.astype(held_in(path[-1].name, dtype))
  return jax.tree_util.tree_map_with_path(leaf, params)


def held_in(name: str, dtype: Any) -> Any:
  """The dtype of a parameter of this name where matrices are in `dtype`."""
  return jnp.float32 if name in FLOAT32 else dtype


def block(
  weights: Block, config: Config, x: Hidden, positions: Ids, mixers: Mixers, memory: Any
) -> tuple[Hidden, Any]:
  """One layer of the model."""
  join = mixers.exchange.join
  if weights.mixer is None:
    return behind(weights, config, x, join), memory
  y = rms_norm(x, weights.norm)
  if isinstance(weights.mixer, Attention):
    y, memory = attention.attention(weights.mixer, config, y, positions, mixers.attend, memory)
  else:
    y, memory = layer.gated_delta_net(
      weights.mixer, config, y, mixers.conv, mixers.recurrent, memory
    )
  return behind(weights, config, x + join(y), join), memory


def behind(weights: Block, config: Config, x: Hidden, join=ALONE.join) -> Hidden:
  """What follows a layer's mixer."""
  y = rms_norm(x, weights.mlp_norm)
  if isinstance(weights.mlp, Experts):
    return x + join(experts.mixture(weights.mlp, config, y))
  return x + join(mlp(weights.mlp, y))


def hidden_states(
  params: Params, config: Config, ids: Ids, positions: Ids, mixers: Mixers, memories: Memories
) -> tuple[tuple[Hidden, ...], Memories]:
  """The residual stream after every layer, and the memories. A drafter reads some of them.

  Differentiating recomputes each layer from its input: a long sequence fits, values are the same.
  """
  x, hidden, new = mixers.exchange.embed(params.embed, ids), [], []
  # One function for all layers: those of a kind are traced and lowered once.
  run = jax.jit(jax.checkpoint(lambda w, x, p, m: block(w, config, x, p, mixers, m)))
  for weights, memory in zip(params.layers, memories, strict=True):
    x, memory = run(weights, x, positions, memory)
    hidden.append(x)
    new.append(memory)
  return tuple(hidden), tuple(new)


def logits(params: Params, x: Hidden, exchange: Exchange = ALONE) -> Logits:
  """Float32 logits of the last layer's residual stream."""
  head = params.embed if params.head is None else params.head
  return scores(rms_norm(x, params.norm), head, exchange)


def scores(
  x: Float[Array, "... width"], head: Float[Array, "rows width"], exchange: Exchange = ALONE
) -> Float[Array, "... vocab"]:
  """Float32 logits of what a model's last norm has left."""
  exact = jax.lax.Precision.HIGHEST
  return exchange.gather(jnp.matmul(x, head.T, precision=exact, preferred_element_type=jnp.float32))


def forward(
  params: Params, config: Config, ids: Ids, positions: Ids, mixers: Mixers, memories: Memories
) -> tuple[Logits, Memories]:
  """Next-token logits [B, T, vocab] in float32, and what the mixers left of each layer's memory.

  ids, positions  int [B, T]; positions count from the start of the sequence (rotary embedding)
  memories        one entry per layer, `GDNMemory` or what `mixers.attend` takes
  """
  hidden, memories = hidden_states(params, config, ids, positions, mixers, memories)
  return logits(params, hidden[-1], mixers.exchange), memories


def featured(
  params: Params, config: Config, ids: Ids, positions: Ids, mixers: Mixers, memories: Memories,
  taps: tuple[int, ...],
) -> tuple[Logits, Float[Array, "B T features"], Memories]:  # fmt: skip
  """`forward` that also returns what a drafter reads: the residual stream after each layer of
  `taps`, side by side."""
  hidden, memories = hidden_states(params, config, ids, positions, mixers, memories)
  features = jnp.concatenate([hidden[i] for i in taps], axis=-1)
  return logits(params, hidden[-1], mixers.exchange), features, memories


__all__ = [
  "MLP",
  "Block",
  "Config",
  "Experts",
  "GDNMemory",
  "Memories",
  "Mixers",
  "Params",
  "block",
  "cast",
  "featured",
  "forward",
  "hidden_states",
  "init",
  "logits",
]
