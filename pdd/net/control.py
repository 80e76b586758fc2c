"""Typed control messages between processes: one PULL socket for each process, one PUSH socket for each peer.

Invariant: what `recv` returns was made by a holder of the secret and is a valid message. Anything else is
counted in `rejected`, logged in one line, and disturbs nothing. On the wire: [16 B keyed BLAKE2b, msgpack of
(sender, message)].
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from pdd.errors import ConfigError, WireError
from pdd.net import secret as keys
from pdd.net.reject import Rejections

HIGH_WATER = 20_000
MAX_MESSAGE_BYTES = 64 << 20
IPC_PATH_BYTES = 107

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED

_context: zmq.asyncio.Context | None = None
_users = 0


def _take_context() -> zmq.asyncio.Context:
    global _context, _users
    if _context is None:
        _context = zmq.asyncio.Context()
    _users += 1
    return _context


def _leave_context() -> None:
    # Only the end of the context waits for queued messages (each socket's LINGER bounds the wait), so the
    # last one out ends it: closing a socket alone would lose a process's last words.
    global _context, _users
    _users -= 1
    if _users == 0 and _context is not None:
        context, _context = _context, None
        context.term()


class ControlSocket:
    """A process's control end. `messages`: a msgspec tagged union of the messages it understands.

    Raises:
        ConfigError: `host` is beyond loopback without a secret, cannot be bound, or `ipc_dir` is too long a
        path.
    """

    def __init__(
        self,
        name: str,
        secret: bytes,
        host: str = "127.0.0.1",
        *,
        messages: Any,
        ipc_dir: Path | None = None,
        port: int = 0,
    ) -> None:
        keys.require_secret(host, secret)
        self.name = name
        self._secret = secret
        self._rejections = Rejections(f"control socket of {name}")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(tuple[str, messages])
        self._peers: dict[str, tuple[str, zmq.Socket[bytes]]] = {}
        self._monitor_task: asyncio.Task[None] | None = None
        self._closed = False
        ipc_path = _ipc_path(name, ipc_dir)
        self._context = _take_context()
        try:
            self._bind(host, port, ipc_path)
        except zmq.ZMQError as error:
            self._pull.close(0)
            _leave_context()
            raise ConfigError(
                f"control address: {host}:{port} cannot be bound ({error}); give one of this host"
            ) from None

    def _bind(self, host: str, port: int, ipc_path: Path | None) -> None:
        self._pull = self._context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.RCVHWM, HIGH_WATER)
        self._pull.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._pull.setsockopt(zmq.HANDSHAKE_IVL, 5_000)
        self._pull.bind(f"tcp://{host}:{port or '*'}")
        self.address: str = self._pull.getsockopt_string(zmq.LAST_ENDPOINT)
        self.ipc_address: str | None = None
        self._ipc_path = ipc_path
        if ipc_path is not None:
            self.ipc_address = f"ipc://{ipc_path}"
            self._pull.bind(self.ipc_address)
        self._monitor = self._pull.get_monitor_socket(_WATCHED)

    @property
    def rejected(self) -> Counter[str]:
        """How many were refused: `wrong_secret`, `undecodable`, `garbage` (no ZMQ at all)."""
        return self._rejections.count

    @property
    def peers(self) -> dict[str, str]:
        """Connected peers and their addresses."""
        return {peer: address for peer, (address, _) in self._peers.items()}

    def connect(self, peer: str, address: str) -> None:
        """Send to `peer` at `address` (tcp:// or ipc://) from now on; a changed address reconnects."""
        if peer in self._peers:
            if self._peers[peer][0] == address:
                return
            self.disconnect(peer)
        # A plain socket of the same context: sends never wait, so they need no event loop.
        push: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUSH)
        push.setsockopt(zmq.SNDHWM, HIGH_WATER)
        push.setsockopt(zmq.LINGER, 0)
        push.setsockopt(zmq.RECONNECT_IVL, 20)
        push.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        try:
            push.connect(address)
        except zmq.ZMQError as error:
            push.close(0)
            raise ConfigError(
                f"address of {peer}: {address!r} is no address ({error}); give tcp://host:port"
            ) from None
        self._peers[peer] = (address, push)

    def disconnect(self, peer: str) -> None:
        """Forget the peer, with whatever was still on its way to it."""
        known = self._peers.pop(peer, None)
        if known is not None:
            known[1].close(0)

    async def send(self, peer: str, message: msgspec.Struct) -> int:
        """Hand `message` to the peer's queue without waiting. Returns the bytes on the wire, envelope
        included.

        Raises:
            WireError: unknown peer, closed socket, or a queue that is full because the peer does not read.
        """
        if self._closed or peer not in self._peers:
            raise WireError(f"peer: {peer!r} is not connected to {self.name}; connect it first")
        body = self._encoder.encode((self.name, message))
        try:
            self._peers[peer][1].send_multipart([keys.mac(self._secret, body), body], zmq.NOBLOCK, copy=True)
        except zmq.Again:
            raise WireError(f"peer: {peer!r} does not read; {HIGH_WATER} messages wait for it") from None
        return _framed_bytes(len(body))

    def wire_bytes(self, message: msgspec.Struct) -> int:
        """The bytes that `message` takes on the wire: framing, MAC, sender and body."""
        return _framed_bytes(len(self._encoder.encode((self.name, message))))

    async def recv(self) -> tuple[str, Any]:
        """The next valid message as (sender, message); waits for ever, so bound it with `asyncio.timeout`."""
        if self._monitor_task is None:
            self._monitor_task = asyncio.create_task(self._watch())
        while True:
            parts = await self._pull.recv_multipart()
            valid = self._open(parts)
            if valid is not None:
                return valid

    def _open(self, parts: list[bytes]) -> tuple[str, Any] | None:
        if len(parts) != 2 or len(parts[0]) != keys.MAC_BYTES:
            self._rejections.note(
                "garbage", f"{len(parts)} parts of {sum(map(len, parts))} bytes, no envelope"
            )
            return None
        code, body = parts
        if not keys.same(code, keys.mac(self._secret, body)):
            self._rejections.note("wrong_secret", f"a body of {len(body)} bytes with a wrong MAC")
            return None
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            self._rejections.note("undecodable", f"a body of {len(body)} bytes: {str(error).splitlines()[0]}")
            return None

    async def _watch(self) -> None:
        strangers = _Strangers()
        while True:
            event = await recv_monitor_message(self._monitor)
            if strangers.refused(event["event"], int(event["value"])):
                self._rejections.note("garbage", "a connection that does not speak the protocol")

    def close(self, linger_ms: int = 500) -> None:
        """Close every socket. If it is the process's last, sent messages get up to `linger_ms` to leave."""
        if self._closed:
            return
        self._closed = True
        if self._monitor_task is not None:
            self._monitor_task.cancel()
        for _, push in self._peers.values():
            push.close(linger_ms)
        self._peers.clear()
        self._pull.disable_monitor()
        self._monitor.close(0)
        self._pull.close(0)
        if self._ipc_path is not None:
            with contextlib.suppress(FileNotFoundError):
                self._ipc_path.unlink()
        _leave_context()


class _Strangers:
    """Connections that were accepted and have not shown that they speak ZMQ.

    What they send never becomes a message, so the events of the socket are their only trace. The library does
    not say whose handshake succeeded: with several under way, a stranger that leaves may pass for a peer.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._unnamed = 0
        self._failed = 0

    def refused(self, event: int, connection: int) -> bool:
        """Take an event in; whether it tells of one more refused connection."""
        if event & _FAILED:
            # Tells an error in place of the connection, and the end of that connection follows.
            self._failed += 1
        elif event == zmq.EVENT_ACCEPTED:
            self._open.add(connection)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if len(self._open) == 1:
                self._open.clear()
            else:
                self._unnamed += 1
        elif connection in self._open:
            self._open.discard(connection)
            return self._leaves()
        return False

    def _leaves(self) -> bool:
        if self._failed:
            self._failed -= 1
            return True
        if self._unnamed:
            self._unnamed -= 1
            return False
        return True


def _framed_bytes(body_bytes: int) -> int:
    # ZMTP 3: a flag byte and a length of 1 or 8 bytes before each part.
    return 2 + keys.MAC_BYTES + (2 if body_bytes < 256 else 9) + body_bytes


def _ipc_path(name: str, ipc_dir: Path | None) -> Path | None:
    if ipc_dir is None:
        return None
    path = Path(ipc_dir) / f"{name}.ipc"
    if len(str(path).encode()) > IPC_PATH_BYTES:
        raise ConfigError(
            f"ipc_dir: {str(path)!r} is too long; give a folder that leaves {IPC_PATH_BYTES} bytes in all"
        )
    return path
