"""The raw streams of every recurrent layer over a text: what its recurrence reads."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdn.config import Config
from gdn.hybrid import Mixers, Params, forward
from gdn.layer import GDN, GDNMemory, gate_params
from gdn.ops import XLA, Ops
from gdn.streaming import empty, streaming
from gdn.typing import GateParams, Raw


class Streams(NamedTuple):
  """All recurrent layers side by side, their heads one after the other: one layer of many heads.

  raw     arrays [T, heads, ...], in the activations' dtype
  gates   of all heads
  layers  index in the model of each group of heads
  """

  raw: Raw
  gates: GateParams
  layers: tuple[int, ...]

  @property
  def tokens(self) -> int:
    return self.raw.b.shape[0]

  def only(self, layers: tuple[int, ...]) -> "Streams":
    """The streams of some layers. ValueError: one that is not recurrent."""
    if unknown := set(layers) - set(self.layers):
      raise ValueError(f"layers {sorted(unknown)} are not recurrent; allowed: {self.layers}")
    groups = len(self.layers)

    def cut(x, axis):
      size = x.shape[axis] // groups
      at = [self.layers.index(i) * size + jnp.arange(size) for i in layers]
      return jnp.take(x, jnp.concatenate(at), axis=axis)

    A_log, dt_bias, beta_max = self.gates
    gates = GateParams(cut(A_log, 0), cut(dt_bias, 0), beta_max)
    return Streams(jax.tree.map(lambda x: cut(x, 1), self.raw), gates, tuple(layers))

  def heads(self, i: int) -> slice:
    """The value heads of the i-th recurrent layer."""
    H = self.raw.b.shape[1] // len(self.layers)
    return slice(i * H, (i + 1) * H)


def capture(
  params: Params,
  config: Config,
  text: np.ndarray,
  *,
  piece: int = 4096,
  ops: Ops = XLA,
  progress: Callable[[float], None] = lambda fraction: None,
) -> Streams:
  """Streams of the model over `text`, uint8 [T], each token seen once, in pieces.

  ValueError: an empty text.
  """
  if not text.size:
    raise ValueError("the text to capture is empty")
  plain = streaming(ops)

  def keep_raw(memory, raw, gates):
    o, S = plain.recurrent(memory[0], raw, gates)
    return o, (S, raw)

  @jax.jit
  def run(params, ids, start, memories):
    """Streams of one piece; a recurrent memory is a pair whose second entry is the last raw."""
    positions = (start + jnp.arange(ids.shape[0], dtype=jnp.int32))[None]
    mixers = Mixers(plain.conv, keep_raw, plain.attend)
    memories = tuple(m._replace(recurrent=(m.recurrent,)) if recurs(m) else m for m in memories)
    _, memories = forward(params, config, ids[None].astype(jnp.int32), positions, mixers, memories)
    raw = [m.recurrent[1] for m in memories if recurs(m)]
    memories = tuple(m._replace(recurrent=m.recurrent[0]) if recurs(m) else m for m in memories)
    return memories, jax.tree.map(lambda *x: jnp.concatenate(x, axis=2)[0], *raw)

  recurs = lambda m: isinstance(m, GDNMemory)
  memories, pieces = empty(config, 1, params.embed.dtype), []
  for at in range(0, len(text), piece):
    memories, raw = run(params, jnp.asarray(text[at : at + piece]), jnp.int32(at), memories)
    pieces.append(raw)
    progress((at + piece) / len(text))
  layers = tuple(i for i, b in enumerate(params.layers) if isinstance(b.mixer, GDN))
  mixers = [b.mixer for b in params.layers if isinstance(b.mixer, GDN)]
  gates = [gate_params(mixer, config) for mixer in mixers]
  joined = GateParams(
    jnp.concatenate([g.A_log for g in gates]),
    jnp.concatenate([g.dt_bias for g in gates]),
    gates[0].beta_max,
  )
  return Streams(jax.tree.map(lambda *x: jnp.concatenate(x), *pieces), joined, layers)
