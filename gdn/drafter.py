"""A DFlash block drafter: a block of tokens in one pass, from what the target knew before it.

    H   = rmsnorm([h^(1) .. h^(n)] Wc)       features of n target layers, fused; one row a token
    x   = [embed(anchor), mask, .., mask]    the newest known token, then what is to be filled in
    q   = x Wq     k, v = [H; x] Wk, [H; x] Wv        in every draft layer; each query sees all
    d_i = softmax(rmsnorm(x_i) embed')       marginal of the i-th token after the anchor

(Chen, Liang, Liu 2026, arXiv 2602.06036.) The target's embedding is also the head. H does not
depend on the block, so its keys and values are projected once, when a token is committed; they are
the drafter's memory. The target has not read the anchor: its features end at the token before.

Deviations of the bundled drafter from the paper: features of each target layer are brought to unit
rms before Wc, because a residual stream grows from layer to layer; attention has the target's
heads, with partial rotation. Published drafters have neither (`feature_norm`, `heads`); of some of
them certain layers see less (`sliding`, `causal_layers`).
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from gdn.attention import rotate
from gdn.config import Config, misfit
from gdn.dots import exact
from gdn.exchange import ALONE, Exchange
from gdn.hybrid import MLP, mlp, scores
from gdn.norms import rms_norm, unit_rms

Features = Float[Array, "B S features"]


@dataclass(frozen=True)
class Heads:
  """Attention of a drafter whose heads are not its target's; fields as in `Config`."""

  query_heads: int
  kv_heads: int
  head_dim: int
  rotary: int
  rope_theta: float


@dataclass(frozen=True)
class DrafterConfig:
  """Sizes of a drafter. The defaults are the bundled one, 3.8 M parameters of its own.

  block   D: the anchor and D - 1 drafted tokens
  taps    target layers whose features it reads, counted from 0. The published choice, evenly in
          [1, L - 3], would miss the upper of the only two attention layers of eight.
  window  how many tokens before the anchor a block sees
  heads   the drafter's own, where they are not the target's
  feature_norm  features are brought to unit rms, layer by layer, before they are fused
  sliding  in `sliding_layers` a query sees what is less than so many places from its own: of the
           context and of its block, where it sees both ways
  causal_layers  where a query sees nothing of its block that is behind it
  """

  target: Config = field(default_factory=Config)
  block: int = 16
  taps: tuple[int, ...] = (1, 3, 5, 6, 7)
  layers: int = 5
  inner: int = 640
  window: int = 512
  heads: Heads | None = None
  feature_norm: bool = True
  sliding: int | None = None
  sliding_layers: tuple[int, ...] = ()
  causal_layers: tuple[int, ...] = ()

  def __post_init__(self):
    """ValueError: one line for every field that is out of range, with what is allowed."""
    least = {"block": 2, "layers": 1, "inner": 1, "window": 1}
    least |= {"sliding": 1} if self.sliding_layers else {}
    wrong = [line for name, n in least.items() for line in misfit(name, getattr(self, name), n)]
    some = {"taps": self.target.layers}
    some |= {name: self.layers for name in ("sliding_layers", "causal_layers") if not wrong}
    for name, n in some.items():
      found = getattr(self, name)
      if list(found) != sorted(set(found) & set(range(n))) or (name == "taps" and not found):
        wrong.append(f"{name} = {found}, allowed: rising, 0 to {n - 1}")
    if not self.sliding_layers and self.sliding is not None:
      wrong.append(f"sliding = {self.sliding!r}, allowed: None without sliding_layers")
    if wrong:
      raise ValueError("drafter config:\n  " + "\n  ".join(wrong))
    _ = self.attention  # its own ValueError

  @property
  def features(self) -> int:
    """Width of the concatenated features."""
    return len(self.taps) * self.target.width

  @property
  def attention(self) -> Config:
    """The target's config with the drafter's own heads."""
    return self.target if self.heads is None else replace(self.target, **asdict(self.heads))

  def as_dict(self) -> dict[str, Any]:
    """The fields, for a checkpoint's metadata."""
    return asdict(self)


class Context(NamedTuple):
  """How features become the rows that every layer reads."""

  fuse: Float[Array, "features width"]
  norm: Float[Array, "width"]


class Layer(NamedTuple):
  """One draft layer. Norms are float32 and zero-centred, as in the target."""

  norm: Float[Array, "width"]
  q: Float[Array, "width q"]
  k: Float[Array, "width kv"]
  v: Float[Array, "width kv"]
  q_norm: Float[Array, "D"]
  k_norm: Float[Array, "D"]
  out: Float[Array, "q width"]
  mlp_norm: Float[Array, "width"]
  mlp: MLP


class DrafterParams(NamedTuple):
  """All weights of a drafter's own; embedding and head are the target's."""

  context: Context
  mask: Float[Array, "width"]
  layers: tuple[Layer, ...]
  norm: Float[Array, "width"]


class KeyValues(NamedTuple):
  """Rotated keys, and values, of S tokens in one layer."""

  k: Float[Array, "B S Hkv D"]
  v: Float[Array, "B S Hkv D"]


def init(config: DrafterConfig, key: Array, dtype: Any = jnp.float32) -> DrafterParams:
  """Random weights: normal over fan-in; what adds to the residual is smaller by sqrt(2 layers)."""
  c, n = config.attention, config.inner
  d, q, kv = c.width, c.query_heads * c.head_dim, c.kv_heads * c.head_dim
  keys = iter(jax.random.split(key, 7 * config.layers + 2))

  def normal(n: int, m: int, shrink: int = 1) -> Array:
    return (jax.random.normal(next(keys), (n, m)) * (shrink * n) ** -0.5).astype(dtype)

  zero = lambda n: jnp.zeros((n,), jnp.float32)  # a buffer each: a donated one cannot be shared
  deep = 2 * config.layers

  def layer() -> Layer:
    attention = zero(d), normal(d, q), normal(d, kv), normal(d, kv)
    norms = zero(c.head_dim), zero(c.head_dim)
    rest = normal(q, d, deep), zero(d)
    return Layer(*attention, *norms, *rest, MLP(normal(d, n), normal(d, n), normal(n, d, deep)))

  context = Context(normal(config.features, d), zero(d))
  mask = (0.02 * jax.random.normal(next(keys), (d,))).astype(dtype)
  return DrafterParams(context, mask, tuple(layer() for _ in range(config.layers)), zero(d))


def heads(x: Float[Array, "... n"], D: int) -> Float[Array, "... heads D"]:
  return x.reshape(*x.shape[:-1], -1, D)


def project(
  layer: Layer, c: Config, x: Float[Array, "B S width"], positions: Int[Array, "B S"]
) -> KeyValues:
  k, v = heads(exact(x, layer.k), c.head_dim), heads(exact(x, layer.v), c.head_dim)
  return KeyValues(rotate(rms_norm(k, layer.k_norm), positions, c), v)


def context_rows(
  params: DrafterParams, config: DrafterConfig, features: Features, positions: Int[Array, "B S"]
) -> tuple[KeyValues, ...]:
  """Each layer's keys and values of tokens that the target has read. ValueError: other features."""
  if features.shape[-1] != config.features:
    raise ValueError(
      f"features are {features.shape[-1]} wide, wanted {config.features} from layers {config.taps}"
    )
  B, S, _ = features.shape
  if config.feature_norm:
    features = unit_rms(features.reshape(B, S, len(config.taps), -1)).reshape(B, S, -1)
  H = exact(features.astype(params.context.fuse.dtype), params.context.fuse)
  H = rms_norm(H, params.context.norm)
  return tuple(project(layer, config.attention, H, positions) for layer in params.layers)


def joint_attend(
  q: Float[Array, "A D Hq h"],
  own: KeyValues,
  rows: KeyValues,
  see: Bool[Array, "A D S"],
  near: Bool[Array, "D D"],
) -> Float[Array, "A D Hq h"]:
  """A blocks of one sequence: each query sees the context rows in `see`, of its block those in
  `near`.

  own [A, D, Hkv, h]; rows [S, Hkv, h]. Scores and sums in float32. A row that no block sees is
  selected away, whatever it holds.
  """
  (A, D, Hq, h), Hkv = q.shape, rows.k.shape[1]
  seen = see.any((0, 1))[:, None, None]
  ck, cv = (jnp.where(seen, x, jnp.zeros((), x.dtype)) for x in rows)
  dot = lambda form, x, y: jnp.einsum(
    form, x, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
  )
  q = q.reshape(A, D, Hkv, Hq // Hkv, h)
  far = jnp.where(see[None, None], dot("adgrh,sgh->grads", q, ck), -jnp.inf)
  inside = jnp.where(near[None, None, None], dot("adgrh,aegh->grade", q, own.k), -jnp.inf)
  weights = jax.nn.softmax(jnp.concatenate([far, inside], axis=-1) * h**-0.5, axis=-1)
  far, inside = jnp.split(weights.astype(own.v.dtype), [rows.k.shape[0]], axis=-1)
  o = dot("grads,sgh->adgrh", far, cv) + dot("grade,aegh->adgrh", inside, own.v)
  return o.reshape(A, D, Hq, h).astype(q.dtype)


def visible(
  config: DrafterConfig, layer: int, back: Int[Array, "B A S"]
) -> tuple[Bool[Array, "B A D S"], Bool[Array, "D D"]]:
  """What each query of a block sees in a draft layer: context rows, and tokens of its block."""
  step = jnp.arange(config.block, dtype=jnp.int32)
  behind, ahead = back[:, :, None] + step[None, None, :, None], step[None] - step[:, None]
  see = jnp.broadcast_to((back > 0)[:, :, None], behind.shape)
  near = jnp.ones(ahead.shape, bool) if layer not in config.causal_layers else ahead <= 0
  if (reach := config.sliding) is not None and layer in config.sliding_layers:
    see, near = see & (behind < reach), near & (jnp.abs(ahead) < reach)
  return see, near


def marginals(
  params: DrafterParams,
  config: DrafterConfig,
  embed: Float[Array, "vocab width"],
  anchors: Int[Array, "B A"],
  positions: Int[Array, "B A"],
  rows: tuple[KeyValues, ...],
  back: Int[Array, "B A S"],
  head: Float[Array, "vocab width"] | None = None,
  exchange: Exchange = ALONE,
) -> Float[Array, "B A next vocab"]:
  """Float32 logits of the D - 1 tokens that follow each anchor, filled in at once.

  anchors, positions  the newest known token and where it stands; several blocks of one sequence
                      share its context (training), one does in decoding
  rows, back          every layer's context rows, and how many places before its anchor each block
                      has them; 0 or less is none that it may see
  head                the target's, where its embedding is not that as well
  exchange            with the devices that have other rows of the target's embedding and head
  """
  (B, A), c, D = anchors.shape, config.attention, config.block
  first = exchange.embed(embed, anchors).astype(params.mask.dtype)[:, :, None]
  x = jnp.broadcast_to(params.mask[None, None, None], (B, A, D - 1, c.width))
  x = jnp.concatenate([first, x], axis=2).reshape(B, A * D, c.width)
  at = (positions[:, :, None] + jnp.arange(D, dtype=jnp.int32)[None, None]).reshape(B, A * D)
  blocks = lambda x: x.reshape(B, A, D, *x.shape[2:])
  for i, (layer, context) in enumerate(zip(params.layers, rows, strict=True)):
    y = rms_norm(x, layer.norm)
    q = rotate(rms_norm(heads(exact(y, layer.q), c.head_dim), layer.q_norm), at, c)
    own = jax.tree.map(blocks, project(layer, c, y, at))
    context = jax.tree.map(lambda x, y=x: x.astype(y.dtype), context)
    see, near = visible(config, i, back)
    o = jax.vmap(joint_attend, (0, 0, 0, 0, None))(blocks(q), own, context, see, near)
    x = x + exact(o.reshape(B, A * D, -1), layer.out)
    x = x + mlp(layer.mlp, rms_norm(x, layer.mlp_norm))
  y = rms_norm(blocks(x)[:, :, 1:], params.norm)
  return scores(y, (embed if head is None else head).astype(y.dtype), exchange)
