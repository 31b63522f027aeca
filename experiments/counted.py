"""XLA's own count of every kernel of the cost model and of every scheme's step, for one slot.

Bytes are those of the compiled program's arguments and results (`memory_analysis`): the traffic
that nothing can avoid, where the program is given what it needs and no more. Flops are XLA's of the
program before it is optimised (`cost_analysis`): afterwards parts of it are calls of a library,
which have none. XLA counts a loop's body once, so what goes token by token is written out here.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from commit_schemes.footprint import LayerShape, zero_window
from experiments import cost
from experiments.cost import Cost, Part, Point
from gdn.ops import XLA
from gdn.recurrence import read, write
from gdn.typing import Pending, Records, Rows

Program = tuple[Callable[..., Any], tuple[Any, ...]]
SLOT = jnp.int32


def states(s: LayerShape) -> jax.Array:
  return jnp.zeros((1, s.value_heads, s.value_dim, s.key_dim), jnp.float32)


def rows(s: LayerShape, n: int) -> Rows:
  """Of one slot, float32."""
  k = jnp.zeros((1, n, s.key_heads, s.key_dim), jnp.float32)
  u = jnp.zeros((1, n, s.value_heads, s.value_dim), jnp.float32)
  return Rows((k,), (u,), jnp.zeros((1, n, s.value_heads, s.channels), jnp.float32))


def records(s: LayerShape, n: int) -> Records:
  k = jnp.zeros((1, n, s.key_heads, s.key_dim), jnp.bfloat16)
  v = jnp.zeros((1, n, s.value_heads, s.value_dim), jnp.bfloat16)
  beta = jnp.zeros((1, n, s.value_heads), jnp.float32)
  return Records(k, v, beta, jnp.zeros((1, n, s.value_heads, s.channels), jnp.float32))


def pending(n: int) -> Pending:
  path = jnp.arange(n, dtype=SLOT)[None]
  return Pending(jnp.zeros(1, SLOT), path, jnp.full(1, n, SLOT))


def token_by_token(S: jax.Array, x: Records) -> list[jax.Array]:
  """The state of one slot after each record."""
  S, after = S[0], []
  wide = lambda y: jnp.repeat(y, S.shape[0] // y.shape[0], axis=0)
  for t in range(x.k.shape[1]):
    S = jax.vmap(write)(S, wide(x.k[0, t]), x.v[0, t], x.beta[0, t], x.g[0, t])
    after.append(S)
  return after


def program(s: LayerShape, T: int, part: Part) -> Program:
  """What does this part and nothing else. KeyError: there is none."""
  window, gates = zero_window(s, 1, T, jnp.bfloat16)
  S, n = states(s), round(part.n)

  def verify(parts: tuple[Any, ...]) -> Callable[..., Any]:
    def left(S, w, p):
      o, gate, rows = XLA.verify(S, w, p, parts=parts)
      return (o, rows) if parts else (o, w.raw.k, w.raw.v, gate)

    return left

  def beside(S, rows, w, p):
    room = lambda x: jnp.pad(x, ((0, 0), (0, T), *((0, 0),) * (x.ndim - 2)))
    ring, at = jax.tree.map(room, rows), jnp.full(1, n, SLOT)
    o, _, _, ring = XLA.step(S, ring, pending(n), False, at, w, p)
    return o, jax.tree.map(lambda x: x[:, n:], ring)

  def folding(S, rows, w, p):
    S = fold_rank(S, rows)
    return (*verify((jnp.float32,))(S, w, p), S)

  def tokens(keep: int, *, raw: bool) -> Callable[..., Any]:
    def of(S, w, p):
      gate = XLA.verify(S, w, p, parts=())[1]
      after = token_by_token(S, Records(w.raw.k, w.raw.v, *gate))
      q = jnp.repeat(w.raw.q[0], s.value_heads // s.key_heads, axis=1)
      o = jnp.stack([jax.vmap(read)(S, x) for S, x in zip(after, q, strict=True)])
      kept = jnp.stack(after[:keep])
      return (o.astype(jnp.bfloat16), kept, *((w.raw.k, w.raw.v, gate) if raw else ()))

    return of

  one = window._replace(
    raw=jax.tree.map(lambda x: x[:, :1], window.raw), parents=window.parents[:, :1]
  )
  fold_rank = lambda S, x: XLA.fold_rank(S, x, pending(n), jnp.zeros(1, SLOT))
  replay = lambda S, x: [S, *token_by_token(S, x)][-1]
  programs: dict[str, Program] = {
    "verify_raw": (verify(()), (S, window, gates)),
    "verify_rows": (verify((jnp.float32,)), (S, window, gates)),
    "step_ring": (beside, (S, rows(s, n), window, gates)),
    "step_ring_flush": (folding, (S, rows(s, n), window, gates)),
    "step": (folding, (S, rows(s, n), window, gates)),
    "fold_raw": (replay, (S, records(s, n))),
    "fold_rank": (fold_rank, (S, rows(s, n))),
    "snapshot": (tokens(n, raw=False), (S, window, gates)),
    "partial": (tokens(n, raw=True), (S, window, gates)),
    "decode": (tokens(1, raw=False), (S, one, gates)),
    "snapshot_commit": (lambda S: S, (S,)),
    # What it reads the verify has read: only what is written counts.
    "append": (lambda: records(s, T)[:3], ()),
  }
  return programs[part.kernel]


@cache
def count(s: LayerShape, T: int, part: Part) -> Cost:
  """XLA's bytes and flops; launches are not its to count."""
  f, args = program(s, T, part)
  lowered = jax.jit(f).lower(*args)
  memory = lowered.compile().memory_analysis()
  assert memory is not None  # a CPU has it
  flops = (lowered.cost_analysis() or {}).get("flops", 0.0)
  return Cost(memory.argument_size_in_bytes + memory.output_size_in_bytes, flops)


# Windows, and accept lengths with which a ring of 4 T has a whole number of rows on average.
POINTS: Mapping[int, int] = MappingProxyType({4: 2, 16: 6})


def parts(s: LayerShape, T: int) -> dict[str, cost.Parts]:
  """By scheme; plain decoding is one as well."""
  p = Point(T, POINTS[T], ring=4 * T, row=4)
  return {"decode": (Part("decode", cost.plain(s, p)),)} | {
    name: of(s, p) for name, of in cost.PARTS.items()
  }


def counted(s: LayerShape, T: int) -> Iterator[tuple[str, str | None, Cost, Cost]]:
  """Scheme, kernel (None: all of the step), our cost and XLA's."""
  for scheme, some in parts(s, T).items():
    found = tuple(x._replace(cost=count(s, T, x)) for x in some if x.share)
    for ours, theirs in zip((x for x in some if x.share), found, strict=True):
      yield scheme, ours.kernel, ours.cost, theirs.cost
    yield scheme, None, cost.whole(some), cost.whole(found)
