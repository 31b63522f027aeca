"""How numbers are multiplied: one place for the precision of every dot in a window.

On a GPU XLA rounds float32 operands to tf32 unless told otherwise, so the default here says so.
Experiments put lower precisions in, one site at a time.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

Dot = Callable[[jax.Array, jax.Array], jax.Array]

exact: Dot = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Dots(NamedTuple):
  """The four sites of a window: S [k q]', k k' and q k', the products of the solve, the fold."""

  state: Dot = exact
  gram: Dot = exact
  solve: Dot = exact
  fold: Dot = exact


EXACT = Dots()
