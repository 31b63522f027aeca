"""A radix tree of texts whose memories are kept: a request that begins with one starts behind it.

Memories are materialised: the recurrent state, the conv window and the last KV rows after a number
of tokens that the block divides. They come from a prefill or from `state_at` inside a commit, never
from a carry, so history that is still pending in a ring cannot be lost (a carry is refused by its
structure). Attention is windowed, so an entry holds all that its text needs and no other entry.

Leaves leave first, the least recently used of them, when the bytes exceed the budget. An entry that
is in use is pinned and stays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from commit_schemes.footprint import nbytes
from gdn.streaming import Recent


@dataclass(eq=False)
class Node:
  """Text from the parent to here. Without `memories` it only branches."""

  edge: tuple[int, ...]
  parent: "Node | None"
  children: dict[int, "Node"] = field(default_factory=dict)  # by the first token of their edge
  memories: Any = None
  depth: int = 0  # tokens from the root
  used: int = 0
  pins: int = 0

  def text(self) -> tuple[int, ...]:
    """The whole text from the root."""
    return (() if self.parent is None else self.parent.text()) + self.edge


def common(a: Sequence[int], b: Sequence[int]) -> int:
  """Length of the common prefix."""
  return next(
    (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
  )


def form(memories: Any) -> Any:
  """What memories and a carry differ in, even where their leaves have the same shapes."""
  leaves, structure = jax.tree.flatten(memories)
  return structure, [(x.shape, x.dtype) for x in leaves]


class PrefixCache:
  """`budget` in bytes; `like` are memories of one text, to compare structures with.

  ValueError: a budget below 0 or a block below 1.
  """

  def __init__(self, budget: int, block: int, like: Any):
    if budget < 0 or block < 1:
      raise ValueError(f"budget={budget} and block={block}; allowed: at least 0 and 1")
    self.budget, self.block, self.bytes = budget, block, 0
    self._like = form(like)
    self._root = Node((), None)
    self._clock = 0

  def _walk(self, text: Sequence[int]) -> Iterator[Node]:
    """Nodes whose whole path is a prefix of `text`, from the root down."""
    node, at = self._root, 0
    while True:
      yield node
      child = node.children.get(text[at]) if at < len(text) else None
      if child is None or common(child.edge, text[at:]) < len(child.edge):
        return
      node, at = child, at + len(child.edge)

  def match(self, text: Sequence[int]) -> Node | None:
    """The longest stored prefix of `text`, pinned until `unpin`; None if there is none."""
    hits = [node for node in self._walk(tuple(text)) if node.memories is not None]
    if not hits:
      return None
    self._touch(hits[-1])
    hits[-1].pins += 1
    return hits[-1]

  def unpin(self, node: Node) -> None:
    node.pins -= 1
    assert node.pins >= 0, "unpinned more often than pinned"
    self._evict()

  def has(self, text: Sequence[int]) -> bool:
    """Whether exactly this text is stored; it counts as used."""
    *_, node = self._walk(tuple(text))
    if node.depth != len(text) or node.memories is None:
      return False
    self._touch(node)
    return True

  def store(self, text: Sequence[int], memories: Any) -> bool:
    """Keep what a model remembers after exactly this text; False where the budget has no room.

    ValueError: no multiple of the block; memories of another structure (such as a carry with
    pending history); KV rows of another number of tokens.
    """
    text = tuple(text)
    if not text or len(text) % self.block:
      raise ValueError(f"{len(text)} tokens; allowed: a multiple of the block of {self.block}")
    if form(memories) != self._like:
      raise ValueError("not the materialised memories of one text")
    for rows in (m for m in memories if isinstance(m, Recent)):
      wanted = min(len(text), rows.k.shape[1])
      if (held := int(np.asarray(rows.length)[0])) != wanted:
        raise ValueError(f"KV rows of {held} tokens where {len(text)} tokens leave {wanted}")
    if nbytes(memories) > self.budget:
      return False
    if not self.has(text):
      node = self._at(text)
      node.memories = memories
      self.bytes += nbytes(memories)
      self._touch(node)
      self._evict()  # the new leaf itself where all the rest is above it
    return self.has(text)

  def _at(self, text: tuple[int, ...]) -> Node:
    """The node of a text, made where it is not there; an edge is split where texts part."""
    *_, node = self._walk(text)
    rest = text[node.depth :]
    if not rest:
      return node
    child = node.children.get(rest[0])
    if child is not None:
      n = common(child.edge, rest)
      middle = Node(rest[:n], node, {child.edge[n]: child}, depth=node.depth + n)
      node.children[rest[0]] = middle
      child.edge, child.parent = child.edge[n:], middle
      node, rest = middle, rest[n:]
    if rest:
      node.children[rest[0]] = leaf = Node(rest, node, depth=len(text))
      node = leaf
    return node

  def _touch(self, node: Node) -> None:
    """A use of an entry is one of everything above it: no parent is older than its children."""
    self._clock += 1
    above: Node | None = node
    while above is not None:
      above.used, above = self._clock, above.parent

  def nodes(self) -> Iterator[Node]:
    """Every node, the root first."""
    todo = [self._root]
    while todo:
      yield (node := todo.pop())
      todo += node.children.values()

  def _evict(self) -> None:
    while self.bytes > self.budget:
      leaves = [n for n in self.nodes() if not n.children and not n.pins and n is not self._root]
      if not leaves:
        return  # all pinned: unpin comes back here
      node = min(leaves, key=lambda n: n.used)
      self.bytes -= nbytes(node.memories)
      self._remove(node)

  def _remove(self, node: Node) -> None:
    """A leaf goes, and with it what only led to it; a node with one way on joins it."""
    node.memories, parent = None, node.parent
    if parent is None:
      return
    if not node.children:
      del parent.children[node.edge[0]]
      if parent.memories is None and len(parent.children) < 2:
        self._remove(parent)
    elif len(node.children) == 1:
      [child] = node.children.values()
      child.edge, child.parent = node.edge + child.edge, parent
      parent.children[child.edge[0]] = child
