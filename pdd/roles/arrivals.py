"""KV segments on their way into a sequence.

Invariant: segments are loaded in order of position and each once, whatever order the connections deliver them in.
"""

from __future__ import annotations

from typing import Protocol


class Segment(Protocol):
    """A received KV segment: token positions `[start, end)` of the prompt, its header and its bytes."""

    request_id: str
    start: int
    end: int
    meta: bytes
    payload: memoryview


class Arrivals:
    """Holds segments until they are next in line."""

    def __init__(self) -> None:
        self._held: dict[int, Segment] = {}
        self.closed = False

    def add(self, segment: Segment) -> None:
        """Take a segment in; a repeated or an unwanted one is dropped."""
        if not self.closed:
            self._held.setdefault(segment.start, segment)

    def next_at(self, position: int) -> Segment | None:
        """The segment that starts at `position`, if it is here."""
        return self._held.pop(position, None)

    def close(self) -> None:
        """Nothing more is wanted (the KV is whole, or recomputed)."""
        self.closed = True
        self._held.clear()
