"""One direction of the proxy's link: flows share a token bucket fairly, then cross a delay line.

Invariant: a flow's bytes leave in the order they came, none is lost, and the link never carries more than its
rate. Pure: time is an argument. A flow is a byte stream, so each turn takes exactly up to one quantum of it;
this is deficit round robin without a remainder to carry over.
"""

from __future__ import annotations

import heapq
import random
from collections import deque

from pdd.net.wan.shape import CrossTraffic, Delay, LinkShape, LossGap

EOF = "eof"
ABORT = "abort"
OPEN = "open"
Item = memoryview | str

QUANTUM_S = 0.001
QUANTUM_BYTES = (1500, 65536)
# A late wake-up may catch up this much link time; more would be a burst that no link could carry.
BURST_S = 0.02


class Flow:
    """One direction of one connection: what waits before the link, and when its last byte comes out."""

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.pending_bytes = 0
        self.last_s = 0.0
        self.in_ring = False
        self.held = False


class FairLink:
    """Token bucket, round robin, delay line. `serve`, then `due`, then sleep until `wake_s`."""

    def __init__(self, shape: LinkShape, seed: int, now_s: float) -> None:
        self._rng = random.Random(seed)
        self._ring: deque[Flow] = deque()
        self._line: list[tuple[float, int, Flow, Item]] = []
        self._count = 0
        self._free_s = now_s
        self._cut_s: float | None = None
        self.bytes = self.packets = self.lost = 0
        self.update(shape, now_s)

    def update(self, shape: LinkShape, now_s: float) -> None:
        """Take a new shape; what is on the delay line keeps its time."""
        self.shape = shape
        low, high = QUANTUM_BYTES
        self._quantum = int(min(high, max(low, shape.rate_bytes_s * QUANTUM_S)))
        self._cross = CrossTraffic(shape, self._rng, now_s)
        self._loss = LossGap(shape.loss, self._rng)
        self._delay = Delay(shape, self._rng)

    def room_bytes(self, flow: Flow) -> int:
        """How much more the flow may put before the link: its share of the queue, at least one quantum."""
        queue_bytes = self.shape.queue_s * self.shape.rate_bytes_s
        share = queue_bytes / max(1, len(self._ring) + (not flow.in_ring))
        return int(max(self._quantum, share)) - flow.pending_bytes

    def push(self, flow: Flow, item: Item, now_s: float) -> None:
        """Queue bytes, or a mark that keeps its place between them."""
        flow.items.append(item)
        flow.pending_bytes += len(item) if isinstance(item, memoryview) else 0
        self.ready(flow, now_s)

    def ready(self, flow: Flow, now_s: float) -> None:
        """Let the flow take turns, unless its far end is full (`held`) or it has nothing to send."""
        if flow.in_ring or flow.held or not flow.items:
            return
        if not self._ring:
            self._free_s = max(now_s, self._cross.busy_until(self._free_s, now_s))
        flow.in_ring = True
        self._ring.append(flow)

    def send_mark(self, flow: Flow, mark: str, now_s: float, extra_s: float = 0.0) -> None:
        """Put a mark on the delay line at once, beside the queue."""
        self._deliver(flow, mark, now_s + self._delay.draw_s() + extra_s)

    def serve(self, now_s: float) -> set[Flow]:
        """Give turns for the link time that has passed, and a quantum's time more; who had a turn."""
        served: set[Flow] = set()
        if self._cut_s is not None:
            return served
        self._free_s = max(self._free_s, now_s - BURST_S)
        while self._ring and self._free_s <= now_s + QUANTUM_S:
            flow = self._ring.popleft()
            flow.in_ring = False
            self._turn(flow)
            served.add(flow)
            if flow.items and not flow.held:
                flow.in_ring = True
                self._ring.append(flow)
        return served

    def _turn(self, flow: Flow) -> None:
        left = self._quantum
        while flow.items and left > 0:
            item = flow.items.popleft()
            if isinstance(item, str):
                self._deliver(flow, item, self._free_s + self.shape.delay_s)
                continue
            if len(item) > left:
                flow.items.appendleft(item[left:])
                item = item[:left]
            left -= len(item)
            flow.pending_bytes -= len(item)
            self._carry(flow, item)

    def _carry(self, flow: Flow, item: memoryview) -> None:
        # What competes does not back off: all of it that comes before this item's turn goes first.
        while (busy_s := self._cross.busy_until(self._free_s, self._free_s)) > self._free_s:
            self._free_s = busy_s
        self._free_s += len(item) / self.shape.rate_bytes_s
        packets = self.shape.packets(len(item))
        lost = len(self._loss.lost(packets))
        # TCP would send the lost packet again: this flow, and only this flow, waits one RTT for it.
        late_s = 2 * self.shape.delay_s if lost else 0.0
        self.bytes += len(item)
        self.packets += packets
        self.lost += lost
        self._deliver(flow, item, self._free_s + self._delay.draw_s() + late_s)

    def _deliver(self, flow: Flow, item: Item, at_s: float) -> None:
        flow.last_s = max(flow.last_s, at_s)
        self._count += 1
        heapq.heappush(self._line, (flow.last_s, self._count, flow, item))

    def due(self, now_s: float) -> list[tuple[Flow, Item]]:
        """What has come out of the delay line by now, in order."""
        out = []
        while self._line and self._line[0][0] <= now_s and self._cut_s is None:
            _, _, flow, item = heapq.heappop(self._line)
            out.append((flow, item))
        return out

    def wake_s(self) -> float | None:
        """When to call again, if nothing new comes."""
        if self._cut_s is not None:
            return None
        times = [self._line[0][0]] if self._line else []
        if self._ring:
            times.append(self._free_s - QUANTUM_S / 2)
        return min(times, default=None)

    def cut(self, now_s: float) -> None:
        """Stand still."""
        self._cut_s = now_s if self._cut_s is None else self._cut_s

    def restore(self, now_s: float) -> None:
        """Go on; what was on its way arrives later by the length of the cut."""
        if self._cut_s is None:
            return
        gone_s = now_s - self._cut_s
        self._line = [(at_s + gone_s, count, flow, item) for at_s, count, flow, item in self._line]
        for at_s, _, flow, _ in self._line:
            flow.last_s = max(flow.last_s, at_s)
        self._free_s, self._cut_s = max(self._free_s, now_s), None
