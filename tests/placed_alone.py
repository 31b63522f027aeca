"""Loads a checkpoint onto a mesh of four devices and decodes there, in a process of its own.

    python -m tests.placed_alone FOLDER

Prints how much each device holds of the weights, what of them reached the host again, and the text
beside that of one device.
"""

import json
import math
import sys

import experiments  # noqa: F401, before jax: sets the flags of its CPU backend


def watch(pulled: list[int]) -> None:
  """Bytes of everything that is made a host array from now on."""
  from jax._src.array import ArrayImpl

  whole, value = ArrayImpl.__array__, ArrayImpl._value

  def array(self, *args, **kwargs):
    pulled.append(self.nbytes)
    return whole(self, *args, **kwargs)

  def get(self):
    pulled.append(self.nbytes)
    return value.fget(self)

  ArrayImpl.__array__, ArrayImpl._value = array, property(get)


def main(folder: str) -> dict:
  import jax
  import jax.numpy as jnp

  from commit_schemes import SCHEMES, Dtypes, Spec
  from commit_schemes.decoding import placement
  from commit_schemes.decoding.drafts import prompt_lookup
  from commit_schemes.decoding.engine import Engine
  from commit_schemes.decoding.schedule import Limits
  from commit_schemes.decoding.sharding import sharded
  from commit_schemes.decoding.slots import compiled
  from commit_schemes.model import model_memory
  from gdn.checkpoint import names
  from gdn.huggingface import load

  cut: list[tuple[int, int]] = []  # bytes of a parameter, and of what one device got of it
  make = jax.make_array_from_callback

  def counted(shape, where, callback):
    def one(at):
      part = callback(at)
      cut.append((math.prod(shape) * part.dtype.itemsize, part.nbytes))
      return part

    return make(shape, where, one)

  jax.make_array_from_callback = counted
  pulled: list[int] = []
  watch(pulled)
  devices = placement.mesh(2, 2)
  placed, config = placement.loaded(folder, devices)
  jax.make_array_from_callback = make
  spec = lambda c: Spec(c.key_heads, 4, dtypes=Dtypes(raw=jnp.float32))
  scheme = lambda c: SCHEMES["ring_exact"].make(spec(c))

  def text(programs):
    engine = Engine(programs, Limits(64, config.vocab, 4), slots=2)
    for i in range(2):
      engine.submit(i, [5 * i + 1, 2, 3, 1, 2], tokens=20, draft=3)
    engine.run()
    told = [engine.texts[i] for i in range(2)]
    return [{"tokens": t.tokens, "top": [x.tolist() for x in t.top]} for t in told]

  many = text(sharded(placed, config, scheme, prompt_lookup(4), devices))
  largest_pulled = max(pulled, default=0)
  specs = names(placement.weights(config, 2))
  split = {path: any(axes) for path, axes in specs.items()}
  whole = {x.shape for path, x in names(placed.params).items() if split[path]}
  own = {id(x) for x in jax.tree.leaves(placed.params)}
  others = [x for x in jax.live_arrays() if id(x) not in own]
  held = {s.data.shape for x in others for s in x.addressable_shards}
  params, _ = load(folder)
  memory = model_memory(config, scheme(config))
  return {
    "cut": cut,
    "pulled": largest_pulled,
    "matrix": min(
      x.nbytes for x in jax.tree.leaves(placed.params) if x.ndim > 1 and min(x.shape) > 8
    )
    // 2,
    "whole": sorted(x for x in whole & held if math.prod(x) > 64),
    "devices": sorted({len(x.sharding.device_set) for x in jax.tree.leaves(placed.params)}),
    "share": sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed.params)),
    "bytes": {path: x.nbytes for path, x in names(placed.params).items()},
    "split": split,
    "many": many,
    "one": text(compiled(params, config, memory, prompt_lookup(4))),
  }


if __name__ == "__main__":
  print(json.dumps(main(sys.argv[1])))
