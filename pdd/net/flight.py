"""A segment on its way: its stripes, its deadline and its outcome.

Invariant: a flight ends once, with "" or with the reason of its failure; after that none of its stripes is
started.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pdd.lifecycle import now_s
from pdd.net import frames
from pdd.net.frames import Begin
from pdd.net.segment import Segment


@dataclass
class Stripe:
    """A part of a segment that one connection carries. `tries`: connections that took it so far."""

    flight: Flight
    begin: Begin
    views: list[memoryview]
    tries: int = 0


class Flight:
    """One `send`. deadline: on the event loop's clock."""

    def __init__(self, segment: Segment, transfer: int, low: bool, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.segment = segment
        self.transfer = transfer
        self.low = low
        self.queued_s = now_s()
        self.started_s = 0.0
        self.deadline = loop.time() + timeout_s
        self.done: asyncio.Future[str] = loop.create_future()
        self._left = 0

    @property
    def ended(self) -> bool:
        """It has an outcome."""
        return self.done.done()

    @property
    def reason(self) -> str:
        """Why it failed; "" while it flies or when it succeeded."""
        return self.done.result() if self.done.done() else ""

    def split(self, stripes: int, frame_bytes: int) -> list[Stripe]:
        """The segment as at most `stripes` parts."""
        segment = self.segment
        views = frames.byte_views(segment.payload)
        total = sum(view.nbytes for view in views)
        cuts = list(frames.stripes_of(total, stripes, frame_bytes))
        self._left = len(cuts)
        parts = []
        for index, (offset, size) in enumerate(cuts):
            begin = Begin(
                self.transfer, segment.request_id, segment.start, segment.end, segment.last,
                segment.meta, total, index, len(cuts), offset, size,
            )  # fmt: skip
            parts.append(Stripe(self, begin, frames.slice_views(views, offset, offset + size)))
        return parts

    def taken(self) -> None:
        """A connection took one of its stripes."""
        self.started_s = self.started_s or now_s()

    def arrived(self) -> None:
        """The peer acknowledged one of its stripes."""
        self._left -= 1
        if self._left == 0:
            self.end("")

    def end(self, reason: str) -> None:
        """It is over; only the first outcome counts."""
        if not self.done.done():
            self.done.set_result(reason)
