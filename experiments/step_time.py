"""Time of every kernel against the copy ceiling, its error to float64 checked in the same run.

A row is written only after the check of its kernel on the same shape has passed. Shapes are those
of a Qwen3-Next layer: 32 value heads, 16 key heads, K = V = 128, bf16 inputs.
"""

import csv
import dataclasses
import datetime
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.clock import copy_ceiling, device_time
from gdn.gates import NORM_EPS
from gdn.typing import GateParams, Raw, Window
from pallas_kernels import verify as verify_kernel

HOSTILE = ("random", "identical", "correlated", "total_decay", "padded")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
  batches: tuple[int, ...] = (1, 4, 16, 64, 256)
  windows: tuple[int, ...] = (4, 8, 16)
  value_heads: int = 32
  key_heads: int = 16
  dim: int = 128
  state_dtypes: tuple[str, ...] = ("float32", "bfloat16")
  kernels: tuple[str, ...] = ("verify",)
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
  raw = Raw(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, a, b)))
  parents = np.broadcast_to(np.arange(T) - 1, (B, T))
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
  S = wide(S[jnp.maximum(window.slots[rows], 0)])
  share = v.shape[2] // q.shape[2]
  unit = lambda x: np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + NORM_EPS), share, 2)
  q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
  A_log, dt_bias, top = (np.asarray(x, np.float64) for x in params)
  g = -np.exp(A_log) * np.logaddexp(0.0, a + dt_bias)[..., 0]
  beta = top / (1 + np.exp(-b))
  outs, us, states = [], [], []
  for t in range(q.shape[1]):
    S = S * np.exp(g[:, t])[..., None, None]
    u = beta[:, t][..., None] * (v[:, t] - np.einsum("bhvk,bhk->bhv", S, k[:, t]))
    S = S + u[..., None] * k[:, t][..., None, :]
    us.append(u)
    outs.append(np.einsum("bhvk,bhk->bhv", S, q[:, t]))
    states.append(S)
  return np.stack(outs, 1), np.stack(us, 1), np.stack(states, 1), g, beta


def relative(got, want) -> float:
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One kernel at one shape: `call(S, window, params)` is timed, `check` returns its error."""

  kernel: str
  state: str
  batch: int
  window: int
  bytes: int
  call: Callable[..., Any]
  check: Callable[..., float]
  in_place: bool = False


def check_verify(c: StepTime, S, params, rng, B: int, T: int, slots, config) -> float:
  """Largest error over the hostile inputs, before the outputs are rounded."""
  f = jax.jit(
    functools.partial(verify_kernel.verify, parts=(jnp.float32,), out_dtype=jnp.float32, config=config)
  )
  worst = 0.0
  for kind in HOSTILE:
    w = window(c, rng, B, T, kind, slots)
    o, gates, rows = f(S, w, params)
    pick = np.unique(np.linspace(0, B - 1, 4).astype(int))
    want_o, want_u, _, g, beta = float64(S, w, params, pick)
    live = (np.asarray(w.nodes)[pick, None] > np.arange(T)) & (np.asarray(w.slots)[pick, None] >= 0)
    mute = lambda x: np.where(live.reshape(*live.shape, *(1,) * (x.ndim - 2)), x, 0.0)
    errors = {
      "o": relative(o[pick], mute(want_o)),
      "u": relative(rows.u[0][pick], mute(want_u)),
      "g": relative(gates.g[pick][..., 0], mute(g)),
      "beta": relative(gates.beta[pick], mute(beta)),
    }
    finite = all(bool(jnp.isfinite(x).all()) for x in (o, rows.u[0], rows.k[0], gates.g))
    say(f"  check verify {S.dtype} B={B} T={T} {kind}: "
        + " ".join(f"{k} {v:.1e}" for k, v in errors.items()) + ("" if finite else " NOT FINITE"))
    worst = max(worst, errors["o"] if finite else float("inf"))
  return worst


def say(text: str) -> None:
  print(text, flush=True)


def compulsory(c: StepTime, T: int, item: int, *, reads: int = 1, writes: int = 0) -> int:
  """Bytes of one value head: state, raw q and k shared by its key head, v, bf16 outputs."""
  share = c.value_heads // c.key_heads
  state = c.dim * c.dim * item
  return state * (reads + writes) + T * (2 * c.dim * 2 // share + 2 * c.dim + 2 * c.dim)


def verify_cases(c: StepTime, state: str, config) -> Iterator[Case]:
  item = jnp.dtype(state).itemsize
  for T in c.windows:
    for B in c.batches:
      yield Case(
        kernel="verify", state=state, batch=B, window=T,
        bytes=B * c.value_heads * compulsory(c, T, item),
        call=jax.jit(lambda S, w, p: verify_kernel.verify(S, w, p, parts=(), config=config)[0]),
        check=functools.partial(check_verify, c, config=config),
      )


def rows(c: StepTime, cases: Callable[[str], Iterator[Case]]) -> Iterator[dict[str, Any]]:
  rng = np.random.default_rng(c.seed)
  ceiling = copy_ceiling()
  say(f"copy ceiling {ceiling / 1e9:.0f} GB/s")
  params = gate_params(c, rng)
  N = 288
  for state in c.state_dtypes:
    S = jax.random.normal(jax.random.key(1), (N, c.value_heads, c.dim, c.dim), jnp.float32)
    S = jax.block_until_ready((0.3 * S).astype(state))
    checked: dict[Any, float] = {}
    for case in cases(state):
      B, T = case.batch, case.window
      key = (case.kernel, min(B, 16), T)
      if key not in checked:
        try:
          checked[key] = case.check(S, params, rng, min(B, 16), T, rng.permutation(N)[: min(B, 16)])
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
      timing = device_time(
        case.call, [(S, w, params) for w in windows], calls=c.calls, only="mosaic_gpu"
      )
      share = case.bytes / (timing.median * 1e-6) / ceiling
      say(f"{case.kernel:14s} {state:8s} B={B:3d} T={T:2d} {timing.median:8.1f} us "
          f"[{timing.low:.1f}, {timing.high:.1f}] {share:6.1%} error {error:.1e}")
      yield dict(
        kernel=case.kernel, state_dtype=state, batch=B, window=T, time_us=round(timing.median, 2),
        low_us=round(timing.low, 2), high_us=round(timing.high, 2),
        ceiling_share=round(share, 4), relative_error=f"{error:.2e}",
        device=jax.devices()[0].device_kind, bytes=case.bytes, calls=timing.calls,
        ceiling_gb_s=round(ceiling / 1e9),
      )


def main(out: Path) -> None:
  c = StepTime()
  table = list(rows(c, lambda state: verify_cases(c, state, verify_kernel.Config(ctas_per_sm=2 if state == "float32" else 3))))
  out.mkdir(parents=True, exist_ok=True)
  with (out / "rows.csv").open("w", newline="") as f:
    writer = csv.DictWriter(f, fieldnames=list(table[0]))
    writer.writeheader()
    writer.writerows(table)
  git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
  meta = dict(
    config=dataclasses.asdict(c), jax=jax.__version__, device=jax.devices()[0].device_kind,
    commit=os.environ.get("COMMIT", git.stdout.strip()), clock="CUPTI, median of calls",
    date=datetime.date.today().isoformat(),
  )
  (out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")


if __name__ == "__main__":
  main(Path(sys.argv[1]))
