"""Published memory, from the types of our schemes; and each scheme's closed form.

Where it can be told, GB in the sources is 2^30 bytes like GiB.
"""

import pytest

from commit_schemes import SCHEMES, Dtypes, Spec, snapshot
from commit_schemes.footprint import (
  LayerShape,
  ModelShape,
  abstract,
  footprint,
  model_footprint,
  nbytes,
)
from experiments.figures import published
from experiments.models import MODELS
from experiments.published_memory import (
  BF16,
  F32,
  FOLLOWS,
  GIB,
  MIB,
  printed,
  ring_layer,
  stored,
  verify_cache,
)

ROWS = {row["id"]: row for row in published("memory")}
# Each has a test of its own below, which says why.
DOES_NOT_FOLLOW = {
  "mem-k8", "delta-old-request", "delta-alloc-new", "ring-mem-new", "treewy-tree",
}  # fmt: skip


def test_no_memory_row_is_forgotten() -> None:
  assert not DOES_NOT_FOLLOW & set(FOLLOWS)
  assert DOES_NOT_FOLLOW | set(FOLLOWS) == set(ROWS)


@pytest.mark.parametrize("row", FOLLOWS)
def test_published_memory(row: str) -> None:
  value = ROWS[row]["value"]
  assert printed(FOLLOWS[row](), value) == value


def test_8_kept_states_are_rounded_twice() -> None:
  """28.047 GiB is 28.0; the published 28.1 is 28.05 rounded again."""
  assert ROWS["mem-k8"]["value"] == "28.1"
  assert printed(verify_cache(8), "28.05") == "28.05"
  assert printed(verify_cache(8), "28.1") == "28.0"


def test_a_kept_prefix_needs_its_raw_inputs_too() -> None:
  """Published for K = 0: 0.5 GiB of conv windows. Inputs to replay add two thirds of that."""
  whole = model_footprint(SCHEMES["replay_0"].make, MODELS["Qwen3-Next-80B-A3B"], 16)
  assert printed(49 * whole.state.flight / GIB, "0.33") == "0.33"


def test_560_mb_a_request_are_two_byte_states() -> None:
  """70 layers x 64 heads x 4 tokens x 128 x 128 x the 4 bytes of the text are 1,120 MiB."""
  model = ModelShape(70, LayerShape(key_heads=64, value_heads=64))
  at = lambda dtype: model_footprint(snapshot, model, 4, dtypes=Dtypes(checkpoint=dtype)).state
  assert printed(at(F32).flight / MIB, "1120") == "1120"
  assert printed(at(BF16).flight / MIB, "560") == ROWS["delta-old-request"]["value"]


def test_k_and_decay_caches_are_repeated() -> None:
  """0.02 GB each for k, v and decay is so for v alone: k has half the heads, decay no channels.

  Published are three vectors of 128 for every value head, so k is kept r times, decay 128 times.
  """
  model = MODELS["Qwen3-Next-80B-A3B"]
  layer = model.layer.shard(4)
  _, flight = abstract(SCHEMES["delta_cache"].make(Spec(layer.key_heads, 4)), layer, 4)
  k, u, g = (
    33 * model.layers * nbytes(x) / GIB for x in (flight.rows.k, flight.rows.u, flight.rows.g)
  )
  want = ROWS["delta-alloc-new"]["value"]
  repeats = layer.value_heads // layer.key_heads
  assert printed(u, want) == printed(repeats * k, want) == printed(128 * g, want) == want
  assert printed(k, want) == "0.01"
  assert printed(g, want) == "0.00"


def test_the_number_of_ring_slots_is_not_stated() -> None:
  """Six buffers are 388 KiB a slot and layer; 1.81 is 163 slots of 2^30, or 152 of 10^9 bytes.

  Nor is 11.48 over 1.81 the published 6.4; 11.5 over 1.8 is.
  """
  model = MODELS["Qwen3.5-35B-A3B"]
  six = ring_layer(16, "exact")
  assert six == 388 * 1024
  fits = lambda unit: [
    n for n in range(1, 400) if printed(n * model.layers * six / unit, "1.81") == "1.81"
  ]
  assert ROWS["ring-mem-new"]["value"] == "1.81"
  assert (fits(10**9), fits(GIB)) == ([152], [163])
  assert (printed(11.48 / 1.81, "6.4"), printed(11.5 / 1.8, "6.4")) == ("6.3", "6.4")


def test_conv_windows_of_the_partial_cache_are_dense() -> None:
  """0.37 GB in every column of the published table: three columns for each of 16 nodes, 17 rows."""
  carry, _ = stored("Qwen3.5-27B", 16, degree=2).conv
  assert printed(17 * 16 * carry / GIB, "0.37") == "0.37"


def closed_forms(s: LayerShape, T: int) -> dict[str, tuple[int, int]]:
  """Carry and flight in bytes: fp32 states, writes and gates, bf16 raw inputs, 4-byte integers.

  A flight also has the slot number of its row, and of a ring where its window was written.
  """
  Hk, H, K, V, E, _ = s
  S = 4 * H * V * K
  decay = 4 * H * E
  row = lambda item: item * (Hk * K + H * V) + decay
  raw = 2 * (Hk * K + H * V) + 4 * H + decay
  R, slot, cursors = 4 * T, 4, 8
  partial = lambda keep: (S, min(keep, T) * S + T * raw + slot)
  return {
    "snapshot": (S, T * S + slot),
    "replay_0": partial(0),
    "replay_1": partial(1),
    "replay_4": partial(4),
    "replay_8": partial(8),
    "replay_4_compact": partial(4),
    "delta_cache": (S, T * row(4) + slot),
    "ring_open_loop": (S + R * row(4) + cursors, cursors + slot),
    "ring_exact": (S + R * (row(4) + raw - decay) + cursors, cursors + slot),  # one g serves both
    "ring_compensated": (S + R * row(2 + 2) + cursors, cursors + slot),
    "tree_wy": (S + T * row(4) + T * 4 + 4, slot),
  }


SHAPES = {
  "gdn": LayerShape(2, 6, key_dim=8, value_dim=4),
  "kda": LayerShape(3, 3, key_dim=8, value_dim=4, channels=8),
}


@pytest.mark.parametrize("decay", SHAPES)
@pytest.mark.parametrize("name", SCHEMES)
def test_closed_form(name: str, decay: str) -> None:
  shape, T = SHAPES[decay], 6
  scheme = SCHEMES[name].make(Spec(shape.key_heads, T, channels=shape.channels))
  assert tuple(footprint(scheme, shape, T)) == closed_forms(shape, T)[name]


def test_conv_tail_is_three_columns() -> None:
  carry, flight = model_footprint(snapshot, ModelShape(5, SHAPES["gdn"]), 6).conv
  columns = 5 * (2 * 2 * 8 + 6 * 4) * 2
  assert (carry, flight) == (3 * columns, 6 * columns + 5 * 4)


def test_ranks_share_the_whole() -> None:
  model = MODELS["Qwen3.5-122B-A10B"]
  whole = model_footprint(snapshot, model, 4)
  share = model_footprint(snapshot, model, 4, degree=8)
  assert whole.state.carry == 8 * share.state.carry
  assert whole.conv.carry == 8 * share.conv.carry


@pytest.mark.parametrize("degree", [0, 3, 32])
def test_a_degree_that_does_not_divide_is_refused(degree: int) -> None:
  with pytest.raises(ValueError, match=f"degree {degree} must divide 16 key heads and 32 value"):
    model_footprint(snapshot, MODELS["Qwen3-Next-80B-A3B"], 4, degree=degree)


def test_a_tree_of_14_nodes_and_its_anchor() -> None:
  """1.2 GiB are the 14 nodes; store_all keeps the anchor's state as well, 1.32 GiB in all."""
  at = lambda nodes: stored("Qwen3.5-397B-A17B", nodes, checkpoint=BF16).state.flight / GIB
  assert printed(at(14), "1.2") == ROWS["treewy-tree"]["value"]
  assert printed(at(15), "1.32") == "1.32"
