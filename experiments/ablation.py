"""Ops with one site's arithmetic lowered, emulated in float32 so that any machine gives the same.

tf32 keeps 10 mantissa bits of each operand, bf16 7; bf16x3 is the three largest of the four
products of operands split in two bfloat16 parts. Products and sums are float32 in all of them.
"""

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp

from gdn.dots import EXACT, Dot, Dots, exact

SITES = Dots._fields


def round_bits(x: jax.Array, keep: int) -> jax.Array:
  """float32 rounded to nearest even with `keep` explicit mantissa bits."""
  drop = 23 - keep
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  half = jnp.uint32((1 << (drop - 1)) - 1) + ((bits >> drop) & jnp.uint32(1))
  kept = (bits + half) & jnp.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)
  return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(kept, jnp.float32), x)


def round_to(x: jax.Array, keep: jax.Array) -> jax.Array:
  """`round_bits` with a traced number of bits; 23 and more change nothing."""
  drop = jnp.clip(23 - keep, 1, 23).astype(jnp.uint32)
  bits, one = jax.lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(1)
  half = (one << (drop - one)) - one + ((bits >> drop) & one)
  kept = jax.lax.bitcast_convert_type((bits + half) >> drop << drop, jnp.float32)
  return jnp.where(jnp.isfinite(x) & (keep < 23), kept, x)


def rounded(keep: int) -> Dot:
  return lambda a, b: exact(round_bits(a, keep), round_bits(b, keep))


def bf16x3(a: jax.Array, b: jax.Array) -> jax.Array:
  hi = lambda x: round_bits(x, 7)
  ah, bh = hi(a), hi(b)
  return exact(ah, bh) + (exact(ah, hi(b - bh)) + exact(hi(a - ah), bh))


PRECISIONS: Mapping[str, Dot] = MappingProxyType(
  {"bf16x3": bf16x3, "tf32": rounded(10), "bf16": rounded(7)}
)


def lowered(precision: str, sites: tuple[str, ...] = SITES) -> Dots:
  """Dots with `precision` at `sites`. ValueError: an unknown one."""
  if precision not in PRECISIONS:
    raise ValueError(f"precision {precision!r} must be one of {sorted(PRECISIONS)}")
  if unknown := set(sites) - set(SITES):
    raise ValueError(f"sites {sorted(unknown)} must be among {SITES}")
  return EXACT._replace(**dict.fromkeys(sites, PRECISIONS[precision]))


def neumann(A: jax.Array, rhs: jax.Array, dots: Dots) -> jax.Array:
  """(I + A)^-1 rhs as (I - A)(I + A^2)(I + A^4)... rhs: exact for nilpotent A, by its powers."""
  T, X = A.shape[0], -A
  u = rhs + dots.solve(X, rhs)
  for _ in range(max(T - 1, 1).bit_length() - 1):
    X = dots.solve(X, X)
    u = u + dots.solve(X, u)
  return u
