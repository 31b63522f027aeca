"""A whole model decodes end to end under a scheme, and is timed if its text is the plain one."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from commit_schemes import SCHEMES
from experiments import model_step, steps
from experiments.model_step import PLAIN, Cell
from experiments.models import QWEN3_5_4B, shape_of
from experiments.record import measure
from gdn import checkpoint
from gdn.ops import XLA
from gdn.streaming import empty
from gdn.typing import Accepted
from tests.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMOKE = model_step.CONFIGS["smoke"]


def run(config, folder):
  """Rows, and what was said."""
  out = io.StringIO()
  return measure(model_step, config, folder, Console(file=out, width=200)), out.getvalue()


def test_a_wrong_kernel_is_not_timed_and_a_right_one_is(tmp_path, monkeypatch):
  def wrong(S, window, params, *, parts):
    o, gates, rows = XLA.verify(S, window, params, parts=parts)
    return o * jnp.asarray(1.001, o.dtype), gates, rows

  monkeypatch.setattr(model_step, "OPS", {"xla": XLA, "mosaic_gpu": XLA._replace(verify=wrong)})
  config = dataclasses.replace(SMOKE, schemes=("replay_0",), ops=("xla", "mosaic_gpu"))
  rows, said = run(config, tmp_path)
  timed = [(row["scheme"], row["ops"]) for row in rows]
  assert timed == [
    ("none", model_step.BARE), ("none", model_step.PROJECTED), ("replay_0", "xla"),
  ]  # fmt: skip
  assert "replay_0 on mosaic_gpu, batch 2: logits differ by" in said
  last = rows[-1]
  assert 0 < last["low_us"] <= last["step_us"] <= last["high_us"]
  without = rows[0]["step_us"]
  rounded = 1e-4 + 0.05 * without / last["step_us"] ** 2  # the step to a tenth, the share to 1e-4
  assert abs(last["recurrent_share"] - (1 - without / last["step_us"])) <= rounded
  assert last["logit_error"] <= model_step.SLACK * last["logit_noise"]
  assert last["tokens"] == config.batches[0] * config.tokens
  model_step.figure(rows)


def test_a_scheme_that_keeps_a_rejected_token_is_not_timed(tmp_path, monkeypatch):
  def build(spec):
    scheme = SCHEMES["snapshot"].build(spec)
    chain = lambda path: jnp.broadcast_to(
      jnp.arange(path.shape[1], dtype=jnp.int32)[None], path.shape
    )
    more = lambda a: Accepted(chain(a.path), jnp.where(a.length == 1, 2, a.length))
    return scheme._replace(commit=lambda flight, accepted: scheme.commit(flight, more(accepted)))

  kept = {"snapshot": SCHEMES["snapshot"], "replay_0": SCHEMES["replay_0"]._replace(build=build)}
  monkeypatch.setattr(model_step, "SCHEMES", kept)
  rows, said = run(dataclasses.replace(SMOKE, schemes=("snapshot", "replay_0")), tmp_path)
  assert [row["scheme"] for row in rows] == ["none", "none", "snapshot"]
  assert "replay_0 on xla, batch 2: logits differ by" in said


@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_what_is_drafted_is_accepted_up_to_the_first_wrong_token(dtype):
  """In both dtypes all of the text is compared, and its windows are those of the plan."""
  c = dataclasses.replace(SMOKE, dtype=dtype)
  b = model_step.bench(c)
  memories = b.read()
  plain, cell = Cell(2, PLAIN, "xla"), Cell(2, "tree_wy", "xla")
  want = model_step.plainly(b, b.compiled(plain), b.compiled_pass(), memories)
  got = b.decoded(cell, b.compiled(cell), memories, want.text, model_step.TIE * want.noise)
  assert model_step.compared(got, want).fault(want.noise) is None
  assert (got.text == np.asarray(want.text)).all()
  until = c.prompt + c.tokens
  at = np.arange(until + c.window)
  for slot in range(2):
    off = np.asarray(steps.wrong(at[None], jnp.asarray([slot]), c.accepted))[0]
    length, plan = c.prompt, []
    while length < until:
      right = next(i for i in range(c.window) if off[length + i] or i == c.window - 1)
      plan.append(min(1 + right, until - length))
      length += plan[-1]
    emitted = got.emitted[:, slot]
    assert emitted[emitted > 0].tolist() == plan
    assert {1, c.window} <= set(plan)


def test_of_a_token_that_differs_the_first_is_said():
  c = dataclasses.replace(SMOKE, schemes=("replay_0",))
  b = model_step.bench(c)
  memories = b.read()
  plain = Cell(2, PLAIN, "xla")
  want = model_step.plainly(b, programs := b.compiled(plain), b.compiled_pass(), memories)
  got = b.decoded(plain, programs, memories, want.text, model_step.TIE * want.noise)
  other = want._replace(text=want.text.at[1, c.prompt + 7].add(1))
  found = model_step.compared(got, other)
  assert found.first == 7
  assert found.fault(want.noise) == "its text is another from token 7 on"


def test_without_recurrent_layers_nothing_of_them_is_kept_or_computed():
  b = model_step.bench(SMOKE)
  for name, mixers in ((model_step.BARE, 0), (model_step.PROJECTED, 1)):
    cell = Cell(2, model_step.REST, name)
    carry = jax.eval_shape(b.start(cell), empty(b.config, 2, jnp.float32), b.prompts).carry
    assert jax.tree.leaves(carry[0]) == []
    assert len(jax.tree.leaves(carry[1])) == 3  # keys, values, length
    assert (b.weights(cell).layers[0].mixer is not None) == bool(mixers)


def test_prompts_differ_and_go_on_from_where_they_are():
  slots, at = jnp.arange(3), jnp.broadcast_to(jnp.arange(5, 9)[None], (3, 4))
  tokens = steps.known(model_step.TINY, at, slots)
  assert tokens.shape == (3, 4)
  assert (tokens == tokens % model_step.TINY.vocab).all()
  assert len({tuple(row) for row in tokens.tolist()}) == 3
  later = steps.known(model_step.TINY, at + 2, slots)
  assert (tokens[:, 2:] == later[:, :2]).all()


def test_the_model_on_the_gpu_has_the_published_size():
  shapes = checkpoint.names(checkpoint.shapes(QWEN3_5_4B, jnp.bfloat16))
  parameters = sum(x.size for x in shapes.values())
  assert round(parameters / 1e9, 1) == 4.2
  assert shape_of(QWEN3_5_4B).layers == 24


@pytest.mark.parametrize(
  "field, value",
  [("shape", "4B"), ("ops", ("triton",)), ("accepted", 5), ("runs", 2), ("tokens", 35)],
)
def test_a_config_out_of_range_is_refused(field, value):
  with pytest.raises(ValueError, match=f"{field} = .*, allowed: "):
    dataclasses.replace(SMOKE, **{field: value})
