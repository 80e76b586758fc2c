"""The proxy's relay process: `python -m pdd.net.wan.relay <json>`, commanded by JSON lines on stdin.

Invariant: single-threaded; one FairLink for each direction of each datacenter pair; it ends with its parent.
"""

from __future__ import annotations

import heapq
import itertools
import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from pdd.config import WanConfig, from_plain
from pdd.net.wan.fair import FairLink
from pdd.net.wan.loop import EARLY_S, READ, Loop
from pdd.net.wan.shape import LinkShape
from pdd.net.wan.tunnel import Pipe, Tunnel

# Kernel buffers between an endpoint and the relay hold at most this much link time, so the queue is ours.
BUFFER_S = 0.02
BUFFER_BYTES = (65536, 262144)


class Relay:
    """Forwarders, tunnels and links of all datacenter pairs."""

    def __init__(self, config: WanConfig, datacenters: list[str]) -> None:
        now_s = time.monotonic()
        self._order = {name: index for index, name in enumerate(datacenters)}
        self._links: dict[tuple[str, str], FairLink] = {}
        for number, pair in enumerate(itertools.permutations(datacenters, 2)):
            self._links[pair] = FairLink(self._shape(config, pair), config.seed * 1009 + number, now_s)
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._tunnels: set[Tunnel] = set()
        self._listeners: list[socket.socket] = []
        names = ("open", "update", "cut", "restore", "stats")
        self._loop = Loop(self._tick, {name: getattr(self, f"_on_{name}") for name in names})

    def run(self) -> None:
        """Serve until the parent is gone."""
        self._loop.run()

    def _shape(self, config: WanConfig, pair: tuple[str, str]) -> LinkShape:
        return LinkShape.of(config, forward=self._order[pair[0]] < self._order[pair[1]])

    def _tick(self, now_s: float) -> float | None:
        while self._timers and self._timers[0][0] <= now_s:
            heapq.heappop(self._timers)[2]()
        wakes = [self._timers[0][0]] if self._timers else []
        for link in self._links.values():
            wake_s = self._pump(link, now_s)
            if wake_s is not None:
                wakes.append(wake_s)
        return min(wakes, default=None)

    def _pump(self, link: FairLink, now_s: float) -> float | None:
        before = link.wake_s()
        if before is None or before - EARLY_S > now_s:
            return before - EARLY_S if before is not None else None
        touched = link.serve(now_s)
        for flow, item in link.due(now_s + EARLY_S):
            assert isinstance(flow, Pipe)
            flow.tunnel.deliver(flow, item, now_s)
        for flow in touched:
            assert isinstance(flow, Pipe)
            flow.tunnel.refresh()
        after = link.wake_s()
        return after - EARLY_S if after is not None else None

    def _on_open(self, command: dict[str, Any]) -> dict[str, Any]:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Set before listen(): accepted sockets inherit it, and TCP scales its window by it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes())
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        listener.setblocking(False)
        pair = (command["source"], command["target"])
        target = (command["host"], command["port"])
        self._listeners.append(listener)
        self._loop.watch(listener.fileno(), READ, lambda _: self._accept(listener, pair, target))
        return {"port": listener.getsockname()[1]}

    def _buffer_bytes(self) -> int:
        rate = max(link.shape.rate_bytes_s for link in self._links.values())
        return int(min(BUFFER_BYTES[1], max(BUFFER_BYTES[0], rate * BUFFER_S)))

    def _accept(self, listener: socket.socket, pair: tuple[str, str], target: tuple[str, int]) -> None:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        now_s = time.monotonic()
        tunnel = Tunnel(near, target, self._loop, self._tunnels.discard)
        tunnel.bind(
            lambda events: tunnel.on_near(events, time.monotonic()),
            lambda events: tunnel.on_far(events, time.monotonic()),
        )
        self._tunnels.add(tunnel)
        forward = self._links[pair]
        tunnel.start(forward, self._links[pair[::-1]], self._buffer_bytes(), now_s)
        open_s = now_s + 2 * forward.shape.delay_s
        heapq.heappush(self._timers, (open_s, next(self._count), tunnel.open_near))

    def _on_update(self, command: dict[str, Any]) -> dict[str, Any]:
        config = from_plain(WanConfig, command["config"])
        for pair, link in self._links.items():
            link.update(self._shape(config, pair), time.monotonic())
        return {}

    def _on_cut(self, _: dict[str, Any]) -> dict[str, Any]:
        for link in self._links.values():
            link.cut(time.monotonic())
        return {}

    def _on_restore(self, _: dict[str, Any]) -> dict[str, Any]:
        for link in self._links.values():
            link.restore(time.monotonic())
        return {}

    def _on_stats(self, _: dict[str, Any]) -> dict[str, Any]:
        rows = [[*pair, link.bytes, link.packets, link.lost, 0] for pair, link in self._links.items()]
        return {"links": rows}


if __name__ == "__main__":
    START = json.loads(sys.argv[1])
    Relay(from_plain(WanConfig, START["config"]), START["datacenters"]).run()
