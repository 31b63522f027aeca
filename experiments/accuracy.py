"""Errors of verify and step to float64 before outputs are rounded: real inputs and hostile ones.

Real inputs are windows of the recurrent layers of the bundled model (or `--model`) over held-out
text, from the states that float64 has there; a step has the tokens before as its pending history. A
relative error may be 1e-6 where beta is at most 1 and no path longer than 16; beyond, also the
forward bound of substitution: eps T |M^-1| |M| |u| of M = I + A, carried to the outputs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from commit_schemes.footprint import LayerShape
from experiments.capture import read_text
from experiments.figures import HOLLOW, look
from experiments.layer_step import runs_here
from experiments.record import Record, Row
from experiments.step_args import RING, Args, Case, Given
from experiments.step_cases import widened
from experiments.step_checks import after, outputs
from experiments.step_inputs import (
  HOSTILE,
  Sample,
  Truth,
  float64,
  gate_params,
  row_errors,
  row_norms,
  sample,
  window,
)
from experiments.step_time import OPS, STATES
from experiments.streams import Streams, capture
from experiments.target import target
from experiments.truth import truth
from gdn.typing import GateParams, Pending, Rows, Window
from gdn.window import chain

EPS = float(np.finfo(np.float32).eps)
LIMIT = 1e-6


@dataclass(frozen=True, kw_only=True)
class Config:
  """`slots` windows of each kind of input; captured ones end `tokens` into the text at most."""

  ops: str = "mosaic_gpu"
  windows: tuple[int, ...] = (4, 16, 64)
  state_dtypes: tuple[str, ...] = STATES
  tokens: int = 1024
  slots: int = 16
  value_heads: int = 32
  key_heads: int = 16
  heads: int = 4  # of which float64 is asked
  model: Path | None = None  # whose streams; None is the bundled model
  seed: int = 0

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    windows = bool(self.windows) and 1 <= min(self.windows) <= max(self.windows) <= 64
    for name, good, allowed in (
      ("ops", self.ops in OPS, ", ".join(OPS)),
      ("windows", windows, "each 1 to 64"),
      ("state_dtypes", set(self.state_dtypes) <= set(STATES), ", ".join(STATES)),
      ("tokens", self.tokens >= 128, "at least 128"),
      ("slots", self.slots >= 1, "at least 1"),
      ("heads", 1 <= self.heads <= self.value_heads, f"1 to value_heads = {self.value_heads}"),
    ):
      if not good:
        raise ValueError(f"{name} = {getattr(self, name)}, allowed: {allowed}")


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "xla": Config(ops="xla"),
    "smoke": Config(
      ops="xla", windows=(4,), state_dtypes=("float32",), tokens=128, slots=3, value_heads=2,
      key_heads=1, heads=2,
    ),
  }
)  # fmt: skip


class Part(NamedTuple):
  window: int
  state: str

  def __str__(self) -> str:
    return f"T = {self.window}, {self.state} states"


class Inputs(NamedTuple):
  """A window on a pool, and the pool and arguments of a step that ends in such a window."""

  name: str
  layer: LayerShape
  top: float  # of beta
  S: jax.Array
  window: Window
  params: GateParams
  step: tuple[jax.Array, Args]


def hostile(c: Config, kind: str, top: float, part: Part) -> Inputs:
  T, B = part.window, c.slots
  layer = LayerShape(c.key_heads, c.value_heads)
  rng = np.random.default_rng([c.seed, T, HOSTILE.index(kind)])
  p = gate_params(layer, rng)._replace(beta_max=jnp.float32(top))
  shape = (B, layer.value_heads, layer.value_dim, layer.key_dim)
  S = jnp.asarray(0.3 * rng.standard_normal(shape), part.state)
  w = window(layer, rng, T, [kind] * B, np.arange(B))
  case = Case("step_ring", part.state, "gdn", T, B)
  args = RING.args(Given(layer, case, w, p, B))
  return Inputs(f"{kind}, beta up to {top:g}", layer, top, S, w, p, (S, args))


def of_tokens(raw: Any, starts: np.ndarray, n: int) -> Window:
  """Chains of n tokens of a stream from each start, in slots 0, 1, ..."""
  B, at = len(starts), starts[:, None] + np.arange(n)
  i32 = lambda x: jnp.asarray(x, jnp.int32)
  parents = jnp.broadcast_to(chain(n)[None], (B, n))
  return Window(jax.tree.map(lambda x: x[at], raw), parents, i32(np.full(B, n)), i32(np.arange(B)))


def captured(c: Config, found: Streams, part: Part) -> Inputs:
  """All recurrent layers side by side: one layer of many heads. History is what float64 wrote."""
  T, p, raw = part.window, found.gates, found.raw
  layer = LayerShape(raw.k.shape[1], raw.v.shape[1], raw.k.shape[2], raw.v.shape[2], raw.a.shape[2])
  h, R = RING.history(T), RING.length(T)
  starts = np.linspace(h + 1, found.tokens - T, c.slots).astype(int)
  probes = sorted({*starts.tolist(), *(starts - h).tolist()})
  states = dict(zip(probes, truth(found, probes).states, strict=True))
  pool = lambda at: jnp.asarray(np.stack([states[i] for i in at.tolist()]), part.state)

  earlier, before = pool(starts - h), of_tokens(raw, starts - h, h)
  every = Sample(np.arange(c.slots), np.arange(layer.value_heads), layer.value_heads)
  t = float64(every.states(earlier, before.slots), before, p, every)
  in_ring = lambda x: jnp.asarray(np.pad(x, ((0, 0), (0, R - h), (0, 0), (0, 0))), jnp.float32)
  share = layer.value_heads // layer.key_heads
  rows = Rows((in_ring(t.k[:, :, ::share]),), (in_ring(t.u),), in_ring(t.g))
  path = jnp.broadcast_to(jnp.arange(R, dtype=jnp.int32), (c.slots, R))
  full = lambda n: jnp.full(c.slots, n, jnp.int32)
  w = of_tokens(raw, starts, T)
  args = (rows, Pending(before.slots, path, full(h)), full(h % R), w, p)
  return Inputs("captured", layer, float(p.beta_max), pool(starts), w, p, (earlier, args))


def forward_bound(t: Truth, w: Window) -> tuple[np.ndarray, int]:
  """[n, T, h, V] of the outputs of live nodes, in float64; and the longest path. GDN."""
  T, bound, longest = t.k.shape[1], np.zeros_like(t.o), 0
  for i, parents in enumerate(np.asarray(w.parents)):
    above = np.zeros((T, T), bool)
    for node in np.flatnonzero(t.live[i]):
      if parents[node] >= 0:
        above[node] = above[parents[node]]
        above[node, parents[node]] = True
    reach = above | np.diag(t.live[i])
    longest = max(longest, int(reach.sum(1).max()))
    for j in range(t.k.shape[2]):
      g, k, q = t.g[i, :, j, 0], t.k[i, :, j], t.q[i, :, j]
      G = g + above @ g
      decay = np.exp(np.where(reach, G[:, None] - G, -np.inf))
      M = np.eye(T) + t.beta[i, :, j, None] * above * decay * (k @ k.T)
      u = np.where(t.live[i][:, None], np.abs(t.u[i, :, j]), 0.0)
      du = EPS * T * np.abs(np.linalg.inv(M)) @ (np.abs(M) @ u)
      bound[i, :, j] = decay * (np.abs(q) @ np.abs(k).T) @ du
  return bound, longest


def measured(c: Config, ops: Any, x: Inputs) -> Iterator[tuple[str, dict[str, Any]]]:
  """Operation, and its largest error of a row with that row's bound, relative to its outputs."""
  rng = np.random.default_rng(c.seed)
  some = sample(rng, x.layer, c.slots, c.slots, min(c.heads, x.layer.value_heads))
  earlier, args = x.step
  rows, waiting = args[:2]
  roots = {
    "verify": some.states(x.S, x.window.slots),
    "step": after(some.states(earlier, x.window.slots), rows, waiting, some),
  }
  calls = {
    "verify": partial(ops["verify"], x.S, x.window, x.params),
    "step": partial(ops["step"], earlier, *args),
  }
  for name, call in calls.items():
    t = float64(roots[name], x.window, x.params, some)
    bound, longest = forward_bound(t, x.window)
    [(_, got, want)] = outputs(t, call()[0], some)
    norm = np.maximum(row_norms(want), 1e-30)
    errors, bounds = row_errors(got, want), row_norms(bound) / norm
    solved = x.top <= 1 and longest <= 16
    over = errors / (LIMIT + (0.0 if solved else bounds))
    worst = int(np.nanargmax(np.where(np.isnan(over), np.inf, over)))
    yield name, {
      "longest_path": longest, "relative_error": float(errors[worst]),
      "forward_bound": float(bounds[worst]),
      "allowed": LIMIT + (0.0 if solved else float(bounds[worst])),
      "within": bool(over[worst] <= 1),
    }  # fmt: skip


def run(c: Config, record: Record) -> None:
  """BadInput: Mosaic kernels without a GPU."""
  runs_here(f"ops = {c.ops}", OPS[c.ops])
  wide = widened(OPS[c.ops])
  verify = partial(wide.verify, parts=(jnp.float32,))
  ops = {"verify": jax.jit(verify), "step": jax.jit(RING.call(wide.step))}
  record.say("capturing streams")
  params, config, read, _ = target(c.model, context=c.tokens)
  found = capture(params, config, read(read_text(None)).ids[: c.tokens])
  found = found._replace(raw=jax.tree.map(lambda x: x.astype(jnp.bfloat16), found.raw))
  parts = [Part(T, state) for T in c.windows for state in c.state_dtypes]
  for part in record.parts(parts):
    every = [partial(captured, c, found, part)]
    every += [partial(hostile, c, kind, top, part) for kind in HOSTILE for top in (1.0, 2.0)]
    for make in every:
      x = make()
      try:
        for op, columns in measured(c, ops, x):
          record(
            op=op, inputs=x.name, state_dtype=part.state, window=part.window, slots=c.slots,
            **columns, ops=c.ops, device=jax.devices()[0].device_kind,
          )  # fmt: skip
      except (NotImplementedError, RuntimeError, TypeError) as e:  # no kernel for it
        record.console.print(f"{part}, {x.name}: {type(e).__name__}: {str(e)[:200]}", markup=False)


def figure(rows: list[Row]) -> Figure:
  """Error by kind of input, a panel an operation; hollow, what is allowed."""
  names = list(dict.fromkeys(r["inputs"] for r in rows))
  fig = Figure(figsize=(9.6, 0.22 * len(names) + 1.4))
  axes = fig.subplots(1, 2, sharey=True)
  shapes = list(dict.fromkeys((r["window"], r["state_dtype"]) for r in rows))
  for ax, op in zip(axes, ("verify", "step"), strict=True):
    for i, (T, state) in enumerate(shapes):
      line = [r for r in rows if (r["op"], r["window"], r["state_dtype"]) == (op, T, state)]
      at = [names.index(r["inputs"]) + 0.12 * (i - len(shapes) / 2) for r in line]
      style = look(i) | {"linestyle": "none"}
      ax.plot([r["relative_error"] for r in line], at, label=f"T = {T}, {state}", **style)
      ax.plot([r["allowed"] for r in line], at, **style | HOLLOW)
    ax.set(xscale="log", title=f"{op}; hollow: allowed", xlabel="relative error of a row's outputs")
    ax.set_yticks(range(len(names)), names)
  axes[0].invert_yaxis()
  axes[0].legend()
  return fig
