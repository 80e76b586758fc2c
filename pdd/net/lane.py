"""One persistent, warmed connection of a pool.

Invariant: a lane carries one stripe at a time and is free again only when the peer has answered for it; after
any error it has no connection until `open` succeeds anew.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from pdd.config import KvStreamConfig
from pdd.errors import SecretError, TransferError, WireError
from pdd.net import frames
from pdd.net import secret as keys
from pdd.net.flight import Stripe
from pdd.net.frames import Ack, Auth, Drop, Header, Hello, Limits, Nack, Refuse, Warm, Warmed, Welcome
from pdd.net.wire import Wire, tune


class Lane:
    """A connection from `name` to the KV server at `host`:`port`."""

    def __init__(self, name: str, host: str, port: int, secret: bytes, config: KvStreamConfig) -> None:
        self._name = name
        self._host = host
        self._port = port
        self._secret = secret
        self._config = config
        self._wire: Wire | None = None

    @property
    def connected(self) -> bool:
        """There is a connection."""
        return self._wire is not None

    async def open(self) -> None:
        """Connect, prove the secret both ways, and warm the connection up.

        Raises:
            SecretError: the peer holds another secret.
            OSError, WireError: no connection, or not a KV server.
        """
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        wire = Wire(sock)
        try:
            async with asyncio.timeout(self._config.timeout_s):
                tune(sock, self._config.timeout_s, self._config.congestion_control)
                await asyncio.get_running_loop().sock_connect(sock, (self._host, self._port))
                await self._greet(wire)
                await self._warm(wire)
        except BaseException:
            wire.close()
            raise
        self._wire = wire

    async def _greet(self, wire: Wire) -> None:
        hello = await _answer(wire)
        if not isinstance(hello, Hello):
            raise WireError(f"handshake: a {type(hello).__name__} instead of Hello")
        nonce = keys.new_nonce()
        await wire.send(Auth(self._name, nonce, keys.prove(self._secret, hello.nonce, self._name, "client")))
        reply = await _answer(wire)
        if isinstance(reply, Refuse):
            raise SecretError(f"secret: {reply.reason}; give both the cluster's")
        right = isinstance(reply, Welcome) and keys.same(
            reply.proof, keys.prove(self._secret, nonce, hello.name, "server")
        )
        if not right:
            raise SecretError(
                f"secret: {hello.name!r} at {self._host}:{self._port} does not hold this cluster's"
            )
        wire.limits = Limits(payload_bytes=0)

    async def _warm(self, wire: Wire) -> None:
        zeros = memoryview(bytes(min(self._config.frame_bytes, self._config.warmup_bytes)))
        left = self._config.warmup_bytes
        while left > 0:
            part = zeros[: min(left, len(zeros))]
            left -= len(part)
            await wire.send(Warm(left == 0), [part])
        if self._config.warmup_bytes and not isinstance(await _answer(wire), Warmed):
            raise WireError("warm-up: the peer answered something else")

    async def carry(self, stripe: Stripe) -> str:
        """Send one stripe and wait for its answer. Returns "" or the peer's reason for refusing it.

        Raises:
            TransferError: the flight ended meanwhile; the peer was told to drop it and the lane is good.
            OSError, WireError: the connection broke.
        """
        wire = self._wire
        if wire is None:
            raise WireError("lane: not connected")
        await wire.send(stripe.begin)
        for low in range(0, stripe.begin.stripe_bytes, self._config.frame_bytes):
            if stripe.flight.ended:
                await wire.send(Drop(stripe.begin.transfer))
                raise TransferError(stripe.flight.reason)
            high = min(low + self._config.frame_bytes, stripe.begin.stripe_bytes)
            await wire.send(None, frames.slice_views(stripe.views, low, high))
            # A fast path would otherwise never let another task run.
            await asyncio.sleep(0)
        return await self._outcome(wire, stripe)

    async def _outcome(self, wire: Wire, stripe: Stripe) -> str:
        reply = await _answer(wire)
        if not isinstance(reply, Ack | Nack):
            raise WireError(f"answer: a {type(reply).__name__} instead of Ack or Nack")
        if (reply.transfer, reply.stripe) != (stripe.begin.transfer, stripe.begin.stripe):
            raise WireError(f"answer: for transfer {reply.transfer}, not {stripe.begin.transfer}")
        return reply.reason if isinstance(reply, Nack) else ""

    @property
    def stale(self) -> bool:
        """The peer has closed the idle connection, whether or not the event loop knows already."""
        if self._wire is None:
            return True
        try:
            self._wire.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def watch(self, on_readable: Callable[[], None]) -> None:
        """While the lane is idle: anything readable means that the peer has closed it."""
        if self._wire is not None:
            asyncio.get_running_loop().add_reader(self._wire.sock, on_readable)

    def unwatch(self) -> None:
        """The lane is about to be used."""
        if self._wire is not None:
            asyncio.get_running_loop().remove_reader(self._wire.sock)

    def close(self) -> None:
        """Drop the connection."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None


async def _answer(wire: Wire) -> Header:
    prefix = await wire.read_prefix()
    if prefix is None:
        raise WireError("connection: closed by the peer")
    if prefix.kind == frames.DATA:
        raise WireError("kind: data from a server")
    return await wire.read_header(prefix)
