# %% [markdown]
# # A tour of the argument
#
# A Gated DeltaNet layer keeps one matrix per head and forgets by overwriting. Speculative decoding
# verifies a window of drafted tokens and keeps only a prefix of them. What must be stored so that
# the state is afterwards what the accepted prefix alone would have left?

# %%
import sys

sys.path.append("../..")  # Jupyter starts in the folder of the notebook

# %%
import jax
import jax.numpy as jnp
import numpy as np

from commit_schemes import SCHEMES, Accepted, Dtypes, Spec
from commit_schemes.footprint import LayerShape, footprint
from experiments import figures, memory_report, provenance, record
from gdn.typing import GateParams, Raw, Window

# %% [markdown]
# One window of four tokens for one slot, of which the target accepts two.

# %%
T, Hk, H, K, V = 4, 1, 2, 32, 32
draw = lambda i, *shape: jax.random.normal(jax.random.key(i), (1, *shape))
raw = Raw(draw(0, T, Hk, K), draw(1, T, Hk, K), draw(2, T, H, V), draw(3, T, H, 1), draw(4, T, H))
gates = GateParams(jnp.zeros(H), jnp.zeros((H, 1)), jnp.float32(1))
parents = jnp.arange(T, dtype=jnp.int32)[None] - 1
window = Window(raw, parents, jnp.full(1, T, jnp.int32), jnp.zeros(1, jnp.int32))
two = Accepted(jnp.arange(T, dtype=jnp.int32)[None], jnp.full(1, 2, jnp.int32))

# %% [markdown]
# Every published scheme leaves the same state. They differ in what they keep on the way there.

# %%
states = {}
for name in ("snapshot", "replay_0", "delta_cache", "ring_open_loop", "ring_exact", "tree_wy"):
  scheme = SCHEMES[name].make(Spec(Hk, T, dtypes=Dtypes(raw=jnp.float32)))
  o, flight = scheme.verify(scheme.init(jnp.zeros((1, H, V, K))), window, gates)
  states[name] = np.asarray(scheme.materialize(scheme.commit(flight, two)))
  held = footprint(SCHEMES[name].make(Spec(16, T)), LayerShape(16, 32), T)
  apart = np.abs(states[name] - states["snapshot"]).max()
  kib = held.carry // 1024, held.flight // 1024
  print(f"{name:15} differs by {apart:.0e}; KiB kept {kib[0]:,}, in flight {kib[1]:,}")

# %% [markdown]
# Over window and model, beside what was published (hollow):

# %%
memory_rows = record.read_rows(provenance.RESULTS / "memory" / "rows.csv")
figures.picture(memory_report.figure, memory_rows)

# %% [markdown]
# Does a fold of stored factors lose what a replay of raw inputs keeps? One account says that the
# inverse of $I + A$ amplifies errors by up to $2^{BS-1}$. The delta rule's own matrices cannot: see
# the proofs in the documentation, and the rows.

# %%
from experiments import amplification_report

rows = record.read_rows(provenance.RESULTS / "amplification" / "rows.csv")
print(*amplification_report.answer(rows), sep="\n")
figures.picture(amplification_report.figure, rows)
