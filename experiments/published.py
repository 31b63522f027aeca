"""Every published number beside ours: how it was obtained, and a verdict.

Ours is worked out from committed rows, the types of the schemes and the cost model, never typed in:
a row that an experiment has not been run for says so, and gets its value when the rows appear.
"""

import csv
from collections.abc import Callable, Mapping

from matplotlib.figure import Figure
from rich.table import Table

from experiments.figures import HOLLOW, PUBLISHED, logarithmic, look
from experiments.published_answer import UNMEASURED, VERDICTS, Answer, Missing, number, unmeasured
from experiments.published_bounds import LOST, ROOM, SHARP
from experiments.published_derived import memory, traffic
from experiments.published_numerics import numerics
from experiments.published_serving import serving
from experiments.published_speed import bandwidth, peer
from experiments.record import Row

GROUPS: Mapping[str, Callable[[Row], Answer]] = {
  "memory": memory, "traffic": traffic, "numerics": numerics, "bandwidth": bandwidth,
  "throughput": serving, "concurrency": serving, "latency": serving, "quality": serving,
  "acceptance": serving, "kernel time": peer,
}  # fmt: skip


def answer(row: Row) -> Answer:
  try:
    return GROUPS[row["group"]](row)
  except Missing as e:
    return unmeasured(str(e))


def derived_rows() -> list[Row]:
  """One row a published value: id, published, ours, how, verdict."""
  with PUBLISHED.open(newline="") as file:
    table = list(csv.DictReader(file))
  found = []
  for r in table:
    a = answer(r)
    unit = "" if r["unit"] in ("bool", "fraction", "") else f" {r['unit']}"
    found.append(
      {"id": r["id"], "published": r["value"] + unit, "ours": a.ours, "how": a.how,
       "verdict": a.verdict}
    )  # fmt: skip
  return found


def table(rows: list[Row]) -> Table:
  out = Table(title=f"{len(rows)} published values")
  for name in ("id", "published", "ours", "how", "verdict"):
    out.add_column(name, overflow="fold")
  for r in rows:
    out.add_row(*(str(r[k]) for k in ("id", "published", "ours", "how", "verdict")))
  return out


def figure(rows: list[Row]) -> Figure:
  """Ours over published, where both are one number; hollow is what was published."""
  pairs = [(r["id"], number(r["ours"]), number(r["published"].split()[0]), r["how"]) for r in rows]
  good = [(id, x, y, how) for id, x, y, how in pairs if x and y and how != "derived by arithmetic"]
  fig = Figure(figsize=(8.0, 0.15 * len(good) + 1.2))
  ax = fig.subplots()
  at = range(len(good))
  ax.plot([1.0] * len(good), list(at), color="black", marker="o", label="published", **HOLLOW)
  for i, how in enumerate(dict.fromkeys(p[3] for p in good)):
    some = [(x / y, n) for n, (_, x, y, h) in zip(at, good, strict=True) if h == how]
    style = look(i + 1) | {"linestyle": "none", "label": how}
    ax.plot([s[0] for s in some], [s[1] for s in some], **style)
  ax.set_yticks(list(at), [p[0] for p in good], fontsize=6)
  ax.set(xscale="log", xlabel="our value / published value", ylim=(-1, len(good)))
  logarithmic(ax.xaxis)
  ax.invert_yaxis()
  ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4)
  return fig


def markdown(rows: list[Row]) -> str:
  """The page of the documentation."""
  with PUBLISHED.open(newline="") as file:
    facts = {r["id"]: r for r in csv.DictReader(file)}
  count = lambda v: sum(r["verdict"].split(":")[0] == v for r in rows)
  later = sum(UNMEASURED in r["verdict"] for r in rows)
  lines = [
    "# Every published number",
    "",
    "Written by `python -m experiments table published --markdown`; a test keeps it current. "
    + ", ".join(f"{count(v)} {v}" for v in VERDICTS)
    + f". Of those that cannot be tested here, {later} can be where their experiment is run, and "
    "have not been measured yet. The numbers are those of experiments/published.csv: what a "
    "scheme, a kernel or a count of this project touches, not all that the sources have.",
    "",
    "*Reproduced*: digit for digit where it is arithmetic; within 1.05 for slots that fit, 1.1 for "
    "times, 1.25 to 1.5 for means over cycles on keys of the same law, half a decade for errors of "
    "one random draw; never where the setting differs in what the number depends on (device, "
    "streams, type of the state, model). *In shape*: the same law, or the same order of "
    "magnitude, by the factor that is stated: at most 2 for ratios of times (1.5 and 1.6 for "
    "shares of bandwidth and modelled times), 10 for errors on streams of another law, half a "
    "decade for errors of a solve (100 where they have blown up), 3 and 2 for means over cycles on "
    "keys of the same law, 1.5 for sums of a row. Where an effect was published, it is judged. "
    "Beside a published range the factor is that to its nearer end, and 1 inside of it. "
    f"*Modelled*: a range of what bytes allow. A published ratio above it by more than {ROOM} "
    f"differs, and so does a loss of more than {1 - LOST:.0%} where bytes allow none; one below it "
    "contradicts nothing; a range whose largest gain (over 1, and "
    f"counted as {ROOM - 1:.0%} at least) is more than {SHARP} times its smallest would pass "
    "whatever was published, so that what lies in it cannot be tested here. What is modelled says "
    "what it leaves out, and which accept length it assumes. The accuracy of a model at a task is "
    "never reproduced by the error of a state.",
    "",
    "| published | setting, source | value | ours | how | verdict |",
    "|---|---|---|---|---|---|",
  ]  # fmt: skip

  def clean(text: object) -> str:
    """Escaped, but for what stands in backticks."""
    parts = str(text).replace("|", "\\|").split("`")
    parts[::2] = [x.replace("_", "\\_").replace("*", "\\*") for x in parts[::2]]
    return "`".join(parts)

  for r in rows:
    f = facts[r["id"]]
    where = f"{f['setting']}; {f['source']}" + (f" ({f['note']})" if f["note"] else "")
    cells = (
      f"{f['quantity']} (`{r['id']}`)".replace("|", "\\|"), clean(where),
      clean(r["published"]), clean(r["ours"]), r["how"], clean(r["verdict"]),
    )  # fmt: skip
    lines.append("| " + " | ".join(cells) + " |")
  return "\n".join(lines) + "\n"
