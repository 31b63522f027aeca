"""A whole model decodes under a scheme, and is timed only if its logits are right."""

import dataclasses
import io

import jax.numpy as jnp
import pytest
from rich.console import Console

from experiments import model_step, steps
from experiments.models import QWEN3_5_4B, shape_of
from experiments.record import measure
from gdn import checkpoint
from gdn.ops import XLA

SMOKE = model_step.CONFIGS["smoke"]


def test_a_wrong_scheme_is_not_timed_and_a_right_one_is(tmp_path, monkeypatch):
  def wrong(S, window, params, *, parts):
    o, gates, rows = XLA.verify(S, window, params, parts=parts)
    return o * jnp.asarray(1.001, o.dtype), gates, rows

  monkeypatch.setattr(model_step, "OPS", {"xla": XLA, "mosaic_gpu": XLA._replace(verify=wrong)})
  config = dataclasses.replace(SMOKE, schemes=("replay_0",), ops=("xla", "mosaic_gpu"))
  out = io.StringIO()
  rows = measure(model_step, config, tmp_path, Console(file=out, width=200))
  timed = [(row["scheme"], row["ops"]) for row in rows]
  assert timed == [
    ("none", model_step.BARE), ("none", model_step.PROJECTED), ("replay_0", "xla"),
  ]  # fmt: skip
  assert "replay_0 on mosaic_gpu, batch 2: logits differ by" in out.getvalue()
  last = rows[-1]
  assert 0 < last["low_us"] <= last["step_us"] <= last["high_us"]
  without = rows[0]["step_us"]
  assert abs(last["recurrent_share"] - (1 - without / last["step_us"])) < 2e-3  # both are rounded
  assert last["logit_error"] == 0  # it is what it is compared with
  model_step.figure(rows)


def test_every_scheme_sees_the_same_tokens_of_every_slot():
  w = steps.windows(3, 4, 2)
  tokens = steps.known(model_step.TINY, 5 + w.path, w.slots)
  assert tokens.shape == (3, 4)
  assert (tokens == tokens % model_step.TINY.vocab).all()
  assert len({tuple(row) for row in tokens.tolist()}) == 3
  later = steps.known(model_step.TINY, 5 + 2 + w.path, w.slots)
  assert (tokens[:, 2:] == later[:, :2]).all()


def test_the_model_on_the_gpu_has_the_published_size():
  shapes = checkpoint.names(checkpoint.shapes(QWEN3_5_4B, jnp.bfloat16))
  parameters = sum(x.size for x in shapes.values())
  assert round(parameters / 1e9, 1) == 4.2
  assert shape_of(QWEN3_5_4B).layers == 24


@pytest.mark.parametrize(
  "field, value", [("shape", "4B"), ("ops", ("triton",)), ("accepted", 5), ("runs", 2)]
)
def test_a_config_out_of_range_is_refused(field, value):
  with pytest.raises(ValueError, match=f"{field} = .*, allowed: "):
    dataclasses.replace(SMOKE, **{field: value})
