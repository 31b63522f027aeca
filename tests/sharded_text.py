"""Greedy text on a mesh of devices, as JSON: what tests/test_sharding.py runs in other processes.

python -m tests.sharded_text SLOTS HEADS SCHEME DRAFTER [PROCESS PROCESSES ADDRESS]

DRAFTER is `rigged`, which is right by chance, or `block`, of random weights.
"""

import json
import sys

import experiments  # noqa: F401, before jax: sets the flags of its CPU backend


def main(slots: int, heads: int, name: str, drafts: str) -> dict:
  import jax

  from commit_schemes import SCHEMES, Dtypes, Spec
  from commit_schemes.decoding.block import block_drafter
  from commit_schemes.decoding.engine import Engine
  from commit_schemes.decoding.loop import Marking
  from commit_schemes.decoding.placement import mesh
  from commit_schemes.decoding.prefix_cache import PrefixCache
  from commit_schemes.decoding.sharding import sharded
  from commit_schemes.decoding.trees import chain
  from experiments import soak_world
  from gdn.drafter import DrafterConfig, init
  from tests import tiny
  from tests.tiny import C, turn

  jax.config.update("jax_disable_most_optimizations", True)
  w = tiny.world()
  dtypes, drafter, block = Dtypes(raw=w.dtype), soak_world.rigged(w.truth, C.window), None
  if drafts == "block":
    own = DrafterConfig(
      w.config, C.window, taps=(0, w.config.layers - 1), layers=2, inner=16, window=20,
      sliding=9, sliding_layers=(0,), causal_layers=(0,),
    )  # fmt: skip
    block = init(own, jax.random.key(1)), own
    drafter = block_drafter(own, chain(C.window))
  programs = sharded(
    w.params, w.config,
    lambda c: SCHEMES[name].make(Spec(c.key_heads, C.window, w.ops, dtypes=dtypes)),
    drafter, mesh(slots, heads), marking=Marking(C.block, 1), block=block,
  )  # fmt: skip
  # Rows go to the host and back only where one process holds all of them.
  alone = jax.process_count() == 1
  cache = PrefixCache(10**8, C.block, programs.empty())
  e = Engine(programs, w.limits(C.window), slots=4, block=C.block, cache=cache)
  for i in range(6):
    e.submit(i, turn(i % C.prompts, 3 * i), tokens=20, draft=2 * i % C.window)
  for _ in range(3):
    e.step()
  if alone:
    e.fork(1, "fork", tokens=30, draft=5)
    e.retract(0)
    e.resume(0)
  e.run()
  return {
    str(k): {
      "known": list(map(int, t.known)), "prompt": t.prompt, "top": [x.tolist() for x in t.top],
      "steps": t.steps, "restored": t.restored,
    }
    for k, t in e.texts.items()
  }  # fmt: skip


if __name__ == "__main__":
  import jax

  if sys.argv[5:]:
    process, processes, address = sys.argv[5:]
    jax.distributed.initialize(address, int(processes), int(process))
  print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5])))
