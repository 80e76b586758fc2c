"""The KV stream: whole segments, once, in queue order; losses are told in time."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from aio import aio

from pdd.config import KvStreamConfig
from pdd.errors import ConfigError, SecretError, TransferError, WireError
from pdd.lifecycle import now_s
from pdd.net.stream import KvPool, KvServer, Received, Segment

SECRET = b"the cluster's own"
MIB = 1 << 20


def _config(**change: Any) -> KvStreamConfig:
    return KvStreamConfig(**({"connections": 2, "warmup_bytes": 10_000, "timeout_s": 5.0} | change))


def _segment(request_id: str = "r", start: int = 0, end: int = 8, size: int = 100_000) -> Segment:
    return Segment(request_id, start, end, True, f"meta {start}".encode(), [os.urandom(size)])


class Sink:
    """Collects what a server hands over."""

    def __init__(self) -> None:
        self.got: list[Received] = []
        self.failed: list[tuple[str, str]] = []

    def on_segment(self, received: Received) -> None:
        self.got.append(received)

    def on_failed(self, request_id: str, reason: str) -> None:
        self.failed.append((request_id, reason))

    async def until(self, ready: Callable[[], object], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not ready():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def _pair(sink: Sink | None = None, **change: Any) -> AsyncIterator[tuple[KvServer, KvPool, Sink]]:
    sink = sink or Sink()
    config = _config(**change)
    server = KvServer("md0", SECRET, "127.0.0.1", config, sink.on_segment, sink.on_failed)
    await server.start()
    pool = KvPool("p0", "md0", server.address, SECRET, config, "wan")
    await pool.start()
    try:
        yield server, pool, sink
    finally:
        await pool.close()
        await server.close()


class Throttle:
    """A TCP relay before a server that passes `rate` bytes/s, or nothing, or breaks all connections."""

    def __init__(self, target: str, rate: float = 1e12) -> None:
        self.target = target
        self.rate = rate
        self.passing = True
        self.accepted = 0
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=32768)
        return "127.0.0.1:" + str(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        host, port = self.target.split(":")
        back_reader, back_writer = await asyncio.open_connection(host, int(port))
        self._writers += [writer, back_writer]
        await asyncio.gather(self._copy(reader, back_writer), self._copy(back_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while part := await reader.read(16384):
                while not self.passing:
                    await asyncio.sleep(0.01)
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(len(part) / self.rate)
        except OSError:
            pass
        writer.close()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        self.cut()
        self._server.close()
        await asyncio.sleep(0.05)


@asynccontextmanager
async def _throttled(rate: float, **change: Any) -> AsyncIterator[tuple[KvServer, KvPool, Sink, Throttle]]:
    sink, config = Sink(), _config(**change)
    server = KvServer("md0", SECRET, "127.0.0.1", config, sink.on_segment, sink.on_failed)
    await server.start()
    throttle = Throttle(server.address)
    pool = KvPool("p0", "md0", await throttle.start(), SECRET, config, "wan")
    await pool.start()
    throttle.rate = rate
    try:
        yield server, pool, sink, throttle
    finally:
        throttle.passing = True
        await pool.close()
        await throttle.close()
        await server.close()


@aio
async def test_a_segment_arrives_whole_with_its_record() -> None:
    async with _pair() as (_, pool, sink):
        parts = [np.arange(50_000, dtype=np.float32), np.zeros((0,)), os.urandom(3), np.ones((7, 11))]
        before_s = now_s()
        done = await pool.send(Segment("r1", 64, 128, False, b"\0head", parts))
        after_s = now_s()
        (got,) = sink.got
        assert bytes(got.payload) == b"".join(
            bytes(memoryview(part).cast("B")) for part in parts if len(part)
        )
        assert (got.peer, got.request_id, got.start, got.end, got.last) == ("p0", "r1", 64, 128, False)
        assert got.meta == b"\0head"
        assert done.ok and done.error == "" and done.path == "wan"
        assert (done.source, done.target, done.bytes) == ("p0", "md0", got.nbytes)
        assert before_s <= done.queued_s <= done.started_s <= done.ended_s <= after_s
        assert not sink.failed


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 * MIB + 5])
@pytest.mark.parametrize("stripes", [1, 3])
def test_every_size_passes_striped_or_not(size: int, stripes: int) -> None:
    @aio
    async def run() -> None:
        async with _pair(connections=4, stripes=stripes, frame_bytes=4096) as (server, pool, sink):
            segment = _segment(size=size)
            assert (await pool.send(segment)).ok
            assert bytes(sink.got[0].payload) == segment.payload[0]
            assert len(sink.got) == 1 and server.partial_bytes == 0

    run()


@aio
async def test_many_at_once_keep_queue_order_and_the_pool_bound() -> None:
    async with _pair(connections=1) as (_, pool, sink):
        sends = [asyncio.create_task(pool.send(_segment("r", index, index + 1))) for index in range(30)]
        await asyncio.sleep(0)
        assert pool.stats.in_use <= 1 and pool.stats.queued >= 28
        assert all(done.ok for done in await asyncio.gather(*sends))
        assert [got.start for got in sink.got] == list(range(30))
        assert (pool.stats.sent, pool.stats.failed, pool.stats.queued) == (30, 0, 0)


@aio
async def test_low_priority_waits_for_all_normal_ones() -> None:
    async with _pair(connections=1) as (_, pool, sink):
        lows = [asyncio.create_task(pool.send(_segment("low", i, i + 1), True)) for i in range(4)]
        await asyncio.sleep(0)
        normal = [asyncio.create_task(pool.send(_segment("normal", i, i + 1))) for i in range(4)]
        await asyncio.gather(*lows, *normal)
        # The first low one found a free connection; the others had to wait.
        assert [got.request_id for got in sink.got] == ["low"] + ["normal"] * 4 + ["low"] * 3


@aio
async def test_lowered_requests_let_others_pass() -> None:
    async with _pair(connections=1) as (_, pool, sink):
        names = ["first", "done", "done", "next"]
        sends = [asyncio.create_task(pool.send(_segment(name, i, i + 1))) for i, name in enumerate(names)]
        await asyncio.sleep(0)
        pool.lower("done")
        await asyncio.gather(*sends)
        assert [got.request_id for got in sink.got] == ["first", "next", "done", "done"]


@aio
async def test_cancel_drops_what_waits_and_cuts_what_flies() -> None:
    async with _throttled(2e6, connections=1, frame_bytes=4096) as (server, pool, sink, throttle):
        flying = asyncio.create_task(pool.send(_segment("gone", 0, 1, 20 * MIB)))
        waiting = asyncio.create_task(pool.send(_segment("gone", 1, 2)))
        other = asyncio.create_task(pool.send(_segment("kept", 0, 1)))
        await sink.until(lambda: server.partial_bytes)
        pool.cancel("gone")
        for cancelled in (await flying, await waiting):
            assert not cancelled.ok and cancelled.error == "cancelled"
        throttle.rate = 1e12
        assert (await other).ok
        assert [got.request_id for got in sink.got] == ["kept"]
        assert sink.failed == [("gone", "p0 gave it up")]
        assert server.partial_bytes == 0 and pool.stats.reconnects == 0


@aio
async def test_cancelling_the_call_cancels_the_transfer() -> None:
    async with _throttled(2e6, connections=1, frame_bytes=4096) as (server, pool, sink, throttle):
        flying = asyncio.create_task(pool.send(_segment("gone", 0, 1, 20 * MIB)))
        await sink.until(lambda: server.partial_bytes)
        flying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flying
        throttle.rate = 1e12
        await sink.until(lambda: sink.failed)
        assert sink.failed == [("gone", "p0 gave it up")] and not sink.got


@aio
async def test_a_broken_connection_is_retried_once_and_delivered_once() -> None:
    async with _throttled(20e6, connections=2) as (server, pool, sink, throttle):
        sending = asyncio.create_task(pool.send(_segment(size=8 * MIB)))
        await sink.until(lambda: server.partial_bytes)
        throttle.rate = 1e12
        throttle.cut()
        done = await sending
        assert done.ok, done
        assert len(sink.got) == 1
        await sink.until(lambda: pool.stats.connected == 2)
        assert pool.stats.reconnects == 2
        assert (await pool.send(_segment("next"))).ok


@aio
async def test_a_connection_that_keeps_breaking_fails_the_transfer() -> None:
    async with _throttled(20e6, connections=1) as (server, pool, sink, throttle):
        sending = asyncio.create_task(pool.send(_segment(size=8 * MIB)))
        for breaks in (1, 2):
            await sink.until(lambda: server.partial_bytes and pool.stats.in_use)
            throttle.cut()
            await sink.until(lambda expected=breaks: pool.stats.reconnects == expected)
        done = await sending
        assert not done.ok and "broke 2 times" in done.error
        await sink.until(lambda: sink.failed and not server.partial_bytes)
        assert {request for request, _ in sink.failed} == {"r"} and not sink.got


@aio
async def test_a_lost_ack_is_made_up_for_without_a_second_delivery() -> None:
    async with _throttled(1e12, connections=2) as (_, pool, sink, throttle):
        # The segment gets through, its acknowledgement does not: the connections break at delivery.
        class Breaking(list[Received]):
            def append(self, item: Received) -> None:
                super().append(item)
                throttle.cut()

        sink.got = Breaking()
        done = await pool.send(_segment())
        assert done.ok, done
        assert len(sink.got) == 1 and pool.stats.reconnects >= 1


@aio
async def test_a_silent_path_fails_within_the_deadline() -> None:
    async with _throttled(1e12, connections=2, timeout_s=0.6) as (_, pool, _, throttle):
        throttle.passing = False
        start_s = now_s()
        done = await asyncio.gather(*(pool.send(_segment(str(index), size=MIB)) for index in range(5)))
        assert 0.5 < now_s() - start_s < 1.5
        assert not any(one.ok for one in done)
        assert all("within 0.6 s" in one.error for one in done)


@aio
async def test_a_server_that_goes_and_comes_back_is_found_again() -> None:
    sink, config = Sink(), _config()
    server = KvServer("md0", SECRET, "127.0.0.1", config, sink.on_segment)
    await server.start()
    pool = KvPool("p0", "md0", server.address, SECRET, config)
    await pool.start()
    await server.close()
    await sink.until(lambda: pool.stats.connected == 0)
    port = int(server.address.split(":")[1])
    waiting = asyncio.create_task(pool.send(_segment()))
    await asyncio.sleep(0.1)
    server = KvServer("md0", SECRET, "127.0.0.1", config, sink.on_segment, port=port)
    await server.start()
    assert (await waiting).ok
    await pool.close()
    assert not (await pool.send(_segment())).ok
    await server.close()


@aio
async def test_closing_the_pool_ends_what_is_under_way() -> None:
    async with _throttled(2e6, connections=1) as (server, pool, sink, _):
        sends = [asyncio.create_task(pool.send(_segment(str(i), size=20 * MIB))) for i in range(3)]
        await sink.until(lambda: server.partial_bytes)
        await pool.close()
        assert [done.error for done in await asyncio.gather(*sends)] == ["the pool is closed"] * 3
        await sink.until(lambda: sink.failed)
        assert server.partial_bytes == 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (WireError("checksum: wrong"), "checksum: wrong"),
        (RuntimeError("bug"), "md0 could not take the segment"),
    ],
)
def test_a_receiver_that_refuses_fails_the_transfer(error: Exception, reason: str) -> None:
    class Refusing(Sink):
        def on_segment(self, received: Received) -> None:
            if received.request_id == "bad":
                raise error
            super().on_segment(received)

    @aio
    async def run() -> None:
        async with _pair(Refusing()) as (_, pool, sink):
            done = await pool.send(_segment("bad"))
            assert not done.ok and done.error == reason
            assert (await pool.send(_segment("good"))).ok
            assert pool.stats.reconnects == 0 and len(sink.got) == 1

    run()


@aio
async def test_a_wrong_secret_is_one_refusal_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    async with _pair() as (server, pool, sink):
        stranger = KvPool("p1", "md0", server.address, b"another", _config(connections=8))
        with pytest.raises(SecretError, match="md0 does not share this secret"):
            await stranger.start()
        assert server.rejected == {"wrong_secret": 1}
        assert caplog.text.count("wrong_secret") == 1
        assert (await pool.send(_segment())).ok and len(sink.got) == 1


@aio
async def test_an_impostor_server_is_noticed() -> None:
    # It lets everybody in but cannot prove the secret.
    sink = Sink()
    server = KvServer("md0", b"another", "127.0.0.1", _config(), sink.on_segment)
    server._greet = _greet_anybody.__get__(server)  # type: ignore[method-assign]
    await server.start()
    pool = KvPool("p0", "md0", server.address, SECRET, _config())
    with pytest.raises(SecretError, match="'md0' at .* does not hold this cluster's"):
        await pool.start()
    await server.close()


async def _greet_anybody(server: KvServer, wire: Any) -> str:
    from pdd.net import frames
    from pdd.net import secret as keys

    await wire.send(frames.Hello("md0", keys.new_nonce()))
    auth = await wire.read_header(await wire.read_prefix())
    await wire.send(frames.Welcome(keys.prove(b"another", auth.nonce, "md0", "server")))
    return str(auth.name)


@aio
async def test_an_absent_peer_is_a_transfer_error_in_time() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = "127.0.0.1:" + str(unused.getsockname()[1])
    pool = KvPool("p0", "md0", address, SECRET, _config(timeout_s=0.5))
    start_s = now_s()
    with pytest.raises(TransferError, match="md0 was not reached within 0.5 s"):
        await pool.start()
    assert now_s() - start_s < 1.5


def test_impossible_settings_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="congestion_control: 'warp' is not in this kernel; give one of"):
        KvPool("p0", "md0", "127.0.0.1:1", SECRET, _config(congestion_control="warp"))
    with pytest.raises(ConfigError, match="give host:port"):
        KvPool("p0", "md0", "nowhere", SECRET, _config())
    with pytest.raises(ConfigError, match="give a shared secret"):
        KvServer("md0", b"", "0.0.0.0", _config(), lambda received: None)
    with pytest.raises(ConfigError, match="cannot be bound"):
        KvServer("md0", SECRET, "203.0.113.7", _config(), lambda received: None)


@aio
async def test_congestion_control_is_set_on_every_connection() -> None:
    async with _pair(congestion_control="reno") as (_, pool, _):
        for lane in pool._lanes:
            assert lane._wire is not None
            chosen = lane._wire.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            assert chosen.rstrip(b"\0") == b"reno"
