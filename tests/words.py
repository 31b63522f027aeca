"""What Mosaic's interpreter has no words for, in other words: moves between lanes, and products
whose left side is in registers.

A gather reads its whole reference and picks; a scatter reads it, changes its elements and writes it
back. So a race on any element of the reference counts, and an index past its end is NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret, shared_memory
from jax._src.state.types import AbstractRef
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Num

from pallas_kernels import copies, lanes, rows, substitution, vectors

f32, bf16 = jnp.float32, jnp.bfloat16


class Index:
  """`lanes.Index` over all elements of an array at once."""

  def __init__(self, value):
    self.value = value

  constant = classmethod(lambda cls, value: cls(jnp.int32(value)))

  def _with(self, op, other):
    return Index(op(self.value, other.value if isinstance(other, Index) else other))

  __add__ = lambda self, other: self._with(lambda x, y: x + y, other)
  __rsub__ = lambda self, other: self._with(lambda x, y: y - x, other)
  __mul__ = lambda self, other: self._with(lambda x, y: x * y, other)
  __floordiv__ = lambda self, other: self._with(lambda x, y: x // y, other)
  __mod__ = lambda self, other: self._with(lambda x, y: x % y, other)
  at_most = lambda self, last: self._with(jnp.minimum, last)
  below = lambda self, end: self._with(lambda x, y: x < y, end)
  equals = lambda self, other: self._with(lambda x, y: x == y, other)
  choose = lambda self, yes, no: Index(jnp.where(self.value, yes.value, no.value))


def places(shape: tuple[int, ...]) -> list[Index]:
  return [Index(x) for x in jnp.indices(shape, jnp.int32)]


def whole(index, shape):
  return tuple(jnp.broadcast_to(i.value, shape) for i in index)


def gather(ref, shape, layout, dtype, index, scalars=()):
  del layout
  at = whole(index(*places(shape), *map(Index, scalars)), shape)
  strange = jnp.nan if jnp.issubdtype(dtype, jnp.floating) else -(2**30)
  return ref[...].at[at].get(mode="fill", fill_value=strange).astype(dtype)


def flags(shape, layout, test, scalars=()):
  del layout
  return jnp.broadcast_to(test(*places(shape), *map(Index, scalars)).value, shape)


def scatter(ref, x, layout, index, keep=None, scalars=()):
  del layout
  place = [*places(x.shape), *map(Index, scalars)]
  at = whole(index(*place), x.shape)
  if keep is not None:
    on = keep(*place).value
    at = (jnp.where(on, at[0], 2**30), *at[1:])
  ref[...] = ref[...].at[at].set(x, mode="drop")


def brought_rows(ref, at):
  """ref[at], zeros where negative; of no row at all nothing is read."""
  there = at >= 0
  some = jax.lax.cond(there.any(), lambda: ref[...], lambda: jnp.zeros(ref.shape, ref.dtype))
  rows = some.at[jnp.maximum(at, 0)].get(mode="fill", fill_value=jnp.nan)
  return jnp.where(there[:, None], rows, jnp.zeros((), rows.dtype))


def bring_rows(ref, to, at=None):
  to[:, : ref.shape[1]] = ref[...] if at is None else brought_rows(ref, at[...][: to.shape[0]])


def bring_words(ref, to, at=None):
  to[...] = ref[...] if at is None else brought_rows(ref, at[...]).T


def put_decays(ref, to):
  heads, n = ref.shape
  total = jnp.cumsum(ref[...][:, ::-1], axis=1)[:, ::-1]
  to[:heads, :n] = jnp.exp(jnp.pad(total[:, 1:], ((0, 0), (0, 1))))
  to[heads:, 0] = jnp.exp(total[:, 0])


def find(to, least):
  live = functools.reduce(jnp.logical_and, (ref[...] >= n for ref, n in least))
  order = jnp.argsort(jnp.logical_not(live), stable=True)
  at, n = jnp.arange(live.shape[0]), jnp.sum(live, dtype=jnp.int32)
  # From the end, as the kernel does.
  to[...] = jnp.where(at < n, order, order[n - 1 - at]).astype(jnp.int32)
  return n


def words(ref, first):
  return ref[...].at[jnp.arange(first, first + 128)].get(mode="clip")


def map_rows(f, ref, to):
  for i in range(ref.shape[0]):
    to[i, :128] = f(ref[i, :128])


def in_turn(x):
  """Rows of 128 in the order of `vectors`."""
  return x.astype(f32).reshape(-1, 8, 2, 4, 2).swapaxes(2, 3).reshape(-1, 128)


def turned(ref, to):
  to[...] = in_turn(ref[...][:, :128])


def dots(refs, x, to):
  rows = sum(in_turn(ref[...][:, :128]) for ref in refs)
  to[:, : x.shape[0]] = jnp.einsum("nk,mk->nm", rows, x[...])


def products(tile, ref, to):
  to[...] = jnp.einsum("nk,mk->mn", in_turn(tile), ref[...])


def put_rows(ref, x):
  ref[...] = x[: ref.shape[0]]


def three_parts(x: Num[Array, "..."]) -> list[Array]:
  parts = []
  for _ in range(3):
    cut = jax.lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFF0000)
    parts.append(jax.lax.bitcast_convert_type(cut, f32).astype(bf16))
    x = x - parts[-1].astype(f32)
  return parts


def bits(words: Num[Array, " R"], n: int):
  return jax.lax.shift_right_logical(*jnp.broadcast_arrays(words[:, None], jnp.arange(n))) % 2 == 1


def hand_over(ref, x):
  ref[...] = x.reshape(ref.shape)


def received(ref):
  return ref[...].reshape(64, 8 * ref.shape[0])


def scalars(ref, n: int):
  row = ref[...] if n else ()
  return [row[i] for i in range(n)]


def solve(flat, heads: int, at: substitution.Shape) -> None:
  """A lane is (head, key or query, j)."""
  n, x = at.nodes, flat[...]
  for head in range(max(32 // at.rows, heads)):
    base, row = head * at.block, head * at.rows
    for is_key in (True, False):
      given = x[base + at.right :][: n * n].reshape(n, n)
      A = x[base + (0 if is_key else at.second) :][: n * n].reshape(n, n)
      right = jnp.eye(n) if is_key else given
      y = jax.lax.linalg.triangular_solve(A, right, left_side=True, lower=True, unit_diagonal=True)
      i, j = jnp.indices((n, n))
      own = (row + i) * at.pitch + j if is_key else (row + n + j) * at.pitch + n - 1 - i
      x = x.at[at.out + own].set(y)
  flat[...] = x


def wgmma(acc, acc_transforms, a, b, b_transforms, *, thread, mesh_location, source_info, token):
  """acc += a b of the interpreter, `a` an array."""
  memory = callbacks._get_shared_memory()
  info = callbacks.memory.GPULoggingInfo(mesh_location, thread, source_info)

  def place(key, transforms):
    key = callbacks.HostAllocationKey.from_array(key)
    transforms = jax.tree.map(int, callbacks._remove_noop_transforms(transforms))
    return key, memory.access(key, transforms)

  content = lambda at: memory.get_buffer_content(*at, thread, logging_info=info)[0]
  acc, b = place(acc, acc_transforms), place(b, b_transforms)
  with np.errstate(over="ignore", invalid="ignore"):
    total = content(acc) + np.matmul(np.asarray(a, np.float32), np.asarray(content(b), np.float32))
  memory.store_buffer_content(*acc, total, thread, logging_info=info)
  return token


original = jaxpr_interpret.JaxprInterpreter._interpret_wgmma_ref_p


def interpret_wgmma(self, eqn, token, get_invals):
  assert eqn.primitive is primitives.wgmma_ref_p
  if isinstance(eqn.invars[1].aval, AbstractRef):
    return original(self, eqn, token, get_invals)
  acc, a, b, *leaves = get_invals()
  trees = [eqn.params[f"{x}_transforms_tree"] or jax.tree.structure([]) for x in ("acc", "a", "b")]
  transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
  acc, of_acc = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, acc, transforms[0])
  b, of_b = jaxpr_interpret.resolve_ref(eqn.invars[2].aval, b, transforms[2])
  call = functools.partial(wgmma, source_info=eqn.source_info, mesh_location=self.mesh_location)
  token = jaxpr_interpret.callback.io_callback(
    lambda token, acc, of_acc, a, b, of_b, thread: call(
      acc, of_acc, a, b, of_b, thread=thread, token=token
    ),
    callbacks.TOKEN_SHAPE_DTYPE, token, acc, of_acc, a, b, of_b, self.thread,
  )  # fmt: skip
  return token, []


def deallocate(barrier) -> None:
  """A kernel may end without waiting for what tells it that a buffer is free again."""
  with barrier.cv:
    barrier.ref_count -= 1
    assert barrier.ref_count or not barrier.arrivals_count


def speak_of_rows(monkeypatch):
  """What every kernel that walks over slots needs."""
  for name in ("find", "words", "map_rows"):
    monkeypatch.setattr(rows, name, globals()[name])
  for name in ("bring_rows", "bring_words"):
    monkeypatch.setattr(copies, name, globals()[name])
  monkeypatch.setattr(copies, "asked", lambda: None)
  left = lambda later=0: plgpu.wait_smem_to_gmem(later, wait_read_only=True)
  monkeypatch.setattr(copies, "left", left)
  monkeypatch.setattr(copies, "brought", lambda later=0: lanes.sync())
  monkeypatch.setattr(lanes, "fence", lambda: None)


@pytest.fixture
def lane_moves(monkeypatch):
  """Kernels that move data between lanes run in the interpreter. On a GPU nothing is replaced."""
  if jax.default_backend() == "gpu":
    return
  said = "Index gather flags put_decays put_rows scatter three_parts bits hand_over received"
  for name in said.split():
    monkeypatch.setattr(lanes, name, globals()[name])
  for name in ("turned", "dots", "products"):
    monkeypatch.setattr(vectors, name, globals()[name])
  monkeypatch.setattr(lanes, "scalars", scalars)
  monkeypatch.setattr(lanes, "beside", lambda x, y: jnp.concatenate([x, y], axis=1))
  monkeypatch.setattr(lanes, "columns", lambda x, start, n: x[:, start : start + n])
  monkeypatch.setattr(lanes, "fence", lambda: None)
  monkeypatch.setattr(lanes, "meet", lanes.sync)
  monkeypatch.setattr(lanes, "zero", lambda: 0)
  monkeypatch.setattr(lanes, "put_back", lambda ref, x: ref.__setitem__(..., x))
  monkeypatch.setattr(substitution, "Index", Index)
  monkeypatch.setattr(substitution, "solve", solve)
  monkeypatch.setattr(shared_memory.Barrier, "deallocate", deallocate)
  monkeypatch.setattr(jaxpr_interpret.JaxprInterpreter, "_interpret_wgmma_ref_p", interpret_wgmma)
