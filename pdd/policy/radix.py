"""A prefix tree over token ids, one opaque value a page: P's prefix cache and MD's DRC (facts: 1.1).

Invariant: `tokens` never exceeds the budget; a page on a leased path stays until its last lease is released;
what goes first is the page used least recently, from the ends of paths inwards.

An edge is a run of whole pages kept as contiguous int32 bytes, so that a prefix is compared by one memcmp an
edge, and a child is found by the bytes of its first page. A tree belongs to one thread.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

Ids: TypeAlias = "Sequence[int] | np.ndarray"
ID_BYTES = 4


class Node:
    """An edge and what hangs below it. `used` is the tick of the last touch; `queued`: an entry is in the
    heap.
    """

    __slots__ = ("children", "edge", "leases", "parent", "queued", "used", "values")

    def __init__(self, parent: Node | None, edge: bytes, values: list[Any], used: int) -> None:
        self.parent = parent
        self.edge = edge
        self.values = values
        self.used = used
        self.children: dict[bytes, Node] = {}
        self.leases = 0
        self.queued = False


@dataclass(slots=True)
class Match:
    """The longest cached prefix of some ids: `tokens` (a multiple of the page) and one value a page, in
    order.
    """

    tokens: int
    values: list[Any]
    node: Node = field(repr=False)
    leased: bool = False


class RadixTree:
    """Prefix tree with page granularity, leases and LRU eviction under a token budget.

    page_tokens: tokens a page, above 0. budget_tokens: most tokens held, 0 or more; what is leased counts
    too.
    """

    def __init__(self, page_tokens: int, budget_tokens: int) -> None:
        if page_tokens < 1 or budget_tokens < 0:
            raise ValueError(f"page_tokens {page_tokens}, budget_tokens {budget_tokens}: give >= 1 and >= 0")
        self.page_tokens = page_tokens
        self.budget_tokens = budget_tokens
        self.tokens = 0
        self._page_bytes = page_tokens * ID_BYTES
        self._root = Node(None, b"", [], 0)
        self._tick = 0
        self._heap: list[tuple[int, int, Node]] = []
        self._entries = 0
        self._last = self._root

    # -- reading -------------------------------------------------------------------------------------------

    def peek(self, ids: Ids) -> int:
        """Tokens that `match` would find, without counting as a use."""
        _, at, _, pages = self._walk(self._pages_of(ids))
        return (at + pages * self._page_bytes) // ID_BYTES

    def match(self, ids: Ids, usable: Callable[[Any], bool] | None = None) -> Match:
        """The longest cached prefix of `ids`; it counts as a use of its pages.

        usable: if given, the match is cut back to its last page whose value satisfies it.
        """
        data = self._pages_of(ids)
        values = self._touch(data)
        pages = len(values)
        if usable is not None:
            while pages and not usable(values[pages - 1]):
                pages -= 1
            if pages < len(values):
                values = self._touch(data[: pages * self._page_bytes])
        return Match(pages * self.page_tokens, values, self._last)

    # -- leases --------------------------------------------------------------------------------------------

    def lease(self, match: Match) -> Match:
        """Keep the match's pages until `release`. To be called before the next `insert` or `evict`.

        Raises:
            ValueError: the match is leased already, or its pages were evicted meanwhile.
        """
        if match.leased:
            raise ValueError("match: leased already; match again for a second lease")
        if sum(len(node.values) for node in _path(match.node)) != len(match.values):
            raise ValueError("match: its pages were evicted since; lease a match before the next insert")
        self._count(match.node, 1)
        match.leased = True
        return match

    def release(self, match: Match) -> None:
        """Give a lease back; without one (released before), nothing happens."""
        if match.leased:
            match.leased = False
            self._count(match.node, -1)

    def _count(self, node: Node, step: int) -> None:
        for above in _path(node):
            above.leases += step
        self._offer(node)

    # -- writing -------------------------------------------------------------------------------------------

    def insert(self, ids: Ids, make: Callable[[int, int], Any]) -> int:
        """Enter the whole pages of `ids`; returns the tokens that were present.

        make: called as `make(start, end)` in token positions, once for each page not present, in order. If it
            raises, nothing is entered.
        Least recently used pages without a lease make room; of what still does not fit, the leading pages are
        kept.
        """
        data = self._pages_of(ids)
        present = len(self._touch(data))
        leaf, page = self._last, self.page_tokens
        missing = len(data) // self._page_bytes - present
        if missing:
            self._count(leaf, 1)
            try:
                self.evict(self.tokens + missing * page - self.budget_tokens)
                end = present + min(missing, (self.budget_tokens - self.tokens) // page)
                values = [make(at * page, (at + 1) * page) for at in range(present, end)]
                if values:
                    self._attach(leaf, data[present * self._page_bytes : end * self._page_bytes], values)
            finally:
                self._count(leaf, -1)
        return present * page

    def evict(self, tokens: int) -> int:
        """Drop at least `tokens` tokens of unleased pages, least recently used first; returns what went."""
        freed = 0
        while freed < tokens and (leaf := self._oldest()) is not None:
            pages = min(len(leaf.values), -(-(tokens - freed) // self.page_tokens))
            self._trim(leaf, pages)
            freed += pages * self.page_tokens
        return freed

    def clear(self) -> None:
        """Drop every page without a lease."""
        self.evict(self.tokens)

    # -- inside --------------------------------------------------------------------------------------------

    def _pages_of(self, ids: Ids) -> bytes:
        whole = len(ids) - len(ids) % self.page_tokens
        if isinstance(ids, np.ndarray):
            return np.ascontiguousarray(ids[:whole], dtype=np.int32).tobytes()
        return struct.pack(f"={whole}i", *ids[:whole])  # twice as fast as numpy on a list

    def _walk(self, data: bytes) -> tuple[Node, int, Node | None, int]:
        """(last whole node, bytes matched so far, the node that matches in part, its matching pages)."""
        node, at, size = self._root, 0, self._page_bytes
        while (child := node.children.get(data[at : at + size])) is not None:
            if not data.startswith(child.edge, at):
                return node, at, child, _common_bytes(data, at, child.edge) // size
            node = child
            at += len(child.edge)
        return node, at, None, 0

    def _touch(self, data: bytes) -> list[Any]:
        """Values of the matching pages; they become the most recently used, their last node is `_last`."""
        self._tick += 1
        node, _, partial, pages = self._walk(data)
        if partial is not None:
            node = self._split(partial, pages)
        values: list[Any] = []
        path = list(_path(node))
        for above in reversed(path):
            above.used = self._tick
            values += above.values
        self._last = node
        return values

    def _split(self, node: Node, pages: int) -> Node:
        """Cut the edge after `pages` pages; the new upper part is returned, `node` stays the lower one."""
        size = self._page_bytes
        cut = pages * size
        upper = Node(node.parent, node.edge[:cut], node.values[:pages], node.used)
        upper.leases = node.leases
        assert node.parent is not None
        node.parent.children[node.edge[:size]] = upper
        node.parent, node.edge, node.values = upper, node.edge[cut:], node.values[pages:]
        upper.children[node.edge[:size]] = node
        return upper

    def _attach(self, parent: Node, edge: bytes, values: list[Any]) -> None:
        child = Node(parent, edge, values, self._tick)
        parent.children[edge[: self._page_bytes]] = child
        self.tokens += len(values) * self.page_tokens
        self._offer(child)

    def _trim(self, leaf: Node, pages: int) -> None:
        """Drop a leaf's last pages, and the leaf with its last one."""
        self.tokens -= pages * self.page_tokens
        if pages < len(leaf.values):
            del leaf.values[-pages:]
            leaf.edge = leaf.edge[: -pages * self._page_bytes]
            self._offer(leaf)
            return
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.edge[: self._page_bytes]]
        leaf.parent = None
        self._offer(parent)

    def _offer(self, node: Node) -> None:
        """Queue a node for eviction if it may go; one entry a node, brought up to date when it comes up."""
        if not (node.queued or node.leases or node.children or node.parent is None):
            node.queued = True
            self._entries += 1
            heapq.heappush(self._heap, (node.used, self._entries, node))

    def _oldest(self) -> Node | None:
        while self._heap:
            used, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.used == used and not node.leases and not node.children:
                return node
            self._offer(node)
        return None


def _path(node: Node) -> Iterator[Node]:
    """The node and those above it, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _common_bytes(data: bytes, at: int, edge: bytes) -> int:
    length = min(len(edge), len(data) - at)
    ours = np.frombuffer(data, np.uint8, length, at)
    differs = ours != np.frombuffer(edge, np.uint8, length)
    return int(differs.argmax()) if differs.any() else length
