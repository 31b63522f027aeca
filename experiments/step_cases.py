"""What `step_time` times: every kernel, its inputs, the bytes that it cannot avoid, its check.

Bytes are those of experiments/cost.py: each input read once, each output written once. A window
comes with what the step before has left: an accepted path, committed rows of a ring.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from commit_schemes.footprint import LayerShape
from experiments import cost, step_checks
from experiments.cost import Point
from experiments.step_inputs import HOSTILE, binary_tree
from gdn.gates import gates as reference_gates
from gdn.gates import l2norm
from gdn.ops import XLA, Ops, xla
from gdn.pool import put
from gdn.typing import GateParams, Pending, Records, Rows, Window

f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32
Args = tuple[Any, ...]


def accepted(T: int) -> int:
  """Tokens of a window that are taken to be accepted: 5 of 16, as in published timings."""
  return -(-5 * T // 16)


class Case(NamedTuple):
  """A kernel at one shape."""

  kernel: str
  state: str
  decay: str
  window: int
  batch: int

  def __str__(self) -> str:
    return f"{self.kernel} {self.state} {self.decay} T = {self.window}, batch {self.batch}"

  def layer(self, s: LayerShape) -> LayerShape:
    return s._replace(channels=s.key_dim if self.decay == "kda" else 1)

  @property
  def rows(self) -> Any:
    """What pseudo-values are stored in beside such a state."""
    return f32 if self.state == "float32" else bf16

  @property
  def point(self) -> Point:
    width = lambda dtype: jnp.dtype(dtype).itemsize
    return Point(self.window, accepted(self.window), state=width(self.state), row=width(self.rows))


class Given(NamedTuple):
  """What a case's arguments are made of; `slots` are those of the pool."""

  layer: LayerShape
  case: Case
  window: Window
  params: GateParams
  slots: int


def plain(x: Given) -> Args:
  return x.window, x.params


def tree(x: Given) -> Args:
  return binary_tree(x.window), x.params


def pending(row: jax.Array, count: int, width: int) -> Pending:
  """`count` tokens at positions 0, 1, ... of these rows of records."""
  path = jnp.broadcast_to(jnp.arange(width, dtype=i32), (row.shape[0], width))
  return Pending(row, path, jnp.full_like(row, count))


def records(x: Given) -> Records:
  """Raw records as a window has left them; what did not exist is zero."""
  raw = x.window.raw
  beta, g = reference_gates(raw.a, raw.b, x.params)
  return Records(*map(jnp.nan_to_num, (raw.k, raw.v, beta, g)))


def written(x: Given, N: int, R: int) -> Rows:
  """R rows in each of N slots: the window's keys, values and decays again and again."""
  k, v, _, g = records(x)
  again = lambda y: jnp.take(
    jnp.take(y, jnp.arange(N) % y.shape[0], axis=0), jnp.arange(R) % y.shape[1], axis=1
  )
  narrow = lambda y: (again(y).astype(x.case.rows),)
  return Rows(narrow(l2norm(k)), narrow(0.5 * v.astype(f32)), again(g))


def own(x: Given) -> jax.Array:
  """Records by batch row; padding has none."""
  return jnp.where(x.window.slots < 0, -1, jnp.arange(x.case.batch, dtype=i32))


def to_fold(x: Given) -> Args:
  T = x.case.window
  return records(x), pending(own(x), accepted(T), T), x.window.slots


def to_fold_rank(x: Given) -> Args:
  T = x.case.window
  return written(x, x.case.batch, T), pending(own(x), accepted(T), T), x.window.slots


def to_pick(x: Given) -> Args:
  """The states of a window, and the last accepted node of each row."""
  s, (_, state, _, T, B) = x.layer, x.case
  shape = (B, T, s.value_heads, s.value_dim, s.key_dim)
  states = jax.random.normal(jax.random.key(2), shape, state)
  return states, jnp.arange(B, dtype=i32) % T, x.window.slots


def pick(S, states, node, slots):
  """A commit by copying."""
  return put(S, slots, states[jnp.arange(slots.shape[0]), node])


class Ring(NamedTuple):
  """Where a step finds its slots: `length(T)` rows, of which `history(T)` are committed.

  known  what all slots do is known to who compiles; otherwise each has a flag
  """

  length: Callable[[int], int]
  history: Callable[[int], int]
  flush: bool = False
  known: bool = True

  def args(self, x: Given) -> Args:
    T, slots = x.case.window, x.window.slots
    R, h = self.length(T), self.history(T)
    at = jnp.full(x.case.batch, h % R if R > T else 0, i32)
    return written(x, x.slots, R), pending(slots, h, R), at, x.window, x.params

  def call(self, op: Callable[..., Any]) -> Callable[..., Any]:
    """The step as it takes these arguments."""

    def step(S, rows, waiting, at, window, params):
      flush = self.flush if self.known else jnp.full_like(at, self.flush, bool)
      return op(S, rows, waiting, flush, at, window, params)

    return step

  def bytes(self, s: LayerShape, c: Case) -> float:
    wrote = cost.rows(s, c.point, c.window) + (cost.state(s, c.point) if self.flush else 0.0)
    return cost.verify(s, c.point, wrote).bytes + cost.rows(s, c.point, self.history(c.window))


# TreeWY writes the state in every step. A ring of 4 T, of 16 where T is 1, finds some rows, or
# enough of them to flush: with T = 8 the 6 and 16 of published timings.
EVERY_STEP = Ring(lambda T: T, accepted, flush=True)
RING = Ring(lambda T: max(16, 4 * T), lambda T: 8 if T == 1 else 3 * T // 4)
FULL = Ring(lambda T: 4 * T, lambda T: 2 * T, flush=True, known=False)


def to_convolve(x: Given) -> Args:
  """Earlier rows, q, k and v of all heads side by side, and taps."""
  s, w = x.layer, x.window
  y = jnp.concatenate([y.reshape(*y.shape[:2], -1) for y in w.raw[:3]], axis=2)
  draw = lambda i, *shape: jax.random.normal(jax.random.key(i), (*shape, y.shape[2]), y.dtype)
  return draw(3, x.case.batch, s.taps - 1), y, draw(4, s.taps), w.parents, w.nodes, own(x)


class Kind(NamedTuple):
  """A kernel at any shape.

  call     (S, *args) -> out
  args     (given) -> what follows S; traceable
  bytes    (layer, case) -> compulsory, of one decode slot
  check    of experiments/step_checks.py
  wide     the same with outputs in float32, by default `call`
  carry    (args, out) -> the next call's, where `donated` arguments are taken over
  hostile  kinds of rows that it is checked on
  rounds   what the timed program rounds to bfloat16
  last     0 is the most wanted
  mosaic   a kernel of ours, whose time alone counts; else all that XLA launches
  xla_too  decays for which XLA does a part of it, which counts
  """

  call: Callable[..., Any]
  args: Callable[[Given], Args]
  bytes: Callable[[LayerShape, Case], float]
  check: Callable[..., step_checks.Pairs]
  wide: Callable[..., Any] | None = None
  windows: tuple[int, ...] = (4, 16)
  states: tuple[str, ...] = ("float32", "bfloat16")
  decays: tuple[str, ...] = ("gdn", "kda")
  most: int = 256  # decode slots
  donated: int = 0
  carry: Callable[[Args, Any], Args] = lambda args, out: args
  hostile: tuple[str, ...] = HOSTILE
  rounds: tuple[str, ...] = ("o",)
  last: int = 0
  mosaic: bool = True
  xla_too: tuple[str, ...] = ()


def widened(ops: Ops) -> Ops:
  """The same with outputs in float32."""
  if ops is XLA:
    return xla(out=f32)
  wide = lambda op: partial(op, out_dtype=f32)
  outs = {name: wide(getattr(ops, name)) for name in ("verify", "snapshot", "decode", "prefill")}
  step = xla(out=f32).step if ops.step is XLA.step else wide(ops.step)
  return ops._replace(**outs, step=step)


def kinds(ops: Ops) -> Mapping[str, Kind]:
  """Every kernel by name. `verify` is outputs only; with rows, what a ring or a cache needs."""
  wide = widened(ops)
  verify_bytes = lambda out: lambda s, c: cost.verify(s, c.point, out(s, c)).bytes
  rows = lambda width: lambda s, c: cost.rows(s, c.point._replace(row=width), c.window)
  fold = lambda read: lambda s, c: 2 * cost.state(s, c.point) + read(s, c)
  kept = lambda s, c: cost.snapshots(s, c.point, c.window).bytes
  advanced = fold(lambda s, c: cost.inputs(s, c.window))

  verify = Kind(
    lambda S, w, p: ops.verify(S, w, p, parts=())[0], plain, verify_bytes(lambda s, c: 0.0),
    step_checks.window_out, lambda S, w, p: wide.verify(S, w, p, parts=(f32,)),
    windows=(1, 4, 8, 16),
  )  # fmt: skip
  with_rows = lambda dtype: verify._replace(
    call=lambda S, w, p: ops.verify(S, w, p, parts=(dtype,)), last=2, windows=(4, 16),
    bytes=verify_bytes(rows(jnp.dtype(dtype).itemsize)),
    rounds=("o", "u", "k") if dtype == bf16 else ("o",),
  )  # fmt: skip
  states = lambda ops: lambda S, w, p: ops.snapshot(S, w, p, keep=w.parents.shape[1])
  snapshot = Kind(states(ops), plain, kept, step_checks.window_out, states(wide), last=1)
  of_tree: dict[str, Any] = {"windows": (64,), "most": 64, "last": 1, "args": tree}
  step = lambda ring: Kind(
    ring.call(ops.step), ring.args, ring.bytes, partial(step_checks.stepped, ring.flush),
    ring.call(wide.step), windows=(4, 8, 16), donated=2, xla_too=("kda",),
    carry=lambda args, out: (*out[2:], *args[2:]),
  )  # fmt: skip
  pool: dict[str, Any] = {"donated": 1, "carry": lambda args, out: (out, *args[1:])}
  and_pool: dict[str, Any] = {"donated": 1, "carry": lambda args, out: (out[1], *args[1:])}
  return {
    "verify": verify,
    "step": step(EVERY_STEP),
    "step_ring": step(RING),
    "step_ring_flush": step(FULL),
    "decode_ring": step(RING)._replace(windows=(1,)),
    "snapshot": snapshot,
    "snapshot_commit": Kind(
      pick, to_pick, fold(lambda s, c: 0.0), step_checks.picked, windows=(16,), decays=("gdn",),
      rounds=(), last=1, mosaic=False, **pool,
    ),
    "fold": Kind(
      ops.fold_raw, to_fold, fold(lambda s, c: cost.raw(s, c.point.accepted)), step_checks.folded,
      windows=(16,), rounds=(), **pool,
    ),
    "fold_rank": Kind(
      ops.fold_rank, to_fold_rank, fold(lambda s, c: cost.rows(s, c.point, c.point.accepted)),
      step_checks.folded, windows=(16,), rounds=(), last=2, **pool,
    ),
    "decode": Kind(
      ops.decode, plain, advanced, step_checks.advanced, wide.decode, windows=(1,), **and_pool
    ),
    "verify_tree": verify._replace(**of_tree),
    "snapshot_tree": snapshot._replace(**of_tree, states=("float32",)),
    "verify_rows_fp32": with_rows(f32),
    "verify_rows_bf16": with_rows(bf16),
    "conv": Kind(
      lambda S, *args: ops.conv(*args), to_convolve,
      lambda s, c: 2 * s.conv_channels * (2 * c.window + s.taps - 1), step_checks.convolved,
      lambda S, tail, x, taps, *rest: ops.conv(*(y.astype(f32) for y in (tail, x, taps)), *rest),
      states=("bfloat16",), decays=("gdn",), rounds=("y",), last=3,
    ),
    "prefill": Kind(
      ops.prefill, plain, advanced, step_checks.advanced, wide.prefill, windows=(4096,), most=4,
      hostile=("random", "total_decay", "short", "padding"), states=("float32",), last=3,
      **and_pool,
    ),
  }  # fmt: skip


def cases(
  known: Mapping[str, Kind], names: Iterable[str], batches: Iterable[int], windows: Iterable[int],
  states: Iterable[str], decays: Iterable[str],
) -> list[Case]:  # fmt: skip
  """Every shape of these kernels; a kernel of one window has it whatever `windows` are."""
  return [
    Case(name, state, decay, T, B)
    for name in names
    for kind in [known[name]]
    for state in kind.states if state in states
    for decay in kind.decays if decay in decays
    if state == "float32" or decay == "gdn" or name == "verify"
    for T in kind.windows if T in windows or len(kind.windows) == 1
    for B in batches if B <= kind.most
  ]  # fmt: skip


def late(kind: Kind, c: Case) -> int:
  """The higher, the less it is wanted: small batches, narrow states, a decay per channel."""
  few, short = c.batch not in (64, 256), c.window < 4 <= max(kind.windows)
  return kind.last + few + short + (c.state != "float32") + 4 * (c.decay == "kda")
