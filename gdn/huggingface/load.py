"""A checkpoint folder into the parameters of the hybrid model, tensor by tensor.

Everything that can be wrong with names, shapes and dtypes is found before a tensor is read. Then
each goes straight to its device: the host holds the parameters that are placed on it and one tensor
in two layouts, and nothing is returned unless all of it is there.
"""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn.bijection import Described, Place, plan
from gdn.checkpoint import DTYPES, names, shapes
from gdn.config import Config
from gdn.huggingface import shards
from gdn.huggingface.config import read_config
from gdn.huggingface.names import PREFIX, rules
from gdn.hybrid import FLOAT32, Params


@functools.partial(jax.jit, donate_argnums=0)
def put_entry(stack: jax.Array, entry: jax.Array, at: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_index_in_dim(stack, entry, at, 0)


def stored_dtype(found: list[shards.Stored]) -> Any:
  """The dtype of the embedding, which all matrices share; bfloat16 if that is not allowed."""
  embed = re.compile(PREFIX + r"embed_tokens\.weight")
  dtypes = [jnp.dtype(x.described.dtype) for x in found if embed.fullmatch(x.name)]
  return next((dtype for dtype in dtypes if dtype in DTYPES), DTYPES[0])


def placed(
  leaves: dict[str, jax.Array], place: Place, x: np.ndarray, want: Described, sharding: Any
) -> jax.Array:
  """The parameter with the array in its place; a stack is filled entry by entry, where it is."""
  x = x if x.dtype == want.dtype else x.astype(want.dtype)
  if place.entry is None:
    return jax.device_put(x, sharding)
  stack = leaves.get(place.path)
  if stack is None:
    stack = jnp.zeros(want.shape, want.dtype, device=sharding)
  return put_entry(stack, x, jnp.int32(place.entry))


def load(folder: str | Path, *, dtype: Any = None, shardings: Any = None) -> tuple[Params, Config]:
  """Parameters and config of a Qwen3-Next or Qwen3.5 checkpoint.

  dtype      of matrices and activations, bfloat16 or float32; by default what the file has. Norms
             and gate parameters are float32 in any case
  shardings  a `jax.sharding.Sharding`, or a tree of them with the parameters' structure or a prefix
             of it; by default the default device

  FileNotFoundError: no folder, config.json, weights or a shard that the index names. ValueError:
  one, with all that disagrees: see `read_config`, `shards.contents` and `bijection.plan`.
  """
  folder = Path(folder)
  if not folder.is_dir():
    raise FileNotFoundError(f"{folder} is no folder")
  if dtype is not None and jnp.dtype(dtype) not in DTYPES:
    raise ValueError(f"dtype = {jnp.dtype(dtype).name}, allowed: bfloat16, float32")
  config, family = read_config(folder)
  found = shards.contents(folder)
  tree = shapes(config, stored_dtype(found) if dtype is None else dtype)
  wanted = names(tree)

  def accepts(path: str) -> tuple[Any, ...]:
    free = dtype is not None or path.split(".")[-1] in FLOAT32
    return DTYPES if free else (wanted[path].dtype,)

  described = {x.name: x.described for x in found}
  try:
    steps = plan(described, wanted, rules(config, family.packed), accepts)
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from None
  where = names(jax.tree.broadcast(shardings, tree, is_leaf=lambda x: x is None))
  leaves: dict[str, jax.Array] = {}
  used = [x for x in found if steps[x.name].places]
  for name, x in shards.tensors(used):
    layout, places = steps[name]
    for place, part in zip(places, layout(x), strict=True):
      path = place.path
      leaves[path] = placed(leaves, place, part, wanted[path], where.get(path))
    del x, part
  return jax.tree.unflatten(jax.tree.structure(tree), [leaves[path] for path in wanted]), config
