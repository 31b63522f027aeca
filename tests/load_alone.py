"""Loads two checkpoints in a process of its own, for what can only be measured there.

    python -m tests.load_alone SMALL LARGE      on two devices

SMALL is loaded over a mesh, each parameter split along its last axis where that is possible, and
what arrived is written to SMALL/placed.npz. Of LARGE the peak of the host's memory is printed.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gdn.checkpoint import names, shapes
from gdn.huggingface import load, read_config


def status(field: str) -> int:
  """Bytes."""
  [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field)]
  return int(line.split()[1]) << 10


def main(small: str, large: str) -> None:
  mesh = jax.make_mesh((2,), ("x",))
  split = lambda x: x.shape[-1] % 2 == 0
  spec = lambda x: PartitionSpec(*[None] * (len(x.shape) - 1), "x" if split(x) else None)
  tree = shapes(read_config(small).config, np.float32)
  params, _ = load(small, shardings=jax.tree.map(lambda x: NamedSharding(mesh, spec(x)), tree))
  for path, x in names(params).items():
    [first, second] = x.addressable_shards
    assert first.device != second.device, path
    assert first.data.shape[-1] == x.shape[-1] // (2 if split(x) else 1), path
  np.savez(Path(small) / "placed.npz", **{path: np.asarray(x) for path, x in names(params).items()})
  del params, x, first, second

  load(large)  # what the compiler needs is no part of the peak
  before = status("VmRSS")
  Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
  params, _ = load(large)
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  print(json.dumps({"peak_bytes": status("VmHWM") - before, "model_bytes": size}))


if __name__ == "__main__":
  main(*sys.argv[1:])
