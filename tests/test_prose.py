"""Numbers that the docs quote are those of the committed rows, to the digits that are printed.

A claim is the words around numbers, each of them `{}`, and what the rows say. A number of a passage
that no claim has is one of its `given`, what was set and not measured; None is any.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import (
  amplification_report,
  concurrency_report,
  cycles_report,
  fold_ablation_report,
  provenance,
  published_streams,
  remeasure,
  roofline_report,
  tail,
)
from experiments.record import Row, read_rows

DOCS = Path(__file__).parents[1] / "docs"
NUMBER = r"(?<![A-Za-z\d.])(\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?)"
Claim = tuple[Any, ...]


@cache
def rows_of(name: str) -> list[Row]:
  return read_rows(provenance.RESULTS / name / "rows.csv")


def passage(page: str, start: str, end: str) -> str:
  """From `start` up to `end`, lines joined."""
  text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
  return text[text.index(start) : text.index(end, text.index(start) + len(start))]


def rounded(printed: str, value: float) -> bool:
  """Whether `value` is within half a unit of the last digit."""
  number = Decimal(printed.replace(",", ""))
  half = Decimal(5).scaleb(int(number.as_tuple().exponent) - 1)
  return abs(Decimal(repr(float(value))) - number) <= half


def wrong(text: str, claims: Iterable[Claim], given: str | None) -> list[str]:
  """What is not said, what is not so, and numbers that are neither claimed nor given."""
  found, rest = [], text
  for words, *values in claims:
    match = re.search(re.escape(words).replace(r"\{\}", NUMBER), text)
    if match is None:
      found.append(f"not there: {words}")
      continue
    pairs = zip(match.groups(), values, strict=True)
    found += [f"{words}: {n} is {value:.6g}" for n, value in pairs if not rounded(n, value)]
    rest = rest.replace(match[0], "", 1)
  known = re.findall(NUMBER, rest) if given is None else given.split()
  return found + [f"of no row: {n}" for n in re.findall(NUMBER, rest) if n not in known]


def ends(values: Iterable[float]) -> tuple[float, float]:
  values = list(values)
  return min(values), max(values)


def folds() -> Iterator[Claim]:
  """States of the fold ablation."""
  rows = rows_of("fold_ablation")
  found, late = fold_ablation_report.curves(rows), fold_ablation_report.late
  lines = lambda **where: list(fold_ablation_report.some(found, **where).values())
  of = {"fold": "open_loop", "records": "fp32", "checkpoint": "fp32", "dots": "fp32"}
  line = lambda every, **other: lines(phantom=False, every=every, **of | other)[0]
  floor = {"fold": "open_loop", "checkpoint": "fp32", "phantom": False}
  bf16 = lines(records="bf16", **floor) + lines(dots="bf16", **floor)
  tf32 = lines(records="fp32", dots="tf32", **floor)
  exact, fault = line(4, fold="exact"), lines(phantom=True)
  drift = token, error = line(1, fold="exact", checkpoint="bf16")
  yield "over {} tokens of real text", token[-1]
  yield "make a floor of {} to {} that does not grow", *ends(map(late, bf16))
  yield "tf32 dots one of {} to {}.", *ends(map(late, tf32))
  at = int(np.argmax(token > 5_000))
  yield "grows to {} over {} tokens", error[at], token[at]
  yield "wanders between {} and {} from there on", *ends(error[at + 1 :])
  yield "it is {}, and {} at the end", late(drift), error[-1]
  yield "of the state wrong, {} to {}", *ends(map(late, fault))
  yield "from token {} on", fault[0][0][np.argmax(fault[0][1] > 1 / 3)]
  yield "every token and is at {} ({} at the end)", late(exact), exact[1][-1]
  yield "fourth commit is at {} ({} at the end)", late(line(4)), line(4)[1][-1]
  yield "one at every commit at {}.", late(line(1))
  early = {m: published_streams.deferral(m, published_streams.SECOND_HALF) for m in (1, 4, 16)}
  yield "{} times for m = 4 and {} for m = 16", early[1] / early[4], early[1] / early[16]
  whole = {m: e for m, e, _ in fold_ablation_report.deferral(rows)}
  yield "it is more, {} and {} times", whole[1] / whole[4], whole[1] / whole[16]


FOLDS = (
  "rounded", "open_loop, bf16 records, tf32 dots", "compensated, bf16 checkpoint", "exact",
  "open_loop, bf16 records and checkpoint, bf16 dots",
)  # fmt: skip


def texts() -> Iterator[Claim]:
  """Texts of the fold ablation."""
  rows = [r for r in rows_of("fold_ablation") if r["part"] == "text"]
  kinds: dict[str, list[Row]] = {n: [r for r in rows if r["fold"] == n] for n in FOLDS}
  plain = {(r["temperature"], r["prompt"]): r for r in kinds["rounded"] if r["bits"] == 23}
  ratio = lambda column, r: r[column] / plain[r["temperature"], r["prompt"]][column]
  left = [r for r in rows if r["first_difference"] is not None]
  changed = sorted(r["bits"] for r in left if r["bits"])
  yield "Texts of {} tokens after two prompts", rows[0]["token"]
  yield (
    "states of {} mantissa bits",
    min(r["bits"] for r in kinds["rounded"] if r["bits"] > changed[-1]),
  )
  apart = [r["distance"] for r in kinds["rounded"] if r["bits"] == changed[-1]]
  yield "At {} bits, where states differ by {} to {},", changed[-1], *ends(apart)
  yield "so it goes on down to {},", changed[0]

  open_loop, compensated, exact, lowered = list(kinds.values())[1:]
  kept = lambda texts: sum(r not in left for r in texts)
  yield "writes the plain text {} times out of {}, and so does", kept(open_loop), len(open_loop)
  assert kept(compensated) == kept(open_loop)
  yield "The exact one does {} times", kept(exact)
  [gone], [too] = ([r for r in texts if r in left] for texts in (exact, lowered))
  where = gone["temperature"], gone["first_difference"]
  yield "at temperature {} it leaves the text of one prompt at token {}, as does", *where
  assert (too["temperature"], too["first_difference"]) == where
  [bits] = [r["bits"] for r in left if r["bits"] and r["first_difference"] == where[1]]
  yield "States of {} bits leave the text at token {}, too", bits, where[1]

  yield "cost {} to {} times as", *ends(ratio("bits_per_byte", r) for r in left)
  yield "repeat a unit up to {} times in a row", max(r["repeats"] for r in plain.values())
  assert min(ratio("repeats", r) for r in left) >= 1
  cold, hot = (r for r in left if r["bits"] == 4)
  more = [n for r in (hot, cold) for n in (r["repeats"], r["repeats"] / ratio("repeats", r))]
  yield "{} times for {} and {} times for {} at 4 bits", *more


BLOCKS = (4, 8, 16, 32, 64, 128)


def amplification() -> Iterator[Claim]:
  rows = rows_of("amplification")
  pick = lambda **where: amplification_report.only(rows, **where)
  most = lambda column, rows: max(r[column] for r in rows if r[column] is not None)
  windows = lambda method, precision, T: most(
    "state_error", pick(inputs="captured", method=method, precision=precision, block=T)
  )
  worse = lambda method, precision, *at: [
    windows(method, precision, T) / windows("substitution", precision, T) for T in at
  ]
  tame = [r for r in pick(inputs="synthetic", method="none") if r["beta"] <= 1]
  power = [most("power_entry", [r for r in tame if r["block"] == T]) for T in (16, 32, 64)]
  yield "up to {} at $BS = 16$, {} at 32, {} at 64", *power
  yield "at most {} at $BS = 128$, where", most("gain", pick(inputs="captured", block=128))
  yield "the published bound is {};", 2.0**127
  harm = pick(inputs="adversarial", beta=1.0)
  yield "row sums of {} (bound 1 gives {})", most("row_sum", harm), most("block", harm)
  yield "a gain of {} (bound 2", most("gain", harm)
  assert most("entry_over_beta", harm) <= 1
  ways = itertools.product(
    ("substitution", "blocks of 16", "doubling blocks"), ("float32",), BLOCKS
  )
  good = itertools.starmap(windows, ways)
  yield "in float32 stays at {} to {} for every", *ends(good)
  three = worse("Neumann doubling", "float32", 16, 64)
  yield "{} times worse than row by row at $BS = 16$, {} times at 64", *three
  yield "it is {} times worse than substitution in tf32", *worse("Neumann doubling", "tf32", 16)
  slow = worse("Newton-Schulz", "float32", 32, 64, 128)
  yield "up to 16, {} times worse at 32, {} times at 64 and {} times at 128", *slow
  slow = worse("Newton-Schulz", "tf32", 16, 32, 64)
  yield "{} times worse at 16, {} times at 32, {} times at 64 and useless", *slow
  worst = {"inputs": "synthetic", "precision": "float32", "correlation": 1.0, "beta": 1.0}
  equal = lambda method, T: most("state_error", pick(method=method, block=T, **worst))
  assert equal("Newton-Schulz", 32) > 1
  yield "({}, where substitution has {})", equal("Newton-Schulz", 16), equal("substitution", 16)


def only(name: str, **where: Any) -> list[Row]:
  return amplification_report.only(rows_of(name), **where)


def cycles() -> Iterator[Claim]:
  yield "{} cycles of verify", max(r["cycle"] for r in rows_of("cycles"))
  last = {"line": "checkpoint bf16", "every": 16, "inputs": "c"}
  yield "down to the {} that", cycles_report.late(rows_of("cycles"), 1 / 3, **last)


def roofline() -> Iterator[Claim]:
  rows = rows_of("roofline")
  added = {d: [us / 1e3 for us in roofline_report.extra(rows, d)] for d in ("M2", "M4", "M4 Max")}
  yield "by {} to {} ms on an M2", *ends([*added["M2"], *added["M4"]])
  yield "by {} to {} ms on an M4 Max", *added["M4 Max"]
  macs = [line for line in roofline_report.answer(rows) if line.startswith("M")]
  yield (
    "per cent and {} % of the time",
    max(float(line.split(" to ")[3].split()[0]) for line in macs),
  )
  moved = {r["scheme"]: r["bytes"] for r in roofline_report.first(rows) if r["device"] == "M2"}
  over = lambda scheme: moved[scheme] / moved["ring_open_loop"]
  yield "exact fold costs {} times", over("ring_exact")
  yield "(`replay_0`) {} times, snapshots {} times", over("replay_0"), over("snapshot")


def kernels() -> Iterator[Claim]:
  """What is, of the table; not what was tried."""

  def of(column: str, kernel: str, windows: tuple[int, ...], *batches: int, **more: str) -> Any:
    where = {"kernel": kernel, "scheme": None, "peer": None, "state_dtype": "float32"} | more
    at = itertools.product(windows, batches)
    rows = [r for T, B in at for r in only("step_time", window=T, batch=B, **where)]
    return np.array([r[column] for r in rows])

  share = lambda *where: ends(of("ceiling_share", *where))
  yield "writes the state, share | {}–{} |", *share("step", (4, 8, 16), 64, 256)
  over = lambda column, *batches: ends(
    of(column, "step_ring", (4, 8), *batches) / of(column, "verify", (4, 8), *batches)
  )
  yield "over verify, T = 4, 8 | {}–{} |", *over("time_us", 64, 256)
  yield "bytes alone are {} and {} times", *over("bytes", 64)
  yield "step of a ring, T = 16, share | {}–{} |", *share("step_ring", (16,), 64, 256)
  yield "131 µs became {} by", *of("time_us", "step_ring", (16,), 64)
  yield "fold of 5 tokens, batch 64, share | {} |", *of("ceiling_share", "fold", (16,), 64)
  yield "at batch 256 it is {} |", *of("ceiling_share", "fold", (16,), 256)
  yield "beside a ring, batch 64, share | {} |", *of("ceiling_share", "decode_ring", (1,), 64)
  yield "warpgroup makes; at batch 256 it is {} |", *of("ceiling_share", "decode_ring", (1,), 256)
  us = [*of("time_us", "fill", (16,), 64), *of("time_us", "snapshot", (16,), 64)]
  yield "takes XLA {} µs of the {} (batch 64)", *us
  us = [*of("time_us", "fill", (16,), 256), *of("time_us", "snapshot", (16,), 256)]
  yield "(batch 64), {} of the {} (256)", *us
  yield "(256), {} of the ceiling, which", *of("ceiling_share", "fill", (16,), 256)
  half = of("relative_error", "verify", (16,), 64, state_dtype="bfloat16")
  yield "hides behind half the bytes; error {} |", *half
  yield "verify, T = 16, one slot | {} µs |", *of("time_us", "verify", (16,), 1)
  whole = lambda column, scheme: of(column, "whole_step", (16,), 64, scheme=scheme)
  rings = ("ring_exact", "ring_open_loop")
  less = lambda column: [(whole(column, "snapshot") / whole(column, s)).item() for s in rings]
  yield "of a ring over snapshot | {}, {} |", *less("time_us")
  noise, again = remeasure.NOISE["step_time"], rows_of("remeasured/step_time")
  found = remeasure.compare(rows_of("step_time"), again, noise, common=True)
  off = lambda column: max(d.off for d in found if d.column == column)
  yield "later, {} of these times differ by {} %", len(again), 100 * off("time_us")
  assert off("relative_error") == 0
  yield "snapshot moves {} and {} times the bytes", *less("bytes")


def tails() -> Iterator[Claim]:
  drafted = ("block", "prompt_lookup", "geometric_4.2")
  found = lambda n, names=drafted: [
    tail.claim(rows_of("tail"), K, n, a) for a, K in itertools.product(names, (4, 8))
  ]
  yield "verify and commit there {} to {} times", *ends(x["slower"] for x in found(4))
  yield "selecting rows is {} to {} of that", *ends(x["blamed"] for x in found(4))
  assert max(x["blamed"] for x in found(64)) <= 1 / 8
  assert max(x["slower"] for n in (16, 64) for x in found(n, ("none",))) < 1
  total = lambda r: r["verify_us"] + r["commit_us"]

  def dense(n: int) -> list[float]:
    every = {r["accepts"]: total(r) for r in only("tail", concurrency=n, tail="all")}
    return ends(total(r) / every[r["accepts"]] for r in only("tail", concurrency=n, tail="dense"))

  yield "take {} to {} times as long as with all", *dense(4)
  yield "requests, {} to {} at 16", *dense(16)
  yield "and {} to {} at 64", *dense(64)


def soak() -> Iterator[Claim]:
  served, alone = (
    [r for r in rows_of("soak") if r["texts_compared"]],
    only("soak", texts_compared=None),
  )
  total = lambda column: sum(r[column] for r in served)
  assert {r["steps"] for r in served} == {20_000}
  yield "All {} states that were compared", total("states_compared")
  yield "and {} that the prefix cache", total("marks")
  yield "their budget ({} of it at most)", max(r["error_over_budget"] for r in served)
  yield "{} of {} texts differ where", total("texts_differing"), total("texts_compared")
  share = ends(r["texts_differing"] / r["texts_compared"] for r in served)
  assert (f"{share[0]:.1f}", round(1 / share[1])) == ("0.1", 4), "one in ten, one in four"
  yield "all eleven schemes, {} to {} steps", *ends(r["steps"] for r in alone)
  assert max(r["error_over_budget"] for r in rows_of("soak")) <= 1
  assert (len(served), len(alone)) == (11, 11)


def trees() -> Iterator[Claim]:
  def of(column: str, topology: str, nodes: int, scheme: str = "tree_wy") -> float:
    (row,) = only("tree_budget", topology=topology, nodes=nodes, scheme=scheme)
    rate = row["accept_length"] * row["slots"] / row["step_ms"]
    return rate if column == "rate" else row[column]

  length = partial(of, "accept_length")
  yield "{} tokens a step from a best-first tree of 16", length("best_first", 16)
  yield "a chain of 16 has {}, {} from 64", length("chain", 16), length("best_first", 64)
  yield "near the root, and has {} from 31", length("top_2_2_2_2", 31)
  best = [of("rate", name, 16) for name in ("chain", "best_first")]
  yield "({} a millisecond; best-first {})", *best
  keys = [(r["topology"], r["nodes"], r["scheme"]) for r in rows_of("tree_budget")]
  assert max(keys, key=lambda key: of("rate", *key)) == ("chain", 16, "tree_wy")
  assert of("rate", "best_first", 64) < best[0] / 2
  held = lambda scheme: of("flight_bytes", "best_first", 64, scheme) / 2**20
  yield "snapshots keep {} MiB a slot for 64 nodes, TreeWY {}", held("snapshot"), held("tree_wy")
  over = lambda scheme, *window: of("step_ms", *window, scheme) / of("step_ms", *window)
  yield "their step is {} times as long", over("snapshot", "best_first", 64)
  yield "as TreeWY's ({} in a chain", over("snapshot", "chain", 16)
  slow = (("chain", 8), ("chain", 16), ("best_first", 16), ("best_first", 32))
  top = (("top_2_2_2", 15), ("top_2_2_2_2", 31))
  yield "takes {} to {} times as long as TreeWY", *ends(over("ring_exact", *x) for x in slow)
  assert max(over("ring_exact", *x) for x in (*top, ("best_first", 64))) < 1.1
  ring = partial(of, topology="best_first", nodes=16, scheme="ring_exact")
  yield "a quarter take {} ms or less and half {} or more", ring("low_ms"), ring("step_ms")
  full = lambda *window: 3 * window[1] / length(*window)
  yield "is full after {} to {} steps there", *ends(full(*x) for x in slow)
  yield "after {} to {} in top-k", *ends(full(*x) for x in top)
  yield "and after {} with 64 nodes", full("best_first", 64)
  yield "have ended, after {}.", of("steps", "best_first", 64, "ring_exact")


def accept_lengths() -> Iterator[Claim]:
  def length(drafter: str, block: int) -> float:
    rows = only("accept_length", drafter=drafter, block=block)
    return sum(r["tokens"] * r["steps"] for r in rows) / sum(r["steps"] for r in rows)

  yield "same {} held-out", len({r["prompt"] for r in rows_of("accept_length")})
  both = lambda block: (length("block", block), length("prompt_lookup", block))
  yield "{} tokens a step for {} in windows of 16", *both(16)
  yield "{} for {} in windows of 8", *both(8)


def concurrency() -> Iterator[Claim]:
  models = ["Qwen3.5-27B", "Qwen3.5-35B-A3B"]
  rows = {m: only("concurrency", model=m, budget="common") for m in models}
  over = {m: concurrency_report.ratios(rows[m]) for m in models}
  best = lambda n: [max(line[n] for line in over[m].values()) for m in models]
  of = lambda scheme, n: [over[m][scheme, "common"][n] for m in models]
  most = [max(r["cap"] for r in rows[m]) for m in models]
  admitted = [only("concurrency", model=m, scheme="snapshot")[0]["cap"] for m in models]
  yield "scheme is {} and {} times as fast as snapshots", *best(1)
  yield "here {} and {})", *of("tree_wy", 1)
  yield "Up to the {} to {} requests", *admitted
  yield "a faster layer, {} and {} times", *best(8)
  yield "go on to {} and {} requests and to {} and {} times", *most, *best(64)
  cap = lambda scheme: [next(r["cap"] for r in rows[m] if r["scheme"] == scheme) for m in models]
  yield "TreeWY to {} and {} and {} and {} times", *cap("tree_wy"), *of("tree_wy", 64)
  rings = ("ring_exact", "ring_open_loop", "ring_compensated")
  requests = ends(n for ring in rings for n in cap(ring))
  yield (
    "rings to {} to {} and {} to {}.",
    *requests,
    *ends(x for ring in rings for x in of(ring, 64)),
  )
  yield (
    "16 requests: {}, {}, {}, {} times K = 16",
    *(of(f"replay_{k}", 16)[0] for k in (0, 1, 4, 8)),
  )
  assert max(of("replay_4_compact", 1)) < 1


def prefix() -> Iterator[Claim]:
  rows = only("prefix", scheme="snapshot")
  yield "KV rows, {} MiB for", rows[0]["entry_mib"]
  of = lambda n: [r for r in rows if r["budget_entries"] == n]
  hits = lambda n: max(of(n), key=lambda r: r["hit_rate"])["block"]
  assert hits(4) == hits(16)
  yield "Blocks of {} tokens restore most where room is scarce, {} where", hits(4), hits(64)
  marks = max(r["marks"] / r["emitted_tokens"] for r in rows if r["block"] == hits(4))
  yield "that is {} times in a thousand tokens", 1000 * marks


def model_step() -> Iterator[Claim]:
  rows = [r for r in rows_of("model_step") if r["tokens"]]
  sizes = (rows[0][name] for name in ("batch", "prompt", "tokens"))
  yield "{} slots, prompts of {} tokens, {} tokens decoded", *sizes
  yield "windows of {}, of", rows[0]["window"]
  assert rounded("5", rows[0]["accept_length"])


RESULTS = "results.md"
PASSAGES = {
  "fold ablation": (
    (RESULTS, "## Fold ablation", "## "), lambda: [*folds(), *texts()], "0 1 4 16 300 600",
  ),
  "amplification": (
    ("amplification.md", "## 3.", "`python -m"), amplification, "1 2 3 4 16 32 64 128",
  ),
  "cycles": ((RESULTS, "## Synthetic keys", "## "), cycles, "16"),
  "tails": ((RESULTS, "## Tails", "## "), tails, "4 8 27 16 4.2 64"),
  "roofline": ((RESULTS, "## Roofline", "What that model"), roofline, "1 4 8 16 3.5 35"),
  "kernels": ((RESULTS, "## Kernels on", "## "), kernels, None),
  "soak": ((RESULTS, "## Soaks", "## "), soak, "20,000"),
  "trees": ((RESULTS, "## Trees", "## "), trees, "16 32 64 31"),
  "accept lengths": (
    (RESULTS, "## Accept lengths", "The same drafter"), accept_lengths, "3.8 4.2 27 512",
  ),
  "concurrency": (
    (RESULTS, "## Concurrency", "TreeWY's layer"), concurrency,
    "3.5 27 35 0.93 0.94 0 1 4 8 100 1.43 1.40 1.27 1.25",
  ),
  "prefix": ((RESULTS, "## Prefix", "## "), prefix, "3.5 27 64"),
  "model step": ((RESULTS, "## A whole model", "Recurrent layers"), model_step, "3.5 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSAGES)
def test_numbers_of_the_docs_are_those_of_the_rows(name: str) -> None:
  where, claims, given = PASSAGES[name]
  assert not wrong(passage(*where), claims(), given)


def test_a_number_or_a_row_that_changes_is_seen() -> None:
  said = "It grows to 3.2e-6 over 5,122 tokens at m = 4 in float32."
  claim = lambda error, tokens=5122: [("grows to {} over {} tokens", error, tokens)]
  assert not wrong(said, claim(3.16e-6), "4")
  assert wrong(said, claim(3.14e-6), "4") == ["grows to {} over {} tokens: 3.2e-6 is 3.14e-06"]
  assert wrong(said, claim(3.2e-6, 5121), "4") == ["grows to {} over {} tokens: 5,122 is 5121"]
  assert wrong(said, claim(3.2e-6), "") == ["of no row: 4"]
  assert wrong(said, [("shrinks to {}", 1.0)], "3.2e-6 5,122 4") == ["not there: shrinks to {}"]
