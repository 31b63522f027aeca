"""One token per slot beside a ring's pending rows. Reference: `gdn.ops.XLA.step` of one node.

Traffic per value head: the state read once and never written, the raw inputs of a token, an output
row, a row left; K + V values and a decay of each pending row, the keys once per key head.

Two products of a state cost less by plain arithmetic than tensor cores cost in conversions and in
waiting. A warpgroup has half a head in registers, as in `recurrent`; with x the key or the query,

    S' x = e^G S x + sum_p (e^after_p u_p) (k_p . x)     u = beta v - S' k     o = S' q + (k . q) u

and four warpgroups hide each other's latency. One visits all halves of a key head's value heads, so
what they share, k_p . x, is worked out once; where there are too few key heads to go round, `step`
is faster. Rows come by cp.async a visit ahead, what they are found by two visits ahead.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from gdn.ops import Gates, dtypes_of
from pallas_kernels import arith, copies, fold_rank, lanes, recurrent, tiles, vectors, verify
from pallas_kernels.arith import bf16, f32
from pallas_kernels.finish import parts_like
from pallas_kernels.recurrent import Inputs, Path
from pallas_kernels.step import check
from pallas_kernels.tiles import HALVES, TILE, Ahead, Config, Items, K, Team, V
from pallas_kernels.tuning import chosen

MOST = 16  # pending rows
SLOTS = 512  # each warpgroup has the order of them all in shared memory
LINES = (TILE,)  # places of pending rows; the weight of row p for key and query, at p and 16 + p
LENGTH, ROW, AT = 32, 33, 34  # words of a `Slot`, behind its places
KEY, QUERY = range(2)


class Slot(NamedTuple):
  """What is known of a batch row, 64 words in shared memory: places of its pending rows, how many
  there are, its row of the records and where the token's row goes."""

  words: Any

  @property
  def row(self):
    return jnp.maximum(self.words[ROW], 0)

  @property
  def to(self):
    return self.words[AT]

  @property
  def writes(self):
    return self.words[ROW] >= 0

  @property
  def pending(self):
    return jnp.where(self.writes, self.words[LENGTH], 0)

  def ask(self, b, path: Path, at) -> None:
    copies.bring_words(path.path.at[b], self.words.at[pl.ds(0, path.path.shape[1])])
    for place, ref in ((LENGTH, path.length), (ROW, path.row), (AT, at)):
      copies.bring_words(ref.at[pl.ds(b, 1)], self.words.at[pl.ds(place, 1)])

  def hide(self) -> None:
    """Places of rows that are not pending become -1."""
    on = functools.partial(lanes.flags, LINES, lanes.ROWS)
    kept = on(lambda r, n: r.below(n), [self.pending]) | on(lambda r: (r // LENGTH).equals(1))
    came = plgpu.load(self.words, layout=lanes.ROWS, optimized=False)
    self.words[...] = jnp.where(kept, came, -1)


class Shared(NamedTuple):
  """Shared memory of a warpgroup."""

  tile: Any  # [1, 64, K]
  order: Any  # [B]
  slots: Any  # [2, 64], the words of a `Slot`
  heads: Any  # [3, 4], write strength and log decay of two heads; weights of S k, S q and u
  after: Any  # [2, 64], e^after of pending rows, and e^G
  g: Any  # [1, rows]
  met: Any  # [2, 4], products of key and query
  aside: Any  # [rows, 4], k_p . x, and behind them what u_p is weighed by
  raw: Any  # [2, K and more], key and query
  x: Any  # [2, K], the same turned
  keys: Any  # [parts, rows, K and more]
  u: Any  # [2, parts, rows, 64]
  v: Any  # [2, 1, 64]
  products: Any  # [2, 64], S x

  @classmethod
  def scratch(cls, team: int, dtype, rows: int, B: int, dtypes) -> dict[str, object]:
    """For a team of warpgroups, by name."""
    smem = lambda dtype, *shape: plgpu.SMEM((team, *shape), dtype)
    parts, stored = len(dtypes), dtypes[0]
    pitch = K + (32 if stored == f32 else 16) // stored.itemsize  # rows start on different banks
    return cls(
      tile=tiles.shared(dtype, team, 1),
      order=smem(jnp.int32, B),
      slots=smem(jnp.int32, 2, TILE),
      heads=smem(f32, 3, 4),
      after=smem(f32, 2, TILE),
      g=smem(f32, 1, rows),
      met=smem(f32, 2, 4),
      aside=smem(f32, rows, 4),
      raw=smem(bf16, 2, K + 8),
      x=smem(f32, 2, K),
      keys=smem(stored, parts, rows, pitch),
      u=smem(stored, 2, parts, rows, TILE),
      v=smem(bf16, 2, 1, TILE),
      products=smem(f32, 2, TILE),
    )._asdict()


def kernel(S_gmem, *refs, parts: int, team: int, ready, **shared):
  take = iter(refs)
  some = lambda n: tuple(itertools.islice(take, n))
  k_gmem, u_gmem, (g_gmem, at_gmem) = some(parts), some(parts), some(2)
  path, x = Path(*some(3)), Inputs(*some(len(Inputs._fields)))
  nodes_gmem, slots_gmem, o_gmem, beta_gmem, decay_gmem = some(5)
  share = x.v.shape[2] // x.k.shape[2]
  items = Items(S_gmem, slots_gmem, nodes_gmem)
  me = lax.axis_index("wg") if team > 1 else 0
  own = Shared(**{name: ref.at[me] for name, ref in shared.items()})
  rows, together, weights = own.keys.shape[1], HALVES * share, own.heads.at[2]
  gather = lambda ref, index: lanes.gather(ref, LINES, lanes.ROWS, ref.dtype, index)

  def leads(number):
    """Whether a visit is the first of its key head's."""
    return lax.rem(number, together) == 0

  def leads_head(number):
    return lax.rem(number, HALVES) == 0

  def slot(number):
    return Slot(own.slots.at[lax.rem(lax.div(number, together), 2)])

  def gates(number):
    return own.heads.at[lax.rem(lax.div(number, HALVES), 2)]

  def ask_slot(item, number):
    b, _, _ = items.split(item)
    pl.when(leads(number))(lambda: slot(number).ask(b, path, at_gmem))

  def ask_rows(item, number):
    (b, h, m), at, to = items.split(item), slot(number), lax.rem(number, 2)
    row, hk, half = at.row, x.key_head(h), pl.ds(m * TILE, TILE)
    copies.bring_rows(x.v.at[b, :, h, half], own.v.at[to])
    for i, ref in enumerate(u_gmem):
      copies.bring_rows(ref.at[row, :, h, half], own.u.at[to, i], at.words)

    @pl.when(leads(number))
    def of_key_head():
      for i, source in ((KEY, x.k), (QUERY, x.q)):
        copies.bring_rows(source.at[b, :, hk], own.raw.at[pl.ds(i, 1)])
      for i, ref in enumerate(k_gmem):
        copies.bring_rows(ref.at[row, :, hk], own.keys.at[i], at.words)

    @pl.when(leads_head(number))
    def decays():
      places = at.words.at[pl.ds(0, rows)]
      copies.bring_words(g_gmem.at[row, :, pl.ds(h, 1), 0], own.g, places)

  def fetch(item):
    b, h, _ = items.split(item)
    return *x.gates(b, 0, h), *x.head(h)

  def stage(fetched, number):
    for i, y in enumerate(arith.gates(*fetched)):
      gates(number)[i] = y

  def weigh(number):
    """What S x, pending rows and the token's own u are multiplied by."""
    beta = gates(number)[0]
    norm = lambda i: arith.inverse_norm(own.met[i, i])
    key, query = beta * norm(KEY), K**-0.5 * norm(QUERY)
    decay = jnp.exp(gates(number)[1])
    at = lambda r: ((r % MOST).at_most(rows - 1), r // MOST % 2)
    is_key = lanes.flags(LINES, lanes.ROWS, lambda r: (r // MOST % 2).equals(KEY))
    after = gather(own.after.at[0], lambda r: at(r)[:1])
    weight = jnp.where(is_key, key, query) * decay * after * gather(own.aside, at)
    lanes.scatter(own.aside, weight, lanes.ROWS, lambda r: (at(r)[0], at(r)[1] + 2))
    state = decay * own.after[1, 0]
    weights[KEY], weights[QUERY] = key * state, query * state
    weights[2] = query * norm(KEY) * own.met[KEY, QUERY]

  def leave_key(hk, at):
    k = plgpu.load(own.raw.at[KEY, pl.ds(0, K)], layout=lanes.PER_ROW, optimized=False)
    k = k.astype(f32) * arith.inverse_norm(own.met[KEY, KEY])

    @pl.when(at.writes)
    def put():
      for ref, part in parts_like(k, k_gmem):
        ref.at[at.row, at.to, hk][...] = part

  def leave_gates(b, h, at, number):
    beta, g = gates(number)[0], gates(number)[1]
    beta_gmem[b, 0, h], decay_gmem[b, 0, h, 0] = beta, g

    @pl.when(at.writes)
    def put():
      g_gmem[at.row, at.to, h, 0] = g

  def meet(item, turn):
    (_, h, _), number = items.split(item), turn.number
    first, of_head = leads(number), leads_head(number)
    copies.brought()
    pl.when(leads(number + 1))(lambda: slot(number + 1).hide())
    pl.when(first)(lambda: vectors.turned(own.raw, own.x))

    @pl.when(of_head)
    def decays():
      lanes.put_decays(own.g, own.after)
      lanes.sync()  # of what is turned as well: the first visit of a key head is one of a head

    @pl.when(first)
    def products():
      vectors.dots([own.raw], own.x, own.met)
      vectors.dots([own.keys.at[i] for i in range(parts)], own.x, own.aside)
      lanes.sync()

    pl.when(of_head)(lambda: weigh(number))
    pl.when(first)(lambda: leave_key(x.key_head(h), slot(number)))
    lanes.sync()  # all lanes are done with what the next rows replace
    pl.when(turn.more)(lambda: ask_rows(turn.following, number + 1))
    ask_slot(turn.later, number + 2)
    copies.asked()

  def begin(item, following):
    ask_slot(item, jnp.int32(0))
    ask_slot(following, jnp.int32(1))
    copies.asked()
    stage(fetch(item), jnp.int32(0))
    copies.brought()
    slot(jnp.int32(0)).hide()
    lanes.sync()
    ask_rows(item, jnp.int32(0))
    copies.asked()

  def visit(item, S, turn):
    (b, h, m), number, at = items.split(item), turn.number, slot(turn.number)
    to, half, fetched = lax.rem(number, 2), pl.ds(m * TILE, TILE), fetch(turn.following)
    load = lambda ref: plgpu.load(ref, layout=lanes.ROWS, optimized=False).astype(f32)
    vectors.products(S, own.x, own.products)
    lanes.fence()
    key, query, inner = lanes.scalars(weights, 3)

    def add(p, y):
      u = sum((load(own.u.at[to, i, p]) for i in range(1, parts)), load(own.u.at[to, 0, p]))
      return [y + w * u for y, w in zip(y, lanes.scalars(own.aside.at[p], 4)[2:], strict=True)]

    y = [key * load(own.products.at[KEY]), query * load(own.products.at[QUERY])]
    y = lax.fori_loop(0, jnp.minimum(at.pending, rows), add, y)
    u = gates(number)[0] * load(own.v.at[to, 0]) - y[KEY]
    recurrent.put_row(o_gmem.at[b, 0, h], m, y[QUERY] + inner * u)

    @pl.when(at.writes)
    def put():
      for ref, part in parts_like(u, u_gmem):
        ref.at[at.row, at.to, h, half][...] = part

    pl.when(m == 0)(lambda: leave_gates(b, h, at, number))
    pl.when(leads_head(number + 1))(lambda: stage(fetched, number + 1))

  def miss(item):
    b, h, m = items.split(item)
    recurrent.put_row(o_gmem.at[b, 0, h], m, recurrent.nothing())

    @pl.when(m == 0)
    def no_gates():
      beta_gmem[b, 0, h], decay_gmem[b, 0, h, 0] = jnp.float32(0.0), jnp.float32(0.0)

  worker, workers = lax.axis_index("cta") * team + me, lax.axis_size("cta") * team
  mine = Team(worker, workers, own.order, together, barriers=me, spare_banks=False)
  ahead = Ahead(begin, meet=meet)
  tiles.walk(items, visit, miss, in_smem=own.tile, ready=ready, ahead=ahead, team=mine)


DEFAULT = Config(ctas_per_sm=4)


def step(S, rows, pending, flush, at, window, params, *, config: Config | None = None,
         out_dtype=None):  # fmt: skip
  """As `step.step`. NotImplementedError: more than one node or sixteen pending rows, one flag that
  all slots flush, few slots or more than `SLOTS`."""
  verify.check(S, window)
  check(rows, pending, window)
  (B, T, H, _), Hk, P = window.raw.v.shape, window.raw.q.shape[2], pending.path.shape[1]
  left, parts = min(P, max(rows.g.shape[1] - 1, 1)), dtypes_of(rows.k)
  if T > 1 or left > MOST or P > LENGTH:
    raise NotImplementedError(
      f"{T=}, {left} pending rows, paths of {P}: at most 1, {MOST}, {LENGTH}"
    )
  if flush is True:
    raise NotImplementedError("all slots flush")
  if B > SLOTS:
    raise NotImplementedError(f"{B} slots: at most {SLOTS}")
  config = config or chosen(
    "decode_ring", DEFAULT, state=S.dtype, channels=1, tokens=left, heads=B * H
  )
  team = config.ctas_per_sm
  if 3 * B * Hk < 5 * team * config.sms:
    raise NotImplementedError(f"{B * Hk} key heads: fewer than {team * config.sms} warpgroups need")
  pending = pending._replace(row=jnp.where(window.slots < 0, -1, pending.row))
  if flush is not False:
    some = pending._replace(length=jnp.where(flush, pending.length, 0))
    S = fold_rank.fold_rank(S, rows, some, window.slots)
    pending = pending._replace(length=jnp.where(flush, 0, pending.length))
  out = [
    jax.ShapeDtypeStruct((B, 1, H, V), out_dtype or window.raw.v.dtype),
    jax.ShapeDtypeStruct((B, 1, H), f32),
    jax.ShapeDtypeStruct((B, 1, H, 1), f32),
  ]
  scratch = Shared.scratch(team, S.dtype, left, B, parts)
  scratch |= {"ready": plgpu.Barrier(num_barriers=team)}
  stored = jax.tree.map(jax.new_ref, rows)
  body = functools.partial(kernel, parts=len(parts), team=team)
  o, beta, g = tiles.launch(body, out, config, B * Hk, scratch, team)(
    S, *stored.k, *stored.u, stored.g, at, *pending, *recurrent.inputs(window, params),
    window.nodes, window.slots,
  )  # fmt: skip
  return o, Gates(beta, g), S, jax.tree.map(jax.freeze, stored)
