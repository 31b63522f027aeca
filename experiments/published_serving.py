"""Answers about engines that are not here: what bytes allow of their ratios, and why no more."""

from collections.abc import Callable, Mapping

from experiments import cost, drift_report, plan_checks
from experiments import fold_ablation_report as folds
from experiments.figures import published
from experiments.models import MODELS
from experiments.published_answer import Answer, Missing, beside, cannot, short, stored
from experiments.published_bounds import ENGINE, Served, assumed, bounded, gains, said
from experiments.published_dflash import dflash
from experiments.record import Row
from experiments.roofline import measured as kernels


def vllm(row: Row) -> Answer:
  """Ring over snapshots, NVFP4 weights with their scales."""
  _, _, batch, window = row["id"].split("-")
  T = int(window[1:])
  s = Served(
    "Qwen3.5-122B-A10B", int(batch[1:]), T, max(1.0, 0.7 * T), bits=(4.5, 4.5), ring=16 + T
  )
  found = gains(s, "picked", "ring_open_loop")
  return bounded(found, float(row["value"]), said(found), assumed(s))


def concurrency(row: Row) -> Answer:
  s = MODELS["Qwen3.5-122B-A10B"].layer
  p = cost.Point(4, 3.0, ring=32)
  value = 5 * cost.state(s, p) / (cost.state(s, p) + cost.rows(s, p, 32))
  why = "states alone, whatever is accepted, which bounds it; KV rows are the same under both"
  return beside(row, value, "modelled", why, same=None, shape=1.5)


FEWEST = 8  # requests of the published series


def ring_gain(row: Row) -> Answer:
  """Percent more throughput, or less time a token, of the merged ring over snapshots."""
  n = int("".join(x for x in row["id"].rsplit("-", 1)[1] if x.isdigit()))
  series = row["id"].removesuffix(str(n))
  s = Served("Qwen3.5-122B-A10B", n, 4, 2.8)
  percent = float(row["value"])
  cut = "tpot" in series
  want = 1 / (1 - percent / 100) if cut else 1 + percent / 100

  def ends(n: int) -> list[float]:
    found = gains(s._replace(requests=n), "snapshot", "ring_exact")
    return [100 * (1 - 1 / x if cut else x - 1) for x in found]

  shown = lambda ends: "{:.0f}–{:.0f} %".format(*ends)
  first, ours = ends(FEWEST), ends(n)
  before = told(f"{series}{FEWEST}")
  if all((b - a) * (percent - before) < 0 for a, b in zip(first, ours, strict=True)):
    law = (
      f"from {FEWEST} to {n} requests bytes let it grow, {shown(first)} to {shown(ours)}, and "
      f"there it falls, {before:.0f} to {percent:.0f} %"
    )
    return Answer(shown(ours), "modelled", f"differs: {law}; {assumed(s)}; {ENGINE}")
  return bounded(gains(s, "snapshot", "ring_exact"), want, shown(ours), assumed(s))


def told(id: str) -> float:
  rows = [r for group in ("throughput", "latency") for r in published(group)]
  return next(float(r["value"]) for r in rows if r["id"] == id)


def pair(s: Served, old: str, new: str, ids: tuple[str, str], faster: bool = True) -> Answer:
  """Two absolute values of which we can have the ratio: the second's row says it."""
  found = gains(s, old, new)
  a, b = map(told, ids)
  want = b / a if faster else a / b
  note = f"of {s.requests} requests" if s.requests > 1 else "of one request"
  return bounded(found, want, f"{said(found)} x as fast", note, assumed(s))


def recompute(row: Row) -> Answer:
  """Final-state recompute against snapshots: at no concurrency more bytes."""
  s = Served("Qwen3.5-397B-A17B", 1, 4, 2.8, bits=(8.0, 8.0))
  of = lambda n: gains(s._replace(requests=n), "snapshot", "replay_0")
  ends = of(1)[0], of(1024)[1]
  want = told("recompute-tput-none") / told("recompute-tput-full")
  note = "how many requests is not stated, from 1 to 1,024; 45 launches a step of its recovery"
  return bounded(ends, want, f"{said(ends)} x of full", note, assumed(s))


def tree_wy(row: Row) -> Answer:
  """TreeWY over vLLM's snapshots, bf16 states: at one request, and at 256 that all fit."""
  id = row["id"]
  model = "Qwen3.5-397B-A17B" if "397b" in id else "Qwen3.5-35B-A3B"
  requests = 1 if "-c1-" in id else 256
  s = Served(model, requests, 4, 2.8, state=2)
  found = gains(s, "picked", "tree_wy")
  note = "more where memory admits fewer requests with snapshots" if requests > 1 else ""
  if requests == 1:
    whole = [c for c in plan_checks.validate(kernels(whole=True)) if c.what.startswith("tree_wy")]
    here = [c.measured for c in whole if c.what.endswith("T = 16, batch 1")]
    note = f"a layer's whole step on an H200, T = 16: {here[0]:.2f} x" if here else ""
  return bounded(found, float(row["value"]), said(found), note, assumed(s))


def states_like(row: Row, scheme: str, claim: str) -> Answer:
  """An accuracy that does not suffer, of which ours has the states and a text, and no task."""
  lines = drift_report.curves(list(stored("drift")), "state_error")
  T = drift_report.base_window(list(stored("drift")))
  both = [lines.get((x, "none", T)) for x in (scheme, "snapshot")]
  free = [r for r in stored("drift") if r["part"] == "free" and r["scheme"] == scheme]
  if None in both or not free:
    raise Missing("drift")
  late = [drift_report.late(x) for x in both if x is not None]
  first, tokens = free[0]["first_difference"], free[0]["token"]
  text = "plain decoding's" if first is None else f"another from token {first} on"
  return cannot(
    f"the accuracy of a model that is not here; {claim}; of the bundled model the state error is "
    f"{late[0]:.1e}, snapshots' {late[1]:.1e}, and text of {tokens:,} tokens is {text}"
  )


def questions(row: Row, base: str, count: int | None) -> str:
  """How far two accuracies are apart, where that is known in questions and standard errors."""
  rows = {r["id"]: float(r["value"]) for r in published("quality")}
  a, b = rows[base], float(row["value"])
  if count is None:
    return f"there {a} without it; of how many questions is not stated"
  off = abs(a - b) / (2 * a * (1 - a) / count) ** 0.5
  both = " and ".join(f"{x * count:,.0f}" for x in (a, b))
  return f"there {both} of {count:,} questions, {off:.1f} standard errors apart"


def degenerate(row: Row) -> Answer:
  """What the fold has to do with it, from the fold ablation."""
  found = folds.curves(list(stored("fold_ablation")))
  late = lambda **where: max(map(folds.late, folds.some(found, **where).values()))
  records = late(fold="open_loop", records="bf16", checkpoint="fp32", dots="tf32", phantom=False)
  checkpoint = late(fold="open_loop", records="bf16", checkpoint="bf16", phantom=False)
  fault = late(phantom=True)
  return cannot(
    "AIME needs the 35B model. What its first revision did to states is in fold_ablation: bf16 "
    f"records and tf32 dots {short(records)}, a bf16 checkpoint {short(checkpoint)}, its second "
    f"fault, a cursor that plain decoding advances too, {short(fault)}"
  )


def kv_buffer(row: Row) -> Answer:
  """It hangs on a batch that is not stated."""
  s = Served("Qwen3-Next-80B-A3B", 1, 4, 2.8)
  gain = lambda n: gains(s._replace(requests=n), "snapshot", "ring_open_loop")[1]
  cut = lambda n: 100 * (1 - 1 / gain(n))
  return cannot(
    f"the batch is not stated, on which it hangs: bytes allow a cut of at most {cut(1):.0f} % at "
    f"one request, {cut(16):.0f} % at 16, {cut(256):.0f} % at 256; {assumed(s)}"
  )


def missing(what: str) -> Callable[[Row], Answer]:
  return lambda row: cannot(what)


RECOMPUTED, SCORED = "recompute-gsm8k-full", 1311  # of which both published values are fractions
ANSWERS: Mapping[str, Callable[[Row], Answer]] = {
  "replay-": dflash,
  "branch-": dflash,
  "vllm-spec": vllm,
  "ring-concurrency": concurrency,
  "ring-122b": ring_gain,
  "ring-tput-new": lambda row: pair(
    Served("Qwen3.5-35B-A3B", 32, 4, 2.8), "snapshot", "ring_exact",
    ("ring-tput-old", "ring-tput-new"),
  ),
  "delta-tpot-new": lambda row: pair(
    Served("Qwen3-Next-80B-A3B", 1, 4, 2.8), "snapshot", "delta_cache",
    ("delta-tpot-old", "delta-tpot-new"), faster=False,
  ),
  "recompute-tput-none": recompute,
  "recompute-gsm8k-none": lambda row: states_like(
    row, "replay_0", questions(row, RECOMPUTED, SCORED)
  ),
  "delta-gsm8k-new": lambda row: states_like(
    row, "delta_cache", questions(row, "delta-gsm8k-old", None)
  ),
  "treewy-": tree_wy,
  "ring-drift-open": degenerate,
  "kvbuffer": kv_buffer,
  "ring-tput-old": missing(
    "tokens a second hang on accept lengths and prompts that are not stated; the ratio to the ring "
    "is under ring-tput-new"
  ),
  "delta-tpot-old": missing(
    "time a token hangs on an accept length that is not stated; the ratio is under delta-tpot-new"
  ),
  "recompute-tput-full": missing(
    "tokens a second of an engine at a concurrency that is not stated; the ratio is under "
    "recompute-tput-none"
  ),
  "recompute-gsm8k-full": missing(
    "the accuracy of a 397B model with snapshots, which says nothing of a scheme by itself; what "
    "recompute changes is under recompute-gsm8k-none"
  ),
  "delta-gsm8k-old": missing(
    "the accuracy of an 80B model with snapshots, which says nothing of a scheme by itself; what "
    "the delta cache changes is under delta-gsm8k-new"
  ),
  "ring-drift-rec": missing(
    "the accuracy of a 35B model under the plain recurrence, which by itself says nothing of any "
    "scheme"
  ),
  "dflash-": missing(
    "Qwen3-8B is no hybrid, so no scheme here has a state of it; of a hybrid model and its "
    "drafter, where both are at hand, `run accept_length --model --drafter` measures the same"
  ),
  "mtl-": missing(
    "accept lengths and numbers of nodes of tree and chain, which decide it, are not stated; a "
    "window of a tree takes the bytes of a chain of as many nodes"
  ),
  "vlm-": missing("neither model nor Mac nor window is stated, so bytes give no share of its step"),
}  # fmt: skip


def serving(row: Row) -> Answer:
  id = row["id"]
  if id == "ring-exact":
    exact = drift_report.claims(list(stored("drift")), "ring_open_loop")[2]
    return cannot(f"AIME needs the 35B model; of the bundled one {exact.evidence}")
  return next(f for prefix, f in ANSWERS.items() if id.startswith(prefix))(row)
