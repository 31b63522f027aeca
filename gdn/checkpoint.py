"""Weights in one safetensors file, by a bijection of names: every tensor has a place, every place a
tensor, or loading fails and says everything that disagrees at once.

Our own files name a tensor by its path, `layers.0.mixer.qkv`; gdn/huggingface reads other names.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from gdn import drafter, hybrid
from gdn.bijection import Described, Rule, plan
from gdn.config import Config
from gdn.drafter import DrafterConfig, DrafterParams, Heads
from gdn.hybrid import Params

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))  # that a file's matrices may have
OURS = (Rule(r".+", (r"\g<0>",)),)


def names(params: Any) -> dict[str, Any]:
  """Each leaf of the parameters (or of their shapes) by its path."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(params)
  return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def shapes(config: Config, dtype: Any) -> Params:
  """Shapes and dtypes of a model's parameters; nothing is computed, and layers of a kind are all as
  that of a model of one layer."""

  @functools.cache
  def alone(attention: bool, sparse: bool) -> Params:
    dense = () if sparse or not config.experts else (0,)
    one = replace(config, layers=1, attention_every=2 - attention, dense_layers=dense)
    return jax.eval_shape(lambda: hybrid.init(one, jax.random.key(0), dtype))

  models = [alone(config.is_attention(i), config.is_sparse(i)) for i in range(config.layers)]
  return models[0]._replace(layers=tuple(model.layers[0] for model in models))


def drafter_shapes(config: DrafterConfig, dtype: Any) -> DrafterParams:
  """The same of a drafter, whose layers are all of a kind, whatever they see."""
  one = replace(config, layers=1, sliding=None, sliding_layers=(), causal_layers=())
  shapes = jax.eval_shape(lambda: drafter.init(one, jax.random.key(0), dtype))
  return shapes._replace(layers=shapes.layers * config.layers)


def assign(
  tensors: Mapping[str, Any], wanted: Mapping[str, Any], rules: tuple[Rule, ...] = OURS
) -> dict[str, Any]:
  """Tensors under our names, in our layouts. ValueError: see `bijection.plan`."""
  described = {name: Described(x.shape, x.dtype) for name, x in tensors.items()}
  steps = plan(described, wanted, rules, lambda path: (wanted[path].dtype,))
  return {
    place.path: x
    for name, step in steps.items()
    for place, x in zip(step.places, step.layout(tensors[name]), strict=True)
  }


def write(path: str | Path, params: Any, metadata: dict[str, Any]) -> None:
  """The weights and one key of metadata; the file appears whole or not at all.

  The same weights give the same bytes: safetensors writes several metadata keys in any order, so
  there is one.
  """
  path = Path(path)
  part = path.with_name(path.name + ".part")
  save_file(
    {name: jnp.asarray(x) for name, x in names(params).items()},
    part,
    metadata={key: json.dumps(value) for key, value in metadata.items()},
  )
  os.replace(part, path)


def save(path: str | Path, params: Params, config: Config) -> None:
  """Write the weights and the config; the file appears whole or not at all."""
  write(path, params, {"config": config.as_dict()})


def read(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
  """All tensors of a safetensors file and its metadata. ValueError names a file that is not one."""
  try:
    with safe_open(path, framework="np") as file:
      stored = list(file.keys())  # a handle, no dict
      return {name: file.get_tensor(name) for name in stored}, file.metadata() or {}
  except SafetensorError as error:
    raise ValueError(f"{path} is truncated or no safetensors file: {error}") from error


def place(
  path: str | Path, tensors: Mapping[str, Any], like: str, shapes: Callable[[Any], Any]
) -> Any:
  """The tensors of a file in the tree of `shapes(dtype)`; tensor `like` says which dtype that is,
  all others must agree with it. ValueError names the file and everything that disagrees."""
  dtype = tensors[like].dtype if like in tensors else DTYPES[0]
  wanted = shapes(dtype if dtype in DTYPES else DTYPES[0])
  try:
    found = assign(tensors, names(wanted))
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None
  leaves = [jnp.asarray(found[name]) for name in names(wanted)]
  return jax.tree.unflatten(jax.tree.structure(wanted), leaves)


def metadata_of(path: str | Path, metadata: Mapping[str, str], key: str, writer: str) -> str:
  """What `writer` stored under `key`. ValueError: the file was written by another."""
  if key not in metadata:
    raise ValueError(
      f"{path} was not written by gdn.checkpoint.{writer}: its metadata has {sorted(metadata)}, "
      f"wanted {key}"
    )
  return metadata[key]


def load(path: str | Path) -> tuple[Params, Config]:
  """Parameters and config as `save` wrote them.

  FileNotFoundError: no such file. ValueError: it is truncated, has no config, or its tensors are
  not exactly those of that config.
  """
  tensors, metadata = read(path)
  stored = metadata_of(path, metadata, "config", "save")
  try:
    config = Config(**json.loads(stored))
  except (TypeError, ValueError) as error:
    raise ValueError(f"{path}: its config is not that of a model: {error}") from error
  return place(path, tensors, "embed", lambda dtype: shapes(config, dtype)), config


def fingerprint(target: Params) -> str:
  """Which model this is: a sha256 of its weights, matrices rounded to bfloat16, names and shapes.

  So a model has one fingerprint in every dtype that its activations are given. One parameter is
  rounded at a time: a second copy of the model may not fit.
  """
  digest = hashlib.sha256()
  for name, x in names(target).items():
    x = x.astype(hybrid.held_in(name.rpartition(".")[2], jnp.bfloat16))
    digest.update(f"{name} {x.shape} ".encode() + np.asarray(x).tobytes())
  return digest.hexdigest()


def save_drafter(
  path: str | Path, params: DrafterParams, config: DrafterConfig, target: Params
) -> None:
  """A drafter's weights, its config, and the fingerprint of the target that it was trained for."""
  write(path, params, {"drafter": {"config": config.as_dict(), "target": fingerprint(target)}})


def load_drafter(path: str | Path, target: Params) -> tuple[DrafterParams, DrafterConfig]:
  """A drafter as `save_drafter` wrote it.

  FileNotFoundError: no such file. ValueError: it is truncated, no drafter, of another target, or
  its tensors are not exactly those of its config.
  """
  tensors, metadata = read(path)
  stored = metadata_of(path, metadata, "drafter", "save_drafter")
  try:
    meant, fields = (json.loads(stored)[key] for key in ("target", "config"))
    model, heads = Config(**fields.pop("target")), fields.pop("heads", None)
    fields = {k: tuple(x) if isinstance(x, list) else x for k, x in fields.items()}
    config = DrafterConfig(**fields, target=model, heads=heads and Heads(**heads))
  except (KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{path}: its config is not that of a drafter: {error}") from error
  if meant != (has := fingerprint(target)):
    raise ValueError(f"{path} is a drafter for the target {meant[:12]}, not for {has[:12]}")
  return place(path, tensors, "context.fuse", lambda dtype: drafter_shapes(config, dtype)), config
