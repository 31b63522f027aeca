"""The shape of a hybrid model, checked when it is made."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

LARGEST = 2**31 - 1  # of a size: an int32 counts it
LAYERS = 1024  # at most: each is made apart


def misfit(name: str, value: Any, least: int = 1) -> list[str]:
  """A line if that is no size, or no number of layers where the name says so."""
  most = LAYERS if name.endswith("layers") else LARGEST
  if not isinstance(value, int) or isinstance(value, bool) or value < least:
    return [f"{name} = {value!r}, allowed: an integer of at least {least}"]
  return [f"{name} = {value}, allowed: at most {most}"] if value > most else []


@dataclass(frozen=True)
class Config:
  """Sizes of a hybrid of Gated DeltaNet and windowed attention. The defaults are the bundled model.

  Letters as in gdn/typing.py: key_heads Hk, value_heads H, key_dim K, value_dim V, conv_taps W,
  decay_channels E (1 is GDN, K is KDA). Attention has query_heads that share kv_heads, each
  head_dim wide; its first `rotary` dims rotate, and a token sees itself and window - 1 before it.
  A `tied` head is the embedding again.

  With experts, a layer that is not in `dense_layers` sends each token to experts_per_token of its
  `experts`, each expert_inner wide, and to one shared expert of shared_inner; `route_normalised`
  says whether the weights of the chosen ones sum to one. `inner` is the width of a dense MLP.
  """

  vocab: int = 256
  width: int = 256
  inner: int = 512
  layers: int = 8
  attention_every: int = 4
  key_heads: int = 2
  value_heads: int = 4
  key_dim: int = 128
  value_dim: int = 128
  conv_taps: int = 4
  decay_channels: int = 1
  beta_max: float = 1.0
  query_heads: int = 4
  kv_heads: int = 2
  head_dim: int = 64
  rotary: int = 32
  rope_theta: float = 10_000.0
  window: int = 1024
  tied: bool = True
  experts: int = 0
  experts_per_token: int = 0
  expert_inner: int = 0
  shared_inner: int = 0
  route_normalised: bool = True
  dense_layers: Sequence[int] = ()

  def __post_init__(self):
    """ValueError: one line for every field that is out of range, with what is allowed."""
    wrong = []
    object.__setattr__(self, "dense_layers", tuple(self.dense_layers))  # JSON has lists

    def want(name: str, ok: bool, allowed: str):
      if not ok:
        wrong.append(f"{name} = {getattr(self, name)!r}, allowed: {allowed}")

    sparse = ("experts", "experts_per_token", "expert_inner", "shared_inner")
    for name, value in asdict(self).items():
      if name in ("tied", "route_normalised"):
        want(name, isinstance(value, bool), "true or false")
      elif name not in ("beta_max", "rope_theta", "dense_layers"):
        least = 0 if name in sparse and not self.experts else 1
        wrong += misfit(name, value, least)
    if not wrong:
      want(
        "value_heads",
        self.value_heads % self.key_heads == 0,
        f"a multiple of key_heads = {self.key_heads}",
      )
      want(
        "query_heads",
        self.query_heads % self.kv_heads == 0,
        f"a multiple of kv_heads = {self.kv_heads}",
      )
      want(
        "decay_channels", self.decay_channels in (1, self.key_dim), f"1 or key_dim = {self.key_dim}"
      )
      want(
        "rotary",
        self.rotary % 2 == 0 and self.rotary <= self.head_dim,
        f"even and at most head_dim = {self.head_dim}",
      )
      want("beta_max", self.beta_max in (1.0, 2.0), "1.0 or 2.0")
      want("rope_theta", self.rope_theta > 1.0, "more than 1.0")
      want(
        "experts_per_token",
        self.experts_per_token <= self.experts,
        f"at most experts = {self.experts}",
      )
      want(
        "dense_layers",
        set(self.dense_layers) <= set(range(self.layers))
        and bool(self.experts or not self.dense_layers),
        f"some of 0 to {self.layers - 1} in a model with experts",
      )
    if wrong:
      raise ValueError("model config:\n  " + "\n  ".join(wrong))

  @property
  def channels(self) -> int:
    """C: what the convolution sees, q and k and v of all heads side by side."""
    return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

  def is_attention(self, layer: int) -> bool:
    """Every `attention_every`-th layer is attention, the last of each group."""
    return (layer + 1) % self.attention_every == 0

  def is_sparse(self, layer: int) -> bool:
    """The layer's MLP is a mixture of experts."""
    return self.experts > 0 and layer not in self.dense_layers

  def as_dict(self) -> dict[str, Any]:
    """The fields, for a checkpoint's metadata."""
    return asdict(self)
