"""A hybrid model small enough to decode thousands of steps on a CPU, and engines over it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.decoding.accept import greedy
from commit_schemes.decoding.drafts import nothing, prompt_lookup
from commit_schemes.decoding.engine import Engine, Text
from commit_schemes.decoding.loop import Marking
from commit_schemes.decoding.prefix_cache import PrefixCache
from commit_schemes.decoding.schedule import Limits
from commit_schemes.decoding.slots import compiled
from commit_schemes.model import model_memory
from gdn import hybrid
from gdn.config import Config

CONFIG = Config(
  width=32, inner=32, layers=2, attention_every=2, key_heads=2, value_heads=4, key_dim=8,
  value_dim=8, query_heads=4, kv_heads=2, head_dim=8, rotary=4, window=24,
)  # fmt: skip
T, BLOCK, CAPACITY, SLOTS = 4, 8, 96, 4


@functools.cache
def params():
  return hybrid.init(CONFIG, jax.random.key(3))


def memory_of(make, window=T, config=CONFIG):
  """Memories in float32 throughout, so that a replay is exact."""
  spec = Spec(config.key_heads, window, dtypes=Dtypes(raw=jnp.float32))
  return model_memory(config, make(spec))


def programs_of(name, *, marking=None, accept=greedy, drafter=None):
  memory = memory_of(SCHEMES[name].make)
  return compiled(
    params(), CONFIG, memory, drafter or prompt_lookup(T), accept=accept, marking=marking
  )


@functools.cache
def built(name, marks=2):
  """Compiled once per scheme; with `marks`, a cache can be filled from its steps."""
  return programs_of(name, marking=Marking(BLOCK, marks) if marks else None)


def engine(name, *, slots=SLOTS, budget=None, programs=None):
  """`budget` bytes of a prefix cache, None for no cache."""
  programs = programs or built(name)
  cache = None if budget is None else PrefixCache(budget, BLOCK, programs.empty())
  limits = Limits(CAPACITY, CONFIG.vocab, T)
  return Engine(programs, limits, slots=slots, block=BLOCK, cache=cache)


def prompt(seed, n):
  """Repetitive, so that prompt lookup finds something, and different for every seed."""
  rng = np.random.default_rng(seed)
  words = rng.integers(0, 256, (3, 3))
  return tuple(int(t) for t in words[rng.integers(0, 3, n // 3 + 1)].reshape(-1)[:n])


@functools.cache
def plain_engine():
  return engine("snapshot", slots=1, programs=compiled(
    params(), CONFIG, memory_of(SCHEMES["snapshot"].make, 1), nothing
  ))  # fmt: skip


@functools.cache
def plain(prompt) -> Text:
  """Plain decoding of a prompt up to the capacity, one token a step and alone."""
  one = plain_engine()
  one.submit(prompt, prompt, tokens=CAPACITY - len(prompt), draft=0)
  one.run()
  return one.texts[prompt]


def equal_by_the_margin_rule(text: Text):
  """Equal to plain decoding, or at the first difference its margin is below the logit error."""
  want = plain(tuple(text.known[: text.prompt]))
  n = len(text.tokens)
  differs = np.flatnonzero(np.asarray(text.tokens) != np.asarray(want.tokens[:n]))
  if len(differs):
    at = differs[0]
    best, plainly = np.stack(text.top[: at + 1]), np.stack(want.top[: at + 1])
    error = np.abs(best[:at] - plainly[:at]).sum(1).max(initial=0)
    margin = plainly[at, 0] - plainly[at, 1]
    assert margin <= error, f"token {at} differs: margin {margin:.1e}, logit error {error:.1e}"
