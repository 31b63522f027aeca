"""Answers by arithmetic: memory from the schemes' types, traffic and flops from the cost model."""

from collections.abc import Mapping

from experiments.published_answer import Answer, cannot, derived
from experiments.published_memory import FOLLOWS, MIB, TRAFFIC, ring_layer, states, verify_cache
from experiments.record import Row

# A whole number that the source does not state, and that only the published value tells.
INFERRED: Mapping[str, str] = {
  "delta-alloc-old": "of 32 requests and a padding row, which are not stated",
  "atom-snapshots": "of 64 requests on a rank, which are not stated",
}


def alike(answer: Answer, why: str) -> Answer:
  """In shape at most: digits that come out, but of a setting that is ours to choose."""
  if answer.verdict != "reproduced":
    return answer
  return answer._replace(verdict=f"reproduced in shape: 1 x the published value; {why}")


def memory(row: Row) -> Answer:
  """Rows of FOLLOWS, and those that need a word."""
  id = row["id"]
  if id in INFERRED:
    return alike(derived(row, FOLLOWS[id](), 1.001, INFERRED[id]), INFERRED[id])
  if id in FOLLOWS:
    reasons = {
      "branch-cache-k16": "19.125; the published 19.12 is it cut off and not rounded",
    }
    return derived(row, FOLLOWS[id](), 1.001, reasons.get(id, ""))
  if id == "mem-k8":
    return derived(row, verify_cache(8), 1.01, "28.047 is 28.0; 28.1 is 28.05 rounded again")
  if id == "delta-old-request":
    value = 70 * 64 * 4 * 128 * 128 * 4 / MIB
    return derived(row, value, 1.0, "the product in the text, with its 4 bytes; 560 is 2 bytes")
  if id == "delta-alloc-new":
    layers = 36
    value = 33 * layers * 4 * (8 * 128 * 4) / 2**30
    why = "so for v; k has half the heads and decay no channels, unless both are repeated"
    return alike(derived(row, value, 1.0, why), why)
  if id == "ring-mem-new":
    slots = float(row["value"]) * 1e9 / (30 * ring_layer(16, "exact"))
    return cannot(
      f"how many slots there are is not stated; at 388 KiB a slot and layer it is {slots:.0f} of "
      "them, and would be some number whatever was published"
    )
  if id == "treewy-tree":
    per = states("Qwen3.5-397B-A17B", 1, keep=1) / 2 / 2**30
    why = "14 bf16 states; with the anchor's, 15, it is 1.32"
    return alike(derived(row, 14 * per, 1.05, why), why)
  raise KeyError(id)


TRAFFIC_WHY: Mapping[str, str] = {
  "bytes-commit": "the source rounds its bytes first",
  "bytes-absorb": "the source rounds its bytes first",
  "bytes-ring": "the source rounds its bytes first, and has 16 rows of history at every step",
  "flops-step": "8 d^2 a token counts the decay twice; a third-party count has 1.84 as well",
  "flops-commit": "the decay of S is counted here",
}


def traffic(row: Row) -> Answer:
  return derived(row, TRAFFIC[row["id"]](), 1.2, TRAFFIC_WHY.get(row["id"], ""))
