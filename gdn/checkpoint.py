"""Weights in one safetensors file, by a bijection of names: every tensor has a place, every place a
tensor, or loading fails and says everything that disagrees at once.

Our own files name a tensor by its path, `layers.0.mixer.qkv`; gdn/huggingface reads other names.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from gdn import hybrid
from gdn.bijection import Described, Rule, plan
from gdn.config import Config
from gdn.hybrid import Params

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))  # that a file's matrices may have
OURS = (Rule(r".+", (r"\g<0>",)),)


def names(params: Params) -> dict[str, Any]:
  """Each leaf of the parameters (or of their shapes) by its path."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def shapes(config: Config, dtype: Any) -> Params:
  """Shapes and dtypes of a model's parameters; nothing is computed."""
  return jax.eval_shape(lambda: hybrid.init(config, jax.random.key(0), dtype))


def assign(
  tensors: Mapping[str, Any], wanted: Mapping[str, Any], rules: tuple[Rule, ...] = OURS
) -> dict[str, Any]:
  """Tensors under our names, in our layouts. ValueError: see `bijection.plan`."""
  described = {name: Described(x.shape, x.dtype) for name, x in tensors.items()}
  steps = plan(described, wanted, rules, lambda path: (wanted[path].dtype,))
  return {
    place.path: x
    for name, (layout, places) in steps.items()
    for place, x in zip(places, layout(tensors[name]), strict=True)
  }


def save(path: str | Path, params: Params, config: Config) -> None:
  """Write the weights and the config; the file appears whole or not at all.

  The same weights give the same bytes: safetensors writes several metadata keys in any order, so
  there is one.
  """
  path = Path(path)
  part = path.with_name(path.name + ".part")
  save_file(
    {name: jnp.asarray(x) for name, x in names(params).items()},
    part,
    metadata={"config": json.dumps(config.as_dict())},
  )
  os.replace(part, path)


def read(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """All tensors of a safetensors file and its metadata. ValueError names a file that is not one."""
  try:
    with safe_open(path, framework="np") as file:
      stored = list(file.keys())  # a handle, no dict
      return {name: file.get_tensor(name) for name in stored}, file.metadata() or {}
  except SafetensorError as error:
    raise ValueError(f"{path} is truncated or no safetensors file: {error}") from error


def load(path: str | Path) -> tuple[Params, Config]:
  """Parameters and config as `save` wrote them.

  FileNotFoundError: no such file. ValueError: it is truncated, has no config, or its tensors are
  not exactly those of that config.
  """
  tensors, metadata = read(path)
  if "config" not in metadata:
    raise ValueError(
      f"{path} was not written by gdn.checkpoint.save: its metadata has {sorted(metadata)}, "
      "wanted config"
    )
  try:
    config = Config(**json.loads(metadata["config"]))
  except (TypeError, ValueError) as error:
    raise ValueError(f"{path}: its config is not that of a model: {error}") from error
  # The embedding says which dtype the file is in; all others must agree with it.
  dtype = tensors["embed"].dtype if "embed" in tensors else DTYPES[0]
  wanted = shapes(config, dtype if dtype in DTYPES else DTYPES[0])
  try:
    found = assign(tensors, names(wanted))
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None
  leaves = [jnp.asarray(found[name]) for name in names(wanted)]
  return jax.tree.unflatten(jax.tree.structure(wanted), leaves), config
