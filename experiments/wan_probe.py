"""The near end of the WAN self-test: measures the link from inside a datacenter and prints one JSON line.

Invariant: plain sockets and the KV stream are timed alike, from the first byte sent to the receiver's answer,
in turns on warm connections. `python -m experiments.wan_probe`, with its orders as JSON on stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from experiments.wan_endpoint import SIZE, TIME, receive
from pdd.config import KvStreamConfig, from_plain
from pdd.net.stream import KvPool, Segment

PING = b"p" * 64
PACE_S = 0.0005
LAST_WAIT_S = 1.0


def _connect(address: str, kind: bytes) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=60.0)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.sendall(kind)
    return sock


def pings(address: str, count: int) -> list[float]:
    """Round trip times of `count` small messages, one after the other, in ms; the first is not counted."""
    out = []
    with _connect(address, b"e") as sock:
        for _ in range(count + 1):
            began_s = time.monotonic()
            sock.sendall(PING)
            receive(sock, len(PING))
            out.append((time.monotonic() - began_s) * 1000)
    return out[1:]


def bulk(sock: socket.socket, payload: bytes) -> tuple[float, float, float]:
    """Clock times: first byte sent, receiver had all, its answer was here."""
    began_s = time.monotonic()
    sock.sendall(SIZE.pack(len(payload)))
    sock.sendall(payload)
    (arrived_s,) = TIME.unpack(receive(sock, TIME.size))
    return began_s, arrived_s, time.monotonic()


def mbps(size_bytes: int, seconds: float) -> float:
    """Megabits a second."""
    return size_bytes * 8 / seconds / 1e6


def shared(address: str, flows: int, size_bytes: int) -> dict[str, float]:
    """`flows` connections send a part of `size_bytes` each, at once: total rate and Jain's fairness."""
    payload = bytes(size_bytes // flows)
    socks = [_connect(address, b"b") for _ in range(flows)]
    for sock in socks:
        bulk(sock, bytes(65536))
    times: list[tuple[float, float, float]] = []

    def send(sock: socket.socket) -> None:
        times.append(bulk(sock, payload))

    _at_once([partial(send, sock) for sock in socks])
    for sock in socks:
        sock.close()
    begun_s = min(item[0] for item in times)
    rates = [mbps(len(payload), arrived_s - begun_s) for _, arrived_s, _ in times]
    return {
        "total_mbps": min(rates) * flows,
        "slowest_mbps": min(rates),
        "fastest_mbps": max(rates),
        "jain": sum(rates) ** 2 / (flows * sum(rate**2 for rate in rates)),
    }


def _at_once(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def beside_bulk(address: str, size_bytes: int) -> list[float]:
    """Round trip times in ms of small messages while a bulk flow runs."""
    out: list[float] = []
    with _connect(address, b"b") as sock, _connect(address, b"e") as small:
        bulk(sock, bytes(1 << 20))
        thread = threading.Thread(target=bulk, args=(sock, bytes(size_bytes)))
        thread.start()
        while thread.is_alive():
            began_s = time.monotonic()
            small.sendall(PING)
            receive(small, len(PING))
            out.append((time.monotonic() - began_s) * 1000)
        thread.join()
    return out[:-1] or out


async def _streams(orders: dict[str, Any]) -> dict[str, Any]:
    size, host = orders["size_bytes"], orders["tcp"]
    config = from_plain(KvStreamConfig, orders["kv_stream"])
    payload = bytes(size)
    pool = KvPool("probe", "selftest", orders["kv"], bytes.fromhex(orders["secret"]), config, "wan")
    rows: dict[str, list[float]] = {"delivered_mbps": [], "plain_socket_mbps": [], "kv_stream_mbps": []}
    await pool.start()
    with _connect(host, b"b") as sock:
        congestion = sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_CONGESTION", 13), 16)
        for turn in range(-1, orders["repetitions"]):
            begun_s, arrived_s, answered_s = await asyncio.to_thread(bulk, sock, payload)
            sent = await pool.send(Segment(f"r{turn}", 0, 1, True, b"", [payload]))
            if not sent.ok:
                raise SystemExit(f"kv stream: {sent.error}")
            if turn >= 0:
                rows["delivered_mbps"].append(mbps(size, arrived_s - begun_s - orders["rtt_s"] / 2))
                rows["plain_socket_mbps"].append(mbps(size, answered_s - begun_s))
                rows["kv_stream_mbps"].append(mbps(size, sent.ended_s - sent.started_s))
    await pool.close()
    return {"streams": rows, "congestion_control": congestion.rstrip(b"\0").decode()}


def clean(orders: dict[str, Any]) -> dict[str, Any]:
    """RTT, rates and sharing on the link as configured."""
    out: dict[str, Any] = {"rtt_ms": pings(orders["tcp"], orders["pings"])}
    out.update(asyncio.run(_streams(orders)))
    flows = orders["flows"]
    out["sharing"] = {str(count): shared(orders["tcp"], count, orders["size_bytes"]) for count in flows}
    out["beside_bulk_ms"] = beside_bulk(orders["tcp"], orders["size_bytes"])
    return out


def jittered(orders: dict[str, Any]) -> dict[str, Any]:
    """RTTs of few messages at a time: order is kept, so messages close together would share one delay."""
    return {"rtt_ms": _many_pings(orders["tcp"], 4, orders["probes"] // 10)}


def lossy(orders: dict[str, Any]) -> dict[str, Any]:
    """Loss, by datagrams where the link drops, by answers an RTT late where it delays instead."""
    if orders["udp"]:
        times, crossings, lost = _datagrams(orders["udp"], orders["probes"])
    else:
        times = _many_pings(orders["tcp"], 16, orders["probes"])
        rtt_ms = orders["rtt_s"] * 1000
        lost = sum(round(item / rtt_ms) - 1 for item in times if item > 1.75 * rtt_ms)
        crossings = 2 * len(times)
    return {"rtt_ms": times, "crossings": crossings, "lost": lost}


def _many_pings(address: str, pingers: int, count: int) -> list[float]:
    times: list[float] = []
    each = max(1, count // pingers)
    _at_once([lambda: times.extend(pings(address, each))] * pingers)
    return times


def _datagrams(address: str, count: int) -> tuple[list[float], int, int]:
    host, _, port = address.rpartition(":")
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect((host, int(port)))
    times: list[float] = []

    def collect() -> None:
        sock.settimeout(LAST_WAIT_S)
        try:
            while True:
                (sent_s,) = TIME.unpack_from(sock.recv(2048))
                times.append((time.monotonic() - sent_s) * 1000)
        except TimeoutError:
            return

    reader = threading.Thread(target=collect)
    reader.start()
    for _ in range(count):
        sock.send(TIME.pack(time.monotonic()) + PING)
        time.sleep(PACE_S)
    reader.join()
    # An echo that comes has crossed twice; one that does not was lost on the way there or on the way back.
    lost = count - len(times)
    return times, 2 * len(times) + lost, lost


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Measure what stdin orders."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    orders = json.loads(sys.stdin.readline())
    out = {"clean": clean, "jittered": jittered, "lossy": lossy}[orders["phase"]](orders)
    print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main()
