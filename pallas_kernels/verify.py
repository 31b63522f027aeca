"""Outputs of every node of a window from the frozen state. Reference: `gdn.ops.XLA.verify`.

Traffic per value head: the state once (64 KiB at K = V = 128, fp32), v once, q and k once per key
head (its value heads run side by side and find them in L2), the outputs once; pseudo-values and
keys only if asked for. The state is never written. How: `pipeline`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn.ops import Gates
from gdn.typing import Rows
from pallas_kernels import lanes, pipeline, prepare
from pallas_kernels.arith import bf16, f32
from pallas_kernels.history import NOTHING
from pallas_kernels.launch import K, Plan, Shared, V, Window, Written
from pallas_kernels.substitution import TILE, Shape
from pallas_kernels.tuning import chosen

WINDOWS = 4  # whose queries and keys are in shared memory or on their way


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """ctas_per_sm  resident blocks a multiprocessor: they hide each other's latency
  pair         value heads of one key head whose window is prepared at once: 1 or 2
  chunks       of the state that are on their way or in shared memory, of each team
  groups       warpgroups of a block: of two each finishes some, a third one finishes everything; of
               five two project and two finish half a head's value rows each
  handed       else, of the four halves of two heads, how many the preparer finishes
  split        resident blocks up to which a head gets two, half its value rows each
  leaving      chunks of the state that leave together, where it is folded: 1, 2 or 4, fewer than
               chunks and no more than half a head has (four of fp32)
  """

  ctas_per_sm: int = 2
  pair: int = 2
  chunks: int = 4
  groups: int = 2
  handed: int = 2
  split: int = 1
  leaving: int = 1
  sms: int = 132

  def __post_init__(self):
    if self.pair not in (1, 2):
      raise ValueError(f"{self.pair=} must be 1 or 2")
    if not 1 <= self.ctas_per_sm <= 4:
      raise ValueError(f"{self.ctas_per_sm=} must be in 1..4")
    if not 2 <= self.chunks <= 8:
      raise ValueError(f"{self.chunks=} must be in 2..8")
    if self.groups not in (2, 3, 5):
      raise ValueError(f"{self.groups=} must be 2, 3 or 5")
    if not 0 <= self.handed <= 4:
      raise ValueError(f"{self.handed=} must be in 0..4")
    if self.split not in (1, 2):
      raise ValueError(f"{self.split=} must be 1 or 2")
    if self.leaving not in (1, 2, 4) or self.leaving >= self.chunks:
      raise ValueError(f"{self.leaving=} must be 1, 2 or 4, and below {self.chunks=}")
    if self.sms < 1:
      raise ValueError(f"{self.sms=} must be positive")


def default(T: int, state, parts) -> Config:
  """Of a narrow state without rows, blocks are small, and the projector's share of them as well."""
  if state == bf16 and not parts:
    return Config(handed=0) if T > 8 else Config(ctas_per_sm=3, chunks=3)
  return Config()


def ancestor_words(parents: jax.Array) -> jax.Array:
  """Bit s of word t: s is a proper ancestor of t.

  Two or three small kernels of XLA's, the same for every layer of a step, so run once a step.
  """
  T = parents.shape[1]
  words: list[jax.Array] = []
  for t in range(T):
    p = parents[:, t]
    hit = [jnp.where(p == s, w | (1 << s), 0) for s, w in enumerate(words)]
    words.append(sum(hit[1:], hit[0]) if hit else jnp.zeros_like(p))
  return jnp.stack(words, axis=1)


def check(S, window):
  """Raises NotImplementedError for what this kernel does not do."""
  raw = window.raw
  (_, T, Hk, K_), (_, _, H, V_) = raw.q.shape, raw.v.shape
  if (K_, V_) != (K, V):
    raise NotImplementedError(f"K, V = {K_}, {V_}: only {K}, {V}")
  if T > 16:
    raise NotImplementedError(f"{T=} nodes: at most 16")
  if raw.a.shape[3] != 1:
    raise NotImplementedError("per-channel decay")
  if H % Hk:
    raise ValueError(f"{H=} value heads over {Hk=} key heads")
  if S.dtype not in (f32, bf16) or {raw.q.dtype, raw.k.dtype, raw.v.dtype} != {jnp.dtype(bf16)}:
    raise NotImplementedError(f"state {S.dtype}, q {raw.q.dtype}: fp32 or bf16 state, bf16 inputs")


def plan(config: Config, B: int, T: int, H: int, Hk: int) -> tuple[Plan, int]:
  """How a window is worked on, and by how many blocks."""
  blocks = config.ctas_per_sm * config.sms
  pair = config.pair if H // Hk % config.pair == 0 and B * H > blocks else 1
  split_rows = 2 * B * H <= min(config.split, config.ctas_per_sm) * config.sms
  grid = min(B * H // pair * (2 if split_rows else 1), blocks)
  shape = Shape(8 if T <= 8 else 16)
  return shared_out(Plan(shape, 1 if split_rows else pair, split_rows), config), grid


def shared_out(plan: Plan, config: Config) -> Plan:
  """The plan with who finishes what."""
  if plan.split_rows:
    return plan
  finisher, teams = config.groups > 2, config.groups // 2
  handed = 2 // teams * plan.pair if finisher else config.handed * plan.pair // 2
  return plan._replace(handed=handed, finisher=finisher, teams=teams)


def scratch(plan: Plan, dtype, chunks: int, windows: int = WINDOWS) -> dict[str, object]:
  """Shared memory of `pipeline.Shared` for a pool of this dtype, by name."""
  rows, width = plan.shape.rows, 128 // dtype.itemsize  # columns of a chunk: 8 KiB of 64 rows
  chunks *= plan.teams
  swizzle = lanes.swizzle(dtype, width)
  return {
    "state": plgpu.SMEM((chunks, TILE, width), dtype, transforms=swizzle),
    "kq": plgpu.SMEM((windows * rows, K), bf16, transforms=lanes.swizzle(bf16, width)),
    "window_ready": plgpu.Barrier(num_arrivals=2, num_barriers=windows),
    "chunk_ready": plgpu.Barrier(num_barriers=chunks),
    "prepared": plgpu.Barrier(num_barriers=2),
    "free": plgpu.Barrier(num_arrivals=plan.teams, num_barriers=2),
    "w_full": plgpu.Barrier(num_barriers=2 * plan.teams),
    "w_free": plgpu.Barrier(num_barriers=2 * plan.teams),
    **prepare.scratch(plan.shape),
    **({"handed": plgpu.SMEM((2 * plan.teams, rows // 8, 128, 4), f32)} if plan.handed else {}),
  }


def launch(kernel, out_type, grid: int, scratch_types, plan: Plan):
  return plgpu.kernel(
    kernel,
    out_type=out_type,
    grid=(grid,),
    grid_names=("cta",),
    num_threads=1 + plan.teams * (1 + plan.finisher),
    thread_name="wg",
    scratch_types=scratch_types,
    compiler_params=lanes.COMPILER,
  )


def inputs(window, params) -> Window:
  """The arrays behind `Window`. Of more than eight rows the copy engine takes only whole eights:
  q and k of a window in between are filled up."""
  fill = -window.parents.shape[1] % 8 if window.parents.shape[1] > 8 else 0
  full = lambda x: jnp.pad(x, ((0, 0), (0, fill), (0, 0), (0, 0))) if fill else x
  raw = window.raw._replace(q=full(window.raw.q), k=full(window.raw.k))
  words, nodes = ancestor_words(window.parents), jnp.where(window.slots >= 0, window.nodes, 0)
  gates = params.A_log, params.dt_bias, params.beta_max.reshape(1)
  return Window._make((*raw, *gates, words, nodes, window.slots))


def verify(S, window, params, *, parts=(f32,), config: Config | None = None, out_dtype=None):
  """`parts=()` leaves keys and pseudo-values unwritten."""
  check(S, window)
  q, _, v, _, _ = window.raw
  (B, T, H, _), Hk, n = v.shape, q.shape[2], len(parts)
  name = "verify_rows" if parts else "verify"
  usual = default(T, S.dtype, parts)
  config = config or chosen(name, usual, state=S.dtype, channels=1, tokens=T, heads=B * H)
  how, grid = plan(config, B, T, H, Hk)
  x = inputs(window, params)

  def kernel(S_gmem, *refs, **shared):
    o, beta, g, *rows = refs[len(x) :]
    written = Written(tuple(rows[:n]), tuple(rows[n:]))
    pipeline.run(
      S_gmem, Window._make(refs[: len(x)]), NOTHING, o, beta, g, written, Shared(**shared), how
    )

  out = [
    jax.ShapeDtypeStruct((B, T, H, V), out_dtype or v.dtype),
    jax.ShapeDtypeStruct((B, T, H), f32),
    jax.ShapeDtypeStruct((B, T, H, 1), f32),
    *(jax.ShapeDtypeStruct((B, T, Hk, K), p) for p in parts),
    *(jax.ShapeDtypeStruct((B, T, H, V), p) for p in parts),
  ]
  o, beta, g, *rows = launch(kernel, out, grid, scratch(how, S.dtype, config.chunks), how)(S, *x)
  return o, Gates(beta, g), Rows(tuple(rows[:n]), tuple(rows[n:]), g)
