"""Engines over the soak's small model, and plain decoding of its prompts to compare texts with."""

import functools

import jax
import numpy as np

from commit_schemes import SCHEMES
from commit_schemes.decoding.engine import Engine
from commit_schemes.decoding.loop import Marking
from commit_schemes.decoding.prefix_cache import PrefixCache
from commit_schemes.decoding.slots import compiled
from commit_schemes.model import model_memory
from experiments import soak, soak_world

C = soak.CONFIGS["smoke"]
MANY = 10**8  # bytes: a prefix cache that evicts nothing


@functools.cache
def world() -> soak_world.World:
  return soak_world.World(C)


def memory_of(name):
  w = world()
  return model_memory(w.config, SCHEMES[name].make(w.spec(C.window)), w.ops)


def programs_of(name, *, drafter=None, marks=2, **kwargs):
  """Compiled anew. With `marks` rows a step a cache can be filled from steps."""
  w = world()
  drafter = drafter or soak_world.rigged(w.truth, C.window)
  marking = Marking(C.block, marks) if marks else None
  return compiled(w.params, w.config, memory_of(name), drafter, marking=marking, **kwargs)


@functools.cache
def built(name):
  return programs_of(name)


def engine(name="ring_exact", *, slots=C.slots, budget=None, programs=None) -> Engine:
  """`budget` bytes of a prefix cache, None for no cache."""
  programs = programs or built(name)
  cache = None if budget is None else PrefixCache(budget, C.block, programs.empty())
  return Engine(programs, world().limits(C.window), slots=slots, block=C.block, cache=cache)


def same_text(text) -> None:
  """Equal to plain decoding's, or at the first difference its margin is below the logit error."""
  want = world().plain[world().prompts[text.known[0]]]
  at, error = soak_world.first_difference(text, want)
  if at is not None:
    top = want.top[text.prompt - want.prompt + at]
    assert top[0] - top[1] <= error, f"token {at} differs, logit error {error:.1e}"


def turn(i, more):
  """Prompt i and the first `more` tokens of its answer."""
  prompt = world().prompts[i]
  return tuple(world().plain[prompt].known[: len(prompt) + more])


def poisoned(tree):
  """NaN in every floating leaf."""
  spoil = lambda x: x * np.nan if np.issubdtype(np.asarray(x).dtype, np.floating) else x
  return jax.tree.map(spoil, tree)


def equal(a, b) -> None:
  jax.tree.map(np.testing.assert_array_equal, a, b)
