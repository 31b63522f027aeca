"""Answers about time: kernels measured on an H200, modelled bytes, and what needs an engine."""

from collections.abc import Callable, Mapping

import numpy as np

from experiments import cost, drift_report, roofline, tail
from experiments.models import MODELS, WEIGHTS
from experiments.published_answer import (
  Answer,
  Missing,
  beside,
  cannot,
  left,
  measured,
  only,
  stored,
)
from experiments.record import Row


def kernels(name: str, T: int, batch: int) -> list[Row]:
  where = {"kernel": name, "window": T, "batch": batch, "state_dtype": "float32"}
  return only(tuple(roofline.measured()), **where)


def kernel(name: str, T: int, batch: int) -> Row:
  rows = kernels(name, T, batch)
  if not rows:
    raise Missing("step_time")
  return rows[0]


def between(name: str, T: int, batch: int) -> float:
  """Microseconds of a kernel; of a window that was not measured, between the nearest that were."""
  times = {row["window"]: row["time_us"] for T in range(1, 17) for row in kernels(name, T, batch)}
  if not times or not min(times) <= T <= max(times):
    raise Missing("step_time")
  return float(np.interp(T, sorted(times), [times[t] for t in sorted(times)]))


def bandwidth(row: Row) -> Answer:
  id = row["id"]
  if id.startswith("gate-b"):
    r = kernel("verify", 4, int(id[6:]))
    share = 100 * r["ceiling_share"] * r["ceiling_gb_s"] / 4800
    why = "an output-only Mosaic kernel, share of the 4.8 TB/s that the H200 is said to have"
    return beside(row, share, measured("step_time"), why, same=1.0, shape=1.6)
  if id == "snapshot-writes":
    value = kernel("snapshot", 4, 16)["time_us"] / kernel("verify", 4, 16)["time_us"]
    why = (
      "bytes make it 5; without writes GB10 reads 16.8 MB in 42.2 us, more than its memory gives"
    )
    return beside(row, value, measured("step_time"), why, shape=2.0)
  us = lambda name, T: between(name, T, 64)
  ratio: Mapping[str, Callable[[], float]] = {
    "fig9-snapshot": lambda: us("snapshot", 6) / us("decode", 1),
    "fig9-replay-lo": lambda: us("verify", 6) / us("verify", 1),
    "fig9-replay-hi": lambda: us("verify", 6) / us("verify", 1),
    "fig10-lo": lambda: us("snapshot", 4) / us("verify", 4),
    "fig10-hi": lambda: us("snapshot", 8) / us("verify", 8),
    "fi-b64-t4": lambda: us("snapshot", 4) / us("decode", 1),
    "fi-b64-t8": lambda: us("snapshot", 8) / us("decode", 1),
  }
  if id in ratio:
    notes: Mapping[str, str] = {
      "fig9-snapshot": "T = 6 between T = 4 and 16 that were measured",
      "fig9-replay-lo": "T = 6 between measured windows, over an output-only T = 1",
      "fig9-replay-hi": "T = 6 between measured windows, over an output-only T = 1",
      "fig10-lo": "by bytes it is 5",
      "fig10-hi": "by bytes it is 9; snapshots of T = 8 between T = 4 and 16 that were measured",
      "fi-b64-t8": "T = 8 between T = 4 and 16 that were measured",
    }
    why, note = "another device and batch", notes.get(id, "")
    return beside(row, ratio[id](), measured("step_time"), why, same=1.15, shape=2.0, note=note)
  if id.startswith("weaver"):
    return cannot("a verify that walks over the nodes one by one and keeps no state is not here")
  return cannot("the serial verify of that paper is not here")


def peer(row: Row) -> Answer:
  """The same kernel of another project, timed beside ours where its package could be carried."""
  _, package, name, T, batch = row["id"].split("-")
  same = only(stored("step_time"), kernel=name, window=int(T[1:]), batch=int(batch[1:]))
  for r in same:
    if (r.get("peer") or "").split(" ")[0] == package:
      why = "the same kernel by CUPTI, on inputs that no cache holds"
      return beside(row, r["time_us"], "measured on H200", why, same=1.1, shape=1.5)
  if any(part.startswith(package) for part in left("step_time")):
    raise Missing("step_time")
  return cannot(f"{package} was not on the GPU machine that the rows come from")


def vllm(row: Row) -> Answer:
  """Ring over snapshots by bytes: all recurrent layers, and weights of 4.5 bits."""
  _, _, batch, window = row["id"].split("-")
  B, T = int(batch[1:]), int(window[1:])
  model = "Qwen3.5-122B-A10B"
  total, active = WEIGHTS[model]
  shape = MODELS[model]
  p = cost.Point(T, max(1.0, 0.7 * T), ring=16 + T)
  moved = lambda c: shape.layers * B * c.bytes
  snapshots = moved(cost.snapshots(shape.layer, p, T))  # vLLM picks a column and copies nothing
  ring = moved(cost.STEPS["ring_open_loop"](shape.layer, p))
  weights = [x * 1e9 * 4.5 / 8 for x in (min(total, active * B * T), active)]
  low, high = ((w + snapshots) / (w + ring) for w in weights)
  ours = f"{low:.2f}–{high:.2f}"
  want = float(row["value"])
  if low * 0.9 <= want <= high * 1.1 and (want >= 1 or low < 1):  # a loss is no gain
    why = "bytes of states and of 4.5-bit weights alone, from every expert read to those of a token"
    return Answer(ours, "modelled", f"reproduced in shape: {why}")
  why = "states and weights alone bound it: launches, attention, KV rows and drafter are left out"
  return Answer(ours, "modelled", f"differs: {why}")


SERVING: Mapping[str, str] = {
  "replay-": "needs SGLang, Qwen3.5-27B with its DFlash drafter and two A100",
  "branch-": "what fits beside the weights depends on the engine's own accounting",
  "recompute-": "needs SGLang, Qwen3.5-397B-A17B-FP8 and four GB200",
  "delta-": "needs SGLang, Qwen3-Next-80B-A3B and four H20",
  "ring-122b": "needs SGLang, Qwen3.5-122B-A10B and four GPUs",
  "ring-tput": "needs SGLang, Qwen3.5-35B-A3B and an H20-3e",
  "ring-": "needs Qwen3.5-35B-A3B and AIME; what depends on the fold alone is in fold_ablation",
  "treewy-": "needs vLLM, the models and a B200",
  "dflash-": "needs Qwen3-8B and its trained drafter",
  "mtl-": "needs vLLM and Qwen3.5-4B with its drafters",
  "kvbuffer": "needs SGLang and Qwen3-Next",
  "vlm-": "needs a Mac",
}


def serving(row: Row) -> Answer:
  id = row["id"]
  if id == "replay-greedy":
    free = [r for r in stored("drift") if r["part"] == "free" and r["scheme"].startswith("replay")]
    if not free:
      raise Missing("drift")
    same = all(r["first_difference"] is None for r in free)
    which = ", ".join(sorted({r["scheme"].removeprefix("replay_") for r in free}))
    where = f"K = {which}, {free[0]['token']:,} tokens after one prompt of the bundled model"
    verdict = "reproduced in shape" if same else "differs"
    return Answer(str(int(same)), measured("drift"), f"{verdict}: {where}")
  if id == "ring-exact":
    exact = drift_report.claims(list(stored("drift")), "ring_open_loop")[2]
    return Answer(
      "the recurrence's errors, digit for digit", measured("drift"),
      f"reproduced in shape: AIME needs the 35B model; here {exact.evidence}",
    )  # fmt: skip
  if id == "replay-tail-slower":
    found = [tail.claim(list(stored("tail")), k, 4, "prompt_lookup") for k in (4, 8)]
    ours = [c for c in found if c]
    if not ours:
      raise Missing("tail")
    slower = all(c["slower"] > 1 for c in ours)
    said = ", ".join(f"{c['slower']:.2f} x the time, {c['blamed']:.0%} of it selects" for c in ours)
    verdict = "reproduced in shape" if slower else "differs"
    return Answer(str(int(slower)), measured("tail"), f"{verdict}: verify and commit, {said}")
  if id == "ring-concurrency":
    s = MODELS["Qwen3.5-122B-A10B"].layer
    p = cost.Point(4, 3.0, ring=32)
    value = 5 * cost.state(s, p) / (cost.state(s, p) + cost.rows(s, p, 32))
    why = "states alone, which bounds it; KV rows are the same under both"
    return beside(row, value, "modelled", why, shape=1.5)
  if id.startswith("vllm-spec"):
    return vllm(row)
  if id == "ring-drift-rec":
    return cannot("needs Qwen3.5-35B-A3B and AIME")
  return cannot(next(why for prefix, why in SERVING.items() if id.startswith(prefix)))
