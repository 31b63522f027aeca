"""The short causal depthwise convolution with SiLU, over a window of a chain or a tree.

    y_t = silu(sum_j w_j x_(t - W + 1 + j))     along the path of t, then along the committed inputs

The memory is the last W - 1 inputs before the convolution, in the activation dtype.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gdn.typing import Parents

Taps = Float[Array, "W C"]
Tail = Float[Array, "tail C"]


def sources(parents: Parents, W: int) -> Int[Array, "T W"]:
  """For each node, the W rows of [tail; window] that its taps meet, the oldest first."""
  T, back = parents.shape[0], W - 1
  up = jnp.concatenate(
    [jnp.arange(back, dtype=jnp.int32) - 1, jnp.where(parents < 0, -1, parents) + back]
  )
  at = [jnp.arange(T, dtype=jnp.int32) + back]
  for _ in range(back):
    at.append(up[at[-1]])
  return jnp.stack(at[::-1], axis=1)


def conv(tail: Tail, x: Float[Array, "T C"], w: Taps, parents: Parents) -> Float[Array, "T C"]:
  """Outputs of every node of one sequence, in the dtype of x; sums in float32."""
  rows = jnp.concatenate([tail.astype(x.dtype), x])[sources(parents, w.shape[0])]
  y = jnp.sum(rows.astype(jnp.float32) * w.astype(jnp.float32)[None], axis=1)
  return jax.nn.silu(y).astype(x.dtype)


def causal(
  tail: Float[Array, "B tail C"], x: Float[Array, "B T C"], w: Taps
) -> Float[Array, "B T C"]:
  """`conv` on chains of a batch, for long T: W shifted products in place of gathered rows."""
  rows, T = jnp.concatenate([tail.astype(x.dtype), x], axis=1), x.shape[1]
  y = sum(
    rows[:, j : j + T].astype(jnp.float32) * w[j].astype(jnp.float32)[None, None]
    for j in range(w.shape[0])
  )
  return jax.nn.silu(y).astype(x.dtype)
