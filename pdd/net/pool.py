"""The sending end of the KV stream: a bounded pool of warm connections behind a FIFO queue (paper, Table 2).

Invariant: every `send` returns within `timeout_s` of its call, with what became of it, and never raises for a
lost peer. A low-priority stripe starts only when no normal one waits.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from pdd.config import KvStreamConfig
from pdd.errors import ConfigError, PddError, SecretError, TransferError, WireError
from pdd.lifecycle import now_s
from pdd.net.flight import Flight, Stripe
from pdd.net.lane import Lane
from pdd.net.segment import Segment
from pdd.net.wire import check_congestion
from pdd.request import Transfer

TRIES = 2
BACKOFF_S = 0.05
BACKOFF_MAX_S = 1.0

_log = logging.getLogger("pdd.net")


@dataclass(frozen=True)
class PoolStats:
    """connected, in_use: connections. queued, queued_low: waiting stripes. The rest: totals."""

    connected: int
    in_use: int
    queued: int
    queued_low: int
    sent: int
    failed: int
    sent_bytes: int
    reconnects: int


class KvPool:
    """Connections from `name` to the KV server of `peer` at `address` ("host:port").

    Raises:
        ConfigError: no such address, or a congestion control that the kernel lacks.
    """

    def __init__(
        self, name: str, peer: str, address: str, secret: bytes, config: KvStreamConfig, path: str = "lan"
    ) -> None:
        check_congestion(config.congestion_control)
        host, port = _split(peer, address)
        self.name, self.peer, self.path = name, peer, path
        self._config = config
        self._lanes = [Lane(name, host, port, secret, config) for _ in range(config.connections)]
        self._free: list[Lane] = []
        self._queue: deque[Stripe] = deque()
        self._queue_low: deque[Stripe] = deque()
        self._flights: set[Flight] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._epoch = secrets.randbits(31) << 32
        self._number = 0
        self._in_use = 0
        self._sent, self._failed, self._sent_bytes, self._reconnects = 0, 0, 0, 0
        self._closed = False

    async def start(self) -> None:
        """Open and warm all connections; a peer that is not up yet is tried until `timeout_s`.

        Raises:
            SecretError: the peer holds another secret.
            TransferError: not all connections stood within `timeout_s`.
        """
        opening: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(self._config.timeout_s):
                # One goes ahead, so that a wrong secret is one refusal and not one for each connection.
                await self._open(self._lanes[0], give_up=True)
                opening += [asyncio.create_task(self._open(lane, give_up=True)) for lane in self._lanes[1:]]
                await asyncio.gather(*opening)
        except TimeoutError:
            await self._abandon(opening)
            raise TransferError(
                f"peer: {self.peer} was not reached within {self._config.timeout_s:g} s; check its address"
            ) from None
        except BaseException:
            await self._abandon(opening)
            raise

    async def _abandon(self, opening: list[asyncio.Task[None]]) -> None:
        for task in opening:
            task.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        await self.close()

    async def send(self, segment: Segment, low_priority: bool = False) -> Transfer:
        """Send a segment; wait until the peer has it or it failed. Cancelling the call cancels it too."""
        self._number += 1
        flight = Flight(segment, self._epoch + self._number, low_priority, self._config.timeout_s)
        if self._closed:
            flight.end("the pool is closed")
        self._flights.add(flight)
        (self._queue_low if low_priority else self._queue).extend(
            flight.split(self._config.stripes, self._config.frame_bytes)
        )
        self._pump()
        try:
            # Not `await flight.done`: a cancelled call would cancel the future that the lanes read.
            await asyncio.wait([flight.done], timeout=self._config.timeout_s)
            flight.end(f"no acknowledgement from {self.peer} within {self._config.timeout_s:g} s")
        finally:
            self._flights.discard(flight)
            flight.end("cancelled")
        return self._record(flight)

    def _record(self, flight: Flight) -> Transfer:
        segment, ended_s = flight.segment, now_s()
        ok = not flight.reason
        self._sent += ok
        self._failed += not ok
        self._sent_bytes += segment.nbytes if ok else 0
        return Transfer(
            segment.request_id, self.name, self.peer, self.path, segment.start, segment.end, segment.nbytes,
            flight.queued_s, flight.started_s or ended_s, ended_s, ok, flight.reason,
        )  # fmt: skip

    def cancel(self, request_id: str) -> None:
        """End the request's transfers: those that wait at once, those in flight after the current frame."""
        for flight in [item for item in self._flights if item.segment.request_id == request_id]:
            flight.end("cancelled")
        self._queue = deque(stripe for stripe in self._queue if not stripe.flight.ended)
        self._queue_low = deque(stripe for stripe in self._queue_low if not stripe.flight.ended)

    def lower(self, request_id: str) -> None:
        """Let what still waits of the request go on at low priority (singular traffic in the background)."""
        moved = [stripe for stripe in self._queue if stripe.flight.segment.request_id == request_id]
        self._queue = deque(stripe for stripe in self._queue if stripe not in moved)
        self._queue_low.extend(moved)

    @property
    def stats(self) -> PoolStats:
        """How the pool is used now and was used so far."""
        return PoolStats(
            sum(lane.connected for lane in self._lanes), self._in_use, len(self._queue), len(self._queue_low),
            self._sent, self._failed, self._sent_bytes, self._reconnects,
        )  # fmt: skip

    async def close(self) -> None:
        """Fail what is under way and close every connection."""
        self._closed = True
        for flight in list(self._flights):
            flight.end("the pool is closed")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for lane in self._lanes:
            lane.close()
        self._free.clear()

    def _pump(self) -> None:
        while self._free and not self._closed:
            # The lane used last is the warmest: TCP shrinks the window of an idle connection.
            if self._free[-1].stale:
                # When one connection breaks, often all do; a stripe's tries are not to be spent on those.
                self._idle_broke(self._free[-1])
                continue
            stripe = self._next()
            if stripe is None:
                return
            lane = self._free.pop()
            lane.unwatch()
            self._spawn(self._carry(lane, stripe))

    def _next(self) -> Stripe | None:
        for queue in (self._queue, self._queue_low):
            while queue:
                stripe = queue.popleft()
                if not stripe.flight.ended:
                    return stripe
        return None

    async def _carry(self, lane: Lane, stripe: Stripe) -> None:
        flight = stripe.flight
        flight.taken()
        stripe.tries += 1
        self._in_use += 1
        try:
            async with asyncio.timeout_at(flight.deadline):
                refusal = await lane.carry(stripe)
        except TransferError:
            self._release(lane)
        except (OSError, WireError) as error:
            self._break(lane, str(error) or "no answer in time")
            self._again(stripe, str(error))
        else:
            if refusal:
                flight.end(refusal)
            else:
                flight.arrived()
            self._release(lane)
        finally:
            self._in_use -= 1
            self._pump()

    def _again(self, stripe: Stripe, reason: str) -> None:
        flight = stripe.flight
        if asyncio.get_running_loop().time() >= flight.deadline:
            flight.end(f"no acknowledgement from {self.peer} within {self._config.timeout_s:g} s")
        elif stripe.tries >= TRIES:
            flight.end(f"the connection to {self.peer} broke {stripe.tries} times ({reason})")
        elif not flight.ended:
            (self._queue_low if flight.low else self._queue).appendleft(stripe)

    def _release(self, lane: Lane) -> None:
        self._free.append(lane)
        lane.watch(partial(self._idle_broke, lane))

    def _idle_broke(self, lane: Lane) -> None:
        lane.unwatch()
        self._free.remove(lane)
        self._break(lane, "closed by the peer while idle")

    def _break(self, lane: Lane, reason: str) -> None:
        lane.close()
        _log.warning(
            "KV pool of %s: a connection to %s broke: %s; reconnecting", self.name, self.peer, reason
        )
        self._reconnects += 1
        self._spawn(self._open(lane))

    async def _open(self, lane: Lane, give_up: bool = False) -> None:
        pause_s = BACKOFF_S
        while True:
            try:
                await lane.open()
                break
            except (OSError, PddError) as error:
                if give_up and isinstance(error, SecretError):
                    raise
                _log.info("KV pool of %s: %s not reached: %s", self.name, self.peer, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACKOFF_MAX_S)
        self._release(lane)
        self._pump()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _split(peer: str, address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"KV address of {peer}: {address!r} is none; give host:port")
    return host, int(port)
