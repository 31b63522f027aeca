"""What devices that share a model tell each other, where the pure functions of it need to know.

Each has its heads' weights, a part of every inner width, and some rows of embedding and head. Its
residual stream is whole, and so are its logits once they are gathered.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
from jaxtyping import Array


@jax.tree_util.register_static
@dataclass(frozen=True)
class Exchange:
  """The defaults are those of one device, which has everything.

  join    what a mixer or MLP of these heads adds to the residual stream -> what all of them add
  embed   (rows of the embedding [v, width], ids [...]) -> [..., width] of any token
  gather  logits [..., v] of these rows of the head -> [..., vocab]
  """

  join: Callable[[Array], Array] = lambda x: x
  embed: Callable[[Array, Array], Array] = lambda rows, ids: rows[ids]
  gather: Callable[[Array], Array] = lambda logits: logits


ALONE = Exchange()
