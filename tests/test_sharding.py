"""The step on a mesh of devices gives the text of one device: heads, slots, and two processes."""

import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from commit_schemes import SCHEMES
from commit_schemes.decoding.drafts import nothing
from commit_schemes.decoding.engine import Text
from commit_schemes.decoding.placement import HEADS, by_rank, divided, mesh, placed, share
from commit_schemes.decoding.sharding import sharded
from experiments import free, sharding
from experiments.record import read_rows
from gdn import drafter, hybrid
from gdn.drafter import DrafterConfig
from tests import parity, tiny
from tests.slow import slow
from tests.tiny import same_text

pytestmark = pytest.mark.usefixtures("quick_compiles")

ROOT = Path(__file__).parents[1]


def start(devices: int, *args: str) -> subprocess.Popen:
  flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
  env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
  return subprocess.Popen(
    [sys.executable, "-m", *args], cwd=ROOT, env=env, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip


def finished(process: subprocess.Popen) -> str:
  out, err = process.communicate(timeout=300)
  assert process.returncode == 0, err
  return out


def check(out: str, *, requests: int) -> dict:
  told = json.loads(out.splitlines()[-1])
  assert len(told) == requests
  for one in told.values():
    text = Text(one["known"], one["prompt"], [np.asarray(x) for x in one["top"]])
    same_text(text)
  return told


def test_eight_devices_share_slots_and_heads():
  """Four groups of two: admissions, a fork, a retraction and prefix hits among them."""
  args = ("tests.sharded_text", "4", "2", "ring_exact", "rigged")
  told = check(finished(start(8, *args)), requests=7)
  assert any(one["restored"] for one in told.values())
  assert told["4"]["steps"] < 20, "drafts are accepted"


def test_two_processes_share_the_heads_of_every_slot():
  """`jax.distributed`: both run the same engine, and the sums of a layer cross between them."""
  with socket.socket() as free:
    free.bind(("localhost", 0))
    address = f"localhost:{free.getsockname()[1]}"
  args = ("tests.sharded_text", "1", "2", "tree_wy", "block")
  both = [start(1, *args, str(i), "2", address) for i in range(2)]
  try:
    outs = [finished(p) for p in both]
  finally:
    for p in both:
      p.kill()
  assert check(outs[0], requests=6) == check(outs[1], requests=6)


@pytest.mark.slow
def test_the_experiment_runs_and_draws(tmp_path):
  run = ("experiments", "run", "sharding", "--config", "smoke", "--out", str(tmp_path))
  finished(start(2, *run))
  rows = read_rows(tmp_path / "sharding" / "rows.csv")
  assert len(rows) == 3
  assert all(row["equal"] for row in rows)
  assert (tmp_path / "sharding" / "figure.png").exists()


TABLES = {"embed", "head"}


@pytest.mark.parametrize(
  ("name", "vocab"),
  [slow("next_r2_experts", 40), slow("qwen3_5_r2_tied", 40), slow("next_r2_experts", 41)],
)
def test_a_checkpoint_is_placed_where_it_decodes_and_never_whole(tmp_path, name, vocab):
  """On four devices: what is cut for each, what it holds, what comes back to the host, the text."""
  folder = parity.write(parity.of_vocabulary(parity.read(name), vocab), tmp_path / "model")
  told = json.loads(finished(start(4, "tests.placed_alone", str(folder))).splitlines()[-1])
  size, split = told["bytes"], told["split"]
  assert {path.rsplit(".", 1)[-1] for path, cut in split.items() if not cut} <= {
    "norm", "mlp_norm", "q_norm", "k_norm", "router", "shared_gate", *TABLES
  }  # fmt: skip
  assert {cut for path, cut in split.items() if path in TABLES} == {vocab % 2 == 0}
  assert told["devices"] == [4]
  assert told["share"] == sum(n // 2 if split[path] else n for path, n in size.items())
  undivided = {n for path, n in size.items() if not split[path]}
  assert all(part == whole // 2 or whole in undivided for whole, part in told["cut"])
  assert len({whole for whole, part in told["cut"] if part == whole // 2}) > 5
  assert told["pulled"] < told["matrix"], "a report of a step, and no weights"
  assert told["whole"] == [], "nothing that is divided is whole anywhere"
  for one, many in zip(told["one"], told["many"], strict=True):
    as_text = lambda t: free.Text(np.asarray(t["tokens"]), np.asarray(t["top"]), 1.0)
    assert free.within_margin(free.compare(as_text(many), as_text(one)))


@pytest.mark.slow
def test_a_checkpoint_no_device_holds_whole_is_compared_between_meshes(tmp_path):
  """The experiment, from a folder; heads and slots of four devices against heads of two."""
  golden = parity.of_vocabulary(parity.read("qwen3_5_r2_tied"), 256)
  folder = parity.write(golden, tmp_path / "model")
  few = "--window 4 --slots 2 --requests 2 --prompt 24 --tokens 12 --schemes tree_wy"
  args = f"--model {folder} --out {tmp_path} --against mesh {few} --meshes 1 2 2 2"
  finished(start(4, "experiments", "run", "sharding", *args.split()))
  rows = read_rows(tmp_path / "sharding" / "rows.csv")
  assert [(r["slot_groups"], r["head_devices"], r["equal"]) for r in rows] == [(2, 2, True)] * 2
  assert all(r["one_device_tokens_per_s"] is None for r in rows)


def test_weights_of_another_mesh_are_refused():
  w = tiny.world()
  held = placed(w.params, w.config, mesh(1, 1))._replace(mesh=None)
  with pytest.raises(ValueError, match="the weights lie on None, allowed: Mesh"):
    sharded(held, w.config, lambda c: SCHEMES["snapshot"].make(w.spec(1)), nothing, mesh(1, 1))


def test_a_block_drafter_that_does_not_fit_is_refused():
  w = tiny.world()
  make = lambda c: SCHEMES["snapshot"].make(w.spec(1))
  sizes = DrafterConfig(w.config, 4, taps=(0,), layers=2, inner=8, window=8)
  weights = drafter.init(sizes, jax.random.key(0))
  refused = functools.partial(sharded, w.params, w.config, make, nothing, mesh(1, 1))
  with pytest.raises(ValueError, match="weights of 2 draft layers, allowed: 1"):
    refused(block=(weights, dataclasses.replace(sizes, layers=1)))
  other = dataclasses.replace(w.config, inner=2 * w.config.inner)
  with pytest.raises(ValueError, match="the drafter is for a"):
    refused(block=(weights, dataclasses.replace(sizes, target=other)))


def test_a_share_of_the_weights_is_a_model_of_its_own():
  """Each device's contiguous share of [q | k | v] holds its own heads' channels."""
  w = tiny.world()
  own = share(w.config, 2)
  qkv = w.params.layers[0].mixer.qkv
  part = qkv[:, by_rank(w.config, 2)]
  key = w.config.key_heads * w.config.key_dim
  heads = lambda x, start, n: [x[:, start + r * n : start + (r + 1) * n] for r in range(2)]
  q, k = heads(qkv, 0, key // 2), heads(qkv, key, key // 2)
  v = heads(qkv, 2 * key, own.channels - key)
  for rank, held in enumerate(heads(part, 0, own.channels)):
    np.testing.assert_array_equal(held, np.concatenate([q[rank], k[rank], v[rank]], axis=1))


@pytest.mark.parametrize(
  "more",
  [{}, {"experts": 4, "experts_per_token": 2, "expert_inner": 16, "shared_inner": 8}],
  ids=["dense", "experts"],
)
def test_the_shares_of_an_mlp_add_up_to_it(more):
  """Each device has a part of every inner width, also of each expert and of the shared one."""
  config = dataclasses.replace(tiny.world().config, layers=1, **more)
  own, key = share(config, 2), jax.random.key(0)
  params, part = hybrid.init(config, key), hybrid.init(own, key)
  specs = divided(params, part)
  x, added = jax.random.normal(key, (1, 3, config.width)), []

  def held(rank):
    def cut(weights, spec):
      axes = [i for i, name in enumerate(spec) if name == HEADS]
      return np.split(np.asarray(weights), 2, axes[0])[rank] if axes else weights

    return jax.tree.map(cut, params, specs).layers[0]

  for weights, c in ((params.layers[0], config), (held(0), own), (held(1), own)):
    hybrid.behind(weights, c, x, lambda y: (added.append(np.asarray(y)), y)[1])
  whole, *parts = added
  terms = config.inner + config.experts * config.expert_inner + config.shared_inner
  lost = terms * float(np.finfo(np.float32).eps) * np.abs(whole).max()
  np.testing.assert_allclose(sum(parts), whole, rtol=0, atol=lost)
  assert all(np.abs(y).max() > 100 * lost for y in parts)


def test_what_does_not_divide_is_named():
  w = tiny.world()
  with pytest.raises(ValueError, match=r"heads over 4 devices: key_heads = 2, kv_heads = 2"):
    share(w.config, 4)
  with pytest.raises(ValueError, match=r"a mesh of 3 x 5 devices; there are 1"):
    mesh(3, 5, jax.devices()[:1])
  one = sharded(
    w.params, w.config, lambda c: SCHEMES["snapshot"].make(w.spec(1)), nothing, mesh(1, 1)
  )
  assert one.new(3, 64).length.shape == (3,)
  with pytest.raises(ValueError, match=r"slots = 3, allowed: a multiple of every mesh's"):
    dataclasses.replace(sharding.Config(), slots=3)
  with pytest.raises(ValueError, match=r"meshes = .*, allowed: at least 2 against a mesh"):
    dataclasses.replace(sharding.Config(), meshes=((1, 2),), against="mesh")
