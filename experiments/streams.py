"""The raw streams of recurrent layers over a text: what their recurrence reads."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from gdn.config import Config
from gdn.hybrid import Mixers, Params, forward
from gdn.layer import GDN, gate_params
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

  def first(self, tokens: int) -> "Streams":
    """The streams of the first tokens. ValueError: there are not so many."""
    if tokens > self.tokens:
      raise ValueError(f"streams of {self.tokens} tokens, {tokens} are wanted")
    return self._replace(raw=jax.tree.map(lambda x: x[:tokens], self.raw))

  def heads(self, i: int) -> slice:
    """The value heads of the i-th recurrent layer."""
    H = self.raw.b.shape[1] // len(self.layers)
    return slice(i * H, (i + 1) * H)


def capture(
  params: Params,
  config: Config,
  text: np.ndarray,
  *,
  layers: tuple[int, ...] | None = None,
  piece: int = 4096,
  ops: Ops = XLA,
  progress: Callable[[float], None] = lambda fraction: None,
) -> Streams:
  """Streams of some recurrent layers, by default of all, over tokens int [T], in pieces.

  ValueError: an empty text, a token outside the vocabulary, or a layer that is not recurrent.
  """
  if not text.size:
    raise ValueError("the text to capture is empty")
  if text.min() < 0 or text.max() >= config.vocab:
    raise ValueError(f"tokens {text.min()} to {text.max()}, allowed: 0 to {config.vocab - 1}")
  every = tuple(i for i in range(config.layers) if not config.is_attention(i))
  layers = every if layers is None else layers
  if not layers or set(layers) - set(every) or len(set(layers)) < len(layers):
    raise ValueError(f"layers {layers}, allowed: some of {every}, which are recurrent, once each")
  plain = streaming(ops)

  def keep_raw(memory, raw, gates):
    """A memory is the state, or of a layer to follow a tuple that takes its raw tokens as well."""
    if not isinstance(memory, tuple):
      return plain.recurrent(memory, raw, gates)
    o, S = plain.recurrent(memory[0], raw, gates)
    return o, (S, raw)

  @jax.jit
  def run(params, ids, start, memories):
    positions = (start + jnp.arange(ids.shape[0], dtype=jnp.int32))[None]
    mixers = Mixers(plain.conv, keep_raw, plain.attend)
    memories = list(memories)
    for i in layers:
      memories[i] = memories[i]._replace(recurrent=(memories[i].recurrent,))
    memories = tuple(memories)
    _, memories = forward(params, config, ids[None].astype(jnp.int32), positions, mixers, memories)
    raw = [memories[i].recurrent[1] for i in layers]
    memories = list(memories)
    for i in layers:
      memories[i] = memories[i]._replace(recurrent=memories[i].recurrent[0])
    return tuple(memories), jax.tree.map(lambda *x: jnp.concatenate(x, axis=2)[0], *raw)

  memories, pieces = empty(config, 1, params.embed.dtype), []
  for at in range(0, len(text), piece):
    memories, raw = run(params, jnp.asarray(text[at : at + piece]), jnp.int32(at), memories)
    pieces.append(raw)
    progress((at + piece) / len(text))
  mixers = [m for i in layers if isinstance(m := params.layers[i].mixer, GDN)]
  gates = [gate_params(mixer, config) for mixer in mixers]
  joined = GateParams(
    jnp.concatenate([g.A_log for g in gates]),
    jnp.concatenate([g.dt_bias for g in gates]),
    gates[0].beta_max,
  )
  return Streams(jax.tree.map(lambda *x: jnp.concatenate(x), *pieces), joined, layers)


def save(path: Path, streams: Streams, ids: np.ndarray, model: str) -> None:
  """Write streams, the tokens that they are of, and the fingerprint of their model; the file
  appears whole or not at all."""
  path.parent.mkdir(parents=True, exist_ok=True)
  arrays = {**streams.raw._asdict(), **streams.gates._asdict(), "ids": jnp.asarray(ids, jnp.int32)}
  part = path.with_name(path.name + ".part")
  about = {"layers": list(streams.layers), "model": model}  # one key: their order is not fixed
  save_file(arrays, part, metadata={"streams": json.dumps(about)})
  os.replace(part, path)


def load(path: Path, model: str) -> tuple[Streams, np.ndarray]:
  """What `save` wrote of the model with this fingerprint, and the tokens.

  FileNotFoundError; ValueError: another kind of file, or streams of another model.
  """
  try:
    with safe_open(path, framework="flax") as file:
      about = json.loads((file.metadata() or {})["streams"])
      layers, of = about["layers"], about["model"]
      arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, a handle
    raw = Raw(*(arrays[name] for name in Raw._fields))
    gates = GateParams(*(arrays[name] for name in GateParams._fields))
  except (SafetensorError, KeyError, TypeError, ValueError) as error:
    raise ValueError(f"{path} holds no streams: {error!r}") from error
  if of != model:
    raise ValueError(f"{path} holds streams of the model {of[:12]}, not of {model[:12]}")
  return Streams(raw, gates, tuple(layers)), np.asarray(arrays["ids"])
