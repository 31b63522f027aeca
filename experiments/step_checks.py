"""What a kernel has left, beside what float64 makes of the same inputs.

A check yields (name, got, want) of the sampled rows and heads; where nothing may be read both are
zero. `Errors` are relative, row by row.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from experiments.step_inputs import Sample, Truth, fetch, float64, relative, unit, write
from gdn.ops import whole
from gdn.typing import GateParams, Pending, Records, Rows

Pair = tuple[str, np.ndarray, np.ndarray]
Pairs = Iterator[Pair]


def select(x: np.ndarray, on: np.ndarray) -> np.ndarray:
  """x where [n, T] rows are on, else zero."""
  return np.where(on.reshape(*on.shape, *(1,) * (x.ndim - on.ndim)), x, 0.0)


def masked(name: str, on: np.ndarray, got: np.ndarray, want: np.ndarray) -> Pair:
  return name, select(got, on), select(want, on)


def placed(slots, some: Sample) -> np.ndarray:
  """Rows that have a slot."""
  return np.asarray(slots)[some.rows] >= 0


def outputs(t: Truth, o, some: Sample) -> Pairs:
  """Of a node whose path holds a NaN anything may come out; of one that does not exist, zero."""
  yield "o", select(some.of(o), ~t.lost), select(t.o, t.live)


def written(t: Truth, gates, rows: Rows | None, some: Sample) -> Pairs:
  """Gates, normalised keys and pseudo-values of real nodes."""
  pairs = [("beta", gates.beta, t.beta), ("g", gates.g, t.g)]
  if rows is not None:
    pairs += [("u", whole(rows.u), t.u), ("k", whole(rows.k), t.k), ("rows' g", rows.g, t.g)]
  for name, got, want in pairs:
    yield masked(name, t.live, some.of(got), want)


def window_out(params: GateParams, roots, args: tuple[Any, ...], out: Any, some: Sample) -> Pairs:
  """verify and snapshot: outputs; where they are there, gates, and rows or states."""
  w = args[0]
  t = float64(roots, w, params, some)
  if not isinstance(out, tuple):
    yield from outputs(t, out, some)
    return
  o, gates, kept = out
  yield from outputs(t, o, some)
  yield from written(t, gates, kept if isinstance(kept, Rows) and kept.u else None, some)
  if not isinstance(kept, Rows):
    keep = kept.shape[1]
    yield masked("states", t.live[:, :keep], some.of(kept), t.S[:, :keep])


def advanced(params: GateParams, roots, args: tuple[Any, ...], out: Any, some: Sample) -> Pairs:
  """decode and prefill: outputs, and the state after the last node."""
  w, (o, S) = args[0], out
  t = float64(roots, w, params, some)
  yield from outputs(t, o, some)
  last = np.asarray(w.nodes)[some.rows] - 1
  moved = t.live[np.arange(len(last)), last] & (last >= 0)
  want = np.where(moved[:, None, None, None], t.S[np.arange(len(last)), last], roots)
  yield masked("S", placed(w.slots, some) & ~t.lost.any(1), some.states(S, w.slots), want)


def folded(params: GateParams, roots, args: tuple[Any, ...], out: Any, some: Sample) -> Pairs:
  """fold_raw and fold_rank: the state after the pending tokens."""
  del params
  records, pending, slots = args
  want = after(roots, records, pending, some)
  yield masked("S", placed(slots, some), some.states(out, slots), want)


def after(roots: np.ndarray, records: Records | Rows, pending: Pending, some: Sample):
  """Raw tokens replayed, or writes added, one at a time."""
  at, path, length = (np.asarray(x)[some.rows] for x in pending)
  ranked = isinstance(records, Rows)
  if isinstance(records, Rows):
    given = [whole(records.k), whole(records.u), records.g]
  else:
    given = [records.k, records.v, records.g, records.beta]
  k, v, g, *rest = (Sample(at, some.heads, some.value_heads).of(x) for x in given)
  states = []
  for i, S in enumerate(roots):
    for p in path[i, : length[i]]:
      if ranked:
        S = S * np.exp(g[i, p])[:, None, :] + v[i, p][..., None] * k[i, p][:, None, :]
      else:
        S, _ = write(S, unit(k[i, p]), v[i, p], rest[0][i, p], g[i, p])
    states.append(S)
  return np.stack(states)


def picked(params: GateParams, roots, args: tuple[Any, ...], out: Any, some: Sample) -> Pairs:
  """A commit that copies: the very state of the last accepted node."""
  del params, roots
  states, node, slots = args
  want = some.of(states)[np.arange(len(some.rows)), np.asarray(node)[some.rows]]
  yield masked("S", placed(slots, some), some.states(out, slots), want)


def filled(params: GateParams, roots, args: tuple[Any, ...], out: Any, some: Sample) -> Pairs:
  """One number everywhere."""
  del params, roots
  got = some.of(out)
  yield "states", got, np.full_like(got, np.float64(args[1]))


def stepped(
  flush: bool, params: GateParams, roots, args: tuple[Any, ...], out: Any, some: Sample
) -> Pairs:
  """step: outputs over the pending writes, which are in the state if it was to be written."""
  rows, pending, at, w, _ = args
  o, gates, S, new = out
  now = after(roots, rows, pending, some)
  t = float64(now, w, params, some)
  yield from outputs(t, o, some)
  yield from written(t, gates, None, some)
  want = now if flush else roots
  yield masked("S", placed(w.slots, some), some.states(S, w.slots), want)
  R, T = new.g.shape[1], w.parents.shape[1]
  where = (np.asarray(at)[some.rows][:, None] + np.arange(T)) % R
  ring = Sample(np.asarray(pending.row)[some.rows], some.heads, some.value_heads)
  for name, pool, want in (
    ("u", whole(new.u), t.u),
    ("k", whole(new.k), t.k),
    ("ring g", new.g, t.g),
  ):
    got = np.take_along_axis(ring.of(pool), where[:, :, None, None], axis=1)
    yield masked(name, t.live, got, want)


def appended(params: GateParams, roots, args: tuple[Any, ...], out: Any, some: Sample) -> Pairs:
  """The very records, and beside them what was there."""
  del params, roots
  pools, slots, at, nodes, records = args
  slots, at, nodes = (np.asarray(y)[some.rows] for y in (slots, at, nodes))
  there = Sample(np.maximum(slots, 0), some.heads, some.value_heads)
  for name, pool, new, old in zip(("k", "v", "beta"), out, records, pools, strict=True):
    want, new = there.of(old), some.of(new)
    for i, n in enumerate(np.where(slots >= 0, nodes, 0)):
      want[i, (at[i] + np.arange(n)) % want.shape[1]] = new[i, :n]
    yield masked(name, slots >= 0, there.of(pool), want)


def convolved(params: GateParams, roots, args: tuple[Any, ...], out: Any, some: Sample) -> Pairs:
  """A causal convolution along each node's own path, then SiLU."""
  del params, roots
  tail, x, taps, parents, nodes, slots = args
  slots, parents, nodes = (np.asarray(y)[some.rows] for y in (slots, parents, nodes))
  tail, x = fetch(tail, np.maximum(slots, 0)), fetch(x, some.rows)
  taps, W = np.asarray(taps, np.float64), taps.shape[0]
  want = np.zeros_like(x)
  for i, n in enumerate(nodes):
    for t in range(n if slots[i] >= 0 else 0):
      node, back = t, W - 1
      for tap in taps[::-1]:
        want[i, t] += tap * (x[i, node] if node >= 0 else tail[i, back])
        node = parents[i, node] if node >= 0 else node
        back -= node < 0
  want = want / (1 + np.exp(-want))
  yield masked("y", ~np.isnan(want), fetch(out, some.rows), want)


class Off(AssertionError):
  """Errors that are larger than allowed."""


def largest(pairs: Pairs, limit: Callable[[str], float]) -> float:
  """The error of what comes first, outputs or states. Off: one of all is too large, or NaN."""
  errors = {name: (relative(got, want), limit(name)) for name, got, want in pairs}
  if not all(error <= allowed for error, allowed in errors.values()):
    raise Off(", ".join(f"{n}: {error:.1e} of {most:.1e}" for n, (error, most) in errors.items()))
  return next(iter(errors.values()))[0]
