"""Time of every kernel against the copy ceiling, its error to float64 checked in the same run.

A row is written only after the check of its kernel on the same shape has passed. Shapes are those
of a Qwen3-Next layer: 32 value heads, 16 key heads, K = V = 128, bf16 inputs.
"""

import csv
import dataclasses
import datetime
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from experiments.clock import copy_ceiling, device_time
from gdn.gates import NORM_EPS
from gdn.gates import gates as reference_gates
from gdn.ops import Gates
from gdn.pool import put
from gdn.typing import GateParams, Pending, Raw, Records, Window
from pallas_kernels import decode as decode_kernel
from pallas_kernels import fold as fold_kernel
from pallas_kernels import snapshot as snapshot_kernel
from pallas_kernels import verify as verify_kernel

HOSTILE = ("random", "identical", "correlated", "total_decay", "padded", "tree", "lost_branch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
  batches: tuple[int, ...] = (1, 4, 16, 64, 256)
  windows: tuple[int, ...] = (1, 4, 8, 16)
  value_heads: int = 32
  key_heads: int = 16
  dim: int = 128
  state_dtypes: tuple[str, ...] = ("float32", "bfloat16")
  kernels: tuple[str, ...] = ("verify", "fold", "decode", "snapshot", "snapshot_commit")
  calls: int = 24
  seed: int = 0


def window(c: StepTime, rng: np.random.Generator, B: int, T: int, kind: str, slots) -> Window:
  """Inputs of one kind. NaN stands wherever nothing may be read."""
  H, Hk, K = c.value_heads, c.key_heads, c.dim
  normal = lambda *s: rng.standard_normal(s, np.float32)
  rho = {"identical": 1.0, "correlated": 0.99}.get(kind, 0.0)
  common = normal(B, 1, Hk, K)
  mix = lambda: np.sqrt(rho) * common + np.sqrt(1 - rho) * normal(B, T, Hk, K)
  q, k, v = mix(), mix(), normal(B, T, H, K)
  a, b = normal(B, T, H, 1), normal(B, T, H)
  nodes = np.full(B, T)
  if kind in ("identical", "correlated"):
    a, b = np.full_like(a, -20.0), np.full_like(b, 8.0)
  if kind == "total_decay":
    a[:, T // 2] = 60.0
  if kind == "padded":
    slots = np.where(np.arange(B) % 4 == 3, -1, slots)
    nodes = rng.integers(0, T + 1, B)
    for x in (q, k, v, a, b):
      x[np.arange(T)[None] >= nodes[:, None]] = np.nan
  parents = np.broadcast_to(np.arange(T) - 1, (B, T))
  if kind in ("tree", "lost_branch"):
    parents = np.stack([rng.integers(-1, t, B) if t else np.full(B, -1) for t in range(T)], 1)
  if kind == "lost_branch" and T > 1:
    for x in (k, v)[: 1 + int(rng.integers(2))]:
      x[:, 1] = np.nan
  raw = Raw(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, a, b)))
  i32 = lambda x: jnp.asarray(np.ascontiguousarray(x), jnp.int32)
  return Window(raw, i32(parents), i32(nodes), i32(slots))


def gate_params(c: StepTime, rng: np.random.Generator) -> GateParams:
  H = c.value_heads
  return GateParams(
    jnp.asarray(np.log(rng.uniform(0.5, 4.5, H)), jnp.float32),
    jnp.asarray(rng.standard_normal((H, 1)) * 0.1 - 4.0, jnp.float32),
    jnp.float32(1.0),
  )


def float64(S, window: Window, params: GateParams, rows) -> tuple[np.ndarray, ...]:
  """Outputs, writes and states of the given decode slots, one token at a time in float64."""
  wide = lambda x: np.asarray(x.astype(jnp.float32), np.float64)
  q, k, v, a, b = (np.nan_to_num(wide(x[rows])) for x in window.raw)
  parents = np.asarray(window.parents)[rows]
  states = [wide(S[jnp.maximum(window.slots[rows], 0)])]
  share = v.shape[2] // q.shape[2]
  unit = lambda x: np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + NORM_EPS), share, 2)
  q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
  A_log, dt_bias, top = (np.asarray(x, np.float64) for x in params)
  g = -np.exp(A_log) * np.logaddexp(0.0, a + dt_bias)[..., 0]
  beta = top / (1 + np.exp(-b))
  outs, us = [], []
  for t in range(q.shape[1]):
    before = np.stack([states[p + 1][i] for i, p in enumerate(parents[:, t])])
    S = before * np.exp(g[:, t])[..., None, None]
    u = beta[:, t][..., None] * (v[:, t] - np.einsum("bhvk,bhk->bhv", S, k[:, t]))
    S = S + u[..., None] * k[:, t][..., None, :]
    us.append(u)
    outs.append(np.einsum("bhvk,bhk->bhv", S, q[:, t]))
    states.append(S)
  return np.stack(outs, 1), np.stack(us, 1), np.stack(states[1:], 1), g, beta


def root_path(parents, node: int) -> list[int]:
  path = []
  while node >= 0:
    path.append(int(node))
    node = parents[node]
  return path[::-1]


def sound(w: Window, kind: str) -> np.ndarray:
  """[B, T] nodes that exist and have no NaN on their path."""
  B, T = w.parents.shape
  parents = np.asarray(w.parents)
  on = (np.asarray(w.nodes)[:, None] > np.arange(T)) & (np.asarray(w.slots)[:, None] >= 0)
  if kind == "lost_branch" and T > 1:
    on &= np.array([[1 not in root_path(parents[b], t) for t in range(T)] for b in range(B)])
  return on


def relative(got, want) -> float:
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


@dataclasses.dataclass(frozen=True, kw_only=True)
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


def check_verify(c: StepTime, S, params, rng, B: int, T: int, slots, config) -> float:
  """Largest error over the hostile inputs, before the outputs are rounded."""
  f = jax.jit(
    functools.partial(
      verify_kernel.verify, parts=(jnp.float32,), out_dtype=jnp.float32, config=config
    )
  )
  worst = 0.0
  for kind in HOSTILE:
    w = window(c, rng, B, T, kind, slots)
    o, gates, rows = f(S, w, params)
    pick = np.unique(np.linspace(0, B - 1, 4).astype(int))
    want_o, want_u, _, g, beta = float64(S, w, params, pick)
    live, lost = sound(w, ""), sound(w, "") & ~sound(w, kind)
    only = lambda x, on: np.where(on.reshape(*on.shape, *(1,) * (x.ndim - 2)), x, 0.0)
    mute = lambda x, on=live & ~lost: only(np.asarray(x), on[pick])
    hidden = lambda x, lost=lost: only(np.asarray(x), ~lost)
    errors = {
      "o": relative(hidden(o)[pick], mute(want_o)),
      "u": relative(hidden(rows.u[0])[pick], mute(want_u)),
      "g": relative(gates.g[pick][..., 0], np.where(live[pick][..., None], g, 0.0)),
      "beta": relative(gates.beta[pick], np.where(live[pick][..., None], beta, 0.0)),
    }
    finite = all(np.isfinite(hidden(x)).all() for x in (o, rows.u[0], rows.k[0], gates.g))
    told = "" if finite else " NOT FINITE"
    say(
      f"  check verify {S.dtype} B={B} T={T} {kind}: "
      + " ".join(f"{k} {v:.1e}" for k, v in errors.items())
      + told
    )
    worst = max(worst, errors["o"] if finite else float("inf"))
  return worst


def say(text: str) -> None:
  print(text, flush=True)


def compulsory(c: StepTime, T: int, item: int, *, reads: int = 1, writes: int = 0) -> int:
  """Bytes of one value head: state, raw q and k shared by its key head, v, bf16 outputs."""
  share = c.value_heads // c.key_heads
  state = c.dim * c.dim * item
  return state * (reads + writes) + T * (2 * c.dim * 2 // share + 2 * c.dim + 2 * c.dim)


def verify_cases(c: StepTime, state: str, config, name: str = "verify") -> Iterator[Case]:
  item = jnp.dtype(state).itemsize
  for T, B in itertools.product(c.windows, c.batches):
    if T > 1 or B >= 64:
      yield Case(
        kernel=name,
        state=state,
        batch=B,
        window=T,
        bytes=B * c.value_heads * compulsory(c, T, item),
        call=jax.jit(lambda S, w, p: verify_kernel.verify(S, w, p, parts=(), config=config)[0]),
        check=functools.partial(check_verify, c, config=config),
      )


def records_of(window: Window, gates: Gates) -> Records:
  return Records(window.raw.k, window.raw.v, gates.beta, gates.g)


def check_recurrent(c: StepTime, S, params, rng, B: int, T: int, slots) -> float:
  """fold, snapshot and (in float32) decode leave the same bits; snapshot is right to float64."""
  worst, T = 0.0, max(T, 5)
  i32 = lambda x: jnp.asarray(x, jnp.int32)
  snap = jax.jit(functools.partial(snapshot_kernel.snapshot, keep=T, out_dtype=jnp.float32))
  fold, one = jax.jit(fold_kernel.fold_raw), jax.jit(decode_kernel.decode)
  before = np.asarray(S[slots].astype(jnp.float32))
  for kind in HOSTILE[:-1]:
    w = window(c, rng, B, T, kind, slots)
    o, gates, states = snap(S, w, params)
    live = sound(w, kind)
    pick = np.unique(np.linspace(0, B - 1, 4).astype(int))
    want_o, _, want_S, *_ = float64(S, w, params, pick)
    mute = lambda x, on=live[pick]: np.where(on.reshape(*on.shape, *(1,) * (x.ndim - 2)), x, 0.0)
    error = relative(o[pick], mute(want_o))
    states = np.asarray(states.astype(jnp.float32))
    state_error = relative(mute(states[pick]), mute(want_S))
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
    say(f"  check recurrent {S.dtype} B={B} {kind}: o {error:.1e} S {state_error:.1e}, bitwise")
    worst = max(worst, error if np.isfinite(np.asarray(o)).all() else float("inf"))
  return worst


def recurrent_cases(c: StepTime, state: str) -> Iterator[Case]:
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


def rows(c: StepTime, cases: Callable[[str], Iterator[Case]]) -> Iterator[dict[str, Any]]:
  rng = np.random.default_rng(c.seed)
  ceiling = copy_ceiling()
  say(f"copy ceiling {ceiling / 1e9:.0f} GB/s")
  params = gate_params(c, rng)
  N = 288

  @functools.partial(jax.jit, static_argnums=0)
  def fresh(state: str):
    shape = (N, c.value_heads, c.dim, c.dim)
    return (0.3 * jax.random.normal(jax.random.key(1), shape, jnp.float32)).astype(state)

  for state in c.state_dtypes:
    S = fresh(state)
    checked: dict[Any, float] = {}
    for case in cases(state):
      B, T = case.batch, case.window
      # Shapes that compile to one program up to their batch are checked once, at a small one.
      few = 4 if B <= 8 else 16
      key = (case.check.func, few, T) if case.kernel == "verify" else case.check.func
      if key not in checked:
        try:
          checked[key] = case.check(S, params, rng, few, T, rng.permutation(N)[:few])
        except Exception as e:  # one broken kernel must not cost the others their rows
          say(f"{case.kernel} {state} B={B} T={T}: {type(e).__name__} {str(e)[:300]}")
          checked[key] = float("nan")
      error = checked[key]
      limit = 1e-6
      if not error <= limit:
        say(f"{case.kernel} {state} B={B} T={T}: error {error:.1e} > {limit:.0e}: not timed")
        continue
      turns = max(2, min(8, 256 // B))
      deck = rng.permutation(N)
      windows = [
        window(c, rng, B, T, "random", np.take(deck, range(i * B, i * B + B), mode="wrap"))
        for i in range(turns)
      ]
      inputs = [case.inputs(S, params, w) for w in windows]
      carry = None
      if case.in_place:
        S = None  # the pool moves from call to call
        carry = lambda args, out: (out[-1] if isinstance(out, tuple) else out, *args[1:])
      timing = device_time(case.call, inputs, calls=c.calls, carry=carry, only=case.only)
      del inputs
      S = fresh(state) if S is None else S
      share = case.bytes / (timing.median * 1e-6) / ceiling
      say(
        f"{case.kernel:14s} {state:8s} B={B:3d} T={T:2d} {timing.median:8.1f} us "
        f"[{timing.low:.1f}, {timing.high:.1f}] {share:6.1%} error {error:.1e}"
      )
      yield dict(
        kernel=case.kernel,
        state_dtype=state,
        batch=B,
        window=T,
        time_us=round(timing.median, 2),
        low_us=round(timing.low, 2),
        high_us=round(timing.high, 2),
        ceiling_share=round(share, 4),
        relative_error=f"{error:.2e}",
        device=jax.devices()[0].device_kind,
        bytes=case.bytes,
        calls=timing.calls,
        ceiling_gb_s=round(ceiling / 1e9),
      )


def main(out: Path, changes: dict[str, Any]) -> None:
  c = dataclasses.replace(StepTime(), **changes)

  def cases(state: str) -> Iterator[Case]:
    every = itertools.chain(
      verify_cases(c, state, verify_kernel.DEFAULT), recurrent_cases(c, state)
    )
    yield from (case for case in every if case.kernel in c.kernels)

  out.mkdir(parents=True, exist_ok=True)
  git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
  meta = {
    "config": dataclasses.asdict(c),
    "jax": jax.__version__,
    "device": jax.devices()[0].device_kind,
    "platform": jax.extend.backend.get_backend().platform_version,
    "commit": os.environ.get("COMMIT", git.stdout.strip()),
    "clock": "CUPTI, median over calls of the kernel's device time",
    "date": datetime.date.today().isoformat(),
  }
  (out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
  with (out / "rows.csv").open("w", newline="") as f:
    writer = None
    for row in rows(c, cases):  # written as they come: a lease that ends keeps what it measured
      writer = writer or csv.DictWriter(f, fieldnames=list(row))
      if f.tell() == 0:
        writer.writeheader()
      writer.writerow(row)
      f.flush()


if __name__ == "__main__":
  main(Path(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
