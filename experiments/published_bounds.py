"""What bytes alone allow a served model: steps of states and weights, ratios between schemes.

An engine does more than recurrent layers and weights. So a ratio here is what a scheme can gain at
most, and every answer says what it leaves out.
"""

from typing import NamedTuple

from experiments import cost
from experiments.cost import Point
from experiments.models import MODELS, WEIGHTS
from experiments.published_answer import Answer, cannot, short

ENGINE = "attention, KV rows, drafter, prefill and the engine are left out"
Range = tuple[float, float]
ROOM = (
  1.1  # a ratio of times that is further from what bytes allow differs; a gain below it is none
)
LOST = 0.99  # a ratio of two runs below it is a loss
SHARP = 3  # a range whose gains are further apart would pass whatever was published


class Served(NamedTuple):
  """`requests` at once, `accepted` of windows of `window` nodes; weights of `bits`; states of
  `state` bytes an element. Ranks share the work evenly, so their number does not change a ratio."""

  model: str
  requests: int
  window: int
  accepted: float
  bits: Range = (8.0, 16.0)
  state: int = 4
  ring: int = 16


def step_bytes(s: Served, scheme: str) -> Range:
  """Of states and weights in one step, least and most: weights of one token, or of each anew.

  `picked` are snapshots of which a commit picks one by its index, as vLLM does, and copies nothing.
  """
  layers, layer = MODELS[s.model]
  p = Point(s.window, s.accepted, ring=s.ring, state=s.state)
  one = cost.snapshots(layer, p, s.window) if scheme == "picked" else cost.STEPS[scheme](layer, p)
  total, active = WEIGHTS[s.model]
  read = (active * s.bits[0], min(total, active * s.requests * s.window) * s.bits[1])
  low, high = (1e9 * w / 8 + s.requests * layers * one.bytes for w in read)
  return low, high


def gains(s: Served, old: str, new: str) -> Range:
  """How many times as fast a step is, by bytes: where all weights are read anew, where few are."""
  a, b = (step_bytes(s, scheme) for scheme in (old, new))
  return a[1] / b[1], a[0] / b[0]


def said(r: Range) -> str:
  return f"{r[0]:.2f}–{r[1]:.2f}"


def assumed(s: Served) -> str:
  return f"{s.accepted:.2g} of {s.window} accepted, which is assumed"


def wide(found: Range) -> bool:
  """Whether the range would pass whatever was published."""
  low, high = found
  return max((max(high, ROOM) - 1) / (max(low, ROOM) - 1), high / low) > SHARP


ENDS = "bytes of states and weights alone, from every expert read to those of one token"


def bounded(found: Range, want: float, ours: str, *notes: str, ends: str = ENDS) -> Answer:
  """In shape where the published ratio lies in what bytes allow, if they allow little else. Above
  it differs, and so does a loss, which is never what they say; a gain below contradicts nothing."""
  low, high = found
  near = min(max(want, low), high)
  more = "; ".join(n for n in (*notes, ENGINE) if n)
  lost, why = want < LOST and low >= 1, f"states and weights alone make it {said(found)} x"
  if want / near > ROOM or lost:
    return Answer(ours, "modelled", f"differs: {why}, there {want:.2f} x; {more}")
  if near / want > ROOM:
    return cannot(f"{why} at most, there it is {want:.2f} x, which contradicts nothing; {more}")
  if wide(found):
    why = f"the model is no sharper than {said(found)} x, where {want:.2f} x was published"
    return cannot(f"{why}; {ends}; {more}")
  factor = f"{short(near / want)} x the published ratio"
  return Answer(ours, "modelled", f"reproduced in shape: {factor}; {ends}; {more}")
