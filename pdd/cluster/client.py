"""The client's end of a cluster: an asyncio loop in a thread, the registrar, and the handles of open requests.

Invariant: all sockets and books live on that loop; other threads only post to it and wait with deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, TypeVar

from pdd.cluster.handle import Handle
from pdd.cluster.registrar import Registrar
from pdd.errors import CancelledError, ClusterError, RoleDiedError, WireError, error_of
from pdd.net.control import ControlSocket
from pdd.net.messages import (
    Answer,
    Cancel,
    Failed,
    Heartbeat,
    Join,
    Message,
    PeerDown,
    Ready,
    Refused,
    Reset,
    ResetDone,
    Shutdown,
    Submit,
    Tokens,
)
from pdd.request import Completion

log = logging.getLogger("pdd.cluster")

T = TypeVar("T")


class Client:
    """Talks to the roles. `finish` turns an answer's ids into text (it needs the tokenizer)."""

    name = "client"

    def __init__(
        self,
        secret: bytes,
        ipc_dir: Path,
        registrar: Registrar,
        finish: Callable[[Handle, Completion], Completion],
    ) -> None:
        self.registrar = registrar
        self._finish = finish
        self._handles: dict[str, Handle] = {}
        self._resets: set[str] = set()
        self._changed = threading.Condition()
        self.down: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pdd-client", daemon=True)
        self._thread.start()
        self._control = self._call(self._open(secret, ipc_dir))
        self._receiver = asyncio.run_coroutine_threadsafe(self._receive(), self._loop)

    async def _open(self, secret: bytes, ipc_dir: Path) -> ControlSocket:
        return ControlSocket(self.name, secret, "127.0.0.1", messages=Message, ipc_dir=ipc_dir)

    @property
    def address(self) -> str:
        """Where roles of this host join."""
        assert self._control.ipc_address is not None
        return self._control.ipc_address

    def _call(self, work: Coroutine[Any, Any, T], timeout_s: float = 30.0) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            future.cancel()
            raise ClusterError(f"the cluster's loop did not answer within {timeout_s:g} s") from None

    # -- receiving, on the loop ------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            sender, message = await self._control.recv()
            try:
                await self._handle(sender, message)
            except Exception as error:  # one bad message must not end the client
                log.error("%s from %s failed: %s", type(message).__name__, sender, error, exc_info=error)

    async def _handle(self, sender: str, message: Any) -> None:
        if isinstance(message, Tokens):
            if (handle := self._handles.get(message.request_id)) is not None:
                handle.add(message.tokens)
        elif isinstance(message, Answer):
            if (handle := self._handles.pop(message.completion.request_id, None)) is not None:
                handle.end(self._finish(handle, message.completion))
        elif isinstance(message, Failed):
            self._end(message.request_id, message.code, message.reason)
        elif isinstance(message, Heartbeat):
            self.registrar.beat(sender, message)
        elif isinstance(message, Join):
            await self._on_join(message)
        else:
            with self._changed:
                if isinstance(message, Ready):
                    self.registrar.ready.add(sender)
                elif isinstance(message, ResetDone):
                    self._resets.add(sender)
                self._changed.notify_all()

    def _end(self, request_id: str, code: str, reason: str) -> None:
        if (handle := self._handles.pop(request_id, None)) is not None:
            handle.end(error_of(code, reason))

    async def _on_join(self, join: Join) -> None:
        name = join.peer.name
        self._control.connect(name, join.reply_to)
        reason = self.registrar.admit(join)
        if reason:
            log.warning("refused: %s", reason)
            await self._control.send(name, Refused(ClusterError.code, reason))
            return
        self.down.discard(name)
        if not self.registrar.complete:
            return
        # Addresses may open forwarders in the WAN's process: off the loop.
        for member in list(self.registrar.joined):
            book = await self._loop.run_in_executor(None, self.registrar.book_for, member)
            await self._control.send(member, book)

    # -- for the cluster -------------------------------------------------------------------------------------------

    def wait_for(self, check: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until `check()` is true after a message; False if it never was within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(check, timeout_s)

    def submit(self, gateway: str, handle: Handle, timeout_s: float, relay: bool) -> None:
        """Send a request to a gateway."""
        request = handle.request
        self._handles[request.id] = handle
        if gateway in self.down:
            self._end(request.id, RoleDiedError.code, f"{gateway} is down")
            return
        self.send(gateway, Submit(request.id, request.prompt, request.sampling, timeout_s, relay))

    def cancel(self, gateways: list[str], request_id: str) -> None:
        """Give a request up."""
        for gateway in gateways:
            self.send(gateway, Cancel(request_id, "the client gave it up"))
        self._end(request_id, CancelledError.code, f"{request_id}: cancelled by the client")

    def send(self, name: str, message: Any) -> None:
        """Send from any thread, in order."""
        self._loop.call_soon_threadsafe(self._send_now, name, message)

    def _send_now(self, name: str, message: Any) -> None:
        self._loop.create_task(self._deliver(name, message))

    async def _deliver(self, name: str, message: Any) -> None:
        try:
            await self._control.send(name, message)
        except WireError as error:
            log.warning("%s to %s was not sent: %s", type(message).__name__, name, error)

    def reset(self, names: list[str], timeout_s: float) -> None:
        """Empty the caches of `names`."""
        self._resets.clear()
        for name in names:
            self.send(name, Reset())
        if not self.wait_for(lambda: self._resets >= set(names), timeout_s):
            missing = ", ".join(sorted(set(names) - self._resets))
            raise ClusterError(f"caches of {missing} were not emptied within {timeout_s:g} s")

    def peer_down(self, name: str, reason: str) -> None:
        """Tell everyone that a process has ended; requests of a dead gateway end here."""
        self.down.add(name)
        for other in self.registrar.joined:
            if other not in self.down:
                self.send(other, PeerDown(name, reason))
        if name.startswith("gw-"):
            for request_id in list(self._handles):
                self._end(request_id, RoleDiedError.code, f"{name} died: {reason}")

    def shutdown(self) -> None:
        """Ask every role to end."""
        for name in self.registrar.joined:
            if name not in self.down:
                self.send(name, Shutdown())

    def close(self) -> None:
        """End the loop; open requests end with an error."""
        for request_id in list(self._handles):
            self._end(request_id, ClusterError.code, f"{request_id}: the cluster was closed")
        self._receiver.cancel()
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    async def _shut(self) -> None:
        self._control.close()
