"""Parts of a decode step on one rank, each timed alone: a recurrent layer's verify and commit under
a scheme, a group of such layers and one of attention without their recurrences, and the output
projection. One part is on the device at a time, with random weights.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes.conv_window import conv_window
from commit_schemes.footprint import LayerShape
from commit_schemes.kv_rows import kv_rows
from experiments.clock import mean_time
from experiments.layer_step import OPS, LayerStep, accept_lengths
from experiments.models import AROUND, Around, layer_of, sizes
from experiments.record import BadInput
from gdn import hybrid
from gdn.config import Config
from gdn.hybrid import Mixers, hidden_states
from gdn.layer import GDNMemory
from gdn.streaming import empty
from gdn.typing import Accepted
from gdn.window import chain


class Load(NamedTuple):
  """What a step does: windows of `window` nodes in slots of `context` tokens, and how much of them
  is accepted. Every part is timed over `calls` calls for each of `batches` slots."""

  window: int
  context: int
  accepts: str
  ops: str
  batches: tuple[int, ...]
  calls: int

  @property
  def mean_accept(self) -> float:
    counts = accept_lengths(self.accepts, window=self.window)
    return sum(min(n, self.window) * k for n, k in counts.items()) / sum(counts.values())


Times = dict[int, tuple[float, float]]  # microseconds on the device and by the wall, by batch


def compiled_layer(load: Load, scheme: str, shape: LayerShape) -> LayerStep:
  """A layer's step at every batch, and at what its check and its past take."""
  accepts, pool = accept_lengths(load.accepts, window=load.window), max(load.batches)
  layer = LayerStep(scheme, shape, load.window, OPS[load.ops], accepts, pool=pool)
  return layer.ready(*{*load.batches, min(4, pool), pool})


def layer_times(load: Load, layer: LayerStep) -> tuple[Times, float]:
  """(device, wall) microseconds of a layer's step by batch, and the error over its budget.

  AssertionError: the states are wrong, and nothing is timed.
  """
  error, carry, times = layer.check(), layer.used(), {}
  for B in sorted(load.batches, reverse=True):
    times[B], carry = timed(layer, carry, B, load.calls)
  return times, error


def timed(layer: LayerStep, carry: Any, B: int, calls: int) -> tuple[tuple[float, float], Any]:
  """(device, wall) microseconds of a step of B slots, and the carry that has been through it."""
  last = carry

  def step(carry, *rest):
    nonlocal last
    last, o = layer.step(carry, *rest)
    return last, o

  first, *rest = [(w, layer.gates, a) for w, a in layer.inputs(B, calls)]
  inputs: list[tuple[Any, ...]] = [(carry, *first), *((None, *x) for x in rest)]
  return mean_time(step, inputs, calls=calls, carry=threaded), last


def threaded(args: tuple[Any, ...], out: tuple[Any, ...]) -> tuple[Any, ...]:
  """The next call's arguments: a step gives its new carry first."""
  return (out[0], *args[1:])


def surrounds(model: str) -> tuple[Around, int]:
  """And how many recurrent layers there are to one of attention. BadInput: not a whole number."""
  _, (recurrent, _), _, a = sizes(model)
  if a is None or not a.attention or recurrent % a.attention:
    raise BadInput(
      f"model {model}, allowed: {', '.join(AROUND)}, or a checkpoint with as many recurrent layers "
      "to each of attention"
    )
  return a, recurrent // a.attention


def group_config(model: str, degree: int, context: int) -> Config:
  """One group of layers as one rank holds it; the vocabulary is measured by itself.

  BadInput: heads or groups do not divide. ValueError: nor does something else.
  """
  (a, behind), layer = surrounds(model), layer_of(model, degree)
  return Config(
    vocab=256, width=a.width, inner=a.inner // degree, layers=behind + 1,
    attention_every=behind + 1, key_heads=layer.key_heads,
    value_heads=layer.value_heads, key_dim=layer.key_dim,
    value_dim=layer.value_dim, query_heads=a.query_heads // degree,
    kv_heads=max(1, a.kv_heads // degree), head_dim=a.head_dim, rotary=2 * (a.head_dim // 8),
    window=context,
  )  # fmt: skip


class Group:
  """A group of layers for B slots: its convolutions and attention are committed, and what would go
  into the recurrences goes past them. `step(carry, params, ids, positions, accepted)`."""

  def __init__(self, load: Load, config: Config, B: int):
    self.load, self.config, self.B = load, config, B
    self.conv, self.rows = conv_window(OPS[load.ops]), kv_rows()
    self.params = jax.jit(lambda: hybrid.init(config, jax.random.key(0), jnp.bfloat16))
    self.fresh = jax.jit(self._fresh)

  def split[Item](self, items: tuple[Item, ...]) -> Iterator[tuple[bool, Item]]:
    return ((self.config.is_attention(i), x) for i, x in enumerate(items))

  def _fresh(self) -> tuple[Any, ...]:
    """A carry of slots that hold `context` tokens."""
    memories = empty(self.config, self.B, jnp.bfloat16)
    full = lambda m: m._replace(length=jnp.full(self.B, self.load.context, jnp.int32))
    return tuple(
      self.rows.init(full(m)) if attends else self.conv.init(m.conv)
      for attends, m in self.split(memories)
    )

  def step(self, carry, params, ids, positions, accepted):
    B, T = ids.shape
    parents = jnp.broadcast_to(chain(T)[None], (B, T))
    nodes, slots = jnp.full(B, T, jnp.int32), jnp.arange(B, dtype=jnp.int32)
    mixers = Mixers(
      conv=lambda m, x, taps: self.conv.verify(m, x, taps, parents, nodes, slots),
      recurrent=lambda m, raw, gates: (raw.v, raw),  # `raw` stays an output, so nothing is left out
      attend=lambda m, q, k, v: self.rows.verify(m, q, k, v, parents, nodes, slots),
    )
    memories = tuple(m if attends else GDNMemory(m, None) for attends, m in self.split(carry))
    hidden, flights = hidden_states(params, self.config, ids, positions, mixers, memories)
    new = tuple(
      self.rows.commit(f, accepted) if attends else self.conv.commit(f.conv, accepted)
      for attends, f in self.split(flights)
    )
    return new, hidden[-1], [f.recurrent for attends, f in self.split(flights) if not attends]

  def inputs(self) -> Iterator[tuple[Any, ...]]:
    """(ids, positions, accepted), without end."""
    load, rng = self.load, np.random.default_rng(0)
    path = jnp.broadcast_to(jnp.arange(load.window, dtype=jnp.int32)[None], (self.B, load.window))
    accepted = Accepted(path, jnp.full(self.B, max(1, round(load.mean_accept)), jnp.int32))
    while True:
      ids = rng.integers(0, self.config.vocab, path.shape)
      yield jnp.asarray(ids, jnp.int32), load.context + path, accepted

  @cached_property
  def compiled(self) -> Any:
    """`step`: from a thread, ahead of its turn."""
    shapes = jax.eval_shape(self.fresh), jax.eval_shape(self.params), *next(self.inputs())
    return jax.jit(self.step, donate_argnums=0).lower(*shapes).compile()

  def time(self) -> float:
    """Microseconds of a step, verify and commit."""
    carry, params, inputs = self.fresh(), self.params(), self.inputs()
    calls = [(carry if i == 0 else None, params, *next(inputs)) for i in range(4)]
    count = max(8, self.load.calls // 4)
    return mean_time(self.compiled, calls, calls=count, carry=threaded)[0]


class Head:
  """The output projection of B windows on one rank, and the choice of a token."""

  def __init__(self, load: Load, model: str, degree: int, B: int):
    (a, _), self.load = surrounds(model), load
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    self.inputs = jax.jit(lambda: (
      draw(0, a.width, a.vocab // degree), *(draw(i, B * load.window, a.width) for i in (1, 2))
    ))  # fmt: skip

  @cached_property
  def compiled(self) -> Any:
    dot = lambda x, w: jnp.argmax(jnp.matmul(x, w, preferred_element_type=jnp.float32), -1)
    table, x, _ = jax.eval_shape(self.inputs)
    return jax.jit(dot).lower(x, table).compile()

  def time(self) -> float:
    """Microseconds."""
    table, *rows = self.inputs()
    return mean_time(self.compiled, [(x, table) for x in rows], calls=max(8, self.load.calls // 4))[
      0
    ]
