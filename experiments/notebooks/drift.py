# %% [markdown]
# # Drift over 16,384 tokens
#
# The recurrent state of the bundled model under every scheme, against float64, over held-out Python
# source. The committed rows first; then the same thing live, as long as `TOKENS` says.

# %%
import sys

sys.path.append("../..")  # Jupyter starts in the folder of the notebook

# %%
import os

import numpy as np

from experiments import corpus, drift, drift_report, figures, forced, provenance, record, score
from experiments.streams import capture
from experiments.truth import truth
from gdn import checkpoint

TOKENS = int(os.environ.get("TOKENS", "96"))
rows = record.read_rows(provenance.RESULTS / "drift" / "rows.csv")
for claim in drift_report.claims(rows, drift.ABLATED):
  print(f"{claim.verdict}: {claim.claim}. {claim.evidence}.\n")

# %%
figures.picture(drift.figure, rows)

# %% [markdown]
# Live: capture the raw streams of one layer once, then run any scheme over them.

# %%
params, model = checkpoint.load(score.BUNDLED)
text = corpus.heldout()[:TOKENS]
streams = capture(params, model, text).only((0,))
probes = sorted({TOKENS // 4, TOKENS // 2, TOKENS})
want, plan = truth(streams, probes), forced.schedule(text, 4, probes)
print(f"{len(plan.start)} windows accept {np.mean(plan.accepted):.2f} tokens each")

# %%
for ablation in ("none", "records bf16"):
  spec = drift.FACTORS[ablation].spec(model.key_heads, 4)
  scheme = drift.SCHEMES["ring_open_loop"].make(spec)
  for i, probe in enumerate(forced.run(scheme, streams, plan, 4)):
    error = drift.relative(probe.state, want.states[i])
    print(f"{ablation:14} token {probe.token:6} state error {error:.1e}")
