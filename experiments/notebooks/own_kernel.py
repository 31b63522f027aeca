# %% [markdown]
# # Run a kernel against your own
#
# An operation is a function of `gdn.ops.Ops`; whoever has its signature can take its place. Here is
# a naive decode step, beside the reference and beside the Mosaic GPU kernel. Without a GPU the
# kernel runs in the interpreter, which also looks for races; it is slow there, and right. Moves
# between lanes, for which the interpreter has no words, are then said in others (tests/words.py).

# %%
import sys

sys.path.append("../..")  # Jupyter starts in the folder of the notebook

# %%
import functools

import jax
import jax.numpy as jnp
import numpy as np

from gdn.gates import gates as gates_of
from gdn.gates import l2norm
from gdn.ops import XLA, xla
from gdn.typing import GateParams, Raw, Window
from pallas_kernels import decode, tiles
from tests.test_kernels import interpreted

B, Hk, H, K, V = 2, 1, 2, 128, 128
draw = lambda i, *s: jax.random.normal(jax.random.key(i), s, jnp.bfloat16)
heads = ((Hk, K), (Hk, K), (H, V), (H, 1), (H,))
raw = Raw(*(draw(i, B, 1, *head) for i, head in enumerate(heads)))
params = GateParams(jnp.zeros(H), jnp.zeros((H, 1)), jnp.float32(1))
i32 = lambda *x: jnp.asarray(x, jnp.int32)
window = Window(raw, jnp.full((B, 1), -1, jnp.int32), i32(1, 1), i32(2, 0))
S = 0.3 * jax.random.normal(jax.random.key(9), (3, H, V, K))


# %%
def my_decode(S, window, params):
  """One token of every slot, as one reads it in the paper. No padding, no odd slots."""
  raw = jax.tree.map(lambda x: x[:, 0], window.raw)
  beta, g = gates_of(raw.a, raw.b, params)
  share = lambda x: jnp.repeat(l2norm(x), H // Hk, axis=1)
  k, q = share(raw.k), share(raw.q) * K**-0.5
  old = jnp.exp(g)[..., None] * S[window.slots]
  u = beta[..., None] * (raw.v.astype(jnp.float32) - jnp.einsum("bhvk,bhk->bhv", old, k))
  new = old + u[..., None] * k[:, :, None]
  return jnp.einsum("bhvk,bhk->bhv", new, q)[:, None], S.at[window.slots].set(new)


# %%
alone = tiles.Config(ctas_per_sm=1, sms=1)
kernel = functools.partial(decode.decode, config=alone, out_dtype=jnp.float32)
with interpreted():  # fails if it finds a race
  theirs = jax.block_until_ready(jax.jit(kernel)(S, window, params))

# %%
reference = xla(out=jnp.float32).decode(S, window, params)
apart = {}
for name, got in {"mine": jax.jit(my_decode)(S, window, params), "kernel": theirs}.items():
  pairs = zip(got, reference, strict=True)
  norm = np.linalg.norm
  apart[name] = [float(norm(np.asarray(x - y)) / norm(np.asarray(y))) for x, y in pairs]
  print(f"{name:7} output {apart[name][0]:.1e}, state {apart[name][1]:.1e} from the reference")
assert max(max(x) for x in apart.values()) < 2.0**-18

# %% [markdown]
# On a GPU, `experiments.clock.device_time` times both by CUPTI. To let every scheme use it:

# %%
ops = XLA._replace(decode=my_decode)
