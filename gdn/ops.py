"""The arithmetic of every commit scheme as one value, and its XLA implementation.

All operations act on a batch of decode slots. Pools are [N, ...]; `window.slots` names the rows.
Kernels implement the same signatures; schemes call nothing else.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gdn import conv as short_conv
from gdn import prefill as chunked
from gdn.dots import EXACT, Dots
from gdn.gates import gates, l2norm
from gdn.pool import along, bcast, put, put_at, take
from gdn.recurrence import read, write
from gdn.typing import (
  GateParams,
  Mask,
  Outputs,
  Pending,
  Pool,
  Raw,
  Records,
  Rows,
  Slots,
  Tokens,
  Window,
)
from gdn.window import Solve, Writes, fold, project, solve, substitute


class Gates(NamedTuple):
  """Write strength and log decay of a window's nodes, float32."""

  beta: Float[Array, "B T H"]
  g: Float[Array, "B T H E"]


class Ops(NamedTuple):
  """Nine operations. S is a pool [N, H, V, K] of float32 or bfloat16; outputs [B, T, H, V].

  verify     (S, window, params, *, parts) -> (o, gates, rows [B, T])
             outputs of every node; S is read once and never written
  step       (S, rows [N, R], pending, flush, at, window, params) -> (o, gates, S, rows)
             verify from S and its pending writes; where `flush`, S receives them first; the
             window's writes go to positions (at + t) mod R of row `pending.row`, which hold
             nothing that stays pending. `flush` is a flag for each slot, or True or False for all
             where that is known to who compiles
  fold_raw   (S, records, pending, slots) -> S     replay: bitwise what `decode` leaves
  fold_rank  (S, rows, pending, slots) -> S        e^G S + sum u k'
  snapshot   (S, window, params, *, keep) -> (o, gates, states [B, keep, H, V, K])
             token by token; the state after each of the first `keep` nodes
  decode     (S, window, params) -> (o, S)         T = 1, state read and written
  prefill    (S, window, params) -> (o, S)         a chain of any length
  conv       (tail [N, W-1, C], x [B, T, C], taps [W, C], parents, nodes, slots) -> y
  append     (pools [N, R], row, at, nodes, records [B, T]) -> pools
             a tree of records, each in its pool's dtype: those of the first `nodes` nodes to
             positions (at + t) mod R of `row`; of row -1 none
  """

  verify: Callable[..., tuple[Outputs, Gates, Rows]]
  step: Callable[..., tuple[Outputs, Gates, Pool, Rows]]
  fold_raw: Callable[..., Pool]
  fold_rank: Callable[..., Pool]
  snapshot: Callable[..., tuple[Outputs, Gates, Float[Array, "B keep H V K"]]]
  decode: Callable[..., tuple[Outputs, Pool]]
  prefill: Callable[..., tuple[Outputs, Pool]]
  conv: Callable[..., Float[Array, "B T C"]]
  append: Callable[..., Any]


def real(window: Window) -> Bool[Array, "B T"]:
  """Rows that exist: before `nodes`, and not of a padding slot."""
  T = window.parents.shape[1]
  return (jnp.arange(T)[None] < window.nodes[:, None]) & (window.slots >= 0)[:, None]


def clean(window: Window) -> Window:
  """The window with every row that does not exist set to zero and its parent to the root."""
  on = real(window)
  zero = lambda x: jnp.where(bcast(on, x), x, jnp.zeros((), x.dtype))
  return window._replace(
    raw=jax.tree.map(zero, window.raw), parents=jnp.where(on, window.parents, -1)
  )


def token_gates(raw: Raw, params: GateParams) -> Gates:
  """Gates one token at a time between barriers: the same bits for a window as for one token."""

  def token(ab):
    a, b = jax.lax.optimization_barrier(ab)
    return jax.lax.optimization_barrier(gates(a, b, params))

  by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (raw.a, raw.b))
  beta, g = jax.lax.map(token, by_token)
  return Gates(jnp.moveaxis(beta, 0, 1), jnp.moveaxis(g, 0, 1))


def parted(x: Array, dtypes: tuple[Any, ...]) -> tuple[Array, ...]:
  """float32 as a sum of parts: one rounding, or hi + lo."""
  parts = []
  for dtype in dtypes:
    parts.append(x.astype(dtype))
    x = x - parts[-1].astype(x.dtype)
  return tuple(parts)


def dtypes_of(parts: tuple[Array, ...]) -> tuple[Any, ...]:
  return tuple(x.dtype for x in parts)


def append(pools: Any, row: Slots, at: Slots, nodes: Slots, records: Any) -> Any:
  """See `Ops`."""
  t = jnp.arange(jax.tree.leaves(records)[0].shape[1], dtype=at.dtype)[None]

  def one(pool, x):
    where = jnp.where(t < nodes[:, None], (at[:, None] + t) % pool.shape[1], -1)
    return put_at(pool, row, where, x)

  return jax.tree.map(one, pools, records)


def whole(parts: tuple[Array, ...]) -> Array:
  """The float32 value of a tuple of parts."""
  return functools.reduce(jnp.add, (p.astype(jnp.float32) for p in parts))


def xla(
  *,
  dots: Dots = EXACT,
  inverse: Solve = substitute,
  chunk: int = 64,
  out: Any = None,
) -> Ops:
  """Ops on any backend. `dots` and `inverse` lower one site's arithmetic; `out` is the dtype of the
  outputs, by default that of v."""

  def per_value_head(x: Array, H: int, axis: int) -> Array:
    return jnp.repeat(x, H // x.shape[axis], axis=axis)

  def per_head(x: Array, H: int) -> Array:
    """[B, T, heads, ...] -> float32 [B, H, T, ...], key heads shared by their value heads."""
    return jnp.moveaxis(per_value_head(x.astype(jnp.float32), H, 2), 2, 1)

  def outputs(o: Array, window: Window) -> Outputs:
    o = jnp.moveaxis(o, 1, 2)
    return jnp.where(bcast(real(window), o), o, 0.0).astype(out or window.raw.v.dtype)

  def tokens_of(window: Window, gate: Gates) -> tuple[Tokens, Float[Array, "B T Hk K"]]:
    raw, H = window.raw, window.raw.v.shape[2]
    on = real(window)
    mute = lambda x: jnp.where(bcast(on, x), x, 0.0)
    q, k = l2norm(raw.q) * raw.q.shape[-1] ** -0.5, l2norm(raw.k)
    x = Tokens(q, k, raw.v, mute(gate.beta), mute(gate.g))
    return jax.tree.map(lambda x: per_head(x, H), x), k

  def window_solve(S, history: Writes | None, tokens: Tokens, parents):
    """All heads of all slots: S [B, H, V, K] float32, history and tokens [B, H, ...]."""

    def slot(S, history, tokens, parents):
      head = lambda S, h, x: solve(project(S, h, dots), x, parents, dots=dots, inverse=inverse)
      return jax.vmap(head)(S, history, tokens)

    return jax.vmap(slot)(S, history, tokens, parents)

  def pending_writes(rows: Rows, pending: Pending, H: int) -> Writes:
    """[B, H, P, ...] in order; neutral past the pending length."""
    P = pending.path.shape[1]
    on = (jnp.arange(P)[None] < pending.length[:, None]) & (pending.row >= 0)[:, None]
    pick = lambda x: along(take(x, pending.row), pending.path, on)
    k, u, g = (whole(jax.tree.map(pick, x)) for x in (rows.k, rows.u, (rows.g,)))
    return Writes(per_head(k, H), per_head(u, H), per_head(g, H))

  def folded(S, writes: Writes):
    return jax.vmap(jax.vmap(lambda S, w: fold(S, w, dots=dots)))(S, writes)

  def verify(S, window: Window, params, *, parts=(jnp.float32,)):
    window = clean(window)
    gate = token_gates(window.raw, params)
    tokens, k = tokens_of(window, gate)
    o, u = window_solve(take(S, window.slots).astype(jnp.float32), None, tokens, window.parents)
    rows = Rows(parted(k, parts), parted(jnp.moveaxis(u, 1, 2), parts), gate.g)
    return outputs(o, window), gate, rows

  def step(S, rows: Rows, pending: Pending, flush: Mask | bool, at: Slots, window: Window, params):
    window = clean(window)
    H = S.shape[1]
    gate = token_gates(window.raw, params)
    tokens, k = tokens_of(window, gate)
    if flush is not False:
      now = pending._replace(length=jnp.where(flush, pending.length, 0))
      S = fold_rank(S, rows, now, window.slots)
      pending = pending._replace(length=jnp.where(flush, 0, pending.length))
    history = pending_writes(rows, pending, H)
    o, u = window_solve(take(S, window.slots).astype(jnp.float32), history, tokens, window.parents)
    # Nothing is stored before the solve has read the ring: otherwise XLA may store k and g first,
    # and copies both pools to be able to.
    u, k, g = jax.lax.optimization_barrier((u, k, gate.g))
    left = Rows(parted(k, dtypes_of(rows.k)), parted(jnp.moveaxis(u, 1, 2), dtypes_of(rows.u)), g)
    nodes = jnp.where(window.slots >= 0, window.nodes, 0)
    rows = append(rows, pending.row, at, nodes, left)
    return outputs(o, window), gate, S, rows

  def fold_rank(S, rows: Rows, pending: Pending, slots):
    """Slots with nothing pending keep their state bit for bit."""
    some = pending.length > 0

    def apply(S):
      new = folded(take(S, slots).astype(jnp.float32), pending_writes(rows, pending, S.shape[1]))
      return put(S, jnp.where(some, slots, -1), new)

    return jax.lax.cond(some.any(), apply, lambda S: S, S)

  def fold_raw(S, records: Records, pending: Pending, slots):
    P = pending.path.shape[1]
    on = (jnp.arange(P)[None] < pending.length[:, None]) & (pending.row >= 0)[:, None]
    path = jax.tree.map(lambda x: along(take(x, pending.row), pending.path, on), records)

    new = replayed(take(S, slots).astype(jnp.float32), path, on, pending.length)
    return put(S, jnp.where(pending.length > 0, slots, -1), new)

  def replayed(S, path: Records, on: Bool[Array, "B P"], length):
    """The states after the tokens of a path that are on."""

    def token(p, S):
      new = advance(S, jax.tree.map(lambda x: x[:, p], path), S.shape[1])
      return jnp.where(bcast(on[:, p], S), new, S)

    return jax.lax.fori_loop(0, jnp.max(length, initial=0), token, S)

  def advance(S, x: Records, H: int):
    """One token of every head of every slot. Records here are [B, heads, ...]."""
    k = per_value_head(x.k, H, 1)
    return jax.vmap(jax.vmap(write))(S, k, x.v, x.beta, x.g)

  def snapshot(S, window: Window, params, *, keep: int):
    window = clean(window)
    (B, T), H = window.parents.shape, S.shape[1]
    gate = token_gates(window.raw, params)
    on = real(window)
    root = take(S, window.slots).astype(jnp.float32)
    records = Records(window.raw.k, window.raw.v, *gate)
    slot = jnp.arange(B)

    def node(t, states):
      p = window.parents[:, t]
      before = jnp.where(bcast(p < 0, root), root, states[jnp.maximum(p, 0), slot])
      new = advance(before, jax.tree.map(lambda x: x[:, t], records), H)
      new = jnp.where(bcast(on[:, t], new), new, before)
      return states.at[t].set(new)

    # Of a loop over one node XLA makes no loop, see `decode`: it goes on to one that is not there.
    empty = jnp.zeros((T, *root.shape), jnp.float32)
    states = jnp.moveaxis(jax.lax.fori_loop(0, max(T, 2), node, empty), 0, 1)
    q = per_value_head(window.raw.q, H, 2)
    o = jax.vmap(jax.vmap(jax.vmap(read)))(states, q)
    return outputs(jnp.moveaxis(o, 1, 2), window), gate, states[:, :keep].astype(S.dtype)

  def decode(S, window: Window, params):
    window = clean(window)
    H = S.shape[1]
    gate = token_gates(window.raw, params)
    # A path of two, the second never on: of a loop over one token XLA makes no loop, and compiles
    # other arithmetic than a fold's.
    two = lambda x: jnp.concatenate([x, jnp.zeros_like(x)], axis=1)
    path, on = jax.tree.map(two, (Records(window.raw.k, window.raw.v, *gate), real(window)))
    new = replayed(take(S, window.slots).astype(jnp.float32), path, on, window.nodes)
    o = jax.vmap(jax.vmap(read))(new, per_value_head(window.raw.q[:, 0], H, 1))
    S = put(S, jnp.where(window.nodes > 0, window.slots, -1), new)
    return outputs(o[:, :, None], window), S

  def prefill(S, window: Window, params):
    window = clean(window)
    tokens, _ = tokens_of(window, Gates(*gates(window.raw.a, window.raw.b, params)))
    head = lambda S, x: chunked.prefill(S, x, chunk=chunk, dots=dots, inverse=inverse)
    new, o = jax.vmap(jax.vmap(head))(take(S, window.slots).astype(jnp.float32), tokens)
    return outputs(o, window), put(S, window.slots, new)

  def conv(tail, x, taps, parents: Int[Array, "B T"], nodes, slots):
    on = (jnp.arange(x.shape[1])[None] < nodes[:, None]) & (slots >= 0)[:, None]
    x = jnp.where(bcast(on, x), x, jnp.zeros((), x.dtype))
    y = jax.vmap(short_conv.conv, in_axes=(0, 0, None, 0))(
      take(tail, slots), x, taps, jnp.where(on, parents, -1)
    )
    return jnp.where(bcast(on, y), y, jnp.zeros((), y.dtype))

  return Ops(verify, step, fold_raw, fold_rank, snapshot, decode, prefill, conv, append)


XLA = xla()
