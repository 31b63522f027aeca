# %% [markdown]
# # Open-loop against exact fold
#
# A ring keeps the recent writes $(k, u, g)$ and folds them into the checkpoint now and then.
# Folding them *as stored* is open loop: what was rounded stays rounded. An *exact* fold replays the
# raw inputs. Which rounding matters, and how much does it help to fold less often?
#
# Every precision is a traced number here, so one compiled program runs all settings at once.

# %%
import sys

sys.path.append("../..")  # Jupyter starts in the folder of the notebook

# %%
import os

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from experiments import deferred, figures, forced
from experiments.deferred import Setting
from experiments.streams import Streams
from experiments.truth import tokens as float64_tokens
from experiments.truth import truth
from gdn.typing import GateParams, Raw, Tokens

TOKENS = int(os.environ.get("TOKENS", "96"))
H, K, V, WINDOW = 2, 32, 32, 4

# %% [markdown]
# Synthetic streams with correlated keys and little decay, the hard corner.

# %%
rng = np.random.default_rng(0)
normal = lambda *s: rng.standard_normal((TOKENS, *s)).astype(np.float32)
k = 3 * rng.standard_normal((1, 1, K)).astype(np.float32) + normal(1, K)
raw = Raw(*map(jnp.asarray, (normal(1, K), k, normal(H, V), normal(H, 1) - 6, normal(H))))
gates = GateParams(jnp.zeros(H), jnp.zeros((H, 1)), jnp.float32(1))
streams = Streams(raw, gates, (0,))
text = rng.integers(0, 4, TOKENS).astype(np.uint8)
plan = forced.schedule(text, WINDOW, (TOKENS // 2, TOKENS))
want = truth(streams, (TOKENS // 2, TOKENS))
x = float64_tokens(streams.raw, streams.gates)
tokens = Tokens(*(jnp.asarray(np.moveaxis(y, 1, 0), jnp.float32) for y in x))

# %%
lines = {  # mantissa bits of rows, checkpoint and dots, commits from fold to fold, cursor fault
  "all fp32": (23, 23, 23, 4, False),
  "bf16 rows": (7, 23, 23, 4, False),
  "hi + lo rows": (16, 23, 23, 4, False),
  "tf32 dots": (23, 23, 10, 4, False),
  "bf16 checkpoint, every commit": (23, 7, 23, 1, False),
  "bf16 checkpoint, every 4th": (23, 7, 23, 4, False),
  "stale record at every commit": (23, 23, 23, 4, True),
}
settings = Setting(*(np.array(c) for c in zip(*lines.values(), strict=True)))
errors = {}
for fold, replay in (("open loop", False), ("exact", True)):
  *_, probe = deferred.run(settings, tokens, plan, WINDOW, replay=replay)
  apart = lambda S: np.linalg.norm(S - want.states[-1]) / np.linalg.norm(want.states[-1])
  errors[fold] = [apart(S) for S in probe.states]
for name, loose, exact in zip(lines, *errors.values(), strict=True):
  print(f"{name:30} open loop {loose:.1e}, exact {exact:.1e}")


# %%
def figure(errors):
  """The state's error after the last token, a line a setting."""
  fig = Figure(figsize=(7, 3))
  ax = fig.subplots()
  for i, (fold, x) in enumerate(errors.items()):
    ax.plot(x, list(lines), label=fold, **figures.look(i) | {"linestyle": "none"})
  ax.set(xscale="log", xlabel=f"relative state error after {TOKENS} tokens")
  ax.invert_yaxis()
  ax.legend()
  return fig


figures.picture(figure, errors)

# %% [markdown]
# An exact fold does not see what is stored in rows or multiplied in dots: only the checkpoint's
# dtype is left, and rounding it less often helps. On the trained model: `python -m experiments run
# fold_ablation`.
