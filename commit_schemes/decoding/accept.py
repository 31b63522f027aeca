"""Which drafted tokens stay: greedy, and sampling that leaves the target's distribution unchanged.

Parents come before children, so one pass over the nodes walks any tree: whoever hangs on the last
accepted node is tried in turn. The anchor is always accepted; the bonus token follows the path.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from commit_schemes.model import Draft
from gdn.typing import Accepted


class Verdict(NamedTuple):
  """The accepted path (anchor first) and the token that follows it. Padding rows accept nothing."""

  accepted: Accepted
  bonus: Int[Array, "B"]


def greedy(logits: Float[Array, "B T vocab"], draft: Draft) -> Verdict:
  """Accept a child that is its parent's most likely token; the bonus is the last one's."""
  return agreed(jnp.argmax(logits, axis=-1).astype(jnp.int32), draft)


def agreed(best: Int[Array, "B T"], draft: Draft) -> Verdict:
  """Accept a child that is what shall follow its parent, `best`; the bonus follows the last one."""

  def slot(best, tokens, parents, nodes):
    T = tokens.shape[0]

    def node(t, walk):
      path, length, at = walk
      hit = (t < nodes) & (parents[t] == at) & (tokens[t] == best[at])
      path = jnp.where(hit & (jnp.arange(T) == length), t, path)
      return path, jnp.where(hit, length + 1, length), jnp.where(hit, t, at)

    start = jnp.zeros(T, jnp.int32), jnp.int32(1), jnp.int32(0)
    path, length, at = jax.lax.fori_loop(1, T, node, start)
    return Accepted(path, jnp.where(nodes > 0, length, 0)), best[at]

  return Verdict(*jax.vmap(slot)(best, *draft))


def sampled(
  key: Array,
  logits: Float[Array, "B T vocab"],
  draft: Draft,
  proposal: Float[Array, "B T vocab"] | None = None,
  *,
  temperature: float = 1.0,
) -> Verdict:
  """Speculative sampling (Leviathan et al. 2022; SpecInfer for trees): lossless.

  proposal  None where children are chosen by rule, such as the top k: each is a point mass, is
            accepted with the probability that is left for it, and takes that mass along. Otherwise
            the distribution that node t's children were drawn from, independently and with
            replacement. Treating top-k children as draws is the trap: it is not lossless.
  ValueError: a temperature that is not above 0.
  """
  if not temperature > 0:
    raise ValueError(f"temperature={temperature} must be above 0; use greedy for the limit")
  p = jax.nn.softmax(logits.astype(jnp.float32) / temperature, axis=-1)
  vocab = p.shape[-1]

  def slot(key, p, proposal, tokens, parents, nodes):
    T = tokens.shape[0]
    chance, last = jax.random.split(key)
    chance = jax.random.uniform(chance, (T,))

    def node(t, walk):
      path, length, at, left = walk
      here = (t < nodes) & (parents[t] == at)
      point = jax.nn.one_hot(tokens[t], vocab, dtype=jnp.float32)
      q = point if proposal is None else proposal[at]
      hit = here & (chance[t] * q[tokens[t]] < left[tokens[t]])
      rest = left * (1 - point) if proposal is None else jnp.maximum(left - q, 0)
      rest = rest / jnp.maximum(jnp.sum(rest), jnp.finfo(jnp.float32).tiny)
      left = jnp.where(hit, p[t], jnp.where(here, rest, left))
      path = jnp.where(hit & (jnp.arange(T) == length), t, path)
      return path, jnp.where(hit, length + 1, length), jnp.where(hit, t, at), left

    start = jnp.zeros(T, jnp.int32), jnp.int32(1), jnp.int32(0), p[0]
    path, length, _, left = jax.lax.fori_loop(1, T, node, start)
    bonus = jax.random.categorical(last, jnp.log(left)).astype(jnp.int32)
    return Accepted(path, jnp.where(nodes > 0, length, 0)), bonus

  keys = jax.random.split(key, p.shape[0])
  axes = (0, 0, None if proposal is None else 0, 0, 0, 0)
  return Verdict(*jax.vmap(slot, in_axes=axes)(keys, p, proposal, *draft))
