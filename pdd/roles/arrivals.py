"""KV segments on their way into a sequence.

Invariant: segments are loaded in order of position and each once, whatever order the connections deliver them in.
"""

from __future__ import annotations

from pdd.net.stream import Received


class Arrivals:
    """Holds segments until they are next in line."""

    def __init__(self) -> None:
        self._held: dict[int, Received] = {}
        self.closed = False

    def add(self, segment: Received) -> None:
        """Take a segment in; a repeated or an unwanted one is dropped."""
        if not self.closed:
            self._held.setdefault(segment.start, segment)

    def next_at(self, position: int) -> Received | None:
        """The segment that starts at `position`, if it is here."""
        return self._held.pop(position, None)

    def close(self) -> None:
        """Nothing more is wanted (the KV is whole, or recomputed)."""
        self.closed = True
        self._held.clear()
