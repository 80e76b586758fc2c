"""Garbage, truncation and silence on both listening sockets: one clear line each, and the socket goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aio import aio

from pdd.config import KvStreamConfig
from pdd.net import frames
from pdd.net import secret as keys
from pdd.net.control import ControlSocket
from pdd.net.frames import Ack, Auth, Begin, Drop, Header, Nack, Warm
from pdd.net.messages import Message, Shutdown
from pdd.net.stream import KvPool, KvServer, Received, Segment
from pdd.net.wire import Wire

SECRET = b"the cluster's own"
CONFIG = KvStreamConfig(connections=1, warmup_bytes=0, timeout_s=0.5)


class Server:
    """A KV server with its outcomes, and a raw client to mistreat it with."""

    def __init__(self) -> None:
        self.got: list[Received] = []
        self.failed: list[tuple[str, str]] = []
        self.kv = KvServer(
            "md0",
            SECRET,
            "127.0.0.1",
            CONFIG,
            self.got.append,
            lambda *call: self.failed.append(call),
            max_segment_bytes=1 << 20,
        )
        host, port = self.kv.address.split(":")
        self.where = (host, int(port))

    async def still_serves(self) -> None:
        pool = KvPool("p0", "md0", self.kv.address, SECRET, CONFIG)
        await pool.start()
        before = len(self.got)
        assert (await pool.send(Segment("ok", 0, 1, True, b"", [b"fine"]))).ok
        assert len(self.got) == before + 1
        await pool.close()

    async def connect(self) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.where)
        return sock

    async def enter(self, name: str = "p9") -> Wire:
        """A client that has passed the challenge."""
        wire = Wire(await self.connect())
        hello = await _read(wire)
        await wire.send(Auth(name, b"n" * 16, keys.prove(SECRET, hello.nonce, name, "client")))  # type: ignore[union-attr]
        await _read(wire)
        wire.limits = frames.Limits()
        return wire


async def _read(wire: Wire) -> Header:
    async with asyncio.timeout(3):
        prefix = await wire.read_prefix()
        assert prefix is not None, "the server closed the connection"
        return await wire.read_header(prefix)


async def _closed(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(3):
        try:
            while await loop.sock_recv(sock, 4096):
                pass
        except ConnectionError:
            pass
    sock.close()


@asynccontextmanager
async def _server() -> AsyncIterator[Server]:
    server = Server()
    await server.kv.start()
    try:
        yield server
    finally:
        await server.kv.close()


def _begin(size: int = 1000, **change: int) -> Begin:
    fields = {"transfer": 5, "request_id": "r", "start": 0, "end": 4, "last": True, "meta": b"m"}
    fields |= {"total_bytes": size, "stripe": 0, "stripes": 1, "offset": 0, "stripe_bytes": size}
    return Begin(**(fields | change))  # type: ignore[arg-type]


def _raw(header: Header | None, payload: bytes = b"") -> bytes:
    return b"".join(bytes(part) for part in frames.encode(header, [memoryview(payload)]))


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\0" * 64,
    random.Random(3).randbytes(5000),
    frames.PREFIX.pack(b"PDDK", 1, 2, 0, 2**32 - 1, 0, 0),
    frames.PREFIX.pack(b"PDDK", 1, 0, 0, 0, 2**32 - 1, 0),
    frames.PREFIX.pack(b"PDDK", 9, 2, 0, 10, 0, 0),
    frames.PREFIX.pack(b"PDDK", 1, 2, 0, 10, 0, 0) + b"x" * 10,
    _raw(_begin()),
    _raw(Warm(True)),
    _raw(Auth("", b"", b"")),
]


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_before_the_challenge_is_one_line(garbage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    @aio
    async def run() -> None:
        async with _server() as server:
            sock = await server.connect()
            await asyncio.get_running_loop().sock_sendall(sock, garbage)
            await _closed(sock)
            lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
            assert len(lines) == 1 and "\n" not in lines[0].getMessage()
            assert server.kv.rejected == {"bad_wire": 1}
            await server.still_serves()

    run()


BAD_FRAMES = {
    "data outside a segment": [_raw(None, b"abc")],
    "is not for a server": [_raw(Ack(1, 0))],
    "is no token range": [_raw(_begin(start=4))],
    "are too many": [_raw(_begin(size=1 << 40))],
    "of the stripe missing": [_raw(_begin()), _raw(None, b"y" * 1001)],
    "0, with 1000 of the stripe": [_raw(_begin()), _raw(None, b"")],
    "Begin inside a segment": [_raw(_begin()), _raw(_begin())],
    "magic": [_raw(_begin()), _raw(None, b"y" * 10), b"noise" * 10],
    "cannot be decoded": [_raw(_begin())[:-3] + b"\xc1\xc1\xc1"],
}


@pytest.mark.parametrize("match", BAD_FRAMES)
def test_bad_frames_close_one_connection_only(match: str, caplog: pytest.LogCaptureFixture) -> None:
    @aio
    async def run() -> None:
        async with _server() as server:
            wire = await server.enter()
            raw = b"".join(BAD_FRAMES[match])
            if match == "cannot be decoded":
                body = raw[frames.PREFIX.size :]
                raw = _with_right_checksum(raw, body)
            await asyncio.get_running_loop().sock_sendall(wire.sock, raw)
            await _closed(wire.sock)
            assert match in caplog.text and server.kv.rejected == {"bad_wire": 1}
            assert server.kv.partial_bytes == 0 and not server.got
            await server.still_serves()

    run()


def _with_right_checksum(raw: bytes, body: bytes) -> bytes:
    import zlib

    return raw[:16] + struct.pack("!I", zlib.crc32(body)) + body


@aio
async def test_every_truncation_of_a_segment_is_dropped_and_told() -> None:
    whole = _raw(_begin()) + _raw(None, b"a" * 600) + _raw(None, b"b" * 400)
    begun = len(_raw(_begin()))
    async with _server() as server:
        cuts = [1, 7, 20, begun - 1, begun, begun + 5, begun + 300, len(whole) - 1]
        for cut in cuts:
            wire = await server.enter()
            await asyncio.get_running_loop().sock_sendall(wire.sock, whole[:cut])
            wire.sock.shutdown(socket.SHUT_WR)
            await _closed(wire.sock)
        assert server.kv.rejected == {"bad_wire": len(cuts)}
        assert [request for request, _ in server.failed] == ["r"] * sum(cut >= begun for cut in cuts)
        assert server.kv.partial_bytes == 0 and not server.got
        await server.still_serves()


@aio
async def test_a_changed_payload_is_refused_and_the_connection_lives() -> None:
    async with _server() as server:
        wire = await server.enter()
        changed = bytearray(_raw(None, b"a" * 1000))
        changed[-1] ^= 1
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(wire.sock, _raw(_begin()) + bytes(changed))
        refusal = await _read(wire)
        assert isinstance(refusal, Nack) and "arrived changed" in refusal.reason
        assert server.kv.rejected == {"checksum": 1}
        assert server.failed == [("r", refusal.reason)]
        await loop.sock_sendall(wire.sock, _raw(_begin(transfer=6)) + _raw(None, b"a" * 1000))
        assert await _read(wire) == Ack(6, 0)
        assert bytes(server.got[0].payload) == b"a" * 1000
        wire.close()


@aio
async def test_the_same_transfer_again_is_acknowledged_but_not_delivered() -> None:
    async with _server() as server:
        loop = asyncio.get_running_loop()
        for _ in range(2):
            wire = await server.enter()
            await loop.sock_sendall(wire.sock, _raw(_begin()) + _raw(None, b"a" * 1000))
            assert await _read(wire) == Ack(5, 0)
            wire.close()
        assert len(server.got) == 1


@aio
async def test_a_silent_peer_is_closed_and_its_segment_dropped() -> None:
    async with _server() as server:
        loop = asyncio.get_running_loop()
        mute = await server.connect()
        slow = await server.enter()
        await loop.sock_sendall(slow.sock, _raw(_begin()) + _raw(None, b"a" * 999)[:-1])
        start_s = loop.time()
        await _closed(mute)
        await _closed(slow.sock)
        assert 0.3 < loop.time() - start_s < 2
        assert server.kv.rejected == {"silent": 2}
        assert [request for request, _ in server.failed] == ["r"]
        await server.still_serves()


@aio
async def test_a_dribbling_peer_does_not_outlive_the_deadline() -> None:
    async with _server() as server:
        loop = asyncio.get_running_loop()
        wire = await server.enter()
        await loop.sock_sendall(wire.sock, _raw(_begin()))
        frame = _raw(None, b"a" * 1000)
        start_s = loop.time()
        with pytest.raises(ConnectionError):
            for index in range(200):
                await loop.sock_sendall(wire.sock, frame[index : index + 1])
                await asyncio.sleep(0.02)
        assert loop.time() - start_s < 2
        assert server.kv.rejected == {"silent": 1} and server.kv.partial_bytes == 0
        wire.close()


@aio
async def test_an_idle_peer_may_stay() -> None:
    async with _server() as server:
        wire = await server.enter()
        await asyncio.sleep(3 * CONFIG.timeout_s)
        await wire.send(_begin(0))
        assert await _read(wire) == Ack(5, 0)
        assert not server.kv.rejected
        wire.close()


@aio
async def test_a_drop_for_an_unknown_transfer_changes_nothing() -> None:
    async with _server() as server:
        wire = await server.enter()
        await wire.send(Drop(77))
        await wire.send(_begin(0))
        assert await _read(wire) == Ack(5, 0)
        assert not server.failed and not server.kv.rejected
        wire.close()


@aio
async def test_fuzz_on_the_kv_socket() -> None:
    dice = random.Random(7)
    async with _server() as server:
        loop = asyncio.get_running_loop()
        good = _raw(_begin()) + _raw(None, b"a" * 1000)
        for round_number in range(60):
            raw = bytearray(good)
            for _ in range(dice.randint(1, 4)):
                raw[dice.randrange(len(raw))] = dice.randrange(256)
            wire = await server.enter() if round_number % 2 else Wire(await server.connect())
            await loop.sock_sendall(wire.sock, bytes(raw[: dice.randint(1, len(raw))]))
            wire.sock.shutdown(socket.SHUT_WR)
            await _closed(wire.sock)
        assert server.kv.partial_bytes == 0
        assert all(bytes(one.payload) == b"a" * 1000 for one in server.got)
        await server.still_serves()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + random.Random(3).randbytes(500),
        random.Random(3).randbytes(300),
        b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\x03" * 300,
        b"\x01" + b"\xff" * 20,
    ],
)
def test_garbage_on_the_control_socket_is_counted_and_peers_go_on(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    @aio
    async def run() -> None:
        end = ControlSocket("md0", SECRET, messages=Message)
        peer = ControlSocket("p0", SECRET, messages=Message)
        peer.connect("md0", end.address)
        await peer.send("md0", Shutdown())
        async with asyncio.timeout(3):
            assert await end.recv() == ("p0", Shutdown())
        host, port = end.address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(garbage)
            with contextlib.suppress(OSError):
                raw.shutdown(socket.SHUT_WR)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await end.recv()
        await peer.send("md0", Shutdown())
        async with asyncio.timeout(3):
            assert await end.recv() == ("p0", Shutdown())
        assert set(end.rejected) == {"garbage"}
        assert 1 <= len(caplog.records) <= 2
        end.close()
        peer.close()

    run()


_SENDER = """
import asyncio, sys
from pdd.config import KvStreamConfig
from pdd.net.stream import KvPool, Segment
async def main():
    config = KvStreamConfig(connections=2, warmup_bytes=0, frame_bytes=4096)
    pool = KvPool("p0", "md0", sys.argv[1], b"the cluster's own", config)
    await pool.start()
    print("up", flush=True)
    sent = 0
    while True:
        await pool.send(Segment("r", sent, sent + 1, False, b"", [bytes(1 << 20)]))
        sent += 1
asyncio.run(main())
"""


@aio
async def test_a_sender_killed_in_mid_transfer_leaves_nothing_behind() -> None:
    async with _server() as server:
        child = subprocess.Popen(
            [sys.executable, "-c", _SENDER, server.kv.address], stdout=subprocess.PIPE, text=True
        )
        try:
            async with asyncio.timeout(15):
                while not server.got or not server.kv.partial_bytes:
                    await asyncio.sleep(0)
            child.send_signal(signal.SIGKILL)
            child.wait(5)
            async with asyncio.timeout(5):
                while server.kv.partial_bytes:
                    await asyncio.sleep(0.01)
        finally:
            child.kill()
            child.wait(5)
        assert len(server.failed) <= 1
        assert [one.start for one in server.got] == list(range(len(server.got)))
        await server.still_serves()


_RECEIVER = """
import asyncio
from pdd.config import KvStreamConfig
from pdd.net.stream import KvServer
async def main():
    server = KvServer("md0", b"the cluster's own", "127.0.0.1", KvStreamConfig(), lambda received: None)
    await server.start()
    print(server.address, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


@aio
async def test_a_receiver_killed_in_mid_transfer_fails_it_in_time() -> None:
    child = subprocess.Popen([sys.executable, "-c", _RECEIVER], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        address = (await asyncio.to_thread(child.stdout.readline)).strip()
        pool = KvPool("p0", "md0", address, SECRET, KvStreamConfig(connections=2, timeout_s=1.5))
        await pool.start()
        child.send_signal(signal.SIGSTOP)
        sends = [
            asyncio.create_task(pool.send(Segment("r", i, i + 1, True, b"", [bytes(32 << 20)])))
            for i in (0, 1, 2)
        ]
        await asyncio.sleep(0.2)
        assert pool.stats.in_use == 2
        child.kill()
        start_s = asyncio.get_running_loop().time()
        done = await asyncio.gather(*sends)
        assert asyncio.get_running_loop().time() - start_s < 2
        assert not any(one.ok for one in done) and all(one.error for one in done)
        await pool.close()
    finally:
        child.kill()
        child.wait(5)
