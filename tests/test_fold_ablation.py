"""Deferred commit with traced precisions: against the ring itself, float64, and a planted fault."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from rich.console import Console

from commit_schemes import Dtypes, Spec, ring
from experiments import deferred, fold_ablation, fold_ablation_report, forced, noisy_text
from experiments.ablation import round_bits, round_to
from experiments.deferred import Setting
from experiments.streams import Streams
from experiments.truth import tokens as float64_tokens
from experiments.truth import truth
from gdn import hybrid, ops
from gdn.config import Config
from gdn.typing import Raw, Tokens
from tests import budget
from tests.strategies import draw_gates, draw_raw

pytestmark = pytest.mark.usefixtures("quick_compiles")

EPS = float(np.finfo(np.float32).eps)
TOKENS, WINDOW = 60, 5
TEXT = np.frombuffer(b"the state and the slate and the state of the art" * 2, np.uint8)[:TOKENS]
PROBES = (5, 17, 40, TOKENS)


def streams():
  rng = np.random.default_rng(0)
  raw = draw_raw(rng, B=1, T=TOKENS)
  return Streams(Raw(*(jnp.asarray(x[0]) for x in raw)), draw_gates(rng), (0,))


def heads(s: Streams) -> Tokens:
  x = float64_tokens(s.raw, s.gates)
  return Tokens(*(jnp.asarray(np.moveaxis(y, 1, 0), jnp.float32) for y in x))


def settings(*lines) -> Setting:
  """Lines of rows, checkpoint, dots, every, phantom."""
  return Setting(*(np.array(x) for x in zip(*lines, strict=True)))


def errors(replay: bool, *lines) -> np.ndarray:
  """[probes, C] relative state errors."""
  s = streams()
  plan, want = forced.schedule(TEXT, WINDOW, PROBES), truth(s, PROBES)
  probes = list(deferred.run(settings(*lines), heads(s), plan, WINDOW, replay=replay))
  assert [p.token for p in probes] == list(PROBES)
  pairs = zip(probes, want.states, strict=True)
  return np.stack([fold_ablation.errors(p.states, w) for p, w in pairs])


def test_a_traced_rounding_is_the_static_one():
  x = jnp.asarray(np.random.default_rng(0).normal(size=500) * 1e5, jnp.float32)
  for keep in (0, 3, 7, 10, 16, 22):
    np.testing.assert_array_equal(round_to(x, jnp.int32(keep)), round_bits(x, keep))
  np.testing.assert_array_equal(round_to(x, jnp.int32(23)), x)
  special = jnp.asarray([0.0, -0.0, np.inf, np.nan], jnp.float32)
  np.testing.assert_array_equal(round_to(special, jnp.int32(4)), special)


def test_in_full_precision_every_fold_is_the_recurrence():
  lines = [(23, 23, 23, m, False) for m in (1, 2, 5)]
  for replay in (False, True):
    assert errors(replay, *lines).max() < TOKENS * EPS


def test_bf16_rows_leave_the_states_that_the_ring_leaves():
  """Same roundings at the same places: equal up to float32 sums, far below the rounding itself."""
  s = streams()
  plan = forced.schedule(TEXT, WINDOW, PROBES)
  every = 1
  arithmetic = ops.xla(out=jnp.float32)
  dtypes = Dtypes(rows=(jnp.bfloat16,), checkpoint=jnp.bfloat16)
  scheme = ring(Spec(2, WINDOW, arithmetic, dtypes=dtypes), slots=WINDOW, fold="open_loop")
  want = [p.state for p in forced.run(scheme, s, plan, WINDOW)]
  got = deferred.run(settings((7, 7, 23, every, False)), heads(s), plan, WINDOW, replay=False)
  # `materialize` of the ring rounds to the checkpoint; the probe does not.
  for p, state in zip(got, want, strict=True):
    mine = np.asarray(jnp.asarray(p.states[0]).astype(jnp.bfloat16).astype(jnp.float32))
    assert budget.rms(mine - state) < 2.0**-9 * budget.rms(state) / 2


def test_each_rounding_and_the_cursor_fault_are_seen():
  exact, rows, ckpt, dots, fault = errors(
    False,
    (23, 23, 23, 2, False),
    (7, 23, 23, 2, False),
    (23, 7, 23, 2, False),
    (23, 23, 7, 2, False),
    (23, 23, 23, 2, True),
  )[-1]
  assert exact < TOKENS * EPS
  assert min(rows, ckpt, dots) > 2.0**-11
  assert max(rows, ckpt, dots) < 2.0**-4
  assert fault > 2.0**-4


def test_rounding_less_often_hurts_less():
  one, four = errors(True, (23, 7, 23, 1, False), (23, 7, 23, 4, False))[-1]
  assert four < one / 1.3


SMALL = Config(
  vocab=32, width=32, inner=32, layers=2, attention_every=2, key_heads=1, value_heads=2,
  key_dim=8, value_dim=8, query_heads=1, kv_heads=1, head_dim=8, rotary=4, window=16,
)  # fmt: skip


def test_text_changes_where_the_state_is_coarse_and_only_there():
  params = hybrid.init(SMALL, jax.random.key(0))
  spec = Spec(SMALL.key_heads, 1)
  bits = np.array([23, 22, 0] * 2)
  prompts = [[1, 2, 3, 4]] * 3 + [[9, 8, 7, 6]] * 3
  state = noisy_text.rounding(spec, bits)
  go = {"tokens": 48, "seed": 0}
  text = noisy_text.write(params, SMALL, state, prompts, temperature=0.02, watch=3, **go)
  np.testing.assert_array_equal(text.tokens[0], text.tokens[1])
  assert (text.tokens[0] != text.tokens[2]).any()
  assert not text.distance[::3].any()
  assert (0 < text.distance[1]).all()
  assert text.distance[1].max() < 2.0**-20
  assert text.distance[2, 0] > 2.0**-4
  assert (text.tokens[0] != text.tokens[3]).any(), "another prompt, another text"
  spent = noisy_text.text_bits(params, SMALL, prompts, text.tokens)
  assert spent.shape == (6,)
  assert spent[0] == pytest.approx(spent[1], rel=1e-3)


def test_a_text_says_how_far_it_is_and_is_the_same_in_pieces(monkeypatch):
  params = hybrid.init(SMALL, jax.random.key(0))
  prompts, told = [[1, 2, 3, 4], [9, 8, 7, 6]], []
  state = noisy_text.rounding(Spec(SMALL.key_heads, 1), np.array([23, 7]))
  go = {"tokens": 21, "seed": 0, "temperature": 0.5, "watch": 2}
  whole = noisy_text.write(params, SMALL, state, prompts, **go)
  monkeypatch.setattr(noisy_text, "PIECE", 8)
  pieces = noisy_text.write(params, SMALL, state, prompts, **go, progress=told.append)
  np.testing.assert_array_equal(whole.tokens, pieces.tokens)
  np.testing.assert_array_equal(whole.distance, pieces.distance)
  assert told == [8 / 21, 16 / 21, 1.0]


@pytest.mark.slow
def test_the_text_parts_tell_their_progress():
  c, told = dataclasses.replace(fold_ablation.CONFIGS["smoke"], rings=("exact",)), []
  goal = fold_ablation.target(None, context=c.prompt + c.text_tokens)
  ids = np.arange(200, dtype=np.int32) % 90 + 32
  rows = list(fold_ablation.text_rows(c, goal, ids, 0.0, told.append))
  assert len(rows) == 3
  assert told == sorted(told)
  assert 0 < told[0] < fold_ablation.WRITING <= told[-1] < 1
  assert len(told) == 4


def test_a_report():
  c = dataclasses.replace(fold_ablation.CONFIGS["smoke"], every=(1, 4))
  every = {"accept_length": 2.0, "output_error": 1e-3, "bf16_equal": 0.5}
  forced_rows = [
    fold_ablation.row(part="forced", **line._asdict(), token=256 * 2**i, state_error=e, **every)
    for line in fold_ablation.lines(dataclasses.replace(c, checkpoints=("fp32", "bf16")))
    for i, e in enumerate([4e-3 / line.every**0.5] * 5)
  ]
  text = [
    fold_ablation.row(
      part="text", fold="rounded", token=100, temperature=0.0, prompt=0, bits=bits, distance=1e-2,
      first_difference=first, bits_per_byte=2.0, repeats=3,
    )
    for bits, first in ((23, None), (7, 40), (4, 2))
  ]  # fmt: skip
  rows = forced_rows + text
  assert isinstance(fold_ablation.figure(rows), Figure)
  said = " ".join(fold_ablation_report.answer(rows))
  assert "2.00 x better than at every one; sqrt(m) is 2.00" in said
  assert "from 7 bits down, where states differ by 1.0e-02" in said


def test_every_text_of_a_ring_is_drawn_beside_those_of_rounded_states():
  """Each measure in its panel, at a letter that the key explains."""
  states = (("rounded", 23, None), ("rounded", 4, 7))
  text = [
    fold_ablation.row(
      part="text", fold=fold, token=100, temperature=t, prompt=prompt, bits=bits,
      first_difference=first, bits_per_byte=2.0 + prompt, repeats=3 + prompt,
    )
    for t in (0.0, 1.0) for prompt in (0, 1)
    for fold, bits, first in (*states, ("exact", None, 40 + prompt), ("open_loop", None, None))
  ]  # fmt: skip
  line = fold_ablation.lines(fold_ablation.CONFIGS["smoke"])[0]._asdict()
  fig = fold_ablation.figure(
    [fold_ablation.row(part="forced", **line, token=8, state_error=1e-3), *text]
  )
  key, *panels = fig.axes[2:]
  names = [t.get_text() for k in key.get_children() if isinstance(k, Legend) for t in k.texts]
  assert names[-2:] == ["exact", "open_loop"]
  wanted = ([40, 100, 41, 100] * 2, [2, 2, 3, 3] * 2, [3, 3, 4, 4] * 2)
  for ax, want in zip(panels, wanted, strict=True):
    assert [label.get_text() for label in ax.get_xticklabels()][-2:] == ["A", "B"]
    after = ax.lines[-1].get_xdata()[0]
    assert [y for x, y in (p for line in ax.lines for p in line.get_xydata()) if x > after] == want
  said = " ".join(fold_ablation_report.answer(text))
  assert "ring exact: 0 of 4 texts are the plain ones; first left at token 40" in said
  assert "ring open_loop: 4 of 4 texts are the plain ones" in said


def test_texts_too_short_for_a_slope_have_none():
  """A smoke run's probes end before slopes begin."""
  line = fold_ablation.lines(fold_ablation.CONFIGS["smoke"])[0]._asdict()
  rows = [
    fold_ablation.row(part="forced", **line | {"phantom": fault}, token=token, state_error=1e-3,
                      output_error=1e-3, bf16_equal=0.5)
    for fault in (False, True) for token in (4, 16, 64)
  ]  # fmt: skip
  out = io.StringIO()
  Console(file=out, width=200).print(fold_ablation.table(rows))
  assert "late error 1.0e-03" in out.getvalue()
  assert "cursor fault" in out.getvalue()
  assert "nan" not in out.getvalue()


@pytest.mark.parametrize(
  ("field", "value"),
  [("tokens", 3), ("window", 1), ("probes", 1), ("records", ("fp8",)), ("checkpoints", ()),
   ("every", (0,)), ("prompts", 0), ("levels", (7,)), ("temperatures", (-1.0,)), ("rings", ("x",))],
)  # fmt: skip
def test_a_bad_field_is_named_with_what_is_allowed(field, value):
  with pytest.raises(ValueError, match=rf"{field}=.*allowed: "):
    dataclasses.replace(fold_ablation.CONFIGS["smoke"], **{field: value})


@pytest.mark.parametrize(("field", "value"), [("slots", 0), ("flush", "never")])
def test_a_bad_ring_is_named_with_what_is_allowed(field, value):
  with pytest.raises(ValueError, match=rf"ring.{field}=.*allowed: "):
    fold_ablation.Ring(**{field: value})
  with pytest.raises(ValueError, match="allowed with early: 2 to 256"):
    fold_ablation.Ring(slots=1, flush="early")
