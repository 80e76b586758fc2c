"""A prefix cache of KV: P's own, and MD's DRC (facts: 1.1).

Invariant: a match ends where a step can continue (its last page carries a boundary), and its pages stay until
it is released. Pages are copies: they share nothing with the sequence that they came from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdd.model.engine import Engine, KvSequence
from pdd.model.kv import KvSegment
from pdd.policy import radix


@dataclass
class Page:
    """A place in the tree; its KV may later be replaced by the same with a boundary."""

    segment: KvSegment


@dataclass
class Match:
    """A leased prefix of `tokens` tokens."""

    tokens: int
    pages: list[Page] = field(repr=False)
    found: radix.Match = field(repr=False)


class PrefixCache:
    """KV pages by the ids they belong to, least recently used out first.

    budget_tokens: most tokens held; 0 keeps nothing. page_tokens: rounded up to what the engine can cut.
    """

    def __init__(self, engine: Engine, budget_tokens: int, page_tokens: int) -> None:
        self._engine = engine
        self.page_tokens = math.lcm(page_tokens, engine.cut_tokens)
        self._tree = radix.RadixTree(self.page_tokens, budget_tokens)

    @property
    def cached_tokens(self) -> int:
        """Tokens held."""
        return self._tree.tokens

    def match(self, ids: Sequence[int]) -> Match:
        """The longest cached prefix from which a step can continue, leased until `release`."""
        found = self._tree.match(ids, usable=lambda page: page.segment.boundary)
        return Match(found.tokens, found.values, self._tree.lease(found))

    def release(self, match: Match) -> None:
        """Let the match's pages be evicted. Safe to call twice."""
        self._tree.release(match.found)

    def load_into(self, seq: KvSequence, match: Match) -> None:
        """Load the matched KV into an empty sequence.

        Raises:
            ValueError: the sequence holds KV already.
        """
        if seq.kv_tokens:
            raise ValueError(
                f"sequence: it holds {seq.kv_tokens} tokens already; load a match into a new one"
            )
        for page in match.pages:
            self._engine.load(seq, page.segment)

    def insert(self, ids: Sequence[int], seq: KvSequence) -> int:
        """Enter the whole pages of `ids`, whose KV `seq` holds; returns the tokens that were there already.

        A page that was there without a boundary gets one if `seq` has it.
        """
        ids = ids[: seq.kv_tokens]
        present = self._tree.insert(ids, lambda start, end: Page(self._export(seq, start, end)))
        if self._engine.cut_tokens > 1:
            self._complete(ids, seq, present)
        return present

    def insert_segments(self, ids: Sequence[int], segments: Iterable[KvSegment]) -> int:
        """Enter the whole pages of `ids` from segments that follow each other from 0, as `insert`."""
        seq = self._engine.new()
        for segment in segments:
            self._engine.load(seq, segment)
        present = self.insert(ids, seq)
        self._engine.release(seq)
        return present

    def clear(self) -> None:
        """Drop every page that is not leased."""
        self._tree.clear()

    def _export(self, seq: KvSequence, start: int, end: int) -> KvSegment:
        return self._engine.export(seq, start, end, boundary=seq.has_boundary(end))

    def _complete(self, ids: Sequence[int], seq: KvSequence, present: int) -> None:
        for page in self._tree.match(ids[:present]).values:
            segment = page.segment
            if not segment.boundary and seq.has_boundary(segment.end):
                page.segment = self._export(seq, segment.start, segment.end)
