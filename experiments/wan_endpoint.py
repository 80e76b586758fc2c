"""The far end of the WAN self-test: echoes, counts bulk bytes, takes KV. Started inside a datacenter.

Invariant: it prints its addresses as one JSON line and ends when its stdin closes.
`python -m experiments.wan_endpoint HOST`, with the secret (hex) as stdin's first line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
import threading
import time

from pdd.config import KvStreamConfig
from pdd.net.stream import KvServer

SIZE = struct.Struct("!Q")
TIME = struct.Struct("!d")
READ_BYTES = 1 << 20


def receive(sock: socket.socket, size_bytes: int) -> bytes:
    """Exactly `size_bytes`, or fewer when the stream ends."""
    data = b""
    while len(data) < size_bytes:
        part = sock.recv(size_bytes - len(data))
        if not part:
            break
        data += part
    return data


def _serve(sock: socket.socket) -> None:
    with sock, contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sock.recv(1) == b"e":
            while data := sock.recv(65536):
                sock.sendall(data)
        else:
            _count(sock)


def _count(sock: socket.socket) -> None:
    buffer = bytearray(READ_BYTES)
    while len(head := receive(sock, SIZE.size)) == SIZE.size:
        (left,) = SIZE.unpack(head)
        while left:
            got = sock.recv_into(buffer, min(left, READ_BYTES))
            if not got:
                return
            left -= got
        sock.sendall(TIME.pack(time.monotonic()))


def _accept(listener: socket.socket) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=_serve, args=(sock,), daemon=True).start()


def _echo_datagrams(sock: socket.socket) -> None:
    while True:
        data, peer = sock.recvfrom(65536)
        sock.sendto(data, peer)


async def _main(host: str) -> None:
    secret = bytes.fromhex(sys.stdin.readline().strip())
    listener = socket.create_server((host, 0), backlog=128)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind((host, 0))
    server = KvServer("selftest", secret, host, KvStreamConfig(), lambda received: None)
    await server.start()
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    threading.Thread(target=_echo_datagrams, args=(datagrams,), daemon=True).start()
    ports = {"tcp": listener.getsockname()[1], "udp": datagrams.getsockname()[1]}
    print(json.dumps({**ports, "kv": server.address}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
