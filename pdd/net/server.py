"""The receiving end of the KV stream.

Invariant: nothing but the challenge is spoken with a peer that has not proved the secret, and whatever one
connection does, the others and the listening socket go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable

from pdd.config import KvStreamConfig
from pdd.errors import ConfigError, PddError, SecretError, WireError
from pdd.net import frames
from pdd.net import secret as keys
from pdd.net.assembly import Assembly, Desk
from pdd.net.frames import Ack, Auth, Begin, Drop, Hello, Limits, Nack, Refuse, Warm, Warmed, Welcome
from pdd.net.reject import Rejections
from pdd.net.segment import Received
from pdd.net.wire import Wire, tune

GREETING_S = 5.0
MAX_CONNECTIONS = 1024

_log = logging.getLogger("pdd.net")


def _ignore(request_id: str, reason: str) -> None:
    """The default of `on_failed`; the loss is in the log."""


class KvServer:
    """Listens for KV segments. Both callbacks run in the event loop and must not block.

    on_segment(received): a whole segment; raising refuses it, and the sender's transfer fails with that
    reason. on_failed(request_id, reason): a segment that had begun will not become whole. A sender that
    reconnects may still bring it later by its retry.

    Raises:
        ConfigError: `host` is beyond loopback without a secret, or cannot be bound.
    """

    def __init__(
        self,
        name: str,
        secret: bytes,
        host: str,
        config: KvStreamConfig,
        on_segment: Callable[[Received], None],
        on_failed: Callable[[str, str], None] = _ignore,
        *,
        port: int = 0,
        max_segment_bytes: int = 1 << 30,
    ) -> None:
        keys.require_secret(host, secret)
        self.name = name
        self._secret = secret
        self._timeout_s = config.timeout_s
        self._on_segment = on_segment
        self._on_failed = on_failed
        self._max_bytes = max_segment_bytes
        self._rejections = Rejections(f"KV server of {name}")
        self._desk = Desk(config.timeout_s, self._failed)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._socket = _listen(host, port)
        bound = self._socket.getsockname()
        self.address = f"{bound[0]}:{bound[1]}"

    @property
    def rejected(self) -> Counter[str]:
        """Connections and segments refused, by kind: `wrong_secret`, `bad_wire`, `silent`, `checksum`, ..."""
        return self._rejections.count

    @property
    def partial_bytes(self) -> int:
        """Bytes set aside for segments that are not whole yet."""
        return self._desk.partial_bytes

    async def start(self) -> None:
        """Begin to accept connections."""
        self._accepting = asyncio.create_task(self._accept())

    async def close(self) -> None:
        """Close every connection; partial segments are dropped without a call."""
        tasks = [*self._tasks, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        self._desk.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._socket)
            except OSError as error:
                self._rejections.note("accept", str(error))
                await asyncio.sleep(0.1)
                continue
            if len(self._tasks) >= MAX_CONNECTIONS:
                self._rejections.note("too_many", f"{address[0]}:{address[1]}: {MAX_CONNECTIONS} are open")
                sock.close()
                continue
            task = asyncio.create_task(self._serve(sock, f"{address[0]}:{address[1]}"))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, sock: socket.socket, where: str) -> None:
        wire = Wire(sock)
        peer = ""
        try:
            tune(sock, self._timeout_s)
            async with asyncio.timeout(min(GREETING_S, self._timeout_s)):
                peer = await self._greet(wire)
            where = f"{where} ({peer})"
            self._desk.connected(peer)
            await self._read(wire, peer)
        except SecretError as error:
            self._rejections.note("wrong_secret", f"{where}: {error}")
        except WireError as error:
            self._rejections.note("bad_wire", f"{where}: {error}")
        except TimeoutError:
            self._rejections.note("silent", f"{where}: stopped in the middle of a handshake or frame")
        except OSError as error:
            self._rejections.note("broken", f"{where}: {error}")
        finally:
            wire.close()
            if peer:
                self._desk.disconnected(peer)

    async def _greet(self, wire: Wire) -> str:
        nonce = keys.new_nonce()
        await wire.send(Hello(self.name, nonce))
        prefix = await wire.read_prefix()
        if prefix is None:
            raise WireError("handshake: the peer left before it")
        auth = await wire.read_header(prefix)
        if not isinstance(auth, Auth) or not auth.name:
            raise WireError(f"handshake: a {type(auth).__name__} instead of a named Auth")
        if not keys.same(auth.proof, keys.prove(self._secret, nonce, auth.name, "client")):
            await wire.send(Refuse(SecretError.code, f"{self.name} does not share this secret"))
            raise SecretError(f"secret: {auth.name!r} holds another one; give both the cluster's")
        await wire.send(Welcome(keys.prove(self._secret, auth.nonce, self.name, "server")))
        wire.limits = Limits()
        return auth.name

    async def _read(self, wire: Wire, peer: str) -> None:
        while (prefix := await wire.read_prefix(self._timeout_s)) is not None:
            async with asyncio.timeout(self._timeout_s):
                if prefix.kind == frames.kind_of(Warm):
                    header: frames.Header = await wire.read_header_over(prefix)
                elif prefix.kind == frames.DATA:
                    raise WireError("kind: data outside a segment; send a Begin first")
                else:
                    header = await wire.read_header(prefix)
            if isinstance(header, Begin):
                await self._receive(wire, peer, header)
            elif isinstance(header, Drop):
                self._desk.drop(peer, header.transfer, f"{peer} gave it up")
            elif isinstance(header, Warm):
                if header.last:
                    await self._reply(wire, Warmed())
            else:
                raise WireError(f"kind: {type(header).__name__} is not for a server")

    async def _receive(self, wire: Wire, peer: str, begin: Begin) -> None:
        frames.check_begin(begin, self._max_bytes)
        if self._desk.outcome(peer, begin) is not None:
            await self._fill(wire, peer, begin, memoryview(bytearray(begin.stripe_bytes)))
            outcome = self._desk.outcome(peer, begin) or ""
        else:
            assembly = self._desk.open(peer, begin)
            try:
                intact = await self._fill(wire, peer, begin, assembly.target(begin))
                if intact is None:
                    return
                outcome = self._settle(assembly, begin, intact)
            finally:
                self._desk.leave(assembly)
        if outcome:
            await self._reply(wire, Nack(begin.transfer, begin.stripe, outcome))
        else:
            await self._reply(wire, Ack(begin.transfer, begin.stripe))

    async def _fill(self, wire: Wire, peer: str, begin: Begin, target: memoryview) -> bool | None:
        """All data frames of a stripe. Returns if all checksums were right; None if the sender gave up."""
        intact = True
        while target:
            async with asyncio.timeout(self._timeout_s):
                prefix = await wire.read_prefix()
                if prefix is None:
                    raise WireError(
                        f"segment of {begin.request_id}: cut short, {len(target)} bytes are missing"
                    )
                if prefix.kind != frames.DATA:
                    await self._interrupted(wire, peer, prefix)
                    return None
                if not 0 < prefix.payload_bytes <= len(target):
                    raise WireError(
                        f"payload bytes: {prefix.payload_bytes}, with {len(target)} of the stripe missing"
                    )
                intact &= await wire.read_payload(prefix, target[: prefix.payload_bytes])
            target = target[prefix.payload_bytes :]
            # A fast sender would otherwise never let another task run.
            await asyncio.sleep(0)
        return intact

    async def _interrupted(self, wire: Wire, peer: str, prefix: frames.Prefix) -> None:
        header = await wire.read_header(prefix)
        if not isinstance(header, Drop):
            raise WireError(
                f"kind: {type(header).__name__} inside a segment; only data and Drop belong there"
            )
        self._desk.drop(peer, header.transfer, f"{peer} gave it up")

    def _settle(self, assembly: Assembly, begin: Begin, intact: bool) -> str:
        """Count a stripe in; hand the segment over when it was the last. Returns "" or why it is refused."""
        if assembly.failed:
            return assembly.failed
        if not intact:
            reason = f"checksum: tokens [{begin.start}, {begin.end}) of {begin.request_id} arrived changed"
            self._rejections.note("checksum", reason)
            self._desk.fail(assembly, reason)
            return reason
        already = self._desk.outcome(*_named(assembly))
        if already is not None:
            return already
        assembly.arrived.add(begin.stripe)
        if not assembly.whole:
            return ""
        outcome = self._hand_over(assembly.received())
        self._desk.deliver(assembly, outcome)
        return outcome

    def _hand_over(self, received: Received) -> str:
        try:
            self._on_segment(received)
        except PddError as error:
            self._rejections.note(
                error.code, f"segment of {received.request_id} from {received.peer}: {error}"
            )
            return str(error)
        except Exception:
            _log.exception("KV server of %s: on_segment failed for %s", self.name, received.request_id)
            return f"{self.name} could not take the segment"
        return ""

    def _failed(self, request_id: str, reason: str) -> None:
        _log.info("KV server of %s: dropped a partial segment of %s: %s", self.name, request_id, reason)
        try:
            self._on_failed(request_id, reason)
        except Exception:
            _log.exception("KV server of %s: on_failed failed for %s", self.name, request_id)

    async def _reply(self, wire: Wire, header: frames.Header) -> None:
        async with asyncio.timeout(self._timeout_s):
            await wire.send(header)


def _named(assembly: Assembly) -> tuple[str, Begin]:
    return assembly.key[0], assembly.begin


def _listen(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"KV address: {host}:{port} cannot be bound ({error}); give one of this host"
            ) from None
        sock.listen(128)
        sock.setblocking(False)
        undo.pop_all()
    return sock
