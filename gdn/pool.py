"""Rows of a pool by slot. Slot -1 is padding: it reads zeros and writes nothing.

JAX wraps negative indices before any out-of-bounds mode looks at them, so -1 would be the last
row. Every access to a pool goes through these functions (FlashInfer issue 5042 is that fault).
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from gdn.typing import Slots


def bcast(mask: Shaped[Array, "B ..."], x: Array) -> Array:
  """`mask` with trailing axes of size one until it has the rank of x."""
  return mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))


def take(pool: Shaped[Array, "N ..."], slots: Slots) -> Shaped[Array, "B ..."]:
  """Rows of the pool; zeros for slot -1, whatever the pool holds."""
  rows = pool.at[jnp.maximum(slots, 0)].get(mode="clip")
  return jnp.where(bcast(slots >= 0, rows), rows, jnp.zeros((), pool.dtype))


def put(
  pool: Shaped[Array, "N ..."], slots: Slots, rows: Shaped[Array, "B ..."]
) -> Shaped[Array, "N ..."]:
  """The pool with its rows replaced, in the pool's dtype; slot -1 touches nothing."""
  N = pool.shape[0]
  return pool.at[jnp.where(slots < 0, N, slots)].set(rows.astype(pool.dtype), mode="drop")


def put_at(
  pool: Shaped[Array, "N R ..."],
  slots: Slots,
  at: Int[Array, "B T"],
  rows: Shaped[Array, "B T ..."],
) -> Shaped[Array, "N R ..."]:
  """The pool with positions `at` of each row replaced; slot or position -1 touches nothing."""
  N, R = pool.shape[:2]
  off = (slots[:, None] < 0) | (at < 0)
  slots, at = jnp.where(off, N, slots[:, None]), jnp.where(off, R, at)
  return pool.at[slots, at].set(rows.astype(pool.dtype), mode="drop")


def along(
  x: Shaped[Array, "B T ..."], path: Int[Array, "B P"], on: Bool[Array, "B P"]
) -> Shaped[Array, "B P ..."]:
  """x[b, path[b, p]] where `on`, else zero. Positions that are off are never read."""
  rows = jnp.take_along_axis(x, bcast(jnp.where(on, path, 0), x), axis=1)
  return jnp.where(bcast(on, rows), rows, jnp.zeros((), x.dtype))
