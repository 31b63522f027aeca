"""Planted bugs. Each is a change to the text of one real function, and the laws that must notice.

The code object of the function is swapped where it stands, so every module that imported it and
every table that holds it has the bug. Compiled schemes do not: a check builds its own.
"""

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from commit_schemes.contract import admit, pending
from commit_schemes.conv_window import conv_window
from commit_schemes.replay import replay, tail_compact
from commit_schemes.ring import ring
from commit_schemes.snapshot import pick
from commit_schemes.tree_wy import tree_wy
from gdn import conv, gates, ops, pool, prefill, recurrence, window


class Mutant(NamedTuple):
  """A bug and the names of checks (tests/test_mutants.py), each of which must fail on it.

  edits  pairs of text in the function's source, each found there exactly once, and what replaces it
  """

  function: Callable[..., Any]
  edits: tuple[tuple[str, str], ...]
  noticed_by: tuple[str, ...]


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
  """The project with the bug in it."""
  function = inspect.unwrap(mutant.function)
  source = textwrap.dedent(inspect.getsource(function))
  for old, new in mutant.edits:
    assert source.count(old) == 1, f"{function.__name__}: {source.count(old)} times {old!r}"
    source = source.replace(old, new)
  made: dict[str, Any] = {}
  exec(compile(source, f"<mutant of {function.__name__}>", "exec"), function.__globals__, made)
  original, sound = function.__code__, ops.XLA
  try:
    function.__code__ = made[function.__name__].__code__
    ops.XLA = ops.xla()
    yield
  finally:
    function.__code__, ops.XLA = original, sound


def edit(old: str, new: str) -> tuple[tuple[str, str], ...]:
  return ((old, new),)


MUTANTS = {
  # Slots and padding.
  "put wraps slot -1 to the last row": Mutant(
    pool.put, edit("jnp.where(slots < 0, N, slots)", "slots"), ("oracle delta_cache", "pool")
  ),
  "put_at wraps slot -1 and position -1": Mutant(
    pool.put_at, edit("off = (slots[:, None] < 0) | (at < 0)", "off = at < -R"), ("pool",)
  ),
  "take wraps slot -1": Mutant(
    pool.take,
    edit("return jnp.where(bcast(slots >= 0, rows), rows, jnp.zeros((), pool.dtype))",
         "return pool[slots]"),
    ("pool",),
  ),
  "take multiplies by zero where it should select": Mutant(
    pool.take, edit("jnp.where(bcast(slots >= 0, rows), rows, jnp.zeros((), pool.dtype))",
                    "rows * bcast(slots >= 0, rows).astype(pool.dtype)"), ("pool",)
  ),
  "take gathers by a product with a one-hot matrix": Mutant(
    pool.take,
    edit("rows = pool.at[jnp.maximum(slots, 0)].get(mode=\"clip\")",
         "one = (slots[:, None] == jnp.arange(pool.shape[0])[None]).astype(pool.dtype); "
         "rows = jnp.tensordot(one, pool, 1)"),
    ("former tenant delta_cache",),
  ),
  "a gather reads past the accepted length": Mutant(
    pool.along,
    (("jnp.where(on, path, 0)", "path"),
     ("jnp.where(bcast(on, rows), rows, jnp.zeros((), x.dtype))",
      "rows * bcast(on, rows).astype(x.dtype)")),
    ("oracle delta_cache", "pool"),
  ),
  "verify reads the state of batch row, not of slot": Mutant(
    ops.xla,
    edit("o, u = window_solve(take(S, window.slots).astype(jnp.float32), None",
         "o, u = window_solve(S[: window.slots.shape[0]].astype(jnp.float32), None"),
    ("oracle delta_cache", "permuted delta_cache"),
  ),
  "admit keeps the former tenant's cursors": Mutant(
    admit,
    edit("lambda pool, row: put(pool, slots, row)",
         "lambda pool, row: put(pool, slots, row) if pool.dtype != jnp.int32 else pool"),
    ("admitted ring_open_loop", "admitted tree_wy"),
  ),
  # The window.
  "decay as a ratio of exponentials": Mutant(
    window.solve,
    edit("gap = path_decays(g, parents)",
         "gap = path_decays(g, parents); G = jnp.exp(gap[:, :1])\n"
         "  gap = gap.at[:, 1:].set(jnp.log(G / jnp.moveaxis(G, 0, 1)) + 0 * gap[:, 1:])"),
    ("oracle delta_cache", "window"),
  ),
  "decay as a difference of cumulated decays": Mutant(
    window.solve,
    edit("gap = path_decays(g, parents)",
         "gap = path_decays(g, parents); G = gap[:, :1]\n"
         "  gap = jnp.where(gap > -jnp.inf, gap.at[:, 1:].set(G - jnp.moveaxis(G, 0, 1)), gap)"),
    ("oracle delta_cache", "window"),
  ),
  "the same in a chunk of prefill": Mutant(
    window.chain_decays,
    edit("return jnp.where(s <= t + 1, gap,",
         "gap = gap[:, :1] - jnp.pad(gap[:, 0], ((1, 0), (0, 0)))[None]\n"
         "  return jnp.where(s <= t + 1, gap,"),
    ("prefill",),
  ),
  "the same to the end of a path": Mutant(
    window.weighted, edit("jnp.exp(after)", "jnp.exp(total[:1] - (total[:1] - after))"),
    ("short way",),
  ),
  "decay not masked before its exponential": Mutant(
    window.path_decays, edit("-jnp.inf", "0.0"), ("ancestors", "oracle delta_cache", "window")
  ),
  "a node is its own ancestor": Mutant(
    window.ancestors,
    edit("(jnp.arange(T) == p))", "(jnp.arange(T) == p) | (jnp.arange(T) == t))"),
    ("ancestors",),
  ),
  "a node does not see its own write": Mutant(
    window.solve,
    edit("decayed_gram(q, k, gap[:, 1:], dots)",
         "jnp.tril(decayed_gram(q, k, gap[:, 1:], dots), -1)"),
    ("oracle delta_cache", "window"),
  ),
  "siblings see each other": Mutant(
    window.path_decays, edit("gap[parents[t] + 1]", "gap[t]"), ("ancestors", "oracle delta_cache")
  ),
  "siblings share a spoiled node": Mutant(
    window.ancestors,
    edit("return jax.lax.fori_loop(0, T, add, jnp.zeros((T, T), bool))",
         "return jnp.tril(jnp.ones((T, T), bool), -1)"),
    ("ancestors", "spoiled node"),
  ),
  "a spoiled node reaches its siblings": Mutant(
    window.spoiled, edit("bad | (M & bad[None]).any(1)", "jnp.zeros_like(bad)"),
    ("spoiled node", "rejected delta_cache"),
  ),
  "inverse by powers of A": Mutant(
    window.substitute,
    edit("return jax.lax.linalg.triangular_solve("
         "A, rhs, left_side=True, lower=True, unit_diagonal=True)",
         "n = A.shape[0].bit_length(); X = jnp.eye(A.shape[0]) - A\n"
         "  for _ in range(n):\n"
         "    A = A @ A; X = X + X @ A\n"
         "  return X @ rhs"),
    ("window",),
  ),
  "history decays from the wrong end": Mutant(
    window.weighted,
    edit("jnp.exp(after)", "jnp.exp(total[:1] - after)"), ("stream tree_wy", "oracle delta_cache")
  ),
  "history read without its decay of the state": Mutant(
    window.project, edit("dots.state(end * x, S.T)", "dots.state(x, S.T)"), ("stream ring_exact",)
  ),
  # Gates and norms.
  "beta rounded to bfloat16": Mutant(
    gates.gates, edit("return beta, g", "return beta.astype(jnp.bfloat16).astype(beta.dtype), g"),
    ("oracle delta_cache", "gates"),
  ),
  "decode rounds its gates, verify does not": Mutant(
    ops.xla,
    edit("path, on = jax.tree.map(two, (Records(window.raw.k, window.raw.v, *gate), real(window)))",
         "path, on = jax.tree.map(two, (Records(window.raw.k, window.raw.v, "
         "*(y.astype(jnp.bfloat16).astype(y.dtype) for y in gate)), real(window)))"),
    ("decode ring_exact", "one token"),
  ),
  "writes without barriers": Mutant(
    recurrence.write,
    (("S, k, v, beta, g = jax.lax.optimization_barrier((S, k, v, beta, g))", "pass"),
     ("jax.lax.optimization_barrier(S + u[:, None] * k[None])", "S + u[:, None] * k[None]")),
    ("one program",),
  ),
  "keys not normalised where the state is written": Mutant(
    recurrence.write, edit("l2norm(k)", "k.astype(jnp.float32)"), ("oracle snapshot",)
  ),
  "keys not normalised where they are recorded": Mutant(
    ops.xla, edit("lambda x: per_head(x, H), x), k", "lambda x: per_head(x, H), x), raw.k"),
    ("oracle delta_cache",),
  ),
  "a checkpoint is rounded after every token": Mutant(
    ops.xla,
    (("replayed(take(S, slots).astype(jnp.float32), path", "replayed(take(S, slots), path"),
     ("advance(S, jax.tree", "advance(S.astype(jnp.float32), jax.tree"),
     ("bcast(on[:, p], S), new, S)", "bcast(on[:, p], S), new.astype(S.dtype), S)")),
    ("rounded once replay_0",),
  ),
  # Commits.
  "a commit leaves out the last accepted node": Mutant(
    pending, edit("0, accepted.length)", "0, jnp.maximum(accepted.length - 1, 0))"),
    ("oracle delta_cache",),
  ),
  "a commit takes one node too many": Mutant(
    pending, edit("0, accepted.length)", "0, accepted.length + 1)"),
    ("oracle delta_cache", "nothing delta_cache"),
  ),
  "a pick with nothing accepted": Mutant(
    pick, edit("jnp.where(accepted.length > 0, slots, -1)", "slots"),
    ("nothing snapshot",),
  ),
  "a fold ignores the order of the path": Mutant(
    ring,
    edit("(base[:, None] + jnp.arange(R, dtype=jnp.int32)[None]) % R, h)",
         "jnp.sort((base[:, None] + jnp.where(jnp.arange(R, dtype=jnp.int32)[None] < h[:, None], "
         "jnp.arange(R, dtype=jnp.int32)[None], 2 * R)) % R, axis=1), h)"),
    ("stream ring_open_loop",),
  ),
  "the ring never flushes": Mutant(
    ring, edit("full = (h > 0) & (h + FLUSHES[flush] * T > R)", "full = h < 0"),
    ("stream ring_open_loop",),
  ),
  "the ring flushes one token too late": Mutant(
    ring, edit("FLUSHES[flush] * T > R)", "FLUSHES[flush] * T > R + 1)"),
    ("brimful ring_open_loop",),
  ),
  "a flush leaves the ring's base": Mutant(
    ring, edit("jnp.where(full, at, base)", "base"),
    ("stream ring_open_loop",),
  ),
  "a flush leaves the ring's rows to be read again": Mutant(
    ring, edit("jnp.where(full, at, base), jnp.where(full, 0, h)", "jnp.where(full, at, base), h"),
    ("stream ring_open_loop",),
  ),
  "the ring's cursor moves by nodes": Mutant(
    ring, edit("h + accepted.length", "h + accepted.path.shape[1]"),
    ("stream ring_open_loop", "nothing ring_open_loop"),
  ),
  "a tree's path is not moved to the cursor": Mutant(
    ring, edit("rows, inputs = jax.tree.map(compact, (rows, inputs))", "pass"),
    ("oracle ring_open_loop",),
  ),
  "an exact fold solves again": Mutant(
    ring, edit("if carry.inputs is not None:\n      return", "if False:\n      return"),
    ("decode ring_exact",),
  ),
  "tree_wy keeps a length when nothing is accepted": Mutant(
    tree_wy,
    edit("put(carry.length, slots, accepted.length)",
         "put(carry.length, jnp.where(accepted.length > 0, slots, -1), accepted.length)"),
    ("nothing tree_wy", "stream tree_wy"),
  ),
  "folded writes are read as history again": Mutant(
    ops.xla,
    edit("pending._replace(length=jnp.where(flush, 0, pending.length))", "pending"),
    ("stream tree_wy", "stream ring_open_loop"),
  ),
  "a replay starts one state too far": Mutant(
    replay, edit("(accepted.path < keep)", "(accepted.path <= keep)"),
    ("oracle replay_4", "decode replay_1"),
  ),
  "a compact replay stops after its first row": Mutant(
    tail_compact, edit("jnp.sum(some)", "jnp.minimum(jnp.sum(some), 1)"),
    ("oracle replay_4_compact",),
  ),
  "low parts of a record are dropped": Mutant(
    ops.parted, edit("x = x - parts[-1].astype(x.dtype)", "x = jnp.zeros_like(x)"),
    ("records delta_cache",),
  ),
  # The convolution.
  "the conv window slides by nodes": Mutant(
    conv_window, edit("slide(rows, accepted.length)",
                                  "slide(rows, jnp.full_like(accepted.length, P))"),
    ("conv commit",),
  ),
  "the conv walks the rows, not the path": Mutant(
    conv.sources, edit("jnp.where(parents < 0, -1, parents) + back", "jnp.arange(T) - 1 + back"),
    ("conv",),
  ),
  # Prefill.
  "prefill forgets the decay between chunks": Mutant(
    prefill.prefill, edit("through = end * jnp.eye", "through = jnp.eye"), ("prefill",)
  ),
  "prefill reads the state after the chunk": Mutant(
    prefill.prefill, edit("return dots.state(S, through) + new, S",
                          "S = dots.state(S, through) + new; return S, S"), ("prefill",)
  ),
}  # fmt: skip
