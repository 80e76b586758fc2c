"""One direction of the netns link: a bottleneck with a finite first-in-first-out buffer, then a delay line.

Invariant: pure; packets leave in the order they came and never faster than the rate; what finds the buffer
full is dropped (tail drop), what the loss rate picks is carried and lost.
"""

from __future__ import annotations

import random
from collections import deque

from pdd.net.wan.packets import Packet
from pdd.net.wan.shape import CrossTraffic, Delay, LinkShape, LossGap


class FifoLink:
    """The buffer is never stored: when the link will be free says how full it is."""

    def __init__(self, shape: LinkShape, seed: int, now_s: float) -> None:
        self._rng = random.Random(seed)
        self._line: deque[tuple[float, bytes]] = deque()
        self._free_s = self._last_s = now_s
        self._is_cut = False
        self.bytes = self.packets = self.lost = self.dropped = 0
        self.update(shape, now_s)

    def update(self, shape: LinkShape, now_s: float) -> None:
        """Take a new shape; what is on the delay line keeps its time."""
        self.shape = shape
        self._cross = CrossTraffic(shape, self._rng, now_s)
        self._loss = LossGap(shape.loss, self._rng)
        self._delay = Delay(shape, self._rng)

    def offer(self, packet: Packet, now_s: float) -> None:
        """Carry, lose or drop each segment of the packet."""
        if self._is_cut:
            self.dropped += packet.segments
            return
        kept = packet.segments
        free_s = max(now_s, self._cross.busy_until(self._free_s, now_s))
        size_bytes = packet.size_bytes
        room_s = self.shape.queue_s - (free_s - now_s)
        if room_s * self.shape.rate_bytes_s < size_bytes:
            # A packet is taken when the buffer has any room as it comes.
            room = int(room_s * self.shape.rate_bytes_s // packet.segment_bytes) + 1 if room_s > 0 else 0
            kept = min(kept, room)
            size_bytes = min(size_bytes, kept * packet.segment_bytes)
            self.dropped += packet.segments - kept
        if not kept:
            return
        self._free_s = free_s + size_bytes / self.shape.rate_bytes_s
        self._last_s = max(self._last_s, self._free_s + self._delay.draw_s())
        lost = self._loss.lost(kept)
        self.lost += len(lost)
        self.packets += kept - len(lost)
        for data in packet.without(lost, kept):
            self.bytes += len(data)
            self._line.append((self._last_s, data))

    def due(self, now_s: float) -> list[bytes]:
        """What comes out by now, in order."""
        out = []
        while self._line and self._line[0][0] <= now_s:
            out.append(self._line.popleft()[1])
        return out

    def wake_s(self) -> float | None:
        """When the next packet comes out."""
        return self._line[0][0] if self._line else None

    def cut(self) -> None:
        """Drop all that comes."""
        self._is_cut = True

    def restore(self) -> None:
        """End the cut."""
        self._is_cut = False
