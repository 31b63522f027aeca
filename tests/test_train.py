"""Training starts again where it stopped, on text that it may see, and the result is measured."""

import dataclasses
import hashlib

import jax
import numpy as np
import pytest

from experiments import corpus, heldout_bpb, train
from experiments.provenance import RESULTS
from experiments.record import read_rows
from experiments.score import BUNDLED, stream_bits
from gdn.checkpoint import load

ROWS = RESULTS / "heldout_bpb" / "rows.csv"
MANIFEST = BUNDLED.parent / "training_files.sha256"


@pytest.fixture(autouse=True)
def _promotion():
  """optax raises a float to an integer power, which strict promotion forbids."""
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
  """A library of a few files: what is tested does not depend on the running Python."""
  root = tmp_path_factory.mktemp("stdlib")
  for i in range(6):
    (root / f"m{i}.py").write_text(f"def f{i}(x):\n  return x + {i}\n" * 60)
  return root


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_weights(
  tmp_path, stdlib, monkeypatch, quick_compiles
):
  config = dataclasses.replace(train.TINY, stdlib=stdlib)
  whole = train.run(config, tmp_path / "whole")
  measure, calls = train.measure, []

  def interrupted(*args):
    calls.append(args)
    if len(calls) == 2:
      raise KeyboardInterrupt
    return measure(*args)

  monkeypatch.setattr(train, "measure", interrupted)
  with pytest.raises(KeyboardInterrupt):
    train.run(config, tmp_path / "half")
  assert not (tmp_path / "half" / "model.safetensors").exists()
  load(tmp_path / "half" / "partial" / "model.safetensors")  # of the last save
  resumed = train.run(config, tmp_path / "half")
  assert int(whole.step) == int(resumed.step) == config.steps
  for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
    np.testing.assert_array_equal(a, b)
  names = ("model.safetensors", "training_files.sha256")
  for a, b in ((tmp_path / way / n for way in ("whole", "half")) for n in names):
    assert a.read_bytes() == b.read_bytes()
  log = read_rows(tmp_path / "whole" / "log.csv")
  assert log[-1]["step"] == config.steps
  assert log[-1]["loss_bits_per_byte"] < log[0]["loss_bits_per_byte"] < 9
  load(tmp_path / "whole" / "model.safetensors")


def test_batches_depend_on_the_step_alone_and_cover_the_text():
  files = [corpus.File(f"{i}.py", bytes([65 + i]) * 50) for i in range(7)]
  draw = lambda start: corpus.batches(files, 10, 3, seed=1, start=start)
  first = draw(0)
  batches = [next(first) for _ in range(40)]
  for start in (7, 11, 25):
    np.testing.assert_array_equal(next(draw(start)), batches[start])
  per_epoch = (7 * 51 - 1) // 10 // 3
  seen = np.bincount(np.concatenate(batches[:per_epoch])[:, 1:].reshape(-1), minlength=72)
  assert all(50 - 10 * 3 <= n <= 50 for n in seen[65:])
  with pytest.raises(
    ValueError, match="context 400 x batch 3 needs more than 1200 bytes, text has"
  ):
    next(corpus.batches(files, 400, 3, seed=0))


def test_heldout_text_is_whole_long_enough_and_was_not_trained_on(tmp_path):
  files = corpus.heldout_files()
  assert len(corpus.heldout()) - 1 >= 65_536
  assert not {f.sha256 for f in files} & {line.split()[0] for line in MANIFEST.open()}
  assert not set(corpus.HELDOUT) & {line.split()[1] for line in MANIFEST.open()}
  assert (corpus.HELDOUT_FOLDER / "LICENSE.txt").exists()
  for file in corpus.HELDOUT_FOLDER.iterdir():
    (tmp_path / file.name).write_bytes(file.read_bytes())
  (tmp_path / "heapq.py.txt").write_bytes(b"other")
  with pytest.raises(ValueError, match=r"held-out files differ from .*: heapq\.py"):
    corpus.heldout_files(tmp_path)


def test_training_text_has_no_duplicate_binary_or_heldout_file(tmp_path):
  texts = {
    "a.py": b"a = 1\n",
    "b.py": b"a = 1\n",
    "nul.py": b"\0",
    "latin.py": b"\xe9",
    "empty.py": b"\n",
    "argparse.py": b"another version\n",
    "copy.py": corpus.heldout_files()[0].text,
    "site-packages/c.py": b"c = 1\n",
    "sub/d.py": b"d = 1\n",
  }
  for name, text in texts.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(text)
  files = corpus.training_files(tmp_path)
  assert [f.name for f in files] == ["a.py", "sub/d.py"]
  digest = hashlib.sha256(b"d = 1\n").hexdigest()
  assert corpus.manifest(files).splitlines()[1] == f"{digest}  sub/d.py"
  with pytest.raises(FileNotFoundError, match="no Python file"):
    corpus.training_files(tmp_path / "none")


def test_bundled_model_scores_as_its_committed_rows_say():
  n = 4_096
  params, config = load(BUNDLED)
  text = corpus.heldout()[None, : n + 1]
  bits = np.concatenate(list(stream_bits(params, config, text, piece=1_024)), axis=1)
  rows = [
    row
    for row in read_rows(ROWS)
    if (row["stream"], row["scored"]) == (0, "whole") and row["first_byte"] < n
  ]
  assert sum(row["bytes"] for row in rows) == n
  mean = sum(row["bytes"] * row["heldout_bits_per_byte"] for row in rows) / n
  # bfloat16 rounds to 2^-8; over 4,096 bytes the mean moves by far less than one such step
  assert abs(float(bits.mean()) - mean) < 2**-8


def test_bits_per_byte_do_not_rise_with_position():
  """On the same bytes a long memory is never worse than an empty one, in the mean of streams."""
  rows = read_rows(ROWS)
  whole, restarted = (heldout_bpb.by_position(rows, way) for way in heldout_bpb.WAYS)
  assert sum(width for _, width in whole) == 65_536
  assert all(whole[at].mean() <= restarted[at].mean() + 1e-4 for at in whole)


@pytest.mark.parametrize(
  "wrong", [{"context": 0}, {"steps": 0}, {"cooldown": 1.5}], ids=lambda w: next(iter(w))
)
def test_train_config_names_the_value_and_what_is_allowed(wrong):
  [(name, value)] = wrong.items()
  with pytest.raises(ValueError, match=f"{name} = {value}, allowed: "):
    train.TrainConfig(**wrong)


@pytest.mark.parametrize(
  "wrong, says",
  [
    ({"streams": 10}, "streams = 10 of length = 65536, allowed: "),
    ({"piece": 1_000}, "piece = 1000, allowed: a divisor of 65536"),
  ],
)
def test_heldout_config_names_the_value_and_what_is_allowed(wrong, says):
  with pytest.raises(ValueError, match=says):
    heldout_bpb.Config(**wrong)
