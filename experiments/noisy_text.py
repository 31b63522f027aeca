"""Text under states that are not exact: sampled with the same noise everywhere, one compiled scan.

Every slot draws its tokens with the same Gumbel noise at the same position, so two slots write the
same text until their logits differ by enough to change a choice. Temperature 0 is greedy decoding.
Scans end after some tokens only to say how far the text is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes import CommitScheme, Spec, snapshot
from commit_schemes.decoding.loop import prefilled
from commit_schemes.model import Draft, model_memory, verify
from experiments.ablation import round_to
from experiments.score import stream_bits
from gdn.config import Config
from gdn.hybrid import Params
from gdn.layer import GDNMemory
from gdn.typing import Accepted


def rounding(spec: Spec, bits: np.ndarray) -> CommitScheme:
  """Snapshots whose committed state is rounded to `bits[n]` mantissa bits in slot n."""
  base, keep = snapshot(spec), jnp.asarray(bits, jnp.int32)[:, None, None, None]
  commit = lambda flight, accepted: round_to(base.commit(flight, accepted), keep)
  return base._replace(commit=commit, state_at=commit)


PIECE = 64  # tokens of one scan


class Written(NamedTuple):
  """tokens [B, n]; distance [B, n]: of a slot's states to the first slot's, relative."""

  tokens: np.ndarray
  distance: np.ndarray


def write(
  params: Params, config: Config, state: CommitScheme, prompts: list[list[int]], *,
  tokens: int, temperature: float, seed: int, watch: int = 1,
  progress: Callable[[float], None] = lambda fraction: None,
) -> Written:  # fmt: skip
  """`tokens` tokens after prompts of one length, one a step.

  Slots come in groups of `watch`; the distance is to the first of a slot's group.
  """
  B, length = len(prompts), len(prompts[0])
  memory = model_memory(config, state)
  start = prefilled(params, config, memory, prompts, capacity=length + 1)
  slots, root = jnp.arange(B, dtype=jnp.int32), jnp.full((B, 1), -1, jnp.int32)
  one = Accepted(jnp.zeros((B, 1), jnp.int32), jnp.ones(B, jnp.int32))

  def apart(carry: Any) -> jax.Array:
    total, base = jnp.zeros(B), jnp.zeros(B)
    for m in carry:
      if isinstance(m, GDNMemory):
        S = memory.state.materialize(m.recurrent).astype(jnp.float32).reshape(B // watch, watch, -1)
        total += jnp.square(S - S[:, :1]).sum(2).reshape(B)
        base += jnp.broadcast_to(jnp.square(S[:, :1]).sum(2), S.shape[:2]).reshape(B)
    return jnp.sqrt(total / base)

  @jax.jit
  def decode(params, newest, carry, key, at):
    def step(loop, i):
      newest, carry = loop
      draft = Draft(newest[:, None], root, jnp.ones(B, jnp.int32))
      positions = jnp.broadcast_to(length - 1 + i, (B, 1))
      logits, flight = verify(params, config, memory, carry, draft, positions, slots)
      carry = memory.whole.commit(flight, one)
      noise = jax.random.gumbel(jax.random.fold_in(key, i), logits.shape[-1:])
      newest = jnp.argmax(logits[:, 0] + temperature * noise[None], -1).astype(jnp.int32)
      return (newest, carry), (newest, apart(carry) if watch > 1 else jnp.zeros(B))

    return jax.lax.scan(step, (newest, carry), at)

  loop, pieces = (start.text[:, length - 1], start.carry), []
  for first in range(0, tokens, PIECE):
    at = jnp.arange(first, min(first + PIECE, tokens), dtype=jnp.int32)
    loop, piece = decode(params, *loop, jax.random.key(seed), at)
    pieces.append(jax.tree.map(np.asarray, piece))
    progress((first + len(at)) / tokens)
  text, distance = (np.concatenate(x) for x in zip(*pieces, strict=True))
  return Written(text.T, distance.T)


def text_bits(
  params: Params, config: Config, prompts: list[list[int]], tokens: np.ndarray
) -> np.ndarray:
  """[B] What the model, its states exact, spends on each text after its prompt."""
  text = np.concatenate([np.asarray(prompts, np.int32), tokens.astype(np.int32)], axis=1)
  spent = np.concatenate(list(stream_bits(params, config, text)), axis=1)
  return spent[:, -tokens.shape[1] :].sum(1, dtype=np.float64)
