"""Hit rate, bytes and forced materialisations of a prefix cache against its block size.

Conversations over held-out source: every first turn begins with one common preamble, every later
turn is the text so far and a new piece. A small random model decodes, since only the texts matter;
an entry's bytes are those of `model`, a name or the path of a checkpoint: its recurrent states,
conv windows and KV rows of `kv_window` tokens. A mark is forced where the scheme would not have
written the state at that step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from commit_schemes import SCHEMES, Dtypes, Spec
from commit_schemes.decoding.drafts import prompt_lookup
from commit_schemes.decoding.engine import Engine
from commit_schemes.decoding.loop import Marking
from commit_schemes.decoding.prefix_cache import PrefixCache
from commit_schemes.decoding.schedule import Limits
from commit_schemes.decoding.slots import compiled
from commit_schemes.footprint import nbytes
from commit_schemes.model import model_memory
from experiments import corpus, figures
from experiments.models import AROUND, named, sizes
from experiments.record import Record, Row
from experiments.soak_world import TINY
from gdn import hybrid
from gdn.ops import XLA

DEFERRED = ("flush", "next verify")  # when a scheme writes its state, if not at every commit


@dataclass(frozen=True, kw_only=True)
class Config:
  """`conversations` of `turns`, each turn `piece` new tokens and `answer` decoded ones."""

  blocks: tuple[int, ...] = (16, 32, 64, 128, 256)
  budgets: tuple[int, ...] = (4, 16, 64)
  schemes: tuple[str, ...] = ("snapshot", "ring_exact", "tree_wy")
  model: str = "Qwen3.5-27B"
  window: int = 8
  kv_window: int = 1024
  slots: int = 4
  conversations: int = 12
  turns: int = 3
  preamble: int = 200
  piece: int = 70
  answer: int = 90
  seed: int = 0

  def __post_init__(self):
    """ValueError: a field, its value and what is allowed."""
    positive = ("window", "kv_window", "slots", "conversations", "turns", "piece", "answer")
    for name, good, allowed in (
      *((n, getattr(self, n) >= 1, "at least 1") for n in positive),
      ("preamble", self.preamble >= 0, "at least 0"),
      ("blocks", self.blocks and min(self.blocks) >= 1, "each at least 1"),
      ("budgets", self.budgets and min(self.budgets) >= 0, "entries, each at least 0"),
      ("schemes", self.schemes and set(self.schemes) <= set(SCHEMES), ", ".join(SCHEMES)),
      ("model", named(self.model, AROUND), f"{', '.join(AROUND)}, or the path of a checkpoint"),
    ):
      if not good:
        raise ValueError(f"{name} = {getattr(self, name)!r}, allowed: {allowed}")

  @property
  def capacity(self) -> int:
    return self.preamble + self.turns * (self.piece + self.answer)


CONFIGS: Mapping[str, Config] = MappingProxyType(
  {
    "full": Config(),
    "smoke": Config(
      blocks=(8,), budgets=(2, 50), schemes=("tree_wy",), window=4, slots=2, conversations=3,
      turns=2, preamble=12, piece=10, answer=12,
    ),
  }
)  # fmt: skip


def entry_bytes(c: Config) -> tuple[int, int, int]:
  """Bytes of an entry of `model` on one device: states, conv windows, KV rows (bfloat16)."""
  _, whole, _, a = sizes(c.model)
  assert a is not None  # AROUND has it, or it was read
  layer = whole.layer
  state = whole.layers * layer.value_heads * layer.value_dim * layer.key_dim * 4
  conv = whole.layers * (layer.taps - 1) * layer.conv_channels * 2
  rows = a.attention * 2 * c.kv_window * a.kv_heads * a.head_dim * 2
  return state, conv, rows


def talk(c: Config, engine: Engine) -> dict[str, int]:
  """All conversations, turn by turn and in a random order within a turn; what they came to."""
  text = corpus.heldout()
  cut = lambda at, n: tuple(map(int, text[at : at + n]))
  rng = np.random.default_rng(c.seed)
  far = rng.permutation(len(text) // 1024 - 2) * 1024 + 1024
  known = {i: cut(0, c.preamble) for i in range(c.conversations)}
  asked = restored = hits = 0
  for turn in range(c.turns):
    for i in rng.permutation(c.conversations).tolist():
      prompt = known[i] + cut(int(far[i]) + turn * c.piece, c.piece)
      engine.submit((i, turn), prompt, tokens=c.answer, draft=c.window - 1)
    engine.run()
    for i in known:
      done = engine.texts[i, turn]
      known[i] = tuple(done.known)
      asked, restored = asked + done.prompt - 1, restored + done.restored
      hits += done.restored > 0
  emitted = c.conversations * c.turns * c.answer
  return {"asked": asked, "restored": restored, "hits": hits, "emitted": emitted}


def run(c: Config, record: Record) -> None:
  """BadInput: the model cannot be read."""
  one = entry_bytes(c)
  params = hybrid.init(TINY, jax.random.key(c.seed))
  spec = Spec(TINY.key_heads, c.window, XLA, dtypes=Dtypes(raw=jnp.float32))
  pairs = [(s, b) for s in c.schemes for b in c.blocks]
  for scheme, block in record.parts(pairs, name=lambda p: f"{p[0]}, blocks of {p[1]}"):
    memory = model_memory(TINY, SCHEMES[scheme].make(spec))
    marking = Marking(block, c.slots)
    programs = compiled(params, TINY, memory, prompt_lookup(c.window), marking=marking)
    for entries in c.budgets:
      counted = {"marks": 0, "steps": 0}

      def step(state, batch, programs=programs, counted=counted):
        state, report = programs.step(state, batch)
        counted["marks"] += int((report.marks.row >= 0).sum())
        counted["steps"] += 1
        return state, report

      empty = programs.empty()
      cache = PrefixCache(entries * nbytes(empty), block, empty)
      limits = Limits(c.capacity, TINY.vocab, c.window)
      watched = programs._replace(step=step)
      engine = Engine(watched, limits, slots=c.slots, block=block, cache=cache)
      seen = talk(c, engine)
      held = cache.bytes // nbytes(empty)
      record(
        scheme=scheme, block=block, budget_entries=entries, model=sizes(c.model).name,
        hit_rate=round(seen["restored"] / seen["asked"], 4),
        requests_hit=round(seen["hits"] / (c.conversations * c.turns), 4),
        prompt_tokens=seen["asked"], restored_tokens=seen["restored"],
        emitted_tokens=seen["emitted"], entries=held, entry_mib=round(sum(one) / 2**20, 3),
        state_mib=round(one[0] / 2**20, 3), conv_mib=round(one[1] / 2**20, 3),
        kv_mib=round(one[2] / 2**20, 3), cache_gib=round(held * sum(one) / 2**30, 3),
        marks=counted["marks"], steps=counted["steps"],
        forced=counted["marks"] if SCHEMES[scheme].writes in DEFERRED else 0,
        device=jax.devices()[0].device_kind,
      )  # fmt: skip


def figure(rows: list[Row]) -> Figure:
  """Against the block: hit rate, bytes that the entries take, forced materialisations."""
  fig = Figure(figsize=(11.0, 3.6))
  hit, size, forced = fig.subplots(1, 3)
  first = rows[0]["scheme"]
  budgets = list(dict.fromkeys(row["budget_entries"] for row in rows))
  for i, entries in enumerate(budgets):
    line = [r for r in rows if r["budget_entries"] == entries and r["scheme"] == first]
    blocks = [r["block"] for r in line]
    hit.plot(blocks, [100 * r["hit_rate"] for r in line], label=f"room for {entries}",
             **figures.look(i))  # fmt: skip
    size.plot(blocks, [r["cache_gib"] for r in line], **figures.look(i))
  for scheme in dict.fromkeys(row["scheme"] for row in rows):
    line = [r for r in rows if r["scheme"] == scheme and r["budget_entries"] == budgets[-1]]
    rate = [1000 * r["forced"] / r["emitted_tokens"] for r in line]
    forced.plot([r["block"] for r in line], rate, label=scheme, **figures.scheme_look(scheme))
  hit.set_title("prompt tokens restored, %")
  size.set_title(f"GiB of {rows[0]['model']}; {rows[0]['entry_mib']:.0f} MiB an entry")
  forced.set_title("forced materialisations per 1,000 tokens")
  for ax in (hit, size, forced):
    ax.set_xscale("log", base=2)
    ax.set_xlabel("block, tokens")
  hit.legend()
  forced.legend()
  return fig
