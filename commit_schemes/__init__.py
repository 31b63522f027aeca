"""Every published way for a recurrent state to survive a speculative step, behind one contract."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from commit_schemes.contract import (
  CommitScheme,
  Decay,
  Dtypes,
  Spec,
  Topology,
  admit,
  check_chain,
  narrow,
  together,
)
from commit_schemes.delta_cache import delta_cache
from commit_schemes.footprint import Footprint, LayerShape, footprint
from commit_schemes.replay import replay
from commit_schemes.ring import ring
from commit_schemes.snapshot import snapshot
from commit_schemes.tree_wy import tree_wy
from gdn.typing import Accepted


class Scheme(NamedTuple):
  """A scheme as data: how to build it and what it can do. Users call `make`.

  lossless  with float32 rows it is the plain recurrence up to float32 rounding
  exact     the committed state is bitwise what one-token steps of the same Ops leave
  solves    outputs come from the window's triangular solve, not token by token
  writes    when the full state is written
  source    where it was published
  """

  build: Callable[[Spec], CommitScheme]
  writes: str
  source: str
  lossless: bool = True
  exact: bool = False
  solves: bool = True
  topologies: tuple[Topology, ...] = ("chain", "tree")
  decays: tuple[Decay, ...] = ("gdn", "kda")

  def make(self, spec: Spec) -> CommitScheme:
    """The functions of the scheme. ValueError: a decay that it does not take.

    If it takes chains alone, its verify refuses a tree wherever it can see one (`check_chain`).
    """
    decay = "gdn" if spec.channels == 1 else "kda"
    if decay not in self.decays:
      raise ValueError(
        f"spec.channels={spec.channels} is {decay}, and this scheme takes {', '.join(self.decays)}"
      )
    scheme = self.build(spec)
    if "tree" in self.topologies:
      return scheme

    def verify(carry, window, gates):
      check_chain(window)
      return scheme.verify(carry, window, gates)

    return scheme._replace(verify=verify)


def partial_cache(keep: int) -> Scheme:
  make = lambda s: replay(s, keep=keep)
  return Scheme(make, "every commit", "SGLang PR 28010", exact=True, solves=False)


SCHEMES: Mapping[str, Scheme] = MappingProxyType(
  {
    "snapshot": Scheme(
      snapshot, "every node", "SGLang and vLLM default (store_all)", exact=True, solves=False
    ),
    "replay_0": Scheme(
      lambda s: replay(s, keep=0),
      "every commit",
      "SGLang PR 26520 (mode none), PR 32692",
      exact=True,
    ),
    "replay_1": partial_cache(1),
    "replay_4": partial_cache(4),
    "replay_8": partial_cache(8),
    "replay_4_compact": Scheme(
      lambda s: replay(s, keep=4, tail="compact"),
      "every commit",
      "SGLang PR 28010",
      exact=True,
      solves=False,
    ),
    "delta_cache": Scheme(delta_cache, "every commit", "SGLang PR 27658"),
    "ring_open_loop": Scheme(
      lambda s: ring(s, slots=4 * s.window, fold="open_loop"), "flush", "ReplaySSM, first revision"
    ),
    "ring_exact": Scheme(
      lambda s: ring(s, slots=4 * s.window, fold="exact"),
      "flush",
      "SGLang PR 28695 as merged",
      exact=True,
    ),
    "ring_compensated": Scheme(
      lambda s: ring(s, slots=4 * s.window, fold="compensated"),
      "flush",
      "SGLang PR 35544",
      lossless=False,
    ),
    "tree_wy": Scheme(tree_wy, "next verify", "TreeWY, arXiv 2608.20961; vLLM reconstruct"),
  }
)
