"""A mesh of devices, and weights on it: each device holds the share of its heads, and never more.

devices = mesh(2, 4)                          # two groups of slots; four devices share the heads
params, config = loaded(folder, devices)      # tensor by tensor, where it will run

Which axis of an array is divided is read off its shape: the one that shrinks when the heads do.
Embedding and head are divided by rows, unless their number does not divide. Router and norms do not
shrink: every device has them.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gdn import huggingface
from gdn.checkpoint import names, shapes
from gdn.config import Config
from gdn.exchange import Exchange
from gdn.hybrid import Params

SLOTS, HEADS = "slots", "heads"


def mesh(slots: int, heads: int, devices: Any = None) -> Mesh:
  """Devices in `slots` groups of `heads`. ValueError: there are fewer."""
  devices = jax.devices() if devices is None else devices
  if slots < 1 or heads < 1 or slots * heads > len(devices):
    raise ValueError(f"a mesh of {slots} x {heads} devices; there are {len(devices)}")
  return Mesh(np.asarray(devices[: slots * heads]).reshape(slots, heads), (SLOTS, HEADS))


def share(config: Config, degree: int) -> Config:
  """What one of `degree` devices holds of a model; a vocabulary that does not divide is whole.

  ValueError: what else does not divide.
  """
  heads = ("key_heads", "value_heads", "query_heads", "kv_heads")
  divided = (*heads, "inner", "expert_inner", "shared_inner")
  odd = [f"{name} = {n}" for name in divided if (n := getattr(config, name)) % degree]
  if odd:
    raise ValueError(f"heads over {degree} devices: {', '.join(odd)}; allowed: multiples of it")
  divided = (*divided, *(() if config.vocab % degree else ("vocab",)))
  return dataclasses.replace(config, **{name: getattr(config, name) // degree for name in divided})


def exchange(config: Config, degree: int) -> Exchange:
  """What the devices that share the heads of a slot tell each other, inside `jax.shard_map`."""
  join = lambda x: jax.lax.psum(x, HEADS)
  if config.vocab % degree:
    return Exchange(join)

  def embed(rows, ids):
    at = ids - rows.shape[0] * jax.lax.axis_index(HEADS).astype(ids.dtype)
    mine = (at >= 0) & (at < rows.shape[0])
    found = rows[jnp.where(mine, at, 0)]
    return join(jnp.where(mine[..., None], found, jnp.zeros((), rows.dtype)))  # all but one add 0

  gather = lambda logits: jax.lax.all_gather(logits, HEADS, axis=logits.ndim - 1, tiled=True)
  return Exchange(join, embed, gather)


def by_rank(config: Config, degree: int) -> np.ndarray:
  """Channels [q | k | v] in the order of the devices that hold them, each with its own q, k, v."""
  key, value = config.key_heads * config.key_dim, config.value_heads * config.value_dim
  parts = (np.arange(key), key + np.arange(key), 2 * key + np.arange(value))
  return np.concatenate([x.reshape(degree, -1) for x in parts], axis=1).reshape(-1)


def divided(whole: Any, part: Any, first: str | None = None) -> Any:
  """Specs of a tree: HEADS on the axes that are shorter in `part`, `first` on axis 0."""

  def spec(a, b):
    axes = [HEADS if m != n else None for m, n in zip(a.shape, b.shape, strict=True)]
    return P(*([first, *axes[1:]] if first else axes))

  return jax.tree.map(spec, whole, part)


class Placed(NamedTuple):
  """Weights on a mesh: each device has its share, of the channels [q | k | v] that of its heads."""

  params: Params
  mesh: Mesh


def weights(config: Config, degree: int) -> Params:
  """The spec of every parameter."""
  whole, part = (shapes(c, np.float32) for c in (config, share(config, degree)))
  return divided(whole, part)


def placer(config: Config, mesh: Mesh) -> Callable[[str, Any], jax.Array]:
  """(path, parameter in the model's own order) -> the parameter on the mesh.

  A device's share is cut out where the parameter is, and nothing larger leaves it.
  """
  specs, order = names(weights(config, mesh.shape[HEADS])), by_rank(config, mesh.shape[HEADS])

  def put(path: str, x: Any) -> jax.Array:
    turned = path.endswith(("mixer.qkv", "mixer.taps"))

    def cut(at):
      *lead, last = at
      return np.asarray(x[(*lead, order[last] if turned else last)])

    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, specs[path]), cut)

  return put


def placed(params: Params, config: Config, mesh: Mesh) -> Placed:
  """Weights that a host or a device has whole. ValueError: heads that do not divide."""
  put = placer(config, mesh)
  leaves = [put(path, x) for path, x in names(params).items()]
  return Placed(jax.tree.unflatten(jax.tree.structure(params), leaves), mesh)


def loaded(folder: str | Path, mesh: Mesh, *, dtype: Any = None) -> tuple[Placed, Config]:
  """A checkpoint in Hugging Face layout, each tensor of it placed as it is read: no device has to
  hold the model. Errors as of `huggingface.load`; ValueError: heads that do not divide."""
  put = placer(huggingface.read_config(folder).config, mesh)
  params, config = huggingface.load(folder, dtype=dtype, put=put)
  return Placed(params, mesh), config
