"""Answers about SGLang PR 28010: partial caches of Qwen3.5-27B under a block drafter, on two A100.

Slots, rows of the KV cache and throughput, from the bytes of our schemes. What the engine had left
beside the weights is not stated: what one published number implies is used to predict another.
"""

from functools import cache

from experiments import cost, roofline, tail
from experiments.cost import Point
from experiments.devices import DEVICES
from experiments.figures import published
from experiments.models import AROUND, MODELS, WEIGHTS
from experiments.plan_checks import envelope
from experiments.published_answer import (
  Answer,
  Missing,
  beside,
  cannot,
  measured,
  only,
  short,
  stored,
)
from experiments.published_bounds import bounded, said
from experiments.published_memory import GIB, states
from experiments.record import Row

MODEL, WINDOW, ACCEPTED, RANKS = "Qwen3.5-27B", 16, 4.2, 2
PER_REQUEST, REQUESTS = 5, 16
SLOTS = {0: 190, 1: 160, 16: 48}  # as published


@cache
def kept(states_kept: int, tails: int) -> int:
  """Bytes on a rank of states and conv tails."""
  layers, layer = MODELS[MODEL]
  tail = layers * layer.shard(RANKS).conv_channels * (layer.taps - 1) * 2
  return states(MODEL, WINDOW, keep=states_kept, degree=RANKS) + tails * tail


def taken(slots: int, keep: int) -> int:
  """Bytes on a rank: the slots, and scratch of all requests that they admit and a spare one."""
  slot, scratch = kept(1, 1), kept(keep, WINDOW)
  return slots * slot + (running(slots) + 1) * scratch


def running(slots: int) -> int:
  return min(slots // PER_REQUEST, REQUESTS)


def slots_in(room: int, keep: int) -> int:
  """The most slots that fit with their scratch."""
  return next(n for n in range(4096, -1, -1) if taken(n, keep) <= room)


def slots(row: Row) -> Answer:
  """K = 0 and 1 from the memory that K = 16 implies, and K = 16 from that of K = 0."""
  keep = int(row["id"].rsplit("k", 1)[1])
  known = 0 if keep == 16 else 16
  room = taken(SLOTS[known], known)
  why = f"in the {room / GIB:.1f} GiB that the {SLOTS[known]} slots of K = {known} imply"
  return beside(row, slots_in(room, keep), "derived by arithmetic", why, same=1.05, shape=1.3)


def capacity(row: Row) -> Answer:
  """KV tokens that the freed scratch holds, on top of those that K = 16 had."""
  had = 276_228
  a = AROUND[MODEL]
  token = a.attention * 2 * a.kv_heads // RANKS * a.head_dim * 2
  freed = (REQUESTS + 1) * states(MODEL, WINDOW, keep=16, degree=RANKS)
  why = (
    f"{freed / GIB:.2f} GiB of scratch hold so many more rows of {token // 1024} KiB; those of the "
    "drafter, which every token has as well, are left out"
  )
  return beside(row, 1 + freed / token / had, "derived by arithmetic", why, same=1.05, shape=1.3)


def rate(keep: int, requests: int) -> tuple[float, float]:
  """Tokens a second at most: recurrent layers and bf16 weights, each rank its half."""
  layers, layer = MODELS[MODEL]
  at_once = min(requests, running(slots_in(taken(SLOTS[16], 16), keep)))
  scheme = "snapshot" if keep == 16 else f"replay_{keep}"
  d, e = DEVICES["A100 80GB"], envelope(scheme)
  c = cost.STEPS[scheme](layer.shard(RANKS), Point(WINDOW, ACCEPTED))
  total, active = WEIGHTS[MODEL]
  half = total / RANKS, active / RANKS
  parts = (
    roofline.time_range(c, at_once, layers, d, e),
    roofline.weights_range(half, at_once * WINDOW, (16.0, 16.0), d, e),
  )
  low, high = (a + b for a, b in zip(*parts, strict=True))
  return 1e6 * at_once * ACCEPTED / high, 1e6 * at_once * ACCEPTED / low


def on_h200(keep: int, requests: int) -> str:
  """The same ratio by measured layers and weights of one rank of an H200; nothing without rows."""
  try:
    rows = only(stored("concurrency"), model=MODEL, concurrency=requests)
  except Missing:
    return ""
  named = lambda r: r["scheme"] in ("snapshot", f"replay_{keep}")
  at: dict[int, float] = {}
  for budget in ("common", "published"):  # the published one where there are rows of it
    at |= {r["keep"]: r["tokens_per_s"] for r in only(tuple(rows), budget=budget) if named(r)}
  return f", {at[keep] / at[16]:.2f} x on a rank of an H200" if {keep, 16} <= set(at) else ""


def throughput(row: Row) -> Answer:
  """A bound for K = 16; of the others what counts is their ratio to it."""
  _, which, k = row["id"].split("-")
  requests, keep = int(which.removeprefix("tput")), int(k[1:])
  low, high = rate(keep, requests)
  ours = f"at most {low:,.0f}–{high:,.0f}"
  told = {
    r["id"]: float(r["value"]) for r in published("throughput") if r["source"] == row["source"]
  }
  base = told[f"replay-{which}-k16"]
  length = f"{ACCEPTED} of {WINDOW} accepted, as published"
  if keep == 16:
    why = f"products, weights and states alone allow {short(low / base)} to {short(high / base)} x"
    bound = f"{why}; {length}; drafter, prefill, KV rows and engine are left out"
    return Answer(ours, "modelled", f"differs: {bound}") if base > high else cannot(bound)
  a, b = rate(16, requests)
  ends = min(low / a, high / b), max(low / a, high / b)
  want = float(row["value"]) / base
  over = f"over K = 16 it is {said(ends)} x here{on_h200(keep, requests)}, {want:.2f} x there"
  return bounded(ends, want, ours, length, ends=over)


def accept_length(row: Row) -> Answer:
  """What is claimed is that it does not depend on K."""
  free = [r for r in stored("drift") if r["part"] == "free"]
  some = {r["scheme"]: r["accept_length"] for r in free if r["scheme"].startswith("replay")}
  whole = [r["accept_length"] for r in free if r["scheme"] == "snapshot"]
  if not some or not whole:
    raise Missing("drift")
  same = set(some.values()) == set(whole)
  which = ", ".join(sorted(x.removeprefix("replay_") for x in some))
  verdict = "reproduced in shape" if same else "differs"
  factor = f"{short(whole[0] / float(row['value']))} x the published value"
  law = f"{factor}, and the same with K = {which} and all states"
  why = "how long it is, drafter and text decide"
  return Answer(short(whole[0]), measured("drift"), f"{verdict}: {law}; {why}")


def greedy(row: Row) -> Answer:
  free = [r for r in stored("drift") if r["part"] == "free" and r["scheme"].startswith("replay")]
  if not free:
    raise Missing("drift")
  same = all(r["first_difference"] is None for r in free)
  which = ", ".join(sorted({r["scheme"].removeprefix("replay_") for r in free}))
  where = f"K = {which}, {free[0]['token']:,} tokens after one prompt of the bundled model"
  verdict = "reproduced in shape" if same else "differs"
  law = "the same law" if same else "another text"
  return Answer(str(int(same)), measured("drift"), f"{verdict}: {law}; {where}")


def slower_tail(row: Row) -> Answer:
  """That it is slower is what is judged; of the cause it is said how much of the commit it is."""
  rows, drafts = list(stored("tail")), ("block", "prompt_lookup", "geometric_4.2")
  ours = [c for accepts in drafts for k in (4, 8) if (c := tail.claim(rows, k, 4, accepts))]
  if not ours:
    raise Missing("tail")
  slower = all(c["slower"] > 1 for c in ours)
  law = "reproduced in shape: the same law" if slower else "differs: no slower"
  least, most = (f(c["slower"] for c in ours) for f in (min, max))
  few, many = (f(c["blamed"] for c in ours) for f in (min, max))
  times = f"with the accept lengths of three drafts verify and commit take {least:.2f}–{most:.2f} x"
  cause = f"the cause that was named, selection, is {few:.0%}–{many:.0%} of the commit"
  return Answer(str(int(slower)), measured("tail"), f"{law}; {times}; {cause}")


def dflash(row: Row) -> Answer:
  """KeyError: a row that is not of this source."""
  id = row["id"]
  if id.startswith("replay-slots"):
    return slots(row)
  if id.startswith("replay-tput"):
    return throughput(row)
  return {
    "branch-capacity-k0": capacity, "replay-accept": accept_length, "replay-greedy": greedy,
    "replay-tail-slower": slower_tail,
  }[id](row)  # fmt: skip
