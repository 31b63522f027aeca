"""Deferred commit with every precision a traced number: many settings in one compiled program.

The ring of `commit_schemes.ring` for one head, with its roundings emulated: what is stored, what is
multiplied and when a fold rounds the checkpoint are data, so `vmap` runs a grid of settings over
the same streams in one scan. A fold comes after every `every`-th commit.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments.ablation import round_to
from experiments.forced import Schedule
from gdn.dots import EXACT, Dots, exact
from gdn.recurrence import step
from gdn.typing import Keys, State, Tokens, Values
from gdn.window import Writes, chain, fold, project, solve


class Setting(NamedTuple):
  """Mantissa bits: of stored k and u, the checkpoint, the operands of all dots but the solve's.

  every    commits from fold to fold
  phantom  a stale record behind the accepted ones of every commit stays in the ring: the cursor
           fault of the first revision, which plain decoding advanced as well
  fold     of the fold's operands alone; None gives them those of `dots`
  """

  rows: Any
  checkpoint: Any
  dots: Any
  every: Any
  phantom: Any
  fold: Any = None


class Slot(NamedTuple):
  """A head's checkpoint, the state replayed from it, and a linear ring of `h` committed rows."""

  S: State
  replayed: State
  k: Keys
  u: Values
  g: Float[Array, "R 1"]
  h: Int[Array, ""]
  commits: Int[Array, ""]


def empty(V: int, K: int, R: int) -> Slot:
  z = jnp.zeros
  n = z((), jnp.int32)
  return Slot(z((V, K)), z((V, K)), z((R, K)), z((R, V)), z((R, 1)), n, n)


def dots_of(setting: Setting) -> Dots:
  low = lambda bits: lambda a, b: exact(round_to(a, bits), round_to(b, bits))
  dots, fold = low(setting.dots), low(setting.fold)
  return EXACT._replace(state=dots, gram=dots, fold=fold)


def history(slot: Slot) -> Writes:
  """The committed rows; those past the cursor are neutral."""
  on = (jnp.arange(slot.g.shape[0]) < slot.h)[:, None]
  return Writes(*(jnp.where(on, x, 0.0) for x in (slot.k, slot.u, slot.g)))


def committed(slot: Slot, replay: bool) -> State:
  """The state of the accepted stream as this slot stands for it, folded without a rounding."""
  return slot.replayed if replay else fold(slot.S, history(slot))


def one(
  slot: Slot, setting: Setting, x: Tokens, accepted: Int[Array, ""], replay: bool
) -> tuple[Slot, Values]:
  """Fold if it is time, verify a window, commit. Outputs of every node."""
  T, dots = x.g.shape[0], dots_of(setting)
  due = slot.commits >= setting.every
  new = slot.replayed if replay else fold(slot.S, history(slot), dots=dots)
  S = jnp.where(due, round_to(new, setting.checkpoint), slot.S)
  h, commits = jnp.where(due, 0, slot.h), jnp.where(due, 0, slot.commits)
  slot = slot._replace(S=S, replayed=jnp.where(due, S, slot.replayed), h=h, commits=commits)
  o, u = solve(project(S, history(slot), dots), x, chain(T), dots=dots)
  put = lambda pool, rows: jax.lax.dynamic_update_slice_in_dim(pool, rows, slot.h, 0)
  k, u = round_to(x.k, setting.rows), round_to(u, setting.rows)
  k, u, g = put(slot.k, k), put(slot.u, u), put(slot.g, x.g)
  replayed = slot.replayed
  if replay:
    on = (jnp.arange(T) < accepted)[:, None]
    mute = lambda y: jnp.where(on.reshape(-1, *(1,) * (y.ndim - 1)), y, 0.0)
    replayed, _ = jax.lax.scan(step, replayed, jax.tree.map(mute, x))
  h = slot.h + accepted + setting.phantom.astype(jnp.int32)
  return Slot(S, replayed, k, u, g, h, commits + 1), o


class Probe(NamedTuple):
  """After the window that ends at `token`, by setting and head."""

  token: int
  states: np.ndarray  # [C, H, V, K]
  outputs: np.ndarray  # [C, H, V]


def run(
  settings: Setting,
  tokens: Tokens,
  plan: Schedule,
  window: int,
  *,
  replay: bool,
  progress: Callable[[float], None] = lambda fraction: None,
) -> Iterator[Probe]:
  """Every setting [C] over the streams [H, n, ...], from a zero state.

  `replay` folds the raw inputs one token at a time (exact fold), otherwise the stored rows.
  """
  (H, _, K), V = tokens.k.shape, tokens.v.shape[2]
  C = len(settings.rows)
  if settings.fold is None:
    settings = settings._replace(fold=settings.dots)
  R = (int(np.max(settings.every)) + 1) * (window + 1)
  settings = Setting(*map(jnp.asarray, settings))
  pad = lambda x: jnp.pad(jnp.asarray(x), ((0, 0), (0, window), (0, 0), (0, 0))[: x.ndim])
  tokens = jax.tree.map(pad, tokens)
  lift = lambda f: jax.vmap(jax.vmap(f, (0, None, 0)), (0, 0, None))

  @jax.jit
  def advance(slots, lo, hi, tokens, plan):
    def body(i, carry):
      slots, _ = carry
      start, nodes, accepted = (x[i] for x in plan)
      cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, window, axis=1)
      real = jnp.arange(window) < nodes
      mute = lambda x: jnp.where(real.reshape(1, -1, *(1,) * (x.ndim - 2)), x, 0.0)
      x = jax.tree.map(lambda x: mute(cut(x)), tokens)
      slots, o = lift(lambda slot, s, x: one(slot, s, x, accepted, replay))(slots, settings, x)
      return slots, jax.lax.dynamic_index_in_dim(o, accepted - 1, 2, keepdims=False)

    slots, o = jax.lax.fori_loop(lo, hi, body, (slots, jnp.zeros((C, H, V))))
    return slots, o, jax.vmap(jax.vmap(lambda s: committed(s, replay)))(slots)

  spread = lambda x: jnp.broadcast_to(x, (C, H, *x.shape))
  slots, lo = jax.tree.map(spread, empty(V, K, R)), 0
  cursors = tuple(map(jnp.asarray, plan[:3]))
  for hi in map(int, plan.last):
    slots, o, S = advance(slots, jnp.int32(lo), jnp.int32(hi), tokens, cursors)
    token = int(plan.start[hi - 1] + plan.accepted[hi - 1])
    yield Probe(token, np.asarray(S), np.asarray(o))
    progress(hi / len(plan.start))
    lo = hi
