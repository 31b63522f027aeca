"""Free-running greedy text under a scheme, beside plain decoding: differences, repetition."""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.decoding.drafts import Drafter, nothing, prompt_lookup
from commit_schemes.decoding.loop import decode, prefilled
from commit_schemes.model import model_memory
from gdn.config import Config
from gdn.hybrid import Params, cast


class Text(NamedTuple):
  """Generated tokens, the two highest logits behind each, and the mean accept length."""

  tokens: np.ndarray  # [n]
  top: np.ndarray  # [n, 2]
  accept_length: float


def generate(
  params: Params, config: Config, prompt: list[int], tokens: int, name: str, drafter: Drafter,
  T: int, progress: Callable[[float], None] = lambda fraction: None,
) -> Text:  # fmt: skip
  """`tokens` tokens after the prompt, greedy, in the dtype of the parameters."""
  spec = Spec(config.key_heads, T, channels=config.decay_channels, dtypes=Dtypes(raw=jnp.float32))
  memory = model_memory(config, SCHEMES[name].make(spec))
  until = len(prompt) + tokens
  state = prefilled(params, config, memory, [prompt], capacity=until + T)
  tick = lambda known: progress((known - len(prompt)) / tokens)
  state, reports = decode(params, config, memory, drafter, state, until=until, progress=tick)
  top = np.concatenate([np.asarray(r.top[0, : int(r.emitted[0])]) for r in reports])
  emitted = float(np.mean([int(r.emitted[0]) for r in reports]))
  return Text(np.asarray(state.text[0, len(prompt) : until]), top[:tokens], emitted)


def repeats(tokens: np.ndarray, longest: int = 256) -> int:
  """Most copies of one unit, up to `longest` tokens, that follow one another without a break."""
  most = 1
  for period in range(1, min(longest, len(tokens) // 2) + 1):
    same = np.concatenate([[0], (tokens[period:] == tokens[:-period]), [0]])
    edges = np.flatnonzero(np.diff(same))
    if len(edges):
      most = max(most, 1 + int(np.max(edges[1::2] - edges[::2])) // period)
  return most


def compare(text: Text, plain: Text) -> dict[str, Any]:
  """Equal, or the first token that differs with what the margin rule needs.

  first_difference  index of the first differing token, None if there is none
  margin            plain decoding's top-2 margin there
  logit_error       largest error of a top-2 margin over the tokens before it
  """
  n = min(len(text.tokens), len(plain.tokens))
  differs = np.flatnonzero(text.tokens[:n] != plain.tokens[:n])
  first = int(differs[0]) if len(differs) else None
  error = np.abs(text.top[:first] - plain.top[:first]).sum(1)
  return {
    "first_difference": first,
    "margin": None if first is None else float(plain.top[first, 0] - plain.top[first, 1]),
    "logit_error": float(error.max(initial=0.0)),
  }


def within_margin(row: dict[str, Any]) -> bool:
  """The margin rule: equal, or the first difference lies within the measured logit error."""
  return row["first_difference"] is None or row["margin"] <= row["logit_error"]


class Plain:
  """Plain decoding of one prompt, done once, and schemes beside it, all in float32."""

  def __init__(self, params: Params, config: Config, prompt: list[int], tokens: int):
    self.params, self.config, self.tokens = cast(params, jnp.float32), config, tokens
    self.prompt = prompt
    self._lock = threading.Lock()
    self._text: Text | None = None

  def text(self) -> Text:
    with self._lock:
      if self._text is None:
        self._text = generate(
          self.params, self.config, self.prompt, self.tokens, "snapshot", nothing, 1
        )
    return self._text

  def beside(self, name: str, T: int, progress: Callable[[float], None]) -> dict[str, Any]:
    """Columns of one row: the scheme's text against plain decoding's."""
    plain = self.text()
    text = generate(
      self.params, self.config, self.prompt, self.tokens, name, prompt_lookup(T), T, progress
    )
    return {
      "scheme": name,
      "ablation": "none",
      "token": self.tokens,
      "repeats": repeats(text.tokens),
      "plain_repeats": repeats(plain.tokens),
      "accept_length": text.accept_length,
      **compare(text, plain),
    }
