"""What a plan's times say of measured rows that are no input of theirs: whole steps, served models.

Of each measured setting: which scheme would have been picked, by rows of single kernels or by bytes
alone, which was the fastest, and how many times as long the pick took.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from commit_schemes.footprint import LayerShape
from experiments import cost, kernel_time, provenance, roofline, step_args
from experiments.cost import Point
from experiments.devices import DEVICES
from experiments.models import MODELS, WEIGHTS
from experiments.record import Row, read_rows

BY = ("kernels", "bytes")


@cache
def envelope(scheme: str) -> roofline.Envelope:
  return roofline.envelope(roofline.measured(), scheme)


class Check(NamedTuple):
  """A measured choice between two schemes, and the predicted one."""

  what: str
  predicted: float
  measured: float


def middle(ends: tuple[float, float]) -> float:
  return (ends[0] * ends[1]) ** 0.5


def step_us(
  scheme: str, p: Point, batch: int, layers: int, layer: LayerShape, device: str, by: str = BY[0]
) -> float:
  """The middle of the predicted range: by measured kernels, or by bytes and what kernels span."""
  if by == BY[0]:
    return middle(kernel_time.step_range(scheme, layer, p, batch, layers, device))
  c, d = cost.STEPS[scheme](layer, p), DEVICES[device.removeprefix("NVIDIA ")]
  return middle(roofline.time_range(c, batch, layers, d, envelope(scheme)))


def whole_us(r: Row, by: str = BY[0]) -> float:
  """The prediction of a measured whole step of one layer, over full flush cycles."""
  T = r["window"]
  p = Point(T, step_args.accepted(T), ring=4 * T, row=4)
  return step_us(r["scheme"], p, r["batch"], 1, LayerShape(16, 32), r["device"], by)


def validate(rows: list[Row]) -> list[Check]:
  """Measured whole steps of a layer: how many times as fast as snapshot."""
  snapshot = {(r["window"], r["batch"]): r for r in rows if r["scheme"] == "snapshot"}
  found = []
  for r in rows:
    T, batch = key = r["window"], r["batch"]
    if r["scheme"] != "snapshot" and key in snapshot:
      base = snapshot[key]
      what = f"{r['scheme']} over snapshot, T = {T}, batch {batch}"
      found.append(Check(what, whole_us(base) / whole_us(r), base["time_us"] / r["time_us"]))
  return found


def admitted(r: Row) -> int:
  """Requests that run at once."""
  return r["concurrency"] if (n := r.get("admitted")) is None else n


def serving_us(r: Row, by: str = BY[0]) -> float:
  """The middle of a predicted step of a served model: a rank's recurrent layers and bf16 weights.

  A mixture is the dense MLP of its active size, as `concurrency` times it.
  """
  layers, layer = MODELS[r["model"]]
  degree, requests = r.get("degree") or 1, admitted(r)
  p = Point(r["window"], r["accept_length"], ring=4 * r["window"])
  d = DEVICES[r["device"].removeprefix("NVIDIA ")]
  active = WEIGHTS[r["model"]][1] / degree
  e = kernel_time.span()
  read = roofline.weights_range((active, active), requests * p.window, (16.0, 16.0), d, e)
  states = step_us(r["scheme"], p, requests, layers, layer.shard(degree), r["device"], by)
  return states + middle(read)


def rate(r: Row, by: str = BY[0]) -> float:
  """The prediction of a measured throughput."""
  return 1e6 * admitted(r) * r["accept_length"] / serving_us(r, by)


def settings(rows: list[Row]) -> dict[tuple, list[Row]]:
  """Serving rows that differ in their scheme alone; those that admit nobody are left out.

  ValueError: a column is missing.
  """
  need = ("model", "device", "scheme", "window", "concurrency", "accept_length", "tokens_per_s")
  if rows and not set(need) <= set(rows[0]):
    raise ValueError(f"columns {sorted(set(need) - set(rows[0]))} are missing, needed: {need}")
  groups: dict[tuple, list[Row]] = {}
  for r in rows:
    if admitted(r) and r["model"] in MODELS and r["scheme"] in cost.STEPS:
      keys = ("model", "device", "window", "concurrency", "budget")
      groups.setdefault(tuple(r.get(k) for k in keys), []).append(r)
  return groups


def validate_serving(rows: list[Row]) -> list[Check]:
  """Throughput of each scheme over the first one's, by concurrency, beside measured serving rows.

  Columns that it reads: model, device, scheme, window, concurrency, accept_length, tokens_per_s;
  and where they are there: admitted, degree, budget. ValueError: one of the first is missing.
  """
  found = []
  for (model, _, T, n, budget), (first, *others) in settings(rows).items():
    for r in others:
      of = "" if budget in (None, "common") else f", {budget} budget"
      what = f"{r['scheme']} over {first['scheme']}, {model}, T = {T}, concurrency {n}{of}"
      found.append(Check(what, rate(r) / rate(first), r["tokens_per_s"] / first["tokens_per_s"]))
  return found


def served() -> list[Row]:
  """Committed rows of `concurrency`, if there are any."""
  path = provenance.RESULTS / "concurrency" / "rows.csv"
  return read_rows(path) if path.exists() else []


def picks() -> Iterator[Row]:
  """Of every measured setting the scheme that is predicted to be the fastest, and the one that was.

  `regret` is the measured time of the pick over that of the best: 1 where they agree.
  """
  steps: dict[tuple, list[Row]] = {}
  for r in roofline.measured(whole=True):
    steps.setdefault((None, r["device"], r["window"], r["batch"], None), []).append(r)
  every = (
    ("whole step", steps, lambda r, by: 1 / whole_us(r, by), lambda r: 1 / r["time_us"]),
    ("served", settings(served()), rate, lambda r: r["tokens_per_s"]),
  )
  for part, groups, predicted, measured in every:
    for (model, device, T, n, budget), rows in groups.items():
      best = max(rows, key=measured)
      for by in BY:
        pick = max(rows, key=lambda r: predicted(r, by))
        yield {
          "part": part, "model": model, "device": device, "concurrency": n, "window": T,
          "budget": budget, "by": by, "scheme": pick["scheme"], "best": best["scheme"],
          "regret": round(measured(best) / measured(pick), 4),
        }  # fmt: skip


def spans() -> Iterator[str]:
  """By scheme, how many times the measured gain over snapshots the predicted one is."""
  of = {"a layer's step": validate(roofline.measured(whole=True))}
  of["served"] = [c for c in validate_serving(served()) if "budget" not in c.what]
  for what, checks in of.items():
    off: dict[str, list[float]] = {}
    for c in checks:
      off.setdefault(c.what.split()[0], []).append(c.predicted / c.measured)
    each = [f"{scheme} {min(x):.2f} to {max(x):.2f}" for scheme, x in off.items()]
    yield f"{what}, gain over snapshots, predicted over measured: {', '.join(each)}"
