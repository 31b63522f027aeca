"""A commit scheme: how a recurrent state survives a window of drafted tokens.

    carry = scheme.init(S)                          # S [N, H, V, K]: the pool of all decode slots
    o, flight = scheme.verify(carry, window, gates) # nothing is committed
    carry = scheme.commit(flight, accepted)         # rejected nodes leave no trace
    S = scheme.materialize(carry)                   # the committed state

Five pure functions and nothing hidden. `carry` is exactly what lives between steps and `flight`
exactly what lives from verify to commit; a flight contains what it took over from its carry, so
both calls may donate their input. Memory is therefore a property of the two types: `footprint`.
Every leaf of a carry has the pool's leading axis N, so a slot is admitted by writing its row. Every
flight is a tuple of the pools, then what goes by batch row, then `slots`: see `narrow`.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from gdn.ops import XLA, Ops
from gdn.pool import put, take
from gdn.typing import Accepted, GateParams, Pending, Slots, Window

Topology = Literal["chain", "tree"]
Decay = Literal["gdn", "kda"]


class CommitScheme(NamedTuple):
  """init, verify, commit, materialize as above.

  `state_at(flight, accepted)` is the state pool after any accepted prefix, for a prefix cache.
  """

  init: Callable[..., Any]
  verify: Callable[..., tuple[Any, Any]]
  commit: Callable[[Any, Accepted], Any]
  state_at: Callable[[Any, Accepted], Any]
  materialize: Callable[[Any], Any]


class Dtypes(NamedTuple):
  """What is stored in which precision.

  checkpoint  the state pool
  rows        pseudo-values and normalised keys: one dtype, or (bfloat16, bfloat16) for hi + lo
  raw         raw k and v kept for replay; exact only if no narrower than the activations
  """

  checkpoint: Any = jnp.float32
  rows: tuple[Any, ...] = (jnp.float32,)
  raw: Any = jnp.bfloat16


class Spec(NamedTuple):
  """What every scheme is built for: the arithmetic, the layer's shape, the window, the dtypes.

  `topology="chain"` promises that no window is a tree. An accepted path is then a prefix: nothing
  has to be moved or remembered for it, and the results are the same.
  """

  key_heads: int
  window: int  # T, the most nodes that one verify takes
  ops: Ops = XLA
  channels: int = 1  # E: 1 for GDN, the key dim for KDA
  dtypes: Dtypes = Dtypes()
  topology: Topology = "tree"


def scheme(init, verify, commit, materialize) -> CommitScheme:
  """A CommitScheme whose `state_at` is, by definition, `materialize` after `commit`.

  Flights name their batch rows: `flight.slots` [B].
  """

  def checked_commit(flight, accepted):
    check_accepted(flight.slots, accepted)
    return commit(flight, accepted)

  state_at = lambda f, a: materialize(checked_commit(f, a))
  return CommitScheme(init, verify, checked_commit, state_at, materialize)


def check(name: str, x: Any, kind: Any, shape: tuple[int, ...]) -> None:
  """ValueError unless x is an array of this dtype (or of any kind of float) and this shape."""
  has, dtype = jnp.shape(x), jnp.result_type(x)
  if has != shape or not jnp.issubdtype(dtype, kind):
    want = "floating " if kind is jnp.floating else jnp.dtype(kind).name
    raise ValueError(f"{name} is {dtype}{list(has)}, not {want}{list(shape)}")


def check_pool(spec: Spec, S: Any) -> None:
  """ValueError unless S [N, H, V, K] is a pool of states that `spec` can take."""
  if S.ndim != 4 or not jnp.issubdtype(S.dtype, jnp.floating):
    raise ValueError(f"S is {S.dtype}{list(S.shape)}; a pool is floating [N, H, V, K]")
  if S.shape[1] % spec.key_heads:
    raise ValueError(
      f"S has {S.shape[1]} value heads, which is no multiple of spec.key_heads={spec.key_heads}"
    )
  if spec.channels not in (1, S.shape[3]):
    raise ValueError(
      f"spec.channels={spec.channels} must be 1 (GDN) or the key dim of S, {S.shape[3]} (KDA)"
    )


def check_window(spec: Spec, S: Any, window: Window, gates: GateParams) -> None:
  """ValueError that names the first array of a window, or of its layer's gate parameters, which
  does not fit the pool S, the others or `spec`."""
  raw = window.raw
  if window.parents.ndim != 2:
    raise ValueError(f"window.parents has shape {list(window.parents.shape)}, which is not [B, T]")
  (B, T), (_, H, V, K), E = window.parents.shape, S.shape, spec.channels
  if T > spec.window:
    raise ValueError(f"a window of {T} nodes does not fit: spec.window={spec.window}")
  keys = (B, T, spec.key_heads, K)
  shapes = (keys, keys, (B, T, H, V), (B, T, H, E), (B, T, H))
  for name, x, shape in zip(raw._fields, raw, shapes, strict=True):
    check(f"raw.{name}", x, jnp.floating, shape)
  for name, x, shape in zip(gates._fields, gates, ((H,), (H, E), ()), strict=True):
    check(f"gates.{name}", x, jnp.float32, shape)
  check("window.parents", window.parents, jnp.int32, (B, T))
  check("window.nodes", window.nodes, jnp.int32, (B,))
  check("window.slots", window.slots, jnp.int32, (B,))


def check_accepted(slots: Slots, accepted: Accepted) -> None:
  """ValueError unless the acceptance has a path and a length for each batch row in flight."""
  path, length = accepted
  if path.ndim != 2:
    raise ValueError(f"accepted.path has shape {list(path.shape)}, which is not [B, P]")
  check("accepted.path", path, jnp.int32, (*slots.shape, path.shape[1]))
  check("accepted.length", length, jnp.int32, slots.shape)


def running(slots: Slots) -> Any:
  """[B, 1], which batch rows are not padding; inside `jit` any of them may run."""
  return isinstance(slots, jax.core.Tracer) or (np.asarray(slots) >= 0)[:, None]


def check_chain(window: Window) -> None:
  """ValueError if a real node's parent is not the node before it.

  Only where the values are known: inside `jit` they are not, and nothing can be refused there. Who
  compiles a scheme that takes chains alone calls this on the windows that go in.
  """
  arrays = window.parents, window.nodes
  if any(isinstance(x, jax.core.Tracer) for x in arrays):
    return
  parents, nodes = map(np.asarray, arrays)
  at = np.arange(parents.shape[1])
  wrong = (parents != at - 1) & (at < nodes[:, None]) & running(window.slots)
  if wrong.any():
    row, node = np.argwhere(wrong)[0]
    raise ValueError(
      f"parents[{row}, {node}] = {parents[row, node]} makes a tree, "
      f"and this scheme takes chains alone: {node - 1} is allowed"
    )


def check_prefix(slots: Slots, accepted: Accepted) -> None:
  """ValueError if an accepted path is not the first nodes of its window. As for `check_chain`."""
  if any(isinstance(x, jax.core.Tracer) for x in accepted):
    return
  path, length = map(np.asarray, accepted)
  at = np.arange(path.shape[1])
  wrong = (path != at) & (at < length[:, None]) & running(slots)
  if wrong.any():
    row, i = np.argwhere(wrong)[0]
    raise ValueError(f"accepted.path[{row}, {i}] = {path[row, i]}, and of a chain it is {i}")


def prefixes(B: int, P: int) -> Int[Array, "B P"]:
  """The path along chains. Dense, so that it is a constant and no program makes it."""
  return jnp.asarray(np.tile(np.arange(P, dtype=np.int32), (B, 1)))


def recurrent(spec: Spec, init, verify, commit, materialize) -> CommitScheme:
  """A CommitScheme of recurrent states, which says at its first call what does not fit `spec`."""

  def checked_init(S):
    check_pool(spec, S)
    return init(S)

  def checked_verify(carry, window, gates):
    check_window(spec, getattr(carry, "S", carry), window, gates)
    if spec.topology == "chain":
      check_chain(window)
      window = window._replace(parents=prefixes(*window.parents.shape) - 1)
    return verify(carry, window, gates)

  def checked_commit(flight, accepted):
    if spec.topology == "chain":
      check_prefix(flight.slots, accepted)
    return commit(flight, accepted)

  return scheme(checked_init, checked_verify, checked_commit, materialize)


def pending(accepted: Accepted, slots: Slots) -> Pending:
  """The accepted path of each batch row, as positions in records that are kept by batch row."""
  row = jnp.where(slots < 0, -1, jnp.arange(slots.shape[0], dtype=slots.dtype))
  return Pending(row, accepted.path, jnp.where(slots < 0, 0, accepted.length))


def admit(scheme: CommitScheme, carry: Any, slots: Slots, S: Any) -> Any:
  """Give `slots` [B] to tenants with states S [B, ...]: every leaf of their rows is replaced."""
  return jax.tree.map(lambda pool, row: put(pool, slots, row), carry, scheme.init(S))


def narrow(flight: Any, rows: Slots) -> Any:
  """The flights of batch rows `rows` [M] alone, over pools of M rows; -1 is padding.

  What a prefix cache asks `state_at` for: the states of a few slots, and no copy of a pool.
  """

  def one(flight):
    pools, *by_row, slots = flight
    slots = jnp.where(rows < 0, -1, take(slots, rows))
    pick = lambda tree, at: jax.tree.map(lambda x: take(x, at), tree)
    here = jnp.where(slots < 0, -1, jnp.arange(rows.shape[0], dtype=slots.dtype))
    return type(flight)(pick(pools, slots), *pick(by_row, rows), here)

  return jax.tree.map(one, flight, is_leaf=lambda x: hasattr(x, "slots"))


def together(schemes: Any) -> CommitScheme:
  """Several memories behind one acceptance. `schemes` is any pytree of CommitSchemes.

  verify is the caller's forward pass, which turns each carry into a flight; it does not compose.
  """
  is_scheme = lambda x: isinstance(x, CommitScheme)
  lift = lambda name: (
    lambda tree, *rest: jax.tree.map(
      lambda s, x: getattr(s, name)(x, *rest), schemes, tree, is_leaf=is_scheme
    )
  )

  def verify(*_):
    raise TypeError("memories behind one acceptance are verified by the model's forward pass")

  return CommitScheme(lift("init"), verify, lift("commit"), lift("state_at"), lift("materialize"))
