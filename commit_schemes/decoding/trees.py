"""From the marginals of a block to a window: a chain, a top-k tree, or the best-first tree.

A block drafter gives one distribution for each depth, whatever the path, so every tree takes its
tokens from the same ranking: the r-th child of any node at depth d - 1 is the r-th likeliest token
of depth d. Node 0 is the anchor and parents come before children.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Marginals = Float[Array, "B depth vocab"]  # logits
Built = tuple[Int[Array, "B drafted"], Int[Array, "B T"], Int[Array, "B"]]


class Shape(NamedTuple):
  """What `build(logits)` makes of marginals: (tokens after the anchor, parents, nodes).

  depth  how many tokens after the anchor a path can have
  nodes  T, the window it fills, with the anchor
  """

  depth: int
  nodes: int
  build: Callable[[Marginals], Built]


def top_k(*widths: int) -> Shape:
  """Each node at depth d - 1 has the widths[d - 1] likeliest tokens of depth d as children.

  Level by level, TreeWY's TreeTopology (arXiv 2608.20961). ValueError: a width below 1.
  """
  if not all(w >= 1 for w in widths):
    raise ValueError(f"widths {widths} must be at least 1")
  parents, level, depths, ranks = [-1], [0], [], []
  for d, width in enumerate(widths):
    parents += [p for p in level for _ in range(width)]
    depths += [d] * (len(level) * width)
    ranks += list(range(width)) * len(level)
    level = list(range(len(parents) - len(level) * width, len(parents)))
  depth_of, rank_of = np.asarray(depths, np.int32), np.asarray(ranks, np.int32)

  def build(logits: Marginals) -> Built:
    B = logits.shape[0]
    if not widths:
      return jnp.zeros((B, 0), jnp.int32), jnp.full((B, 1), -1, jnp.int32), jnp.ones(B, jnp.int32)
    likeliest = jax.lax.top_k(logits, max(widths))[1].astype(jnp.int32)
    tokens = likeliest[:, depth_of, rank_of]
    every = jnp.broadcast_to(jnp.asarray(parents, jnp.int32)[None], (B, len(parents)))
    return tokens, every, jnp.full((B,), len(parents), jnp.int32)

  return Shape(len(widths), 1 + sum(prod(widths[: d + 1]) for d in range(len(widths))), build)


def chain(window: int) -> Shape:
  """The likeliest token of each depth: `window` nodes with the anchor. ValueError: below 1."""
  if window < 1:
    raise ValueError(f"window={window} must be at least 1")
  return top_k(*(1,) * (window - 1))


def best_first(nodes: int, depth: int) -> Shape:
  """The `nodes` - 1 paths of the largest product of marginals: DDTree (arXiv 2604.12989, sec. 3).

  They maximise the expected accept length under independent marginals. A heap is not needed: the
  best of depth d hang on the best of depth d - 1, so one top-k a level keeps all that can matter,
  and one over all levels picks. Nodes are in order of falling weight, so a smaller budget is a
  prefix. ValueError: either number below 1.
  """
  if nodes < 1 or depth < 1:
    raise ValueError(f"nodes={nodes} and depth={depth} must be at least 1")
  if nodes == 1:
    return chain(1)
  budget = nodes - 1

  def sequence(logits: Float[Array, "depth vocab"]):
    k = min(budget, logits.shape[1])
    score, token = jax.lax.top_k(jax.nn.log_softmax(logits), k)

    def level(weights, row):
      score, token = row
      weight, at = jax.lax.top_k((weights[:, None] + score[None]).reshape(-1), budget)
      return weight, (weight, token[at % k], at // k)

    # Before the first level there is the anchor, and places that nothing may hang on.
    start = jnp.where(jnp.arange(budget) == 0, 0.0, -jnp.inf)
    _, (weights, tokens, above) = jax.lax.scan(level, start, (score, token))
    # Ties go to the lower index, so a parent comes before its child.
    weight, chosen = jax.lax.top_k(weights.reshape(-1), budget)
    node = jnp.zeros(weights.size, jnp.int32).at[chosen].set(jnp.arange(1, nodes, dtype=jnp.int32))
    d = chosen // budget
    parent = node[jnp.maximum(d - 1, 0) * budget + above.reshape(-1)[chosen]]
    parents = jnp.where(d == 0, 0, parent).astype(jnp.int32)
    count = 1 + jnp.sum(jnp.isfinite(weight), dtype=jnp.int32)
    return tokens.reshape(-1)[chosen].astype(jnp.int32), parents, count

  def build(logits: Marginals) -> Built:
    tokens, parents, count = jax.vmap(sequence)(logits.astype(jnp.float32))
    root = jnp.full((logits.shape[0], 1), -1, jnp.int32)
    return tokens, jnp.concatenate([root, parents], axis=1), count

  return Shape(depth, nodes, build)
