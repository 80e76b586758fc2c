"""One relayed connection: two sockets, and a flow of bytes through the shaped link in each direction.

Invariant: bytes, end of stream and resets arrive in order and only after the link has carried them; when a
direction cannot go on, its source is not read, so TCP pushes back to the sender.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from typing import TYPE_CHECKING

from pdd.net.wan.fair import ABORT, EOF, OPEN, FairLink, Flow, Item
from pdd.net.wan.loop import READ, WRITE, Loop

if TYPE_CHECKING:
    from collections.abc import Callable

READ_BYTES = 65536
# Beyond this much waiting for a slow reader, its flow takes no more turns on the link.
HOLD_BYTES = 262144
RESET = struct.pack("ii", 1, 0)


class Pipe(Flow):
    """A flow with its two ends: read from `source`, written to `sink` when the link delivers."""

    def __init__(self, tunnel: Tunnel, link: FairLink) -> None:
        super().__init__()
        self.tunnel = tunnel
        self.link = link
        self.out: deque[memoryview] = deque()
        self.out_bytes = 0
        self.reading = False
        self.ended = False
        self.closing = False
        self.done = False


class Tunnel:
    """Near end accepted in the source datacenter, far end connected in the target one.

    A connection costs what TCP's handshake costs: the far end is joined 1.5 RTT after the near end was
    accepted (when the handshake's third segment arrives), and its first bytes cannot be there earlier.
    """

    def __init__(
        self, near: socket.socket, target: tuple[str, int], loop: Loop, on_close: Callable[[Tunnel], None]
    ) -> None:
        self._near, self._far = near, socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._target = target
        self._loop = loop
        self._on_close = on_close
        self._joined = self._connected = self.closed = False

    def start(self, forward: FairLink, backward: FairLink, buffer_bytes: int, now_s: float) -> None:
        """Begin the handshake."""
        self._forward, self._backward = Pipe(self, forward), Pipe(self, backward)
        for sock in (self._near, self._far):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self._far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        forward.send_mark(self._forward, OPEN, now_s, extra_s=2 * forward.shape.delay_s)

    def open_near(self) -> None:
        """One RTT is over: the near end may speak."""
        if not self.closed:
            self._forward.reading = True
            self.refresh()

    def deliver(self, pipe: Pipe, item: Item, now_s: float) -> None:
        """Take what the link carried to the end of `pipe`."""
        if self.closed:
            return
        if item == ABORT:
            return self.close(reset=True)
        if item == OPEN:
            return self._join(now_s)
        if item == EOF:
            pipe.closing = True
        elif isinstance(item, memoryview):
            pipe.out.append(item)
            pipe.out_bytes += len(item)
        self._flush(pipe, now_s)

    def _join(self, now_s: float) -> None:
        self._joined = True
        try:
            self._far.connect(self._target)
        except BlockingIOError:
            pass
        except OSError:
            return self._fail(self._backward, now_s)
        self.refresh()

    def on_near(self, events: int, now_s: float) -> None:
        """The near socket is ready."""
        if self.closed:
            return
        self._on_ready(self._forward, self._backward, events, now_s)

    def on_far(self, events: int, now_s: float) -> None:
        """The far socket is ready, or its connect has ended."""
        if self.closed:
            return
        if not self._connected:
            if self._far.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._joined = False
                return self._fail(self._backward, now_s)
            self._connected = self._backward.reading = True
        self._on_ready(self._backward, self._forward, events, now_s)

    def _on_ready(self, source: Pipe, sink: Pipe, events: int, now_s: float) -> None:
        if events & READ and source.reading and not source.ended:
            self._read(source, now_s)
        if events & WRITE and not self.closed:
            self._flush(sink, now_s)
        self.refresh()

    def _read(self, pipe: Pipe, now_s: float) -> None:
        room = min(READ_BYTES, pipe.link.room_bytes(pipe))
        if room <= 0:
            return
        try:
            data = self._source(pipe).recv(room)
        except BlockingIOError:
            return
        except OSError:
            return self._fail(pipe, now_s)
        pipe.ended = not data
        pipe.link.push(pipe, memoryview(data) if data else EOF, now_s)

    def _flush(self, pipe: Pipe, now_s: float) -> None:
        if pipe is self._forward and not self._connected:
            return
        sink = self._far if pipe is self._forward else self._near
        try:
            while pipe.out:
                sent = sink.send(pipe.out[0])
                pipe.out_bytes -= sent
                if sent < len(pipe.out[0]):
                    pipe.out[0] = pipe.out[0][sent:]
                else:
                    pipe.out.popleft()
            if pipe.closing and not pipe.done:
                pipe.done = True
                sink.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            return self._fail(self._backward if pipe is self._forward else self._forward, now_s)
        pipe.held = pipe.out_bytes > HOLD_BYTES
        pipe.link.ready(pipe, now_s)
        self.refresh()

    def _source(self, pipe: Pipe) -> socket.socket:
        return self._near if pipe is self._forward else self._far

    def _fail(self, pipe: Pipe, now_s: float) -> None:
        """The source of `pipe` is gone without a farewell: the other end learns it half an RTT later."""
        if not pipe.ended or not pipe.done:
            pipe.ended = True
            other = self._backward if pipe is self._forward else self._forward
            other.reading = False
            other.out.clear()
            other.out_bytes = 0
            pipe.link.send_mark(pipe, ABORT, now_s)
        self.refresh()

    def refresh(self) -> None:
        """Tell the loop what each socket waits for; close when both directions are done."""
        if self.closed:
            return
        if self._forward.done and self._backward.done:
            return self.close()
        self._watch(self._near, self._forward, self._backward, self._loop_near)
        if self._joined:
            self._watch(self._far, self._backward, self._forward, self._loop_far)

    def _watch(self, sock: socket.socket, source: Pipe, sink: Pipe, handler: Callable[[int], None]) -> None:
        wants_read = source.reading and not source.ended and source.link.room_bytes(source) > 0
        connecting = sock is self._far and not self._connected
        events = (READ if wants_read else 0) | (WRITE if sink.out or connecting else 0)
        self._loop.watch(sock.fileno(), events, handler)

    def bind(self, near: Callable[[int], None], far: Callable[[int], None]) -> None:
        """Give the handlers that the loop calls."""
        self._loop_near, self._loop_far = near, far

    def close(self, reset: bool = False) -> None:
        """Close both sockets; with `reset` the peers see a reset, not an end of stream."""
        if self.closed:
            return
        self.closed = True
        for pipe in (self._forward, self._backward):
            pipe.items.clear()
            pipe.pending_bytes = 0
        for sock in (self._near, self._far):
            self._loop.watch(sock.fileno(), 0, self._loop_near)
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            sock.close()
        self._on_close(self)
