"""The netns backend's process: owns the namespaces and TUN devices, and is the link between them.

Invariant: namespaces, devices and links live exactly as long as this process, which ends with its parent.
`python -m pdd.net.wan.shaper <json>`, commanded by JSON lines on stdin.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from typing import Any

from pdd.config import WanConfig, from_plain
from pdd.net.wan import namespace
from pdd.net.wan.fifo import FifoLink
from pdd.net.wan.loop import EARLY_S, READ, Loop
from pdd.net.wan.packets import VNET_BYTES, Packet
from pdd.net.wan.shape import LinkShape

READ_BYTES = VNET_BYTES + 65536
BATCH = 64
WINDOW_BYTES = (4 << 20, 64 << 20)


class Shaper:
    """Packets read in one datacenter are written in the other when the link has carried them."""

    def __init__(self, config: WanConfig, datacenters: list[str], addresses: list[str]) -> None:
        self._names = datacenters
        self._namespaces = [namespace.new_namespace() for _ in datacenters]
        self._links: dict[tuple[int, int], FifoLink] = {}
        self._tuns: dict[tuple[int, int], int] = {}
        names = ("namespaces", "update", "cut", "restore", "stats")
        self._loop = Loop(self._tick, {name: getattr(self, f"_on_{name}") for name in names})
        for index, address in enumerate(addresses):
            with namespace.inside(self._namespaces[index]):
                _settings(config)
                namespace.set_address("lo:0", address)
        for number, pair in enumerate(itertools.permutations(range(len(datacenters)), 2)):
            self._open(pair, config, addresses, number)

    def _open(self, pair: tuple[int, int], config: WanConfig, addresses: list[str], number: int) -> None:
        source, target = pair
        with namespace.inside(self._namespaces[source]):
            fd = namespace.open_tun(f"wan{target}", addresses[source], addresses[target], config.mtu_bytes)
        shape = LinkShape.of(config, forward=source < target)
        link = FifoLink(shape, config.seed * 1009 + number, time.monotonic())
        self._tuns[pair], self._links[pair] = fd, link
        self._loop.watch(fd, READ, lambda _: self._read(fd, link))

    def run(self) -> None:
        """Serve until the parent is gone."""
        self._loop.run()

    def _read(self, fd: int, link: FifoLink) -> None:
        now_s = time.monotonic()
        try:
            for _ in range(BATCH):
                link.offer(Packet(os.read(fd, READ_BYTES)), now_s)
        except BlockingIOError:
            return

    def _tick(self, now_s: float) -> float | None:
        wakes = []
        for (source, target), link in self._links.items():
            for data in link.due(now_s + EARLY_S):
                _write(self._tuns[target, source], data)
            wake_s = link.wake_s()
            if wake_s is not None:
                wakes.append(wake_s - EARLY_S)
        return min(wakes, default=None)

    def _on_namespaces(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"files": [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._namespaces]}

    def _on_update(self, command: dict[str, Any]) -> dict[str, Any]:
        config = from_plain(WanConfig, command["config"])
        for (source, target), link in self._links.items():
            link.update(LinkShape.of(config, forward=source < target), time.monotonic())
        return {}

    def _on_cut(self, _: dict[str, Any]) -> dict[str, Any]:
        for link in self._links.values():
            link.cut()
        return {}

    def _on_restore(self, _: dict[str, Any]) -> dict[str, Any]:
        for link in self._links.values():
            link.restore()
        return {}

    def _on_stats(self, _: dict[str, Any]) -> dict[str, Any]:
        rows = []
        for (source, target), link in self._links.items():
            pair = (self._names[source], self._names[target])
            rows.append([*pair, link.bytes, link.packets, link.lost, link.dropped])
        return {"links": rows}


def _write(fd: int, data: bytes) -> None:
    try:
        os.write(fd, data)
    except OSError:
        # The kernel refuses a packet only when it has no room for it: to TCP, a loss like any other.
        return


def _settings(config: WanConfig) -> None:
    shape = LinkShape.of(config, forward=True)
    in_flight = 4 * int(shape.rate_bytes_s * (2 * shape.delay_s + shape.queue_s))
    window = min(WINDOW_BYTES[1], max(WINDOW_BYTES[0], in_flight))
    settings = {
        "ipv6/conf/all/disable_ipv6": "1",
        "ipv4/tcp_slow_start_after_idle": "0",
        # Without this a connection's results would depend on the connections before it.
        "ipv4/tcp_no_metrics_save": "1",
        "ipv4/tcp_ecn": "0",
        # Most hosts' default. A host with another keeps it here; the self-test reports which.
        "ipv4/tcp_congestion_control": "cubic",
        "ipv4/tcp_rmem": f"4096 1048576 {window}",
        "ipv4/tcp_wmem": f"4096 262144 {window}",
    }
    for key, value in settings.items():
        namespace.set_kernel(key, value)


if __name__ == "__main__":
    START = json.loads(sys.argv[1])
    Shaper(from_plain(WanConfig, START["config"]), START["datacenters"], START["addresses"]).run()
