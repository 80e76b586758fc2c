"""What every role process does: join the cluster, learn its peers, tell its load, obey, and end.

Invariant: one asyncio loop owns all sockets; a handler runs on that loop and never waits for another process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from pdd.errors import ClusterError, PddError, WireError, error_of
from pdd.lifecycle import Recorder, now_s
from pdd.net.control import ControlSocket
from pdd.net.messages import (
    Book,
    Heartbeat,
    Join,
    Message,
    Peer,
    PeerDown,
    Ready,
    Refused,
    Shutdown,
)
from pdd.roles.boot import Boot

log = logging.getLogger("pdd.roles")

REGISTRAR = "client"


class Role:
    """Base of the four roles. Subclasses add handlers and override the `connect`, `load` and `close` hooks."""

    def __init__(self, boot: Boot) -> None:
        self.boot = boot
        self.name = boot.name
        self.config = boot.config
        self.peers: dict[str, Peer] = {}
        self.down: set[str] = set()
        self.recorder = Recorder(boot.name)
        self.loop: asyncio.AbstractEventLoop
        self.control: ControlSocket
        self._stopping: asyncio.Event
        self._outbox: asyncio.Queue[tuple[str, Any]]
        self._tasks: set[asyncio.Task[Any]] = set()
        self.handlers: dict[type, Callable[[str, Any], None]] = {
            Book: self._on_book,
            PeerDown: self.on_peer_down,
            Shutdown: self._on_shutdown,
            Refused: self._on_refused,
        }
        self._refusal: PddError | None = None

    async def run(self) -> None:
        """Join, serve until shut down, and close everything."""
        self.loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._outbox = asyncio.Queue()
        ipc_dir = Path(self.boot.ipc_dir) if self.boot.ipc_dir else None
        self.control = ControlSocket(
            self.name, self.boot.secret, self.boot.host, messages=Message, ipc_dir=ipc_dir
        )
        try:
            kv_address = await self.open()
            await self._join(kv_address)
            self.spawn(self._deliver())
            self.spawn(self._receive())
            self.spawn(self._beat())
            self.spawn(self._expect_book())
            await self._stopping.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await self.close()
            self.control.close()
        if self._refusal is not None:
            raise self._refusal

    # -- hooks -----------------------------------------------------------------------------------------------------

    async def open(self) -> str:
        """Open what the role listens on besides control; gives its KV address, "" if it takes none."""
        return ""

    async def connect(self, peer: Peer) -> None:
        """Called for each new peer, before this role says it is ready."""

    async def close(self) -> None:
        """Close what `open` and `connect` opened."""

    def load(self) -> Heartbeat:
        """This role's load now."""
        return Heartbeat(0, 0, 1)

    def facts(self) -> tuple[int, int, str]:
        """Vocabulary size, context length and model fingerprint; zeros for a role without a model."""
        return 0, 0, ""

    def on_peer_down(self, sender: str, message: PeerDown) -> None:
        """A peer is gone."""
        self.down.add(message.name)

    # -- sending ---------------------------------------------------------------------------------------------------

    def send(self, peer: str, message: Any) -> None:
        """Send from the loop or from the engine's thread; a peer that is gone costs a log line, not the request."""
        self.loop.call_soon_threadsafe(self._outbox.put_nowait, (peer, message))

    async def _deliver(self) -> None:
        while True:
            peer, message = await self._outbox.get()
            try:
                await self.control.send(peer, message)
            except WireError as error:
                log.warning("%s to %s was not sent: %s", type(message).__name__, peer, error)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run `work` on the loop; its failure is logged, never lost."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s", error, exc_info=error)

    # -- membership ------------------------------------------------------------------------------------------------

    async def _join(self, kv_address: str) -> None:
        self.control.connect(REGISTRAR, self.boot.join)
        vocab, max_tokens, fingerprint = self.facts()
        me = Peer(self.name, self.boot.role, self.boot.datacenter, self.control.address, kv_address)
        reply_to = self.control.ipc_address or self.control.address
        await self.control.send(REGISTRAR, Join(me, reply_to, vocab, max_tokens, fingerprint, now_s()))

    def _on_book(self, sender: str, book: Book) -> None:
        self.spawn(self._learn(book))

    async def _learn(self, book: Book) -> None:
        for peer in book.peers:
            if self.peers.get(peer.name) == peer:
                continue
            self.peers[peer.name] = peer
            self.down.discard(peer.name)
            self.control.connect(peer.name, peer.control)
            await self.connect(peer)
        await self.control.send(REGISTRAR, Ready(self.name))

    async def _expect_book(self) -> None:
        limit_s = self.config.cluster.start_timeout_s
        await asyncio.sleep(limit_s)
        if not self.peers:
            reason = f"--join {self.boot.join}: no cluster took {self.name} in within {limit_s:g} s; is it up there?"
            self._on_refused("", Refused(ClusterError.code, reason))

    def _on_shutdown(self, sender: str, message: Shutdown) -> None:
        self._stopping.set()

    def _on_refused(self, sender: str, message: Refused) -> None:
        self._refusal = error_of(message.code, message.reason)
        self._stopping.set()

    async def _receive(self) -> None:
        while True:
            sender, message = await self.control.recv()
            handler = self.handlers.get(type(message))
            if handler is None:
                log.warning("%s from %s is not for a %s", type(message).__name__, sender, self.boot.role)
                continue
            try:
                handler(sender, message)
            except Exception as error:  # one bad message must not end the process
                log.error("%s from %s failed: %s", type(message).__name__, sender, error, exc_info=error)

    async def _beat(self) -> None:
        while True:
            beat = self.load()
            for name in self._listeners():
                self.send(name, beat)
            await asyncio.sleep(self.config.cluster.heartbeat_s)
            self.tick()

    def _listeners(self) -> list[str]:
        return [REGISTRAR, *(peer.name for peer in self.peers.values() if peer.role == "gateway")]

    def tick(self) -> None:
        """Called at every heartbeat, for things that lapse."""
