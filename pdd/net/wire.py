"""Frames over one TCP socket, without copying payloads.

Invariant: a reader gets whole checked frames or a `WireError`; after any error the socket is only good for
closing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import zlib
from collections.abc import Sequence

from pdd.errors import ConfigError, WireError
from pdd.net import frames
from pdd.net.frames import Header, Limits, Prefix

# Bytes that the kernel may hold unsent: enough to ride out a busy event loop, small enough that a cancelled
# transfer stops soon (80 ms at 100 Mbps).
UNSENT_BYTES = 1 << 20
# Wake the reader of a payload for this much at a time. At the kernel's default buffer it never narrows TCP's
# window.
WAKE_BYTES = 32 << 10
MAX_VIEWS = 512


def check_congestion(name: str | None) -> None:
    """Refuse a congestion control that this kernel does not offer.

    Raises:
        ConfigError: with the ones it offers.
    """
    if name is None:
        return
    with socket.socket() as trial:
        try:
            trial.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except (OSError, AttributeError):
            raise ConfigError(
                f"kv_stream.congestion_control: {name!r} is not in this kernel; give one of {_offered()}"
            ) from None


def _offered() -> str:
    try:
        with open("/proc/sys/net/ipv4/tcp_available_congestion_control") as table:
            return ", ".join(table.read().split())
    except OSError:
        return "its own, or nothing"


def tune(sock: socket.socket, timeout_s: float, congestion: str | None = None) -> None:
    """Set what every connection of the stream needs; a dead path breaks it within `timeout_s`."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_USER_TIMEOUT": max(1, int(timeout_s * 1000)),
        "TCP_KEEPIDLE": max(1, int(timeout_s / 2)),
        "TCP_KEEPINTVL": max(1, int(timeout_s / 6)),
        "TCP_KEEPCNT": 3,
        "TCP_NOTSENT_LOWAT": UNSENT_BYTES,
    }
    for option, value in options.items():
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if congestion is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


class Wire:
    """One connected, non-blocking socket that speaks frames."""

    def __init__(self, sock: socket.socket, limits: Limits = frames.GREETING) -> None:
        self.sock = sock
        self.limits = limits
        self._loop = asyncio.get_running_loop()
        self._prefix = bytearray(frames.PREFIX.size)
        self._wake_bytes = 1

    async def send(self, header: Header | None, payload: Sequence[memoryview] = ()) -> None:
        """Write one frame.

        Raises:
            OSError: the connection broke.
        """
        await self._write([memoryview(part) for part in frames.encode(header, payload)])

    async def read_prefix(self, timeout_s: float | None = None) -> Prefix | None:
        """The next frame's prefix; None if the peer closed the connection between frames.

        The wait for the first byte is the caller's to bound; the rest must follow within `timeout_s`.

        Raises:
            WireError: not a frame, over the limits, or cut short.
            TimeoutError: the prefix was begun but not ended.
        """
        view = memoryview(self._prefix)
        self._wake_at(1)
        got = await self._loop.sock_recv_into(self.sock, view)
        if got == 0:
            return None
        if got < len(view):
            async with asyncio.timeout(timeout_s):
                await self._fill(view[got:])
        return frames.parse_prefix(self._prefix, self.limits)

    async def read_header(self, prefix: Prefix) -> Header:
        """The header of a frame that carries no payload.

        Raises:
            WireError: undecodable, with a payload, cut short, or with a wrong checksum.
        """
        if prefix.payload_bytes:
            raise WireError(
                f"payload bytes: {prefix.payload_bytes} in a frame of kind {prefix.kind} that has none"
            )
        body = await self._read_body(prefix)
        if zlib.crc32(body) != prefix.crc:
            raise WireError("checksum: the header's differs from the one announced")
        return frames.parse_header(prefix, body)

    async def read_header_over(self, prefix: Prefix) -> Header:
        """The header of a frame whose payload is only thrown away (warm-up)."""
        header = frames.parse_header(prefix, await self._read_body(prefix))
        await self.skip(prefix.payload_bytes)
        return header

    async def read_payload(self, prefix: Prefix, target: memoryview) -> bool:
        """A data frame's payload into `target`, of just that length. Returns if its checksum is right."""
        await self._fill(target)
        return zlib.crc32(target) == prefix.crc

    async def skip(self, count: int) -> None:
        """Read `count` bytes and forget them."""
        scratch = memoryview(bytearray(min(count, 1 << 18)))
        while count:
            part = scratch[: min(count, len(scratch))]
            await self._fill(part)
            count -= len(part)

    async def _read_body(self, prefix: Prefix) -> bytearray:
        body = bytearray(prefix.header_bytes)
        await self._fill(memoryview(body))
        return body

    async def _fill(self, view: memoryview) -> None:
        while view:
            self._wake_at(min(len(view), WAKE_BYTES))
            got = await self._loop.sock_recv_into(self.sock, view)
            if got == 0:
                raise WireError(f"frame: cut short, {len(view)} bytes are missing")
            view = view[got:]

    def _wake_at(self, count: int) -> None:
        if count != self._wake_bytes:
            self._wake_bytes = count
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    async def _write(self, views: list[memoryview]) -> None:
        while views:
            try:
                sent = self.sock.sendmsg(views[:MAX_VIEWS])
            except (BlockingIOError, InterruptedError):
                await self._writable()
                continue
            while views and sent >= len(views[0]):
                sent -= len(views[0])
                views.pop(0)
            if sent:
                views[0] = views[0][sent:]

    async def _writable(self) -> None:
        ready = self._loop.create_future()
        self._loop.add_writer(self.sock, _wake, ready)
        try:
            await ready
        finally:
            self._loop.remove_writer(self.sock)

    def close(self) -> None:
        """Close the socket, whatever state it is in."""
        with contextlib.suppress(OSError, ValueError):
            self._loop.remove_writer(self.sock)
            self._loop.remove_reader(self.sock)
        self.sock.close()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
