"""Answers about kernels: measured on an H200, those of other projects beside ours."""

from collections.abc import Callable, Mapping

import numpy as np

from experiments import roofline
from experiments.figures import published
from experiments.published_answer import (
  Answer,
  Missing,
  beside,
  cannot,
  left,
  measured,
  only,
  stored,
  within,
)
from experiments.record import Row


def kernels(name: str, T: int, batch: int, dtype: str = "float32") -> list[Row]:
  where = {"kernel": name, "window": T, "batch": batch, "state_dtype": dtype}
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
    why = (
      "an output-only Mosaic kernel, not a recurrent one on an H20-3e; share of the 4.8 TB/s that "
      "the H200 is said to have"
    )
    return beside(row, share, measured("step_time"), why, same=None, shape=1.6)
  if id == "snapshot-writes":
    value = kernel("snapshot", 4, 16)["time_us"] / kernel("verify", 4, 16)["time_us"]
    why = (
      "another device, and batch 16 for 8; bytes make it 5; without writes GB10 reads 16.8 MB in "
      "42.2 us, more than its memory gives"
    )
    return beside(row, value, measured("step_time"), why, same=None, shape=2.0)
  us = lambda name, T: between(name, T, 64)
  ratio: Mapping[str, Callable[[], float]] = {
    "fig9-snapshot": lambda: us("snapshot", 6) / us("decode", 1),
    "fig9-replay": lambda: us("verify", 6) / us("verify", 1),
    "fig10-lo": lambda: us("snapshot", 4) / us("verify", 4),
    "fig10-hi": lambda: us("snapshot", 8) / us("verify", 8),
    "fi-b64-t4": lambda: us("snapshot", 4) / us("decode", 1),
    "fi-b64-t8": lambda: us("snapshot", 8) / us("decode", 1),
  }
  stem = id.removesuffix("-lo").removesuffix("-hi") if id.startswith("fig9") else id
  if stem in ratio:
    notes: Mapping[str, str] = {
      "fig9-snapshot": "T = 6 between T = 4 and 16 that were measured",
      "fig9-replay": "T = 6 between measured windows, over an output-only T = 1",
      "fig10-lo": "by bytes it is 5",
      "fig10-hi": "by bytes it is 9; snapshots of T = 8 between T = 4 and 16 that were measured",
      "fi-b64-t8": "T = 8 between T = 4 and 16 that were measured",
    }
    here = "an H200, 32 value heads, fp32 states and batch 64 here"
    fig = "another GPU and model and batch 128 there"
    where = "a B200, 64 heads and bf16 states there" if id.startswith("fi-") else fig
    why = "; ".join(x for x in (notes.get(stem, ""), here, where) if x)
    value, how = ratio[stem](), measured("step_time")
    if stem == id:
      return beside(row, value, how, why, same=None, shape=2.0)
    told = {r["id"]: float(r["value"]) for r in published("bandwidth")}
    return within(told[f"{stem}-lo"], told[f"{stem}-hi"], value, how, why, same=None, shape=2.0)
  if id.startswith("weaver"):
    return weaver(row)
  if id == "bole-state":
    return materialised(row)
  raise KeyError(id)


def weaver(row: Row) -> Answer:
  """A serial chain that keeps no state: SGLang's kernel, which the planning study timed."""
  T = int(row["id"].removeprefix("weaver-t"))
  why = "a verify of GDN that walks over its nodes one by one and keeps no state is not here"
  told = {r["id"]: float(r["value"]) for r in published("kernel time")}
  serial = {n: told.get(f"us-sglang-verify_ring_rows-t{T}-b{n}") for n in (16, 64, 256)}
  pairs = [
    f"{us / kernel('verify', T, n)['time_us']:.1f} x at batch {n}"
    for n, us in serial.items() if us and kernels("verify", T, n)
  ]  # fmt: skip
  if pairs:
    why += f"; SGLang's, as the planning study timed it, over ours: {', '.join(pairs)}"
  elif T > 64:
    why += ", and windows here have at most 64 nodes"
  return cannot(why)


def materialised(row: Row) -> Answer:
  """Of the bytes of a serial verify, those of the states that it writes."""
  share = lambda T: 100 * T / (T + 1)
  why = (
    "where memory alone bounds it, for 5 to 33 nodes; the 86 % that the same source has on a GB10 "
    "are that, so on an A100 the walk over the nodes takes the time and not the bytes"
  )
  return Answer(f"{share(5):.0f}–{share(33):.0f} %", "modelled", f"differs: {why}")


# Our kernel that does what another project's of this name does.
OURS: Mapping[str, str] = {
  "verify": "verify", "verify_tf32": "verify", "verify_ieee": "verify", "snapshot": "snapshot",
  "step_ring": "step_ring", "step_ring_flush": "step_ring_flush", "fold": "fold",
}  # fmt: skip


def peer(row: Row) -> Answer:
  """The same kernel of another project, timed beside ours where its package could be carried."""
  _, package, name, T, batch = row["id"].split("-")
  same = only(stored("step_time"), kernel=name, window=int(T[1:]), batch=int(batch[1:]))
  of_package = lambda said: (said or "").split(" ")[0] == package
  for r in same:
    if of_package(r.get("peer")):
      why = "the same kernel by CUPTI, on inputs that no cache holds"
      return beside(row, r["time_us"], "measured on H200", why, same=1.1, shape=1.5)
  there = any(of_package(r.get("peer")) for r in stored("step_time"))
  if there and any(map(of_package, left("step_time"))):
    raise Missing("step_time")
  why = f"{package} was not on the GPU machine that the rows come from"
  own = OURS.get(name)
  dtype = "float32" if "fp32" in row["setting"] else "bfloat16"
  ours = kernels(own, int(T[1:]), int(batch[1:]), dtype) if own else []
  if ours:
    why += f"; ours, {own} on the same shape, takes {ours[0]['time_us']:.1f} us"
  return cannot(why)
