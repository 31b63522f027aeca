"""Time of every kernel against the copy ceiling, its error to float64 checked in the same run.

A row is recorded only after the check of its kernel has passed. Shapes are those of a Qwen3-Next
layer: 32 value heads, 16 key heads, K = V = 128, bf16 inputs. `ceiling_share` counts the bytes that
the operation cannot avoid: each input read once, each output written once. Times are those of the
Mosaic kernels; what XLA launches once a step for all layers (ancestors from parents) is left out.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments import figures
from experiments.clock import copy_ceiling, device_time
from experiments.record import BadInput, Record, Row
from experiments.step_inputs import (
  HOSTILE,
  float64,
  gate_params,
  relative,
  root_path,
  select,
  sound,
  window,
)
from experiments.target import config_of
from gdn.gates import gates as reference_gates
from gdn.ops import Gates
from gdn.pool import put
from gdn.typing import Pending, Records, Window
from pallas_kernels import decode as decode_kernel
from pallas_kernels import fold as fold_kernel
from pallas_kernels import snapshot as snapshot_kernel
from pallas_kernels import verify as verify_kernel

CLOCK = "CUPTI: device time of a call's kernels, median over calls on inputs that no cache holds"
KERNELS = ("verify", "fold", "decode", "snapshot", "snapshot_commit")
LIMIT = 1e-6  # relative error of outputs before they are rounded


@dataclass(frozen=True, kw_only=True)
class Config:
  """Batches and windows; `calls` is how often each kernel is timed."""

  batches: tuple[int, ...] = (1, 4, 16, 64, 256)
  windows: tuple[int, ...] = (1, 4, 8, 16)
  state_dtypes: tuple[str, ...] = ("float32", "bfloat16")
  kernels: tuple[str, ...] = KERNELS
  value_heads: int = 32
  key_heads: int = 16
  dim: int = 128
  calls: int = 24
  seed: int = 0
  model: Path | None = None  # its heads and dims in place of those above

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    if set(self.kernels) - set(KERNELS) or not self.kernels:
      raise ValueError(f"kernels = {self.kernels}, allowed: some of {', '.join(KERNELS)}")
    if self.calls < 20:
      raise ValueError(f"calls = {self.calls}, allowed: at least 20")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {"full": Config(), "verify": Config(kernels=("verify",), batches=(1, 64, 256))}
)


@dataclass(frozen=True, kw_only=True)
class Case:
  """One kernel at one shape.

  call     is timed on what `inputs(S, params, window)` makes of each window; an operation in place
           returns the pool as its last result and receives it back as its first argument
  check    (S, params, rng, B, T, slots) -> largest relative error to float64
  """

  kernel: str
  state: str
  batch: int
  window: int
  bytes: int
  call: Callable[..., Any]
  check: Callable[..., float]
  inputs: Callable[..., tuple[Any, ...]] = lambda S, params, w: (S, w, params)
  in_place: bool = False
  only: str = "mosaic_gpu"


def check_verify(c: Config, S, params, rng, B: int, T: int, slots) -> float:
  """Largest error over the hostile inputs, before the outputs are rounded."""
  f = jax.jit(functools.partial(verify_kernel.verify, parts=(jnp.float32,), out_dtype=jnp.float32))
  worst = 0.0
  for kind in HOSTILE:
    w = window(c, rng, B, T, kind, slots)
    o, gates, rows = f(S, w, params)
    pick = np.unique(np.linspace(0, B - 1, 4).astype(int))
    want_o, want_u, _, g, beta = float64(S, w, params, pick)
    live, lost = sound(w, ""), sound(w, "") & ~sound(w, kind)
    mute = lambda x, on=(live & ~lost)[pick]: select(np.asarray(x), on)
    hidden = lambda x, on=~lost: select(np.asarray(x), on)
    errors = {
      "o": relative(hidden(o)[pick], mute(want_o)),
      "u": relative(hidden(rows.u[0])[pick], mute(want_u)),
      "g": relative(*(select(np.asarray(x), live[pick]) for x in (gates.g[pick][..., 0], g))),
      "beta": relative(*(select(np.asarray(x), live[pick]) for x in (gates.beta[pick], beta))),
    }
    finite = all(np.isfinite(hidden(x)).all() for x in (o, rows.u[0], rows.k[0], gates.g))
    if not finite or max(errors.values()) > LIMIT:
      raise AssertionError(f"{kind}: {errors}, {finite=}")
    worst = max(worst, errors["o"])
  return worst


def compulsory(c: Config, T: int, item: int, *, reads: int = 1, writes: int = 0) -> int:
  """Bytes of one value head: state, raw q and k shared by its key head, v, bf16 outputs."""
  share = c.value_heads // c.key_heads
  state = c.dim * c.dim * item
  return state * (reads + writes) + T * (2 * c.dim * 2 // share + 2 * c.dim + 2 * c.dim)


def verify_cases(c: Config, state: str) -> Iterator[Case]:
  item = jnp.dtype(state).itemsize
  for T, B in itertools.product(c.windows, c.batches):
    if T > 1 or B >= 64:
      yield Case(
        kernel="verify",
        state=state,
        batch=B,
        window=T,
        bytes=B * c.value_heads * compulsory(c, T, item),
        call=jax.jit(lambda S, w, p: verify_kernel.verify(S, w, p, parts=())[0]),
        check=functools.partial(check_verify, c),
      )


def records_of(window: Window, gates: Gates) -> Records:
  return Records(window.raw.k, window.raw.v, gates.beta, gates.g)


def check_recurrent(c: Config, S, params, rng, B: int, T: int, slots) -> float:
  """fold, snapshot and (in float32) decode leave the same bits; snapshot is right to float64."""
  worst, T = 0.0, max(T, 5)
  i32 = lambda x: jnp.asarray(x, jnp.int32)
  snap = jax.jit(functools.partial(snapshot_kernel.snapshot, keep=T, out_dtype=jnp.float32))
  fold, one = jax.jit(fold_kernel.fold_raw), jax.jit(decode_kernel.decode)
  before = np.asarray(S[slots].astype(jnp.float32))
  # In a narrower pool a branch starts from the rounded state of its parent: no bits to compare.
  for kind in HOSTILE[:-1] if S.dtype == jnp.float32 else HOSTILE[:-2]:
    w = window(c, rng, B, T, kind, slots)
    o, gates, states = snap(S, w, params)
    live = sound(w, kind)
    pick = np.unique(np.linspace(0, B - 1, 4).astype(int))
    want_o, _, want_S, *_ = float64(S, w, params, pick)
    mute = lambda x, on=live[pick]: select(x, on)
    error = relative(o[pick], mute(want_o))
    states = np.asarray(states.astype(jnp.float32))
    rounding = 0.0 if S.dtype == jnp.float32 else 2.0**-8
    if relative(mute(states[pick]), mute(want_S)) > LIMIT + rounding:
      raise AssertionError(f"{kind}: states are off")
    at = lambda pool: np.asarray(pool[slots].astype(jnp.float32))
    want, path, length = before.copy(), np.zeros((B, T), int), np.zeros(B, int)
    for b, count in enumerate(live.sum(1)):
      node = int(rng.integers(-1, count))
      way = root_path(np.asarray(w.parents)[b], node)
      path[b, : len(way)], length[b] = way, len(way)
      if way:
        want[b] = states[b, node]
    pending = Pending(i32(np.where(live.any(1), np.arange(B), -1)), i32(path), i32(length))
    if not np.array_equal(at(fold(S, records_of(w, gates), pending, w.slots)), want):
      raise AssertionError(f"{kind}: fold is not snapshot bit for bit")
    if S.dtype == jnp.float32:
      stepped = S
      for t in range(length.max(initial=0)):
        raw = jax.tree.map(lambda x, p=path[:, t]: x[np.arange(B), p][:, None], w.raw)
        now = Window(raw, w.parents[:, :1], i32(t < length), w.slots)
        stepped = one(stepped, now, params)[1]
      if not np.array_equal(at(stepped), want):
        raise AssertionError(f"{kind}: decode is not snapshot bit for bit")
    worst = max(worst, error if np.isfinite(np.asarray(o)).all() else float("inf"))
  return worst


def recurrent_cases(c: Config, state: str) -> Iterator[Case]:
  item, heads = jnp.dtype(state).itemsize, c.value_heads
  i32 = lambda x: jnp.asarray(x, jnp.int32)

  def fold_inputs(S, params, w, accepted=5):
    B, T = w.parents.shape
    gates = Gates(*reference_gates(w.raw.a, w.raw.b, params))
    path = np.broadcast_to(np.arange(T), (B, T))
    pending = Pending(i32(np.arange(B)), i32(path), i32(np.full(B, accepted)))
    return S, records_of(w, gates), pending, w.slots

  @functools.cache
  def kept(B: int, T: int):
    shape = (B, T, heads, c.dim, c.dim)
    return jax.random.normal(jax.random.key(2), shape, jnp.float32).astype(state)

  def commit_inputs(S, params, w):
    del params
    return (
      S,
      kept(*w.parents.shape),
      i32(np.arange(w.parents.shape[0]) % w.parents.shape[1]),
      w.slots,
    )

  def commit(S, states, node, slots):
    return put(S, slots, states[jnp.arange(slots.shape[0]), node])

  def case(kernel, B, T, bytes_a_head, call, **kwargs):
    return Case(
      kernel=kernel, state=state, batch=B, window=T, bytes=B * heads * bytes_a_head, call=call,
      check=functools.partial(check_recurrent, c), **kwargs,
    )  # fmt: skip

  accepted = 5 * (2 * c.dim * c.key_heads // heads + 2 * c.dim + 8)
  for B in c.batches:
    yield case(
      "fold", B, 16, 2 * c.dim**2 * item + accepted,
      jax.jit(fold_kernel.fold_raw, donate_argnums=0), inputs=fold_inputs, in_place=True,
    )  # fmt: skip
    yield case(
      "decode", B, 1, compulsory(c, 1, item, writes=1),
      jax.jit(decode_kernel.decode, donate_argnums=0), in_place=True,
    )  # fmt: skip
    for T in (4, 16) if B in (1, 16, 64) else ():
      yield case(
        "snapshot", B, T, compulsory(c, T, item, writes=T),
        jax.jit(functools.partial(snapshot_kernel.snapshot, keep=T)),
      )  # fmt: skip
    if B in (16, 64):
      yield case(
        "snapshot_commit", B, 16, 2 * c.dim**2 * item, jax.jit(commit, donate_argnums=0),
        inputs=commit_inputs, in_place=True, only="",
      )  # fmt: skip


def all_cases(c: Config) -> list[Case]:
  every = (
    case
    for state in c.state_dtypes
    for case in itertools.chain(verify_cases(c, state), recurrent_cases(c, state))
  )
  return [case for case in every if case.kernel in c.kernels]


def of_model(c: Config) -> Config:
  """The configuration with the layer of its model. BadInput: key and value dims differ."""
  if c.model is None:
    return c
  config = config_of(c.model)
  if config.key_dim != config.value_dim:
    raise BadInput(f"{c.model}: key_dim = {config.key_dim}, allowed: {config.value_dim}")
  return replace(c, value_heads=config.value_heads, key_heads=config.key_heads, dim=config.key_dim)


def run(c: Config, record: Record) -> None:
  """RuntimeError: there is no GPU."""
  if jax.default_backend() != "gpu":
    raise RuntimeError(f"step_time needs a GPU, jax runs on {jax.default_backend()}")
  c = of_model(c)
  rng = np.random.default_rng(c.seed)
  ceiling, params = copy_ceiling(), gate_params(c, rng)
  N = max(288, max(c.batches))

  @functools.partial(jax.jit, static_argnums=0)
  def fresh(state: str):
    shape = (N, c.value_heads, c.dim, c.dim)
    return (0.3 * jax.random.normal(jax.random.key(1), shape, jnp.float32)).astype(state)

  S, checked = None, dict[Any, float]()
  name = lambda case: f"{case.kernel} {case.state} batch {case.batch} window {case.window}"
  for case in record.parts(all_cases(c), name=name):
    B, T = case.batch, case.window
    if S is None or S.dtype != case.state:
      S = fresh(case.state)
    few = 4 if B <= 8 else 16  # shapes that differ only in a large batch are checked once
    key = (case.state, case.kernel, few, T) if case.kernel == "verify" else (case.state,)
    if key not in checked:
      try:
        checked[key] = case.check(S, params, rng, few, T, rng.permutation(N)[:few])
      except (AssertionError, RuntimeError) as e:  # the others are measured all the same
        record.console.print(f"{name(case)}: {e}")
        checked[key] = float("nan")
    if not checked[key] <= LIMIT:
      record.console.print(f"{name(case)}: error {checked[key]:.1e}, not timed")
      continue
    deck = rng.permutation(N)
    some = lambda i, B=B, deck=deck: np.take(deck, range(i * B, i * B + B), mode="wrap")
    turns = range(max(2, min(8, 256 // B)))
    inputs = [case.inputs(S, params, window(c, rng, B, T, "random", some(i))) for i in turns]
    carry = None
    if case.in_place:
      S = None  # the pool moves from call to call
      carry = lambda args, out: (out[-1] if isinstance(out, tuple) else out, *args[1:])
    timing = device_time(case.call, inputs, calls=c.calls, carry=carry, only=case.only)
    del inputs
    record(
      kernel=case.kernel,
      state_dtype=case.state,
      batch=B,
      window=T,
      time_us=round(timing.median, 2),
      low_us=round(timing.low, 2),
      high_us=round(timing.high, 2),
      ceiling_share=round(case.bytes / (timing.median * 1e-6) / ceiling, 4),
      relative_error=checked[key],
      device=jax.devices()[0].device_kind,
      bytes=case.bytes,
      calls=timing.calls,
      ceiling_gb_s=round(ceiling / 1e9),
    )


def figure(rows: list[Row]) -> Figure:
  """Time, and share of the copy ceiling, against batch: one line a kernel, window and dtype."""
  fig, axes = plt.subplots(2, 2, figsize=(7.2, 5.6), sharex=True)
  for column, dtype in enumerate(("float32", "bfloat16")):
    lines: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
      if row["state_dtype"] == dtype:
        lines.setdefault((row["kernel"], row["window"]), []).append(row)
    for i, ((kernel, T), points) in enumerate(sorted(lines.items())):
      points = sorted(points, key=lambda row: row["batch"])
      batch = [row["batch"] for row in points]
      label = f"{kernel.replace('_', ' ')}, T = {T}"
      times, shares = axes[0, column], axes[1, column]
      times.plot(batch, [row["time_us"] for row in points], label=label, **figures.look(i))
      shares.plot(batch, [100 * row["ceiling_share"] for row in points], **figures.look(i))
    axes[0, column].set(
      title=f"{dtype} states", xscale="log", yscale="log", ylabel="microseconds a layer"
    )
    axes[0, column].legend()
    axes[1, column].set(xlabel="batch", ylabel="share of the copy ceiling, %", ylim=(0, 100))
  return fig
