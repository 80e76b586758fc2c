"""P (Prefill): matches its prefix cache, prefills the rest in chunks, ships KV to RLD and MD (dual path).

Invariant: every target gets each KV position from its `start` to the prompt's last but one exactly once. The last id
is left to the decode side, whose step over it draws token 0 (`first_token=decode`, as in the paper).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pdd import lifecycle
from pdd.errors import PddError, TransferError
from pdd.lifecycle import now_s
from pdd.model.engine import Engine
from pdd.model.load import load
from pdd.model.prefix_cache import Match as CacheMatch
from pdd.model.prefix_cache import PrefixCache
from pdd.model.sampling import sample
from pdd.net.messages import (
    Cancel,
    DropTransfer,
    Failed,
    FirstToken,
    Heartbeat,
    KvLost,
    Match,
    Matched,
    Peer,
    PrefillDone,
    PrefillJob,
    Reset,
    ResetDone,
    Target,
)
from pdd.net.stream import KvPool, Segment
from pdd.request import Token, Transfer
from pdd.roles.base import Role
from pdd.roles.boot import Boot
from pdd.roles.worker import Worker

log = logging.getLogger("pdd.roles")


@dataclass
class Prefilling:
    """A prompt on its way through P. `shipped` is the next position to export."""

    request_id: str
    prompt: list[int]
    match: CacheMatch
    until_s: float
    gateway: str = ""
    job: PrefillJob | None = None
    seq: Any = None
    shipped: int = 0
    started: bool = False
    background: bool = False
    cancelled: bool = False
    sending: list[asyncio.Future[Transfer]] = field(default_factory=list)


class Prefill(Role):
    """The P process."""

    def __init__(self, boot: Boot) -> None:
        super().__init__(boot)
        self._known: dict[str, Prefilling] = {}
        self._queue: deque[Prefilling] = deque()
        self._pools: dict[str, KvPool] = {}
        # The tree is matched on the loop (a router waits) and filled on the engine's thread.
        self._cache_lock = threading.Lock()
        self.handlers |= {
            Match: self._on_match,
            PrefillJob: self._on_job,
            Cancel: lambda _, message: self._on_cancel(message.request_id),
            DropTransfer: self._on_drop,
            Reset: lambda sender, _: self.worker.post(partial(self._on_reset, sender)),
        }

    # -- role hooks ------------------------------------------------------------------------------------------------

    async def open(self) -> str:
        self.loaded = await self.loop.run_in_executor(None, load, self.config.model)
        self.engine = Engine(self.loaded, self.config.engine)
        budget = self.config.engine.prefix_cache_tokens if self.config.system.prefix_cache else 0
        self.cache = PrefixCache(self.engine, budget, self.config.engine.page_tokens)
        self.worker = Worker(self._step)
        self.worker.start()
        return ""

    async def connect(self, peer: Peer) -> None:
        if not peer.kv:
            return
        if (old := self._pools.pop(peer.name, None)) is not None:
            await old.close()
        pool = KvPool(self.name, peer.name, peer.kv, self.boot.secret, self.config.kv_stream, peer.path)
        await pool.start()
        self._pools[peer.name] = pool

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.close()
        if hasattr(self, "worker"):
            self.worker.stop()

    def load(self) -> Heartbeat:
        waiting = len(self._queue)
        return Heartbeat(min(1, waiting), max(0, waiting - 1), 1, self.cache.cached_tokens)

    def facts(self) -> tuple[int, int, str]:
        return self.loaded.vocab, self.loaded.max_tokens, self.loaded.fingerprint

    def tick(self) -> None:
        now = now_s()
        for entry in [entry for entry in self._known.values() if entry.job is None and now > entry.until_s]:
            self._forget(entry)

    # -- handlers --------------------------------------------------------------------------------------------------

    def _on_match(self, gateway: str, message: Match) -> None:
        prompt = list(message.prompt)
        with self._cache_lock:
            match = self.cache.match(prompt[:-1])
        entry = Prefilling(message.request_id, prompt, match, now_s() + message.lease_s, gateway)
        self._known[message.request_id] = entry
        self.send(gateway, Matched(message.request_id, match.tokens))

    def _on_job(self, gateway: str, job: PrefillJob) -> None:
        entry = self._known.get(job.request_id)
        if entry is None:
            reason = f"{self.name}: lease of {job.request_id} has lapsed; match again"
            self.send(gateway, Failed(job.request_id, TransferError.code, reason))
            return
        entry.job = job
        self.worker.post(partial(self._queue.append, entry))

    def _on_cancel(self, request_id: str) -> None:
        if (entry := self._known.get(request_id)) is not None:
            entry.cancelled = True
            for pool in self._pools.values():
                pool.cancel(request_id)
            if entry.job is None:
                self._forget(entry)

    def _on_drop(self, gateway: str, message: DropTransfer) -> None:
        entry = self._known.get(message.request_id)
        if entry is None:
            return
        if message.background:
            entry.background = True
            for pool in self._pools.values():
                pool.lower(message.request_id)
        else:
            self._on_cancel(message.request_id)

    def _on_reset(self, sender: str) -> None:
        with self._cache_lock:
            self.cache.clear()
        self.send(sender, ResetDone())

    # -- prefill, on the engine's thread ---------------------------------------------------------------------------

    def _step(self) -> bool:
        """One chunk of the oldest prompt."""
        if not self._queue:
            return False
        entry = self._queue[0]
        try:
            done = entry.cancelled or self._advance(entry)
        except Exception as error:
            log.error("prefill of %s failed: %s", entry.request_id, error, exc_info=error)
            self._lose(entry, PddError(f"prefill failed: {error}"))
            done = True
        if done:
            self._queue.popleft()
            self.loop.call_soon_threadsafe(self._finish, entry)
        return True

    def _advance(self, entry: Prefilling) -> bool:
        if not entry.started:
            self._begin(entry)
        end = len(entry.prompt) - 1
        done = entry.seq.kv_tokens
        if done < end:
            stop = self._chunk_end(done, end)
            self.engine.extend(entry.seq, entry.prompt[done:stop])
            done = stop
        if done == end or self.config.system.kv_streaming == "chunk":
            self._ship(entry)
        if done < end:
            return False
        self.recorder.note(entry.request_id, lifecycle.PREFILL_END)
        with self._cache_lock:
            self.cache.insert(entry.prompt[:end], entry.seq)
        self._draw_first(entry)
        return True

    def _begin(self, entry: Prefilling) -> None:
        assert entry.job is not None
        entry.started = True
        entry.seq = self.engine.new()
        self.recorder.note(entry.request_id, lifecycle.PREFILL_START, hit_tokens=entry.match.tokens)
        self.cache.load_into(entry.seq, entry.match)
        if entry.match.tokens and self.config.system.kv_streaming == "chunk":
            self._ship(entry)

    def _chunk_end(self, done: int, end: int) -> int:
        size = self.config.engine.chunk_tokens
        return min(end, (done // size + 1) * size)

    def _ship(self, entry: Prefilling) -> None:
        """Export what is new since the last call, for each target from its own start."""
        assert entry.job is not None
        start, end = entry.shipped, entry.seq.kv_tokens
        entry.shipped = end
        exported: dict[int, Segment] = {}
        for target in entry.job.targets:
            first = max(start, target.start)
            if first >= end:
                continue
            if first not in exported:
                exported[first] = self._segment(entry, first, end)
            self.loop.call_soon_threadsafe(self._send_kv, entry, target, exported[first])

    def _segment(self, entry: Prefilling, start: int, end: int) -> Segment:
        meta, payload = self.engine.export(entry.seq, start, end).to_bytes()
        last = end == len(entry.prompt) - 1
        return Segment(entry.request_id, start, end, last=last, meta=meta, payload=payload)

    def _draw_first(self, entry: Prefilling) -> None:
        job = entry.job
        assert job is not None
        if not job.first_token:
            return
        row = self.engine.extend(entry.seq, entry.prompt[-1:])
        drawn = sample(row, job.sampling, entry.prompt, [])
        token = Token(0, drawn.id, self.name, now_s(), drawn.logprob, drawn.top)
        for peer in (entry.gateway, *(target.name for target in job.targets)):
            self.send(peer, FirstToken(entry.request_id, token))

    # -- shipping, on the loop -------------------------------------------------------------------------------------

    def _send_kv(self, entry: Prefilling, target: Target, segment: Segment) -> None:
        if not entry.cancelled:
            entry.sending.append(self.spawn(self._transfer(entry, target, segment)))

    async def _transfer(self, entry: Prefilling, target: Target, segment: Segment) -> Transfer:
        record = await self._pools[target.name].send(segment, low_priority=entry.background)
        if not record.ok and not entry.cancelled:
            self.send(target.name, KvLost(entry.request_id, record.error))
        return record

    def _lose(self, entry: Prefilling, error: PddError) -> None:
        self.send(entry.gateway, Failed(entry.request_id, error.code, f"{self.name}: {error}"))

    def _finish(self, entry: Prefilling) -> None:
        if entry.seq is not None:
            self.worker.post(partial(self.engine.release, entry.seq))
        self.spawn(self._report(entry))

    async def _report(self, entry: Prefilling) -> None:
        """Wait for the transfers (each ends within the stream's deadline), then tell the gateway."""
        transfers = await asyncio.gather(*entry.sending)
        events = tuple(self.recorder.take(entry.request_id))
        self.send(entry.gateway, PrefillDone(entry.request_id, events, tuple(transfers)))
        self._forget(entry)

    def _forget(self, entry: Prefilling) -> None:
        if self._known.pop(entry.request_id, None) is not None:
            with self._cache_lock:
                self.cache.release(entry.match)


__all__ = ["Prefill"]
