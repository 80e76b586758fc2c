"""Segments that are still arriving, stripe by stripe, and the memory of those that were delivered.

Invariant: each transfer is delivered once or fails once; a partial one never outlives its sender's last
connection, nor `timeout_s` without a connection that brings more of it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable

from pdd.errors import WireError
from pdd.lifecycle import now_s
from pdd.net.frames import Begin
from pdd.net.segment import Received

REMEMBERED = 8192

Key = tuple[str, int]


class Assembly:
    """One segment in the making: its whole buffer and the stripes that are there."""

    def __init__(self, peer: str, begin: Begin) -> None:
        self.key: Key = (peer, begin.transfer)
        self.begin = begin
        self.buffer = bytearray(begin.total_bytes)
        self.began_s = now_s()
        self.arrived: set[int] = set()
        self.active = 0
        self.expiry: asyncio.TimerHandle | None = None
        self.failed = ""

    @property
    def whole(self) -> bool:
        """All stripes are there."""
        return len(self.arrived) == self.begin.stripes

    def target(self, begin: Begin) -> memoryview:
        """Where this stripe's bytes belong."""
        return memoryview(self.buffer)[begin.offset : begin.offset + begin.stripe_bytes]

    def received(self) -> Received:
        """The finished segment."""
        head = self.begin
        return Received(
            self.key[0],
            head.request_id,
            head.start,
            head.end,
            head.last,
            head.meta,
            self.buffer,
            self.began_s,
            now_s(),
        )


class Desk:
    """All assemblies of a server. `timeout_s`: how long a partial one waits for a retry."""

    def __init__(self, timeout_s: float, on_failed: Callable[[str, str], None]) -> None:
        self._timeout_s = timeout_s
        self._on_failed = on_failed
        self._partial: dict[Key, Assembly] = {}
        self._delivered: OrderedDict[Key, str] = OrderedDict()
        self._connections: Counter[str] = Counter()

    @property
    def partial_bytes(self) -> int:
        """Bytes set aside for segments that are not whole yet."""
        return sum(len(assembly.buffer) for assembly in self._partial.values())

    def connected(self, peer: str) -> None:
        """One more connection of `peer`."""
        self._connections[peer] += 1

    def disconnected(self, peer: str) -> None:
        """One less; with the last one go all partial segments of the peer."""
        self._connections[peer] -= 1
        if self._connections[peer] > 0:
            return
        del self._connections[peer]
        for assembly in [item for item in self._partial.values() if item.key[0] == peer]:
            self.fail(assembly, f"the last connection of {peer} is gone")

    def outcome(self, peer: str, begin: Begin) -> str | None:
        """None if this transfer is new or partial; else how it was taken: "" or the reason of its refusal."""
        return self._delivered.get((peer, begin.transfer))

    def open(self, peer: str, begin: Begin) -> Assembly:
        """The assembly that a stripe belongs to, held open until `leave`.

        Raises:
            WireError: a stripe that contradicts the ones before it.
        """
        assembly = self._partial.get((peer, begin.transfer))
        if assembly is None:
            assembly = Assembly(peer, begin)
            self._partial[assembly.key] = assembly
        first = assembly.begin
        same = (first.request_id, first.start, first.end, first.total_bytes, first.stripes)
        if same != (begin.request_id, begin.start, begin.end, begin.total_bytes, begin.stripes):
            raise WireError(f"transfer: {begin.transfer} has two meanings; give each segment its own number")
        assembly.active += 1
        if assembly.expiry is not None:
            assembly.expiry.cancel()
            assembly.expiry = None
        return assembly

    def leave(self, assembly: Assembly) -> None:
        """A connection no longer brings bytes of this assembly."""
        assembly.active -= 1
        if assembly.active == 0 and assembly.key in self._partial:
            reason = f"no more of it came for {self._timeout_s:g} s"
            assembly.expiry = asyncio.get_running_loop().call_later(
                self._timeout_s, self.fail, assembly, reason
            )

    def deliver(self, assembly: Assembly, outcome: str) -> None:
        """The segment was handed over; remember how, so that a retry of it is only acknowledged."""
        self._forget(assembly)
        self._delivered[assembly.key] = outcome
        if len(self._delivered) > REMEMBERED:
            self._delivered.popitem(last=False)

    def drop(self, peer: str, transfer: int, reason: str) -> None:
        """The sender gave this transfer up."""
        assembly = self._partial.get((peer, transfer))
        if assembly is not None:
            self.fail(assembly, reason)

    def fail(self, assembly: Assembly, reason: str) -> None:
        """Throw the partial segment away and tell whoever waits for it."""
        if self._forget(assembly):
            assembly.failed = reason
            self._on_failed(assembly.begin.request_id, reason)

    def close(self) -> None:
        """Throw everything away, without a word."""
        for assembly in list(self._partial.values()):
            self._forget(assembly)

    def _forget(self, assembly: Assembly) -> bool:
        if assembly.expiry is not None:
            assembly.expiry.cancel()
        return self._partial.pop(assembly.key, None) is not None
