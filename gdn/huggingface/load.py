"""A checkpoint folder into the parameters of the hybrid model, tensor by tensor.

Everything that can be wrong with names, shapes and dtypes is found before a tensor is read. Then
each goes straight to its device: the host holds the parameters that are placed on it, stacks of
experts not yet whole, and one tensor in two layouts. On a CPU, whose memory is the host's, that is
at most the model and one shard; where experts are stored one by one also one stack of a layer's
experts, which is there twice while it is placed. Nothing is returned unless all of it is.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdn.bijection import Described, Place, Rule, plan
from gdn.checkpoint import DTYPES, names, shapes
from gdn.config import Config
from gdn.faults import Fault, lines
from gdn.huggingface import shards
from gdn.huggingface.config import read_config, there
from gdn.huggingface.names import ignored, rules
from gdn.hybrid import FLOAT32, Params


def stored_dtype(found: list[shards.Stored]) -> Any:
  """The dtype that most matrices have, and all should; bfloat16 if none has one of a model."""
  count = matrix_dtypes(found)
  return max(DTYPES, key=lambda dtype: count[dtype])


def matrix_dtypes(found: list[shards.Stored]) -> Counter:
  """How many matrices have each dtype that a model may have."""
  dtypes = [jnp.dtype(x.described.dtype) for x in found if len(x.described.shape) > 1]
  return Counter(dtype for dtype in dtypes if dtype in DTYPES)


@jax.jit
def not_finite(x: jax.Array) -> jax.Array:
  """How many NaN and infinities there are, counted where the array is."""
  return jnp.sum(~jnp.isfinite(x), dtype=jnp.int32)


class Stacks:
  """Parameters that come entry by entry, on the host until the last entry is there."""

  def __init__(self) -> None:
    self.partial: dict[str, tuple[np.ndarray, set[int]]] = {}

  def add(self, place: Place, x: np.ndarray, want: Described) -> np.ndarray | None:
    """The array, or the stack that it completes, or None."""
    if place.entry is None:
      return x.astype(want.dtype, copy=False)
    if place.path not in self.partial:
      left = set(range(want.shape[place.axis]))
      self.partial[place.path] = np.empty(want.shape, want.dtype), left
    stack, left = self.partial[place.path]
    np.moveaxis(stack, place.axis, 0)[place.entry] = x
    left.remove(place.entry)
    return None if left else self.partial.pop(place.path)[0]


Put = Callable[[str, np.ndarray], jax.Array]  # path, parameter -> the parameter where it shall lie


def by_shardings(tree: Any, shardings: Any) -> Put:
  """Each parameter as `shardings`, a prefix of the tree, says."""
  where = names(jax.tree.broadcast(shardings, tree, is_leaf=lambda x: x is None))
  return lambda path, x: jax.device_put(x, where.get(path))


def assembled(
  folder: Path, found: list[shards.Stored], tree: Any, rules: tuple[Rule, ...], cast: bool, put: Put
) -> Any:  # fmt: skip
  """The tree of shapes filled from the folder's tensors, each where `put` leaves it. Norms and gate
  parameters, and with `cast` all, may be stored in either dtype. ValueError: see `bijection.plan`;
  numbers that are none."""
  wanted = names(tree)
  free = cast or not matrix_dtypes(found)  # all are of another dtype: both are named as allowed
  either = lambda path: free or path.split(".")[-1] in FLOAT32
  accepts = lambda path: DTYPES if either(path) else (wanted[path].dtype,)
  try:
    steps = plan({x.name: x.described for x in found}, wanted, rules, accepts)
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from None
  leaves: dict[str, jax.Array] = {}
  stacks = Stacks()

  def add(place: Place, part: np.ndarray) -> None:
    whole = stacks.add(place, part, wanted[place.path])
    if whole is not None:
      leaves[place.path] = put(place.path, whole)

  at_once = [x for x in found if steps[x.name].entry is None]
  for name, x in shards.tensors(at_once):
    step = steps[name]
    for place, part in zip(step.places, step.layout(x), strict=True):
      add(place, part)
    del x, part  # before the next tensor is read
  for one in (x for x in found if steps[x.name].entry is not None):
    step = steps[one.name]
    assert step.entry is not None
    for i, x in shards.entries(one):
      for place, axis, part in zip(step.places, step.axes, step.entry(x), strict=True):
        add(Place(place.path, i, axis), part)
  if wrong := [Fault(path, f"{n} of {x.size} numbers are NaN or infinite")
               for path, x in leaves.items() if (n := int(not_finite(x)))]:  # fmt: skip
    raise ValueError("\n  ".join([f"{folder} cannot be used:", *lines(wrong)]))
  return jax.tree.unflatten(jax.tree.structure(tree), [leaves[path] for path in wanted])


def checked(folder: str | Path, dtype: Any) -> Path:
  """FileNotFoundError: no folder. ValueError: no dtype of a model."""
  if not there(Path(folder), Path.is_dir):
    raise FileNotFoundError(f"{folder} is no folder")
  if dtype is not None:
    try:
      known, dtype = jnp.dtype(dtype) in DTYPES, jnp.dtype(dtype)
    except TypeError:  # no dtype at all
      known = False
    if not known:
      raise ValueError(f"dtype = {dtype}, allowed: bfloat16, float32")
  return Path(folder)


def load(
  folder: str | Path, *, dtype: Any = None, shardings: Any = None, put: Put | None = None
) -> tuple[Params, Config]:
  """Parameters and config of a Qwen3-Next or Qwen3.5 checkpoint.

  dtype      of matrices and activations, bfloat16 or float32; by default what the file has. Norms
             and gate parameters are float32 in any case
  shardings  a `jax.sharding.Sharding`, or a tree of them with the parameters' structure or a prefix
             of it; by default the default device
  put        instead of them: (path, parameter on the host) -> the parameter where it shall lie, and
             in the order of axes and channels that it shall have there

  FileNotFoundError: no folder, config.json, weights or a shard that the index names. ValueError: an
  argument that is not allowed; one, with all that disagrees: see `read_config`, `shards.contents`
  and `bijection.plan`; or every parameter that holds NaN or infinity.
  """
  if put is not None and shardings is not None:
    raise ValueError("shardings and put, allowed: one of the two")
  folder = checked(folder, dtype)
  config, family = read_config(folder)
  found = shards.contents(folder, ignored)
  tree = shapes(config, stored_dtype(found) if dtype is None else dtype)
  table = rules(config, family.packed)
  put = put or by_shardings(tree, shardings)
  return assembled(folder, found, tree, table, dtype is not None, put), config
