"""The recurrence itself on half a head: what fold, decode and snapshot have in common.

A warpgroup holds [64, K] of a state in registers and advances it token by token. `advance` is the
only place where a kernel changes a state by the recurrence, so states that met the same tokens are
equal bit for bit whichever kernel they went through; `write` is the part of it behind the key's
norm. How tiles come and go: tiles.py.

GDN's decay is one scalar a head. KDA's is one a key channel: gates are worked out with a lane per
channel and reach the columns of the tile through shared memory. Only e^g is ever formed.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes, rows
from pallas_kernels.arith import bf16, f32, inverse_norm, over_columns, over_rows
from pallas_kernels.tiles import LANES, SHAPE, TILE, K, V


def unit(x: jax.Array) -> jax.Array:
  """A raw key or query over the columns of a tile, normalised in float32."""
  x = x.astype(f32)
  return x * inverse_norm(jnp.sum(x * x))


def decayed(S, decay) -> jax.Array:
  """S times e^g, one scalar or one per column."""
  return (over_columns(decay, SHAPE) if decay.ndim else decay) * S


def advance(S, k, v, beta, decay) -> tuple[jax.Array, jax.Array]:
  """One raw token: the new state and the pseudo-value.

  S [64, K] float32, k over the columns and before its norm, v over the rows; `decay` is e^g.
  """
  return write(S, unit(k), v, beta, decay)


def write(S, k, v, beta, decay) -> tuple[jax.Array, jax.Array]:
  """`advance` by a key that has its norm."""
  k = over_columns(k, SHAPE)
  S = decayed(S, decay)
  u = beta * (v.astype(f32) - jnp.sum(S * k, axis=1))
  return S + over_rows(u, SHAPE) * k, u


def read(S, q) -> jax.Array:
  """The output of these rows for a raw query."""
  return jnp.sum(S * over_columns(unit(q) * K**-0.5, SHAPE), axis=1)


def key(ref) -> jax.Array:
  return plgpu.load(ref, layout=lanes.COLS, optimized=False)


def value(ref, m) -> jax.Array:
  return plgpu.load(ref.at[pl.ds(m * TILE, TILE)], layout=lanes.ROWS, optimized=False)


def channels(ref) -> jax.Array:
  """[E] of a head: a scalar for E = 1, else a lane per channel."""
  return ref[0] if ref.shape == (1,) else plgpu.load(ref, layout=lanes.PER_ROW, optimized=False)


def put_channels(ref, x) -> None:
  """The inverse of `channels`."""
  if x.ndim:
    ref[...] = x
  else:
    ref[0] = x


def columns(ref) -> jax.Array:
  """[E] in shared memory as `advance` takes a decay."""
  return ref[0] if ref.shape == (1,) else key(ref)


def decay(g, through) -> jax.Array:
  """e^g as `advance` takes it; channels go through shared memory, which no lane may still read."""
  if not g.ndim:
    return jnp.exp(g)
  put_channels(through, jnp.exp(g))
  lanes.sync()
  return columns(through)


class Inputs(NamedTuple):
  """Global memory of a window: raw tokens, and the gate parameters of its heads."""

  q: Any
  k: Any
  v: Any
  a: Any
  b: Any
  A_log: Any
  dt_bias: Any
  beta_max: Any

  def key_head(self, h):
    return lax.div(h, self.v.shape[2] // self.k.shape[2])

  def head(self, h):
    """What `arith.gates` takes after a and b."""
    return self.A_log[h], channels(self.dt_bias.at[h]), self.beta_max[0]

  def key(self, b, t, h):
    return key(self.k.at[b, t, self.key_head(h)])

  def query(self, b, t, h):
    return key(self.q.at[b, t, self.key_head(h)])

  def value(self, b, t, h, m):
    return value(self.v.at[b, t, h], m)

  def gates(self, b, t, h):
    return channels(self.a.at[b, t, h]), self.b[b, t, h]


def inputs(window, params) -> tuple[jax.Array, ...]:
  """The arrays behind `Inputs`."""
  return (*window.raw, params.A_log, params.dt_bias, params.beta_max.reshape(1))


class Path(NamedTuple):
  """Global memory of `Pending`."""

  row: Any
  path: Any
  length: Any

  def count(self, b):
    return jnp.where(self.row[b] >= 0, self.length[b], 0)

  def place(self, b, p):
    """Row of the record pool and position of a pending token; past the last one, the last one.

    Of a slot with nothing pending, position 0 of some row, whose content is not used.
    """
    length = self.length[b]
    last = jnp.clip(length - 1, 0, self.path.shape[1] - 1)
    at = self.path[b, jnp.clip(p, 0, last)]
    return jnp.maximum(self.row[b], 0), jnp.where(length > 0, at, 0)

  def places(self, b) -> list[jax.Array]:
    """Positions of the pending tokens of a slot, a lane for each, -1 past the last one."""
    P, length = self.path.shape[1], self.length[b]

    def some(first):
      at = rows.words(self.path.at[b], first)
      p = plgpu.broadcasted_iota(jnp.int32, (LANES,), 0, layout=lanes.PER_ROW)
      return jnp.where(p + first < jnp.minimum(length, P), at, -1)

    return [some(first) for first in range(0, P, LANES)]


def nothing() -> jax.Array:
  """A zero per row."""
  return plgpu.layout_cast(jnp.zeros((TILE,), f32), lanes.ROWS)


def put_row(ref, m, x) -> None:
  """Half an output row from a value per row of the tile."""
  ref.at[pl.ds(m * TILE, TILE)][...] = x.astype(ref.dtype)


def check(S, k, v, g) -> None:
  """Raises NotImplementedError for what these kernels do not do."""
  (Hk, K_), (H, V_) = k.shape[-2:], v.shape[-2:]
  if (K_, V_) != (K, V):
    raise NotImplementedError(f"K, V = {K_}, {V_}: only {K}, {V}")
  if H % Hk:
    raise ValueError(f"{H=} value heads over {Hk=} key heads")
  if g.shape[-1] not in (1, K):
    raise NotImplementedError(f"{g.shape[-1]} decays a head: only 1 or {K}")
  if S.dtype not in (f32, bf16):
    raise NotImplementedError(f"state of {S.dtype}")
