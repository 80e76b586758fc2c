"""Endpoints for the tests of the WAN backends, in this process or inside a namespace."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

STREAM_BYTES = 1 << 20


def serve(host: str) -> str:
    """An echo server on threads; gives its "host:port"."""
    listener = socket.create_server((host, 0), backlog=64)

    def echo(sock: socket.socket) -> None:
        with sock:
            try:
                while data := sock.recv(65536):
                    sock.sendall(data)
            except OSError:
                return

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=echo, args=(sock,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return f"{host}:{listener.getsockname()[1]}"


def connect(address: str) -> socket.socket:
    """A connection to "host:port"."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def read(sock: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes."""
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        assert part, "the stream ended early"
        data += part
    return bytes(data)


def rtts_ms(sock: socket.socket, count: int) -> list[float]:
    """Sorted round trip times."""
    out = []
    for _ in range(count):
        began_s = time.monotonic()
        sock.sendall(b"x")
        read(sock, 1)
        out.append((time.monotonic() - began_s) * 1000)
    return sorted(out)


def there_and_back_s(sock: socket.socket, data: bytes) -> float:
    """Send `data` to the echo and compare what returns; the seconds it took."""
    began_s = time.monotonic()
    sender = threading.Thread(target=sock.sendall, args=(data,))
    sender.start()
    assert read(sock, len(data)) == data
    sender.join()
    return time.monotonic() - began_s


def gone(pid: int, within_s: float = 5.0) -> bool:
    """Whether the process ends in time (a zombie has ended)."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def hold(backend: str, folder: str) -> None:
    """Open a WAN, print its process ids and namespaces, and wait to be killed."""
    from pdd.config import WanConfig
    from pdd.net.wan import open_wan

    with open_wan(WanConfig(backend=backend), ("a", "b"), Path(folder)) as wan:
        print(json.dumps({"pid": wan.pid, "enter": wan.enter("a")}), flush=True)  # type: ignore[attr-defined]
        time.sleep(60)


def main() -> None:
    """What a test starts as a process."""
    if sys.argv[1] == "serve":
        print(serve(sys.argv[2]), flush=True)
        sys.stdin.read()
        return
    if sys.argv[1] == "hold":
        return hold(sys.argv[2], sys.argv[3])
    with connect(sys.argv[2]) as sock:
        times = rtts_ms(sock, 20)
        seconds = there_and_back_s(sock, os.urandom(STREAM_BYTES))
        print(json.dumps({"rtt_ms": times[len(times) // 2], "seconds": seconds}))


if __name__ == "__main__":
    main()
