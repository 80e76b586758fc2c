"""What RLD and MD share: a model, a batch of slots, and a door through which KV comes in.

Invariant: slots, sequences and caches are touched on the engine's thread only; handlers post jobs to it. Every slot
ends by `drop`, which frees its KV, whatever happened to the request.
"""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import Any

from pdd import lifecycle
from pdd.errors import PddError, TransferError
from pdd.lifecycle import now_s
from pdd.model.engine import Engine
from pdd.model.kv import KvSegment
from pdd.model.load import load
from pdd.model.sampling import StopRule, sample
from pdd.net.messages import Cancel, Failed, FirstToken, Heartbeat, KvLost, Peer
from pdd.net.stream import KvServer, Received
from pdd.request import SamplingParams
from pdd.roles.arrivals import Arrivals
from pdd.roles.base import Role
from pdd.roles.batch import Batch
from pdd.roles.boot import Boot
from pdd.roles.slot import Slot
from pdd.roles.worker import Worker

log = logging.getLogger("pdd.roles")

EARLY_LIMIT_S = 30.0
"""KV that nobody asked for is freed after this."""

DROPPED_LIMIT = 1024
"""Requests remembered as over, so that their late KV is not kept."""


class DecodeRole(Role):
    """Base of RLD and MD."""

    def __init__(self, boot: Boot) -> None:
        super().__init__(boot)
        self.slots: dict[str, Slot] = {}
        self._arrivals: dict[str, Arrivals] = {}
        self._gateways: dict[str, str] = {}
        self._born_s: dict[str, float] = {}
        self._firsts: dict[str, int] = {}
        self._dropped: deque[str] = deque(maxlen=DROPPED_LIMIT)
        self.handlers |= {
            Cancel: lambda _, message: self.worker.post(partial(self.drop, message.request_id)),
            FirstToken: lambda _, message: self.worker.post(partial(self._on_first, message)),
            KvLost: lambda _, message: self.worker.post(
                partial(self.on_kv_lost, message.request_id, message.reason)
            ),
        }

    # -- role hooks ------------------------------------------------------------------------------------------------

    async def open(self) -> str:
        self.loaded = await self.loop.run_in_executor(None, load, self.config.model)
        self.engine = Engine(self.loaded, self.config.engine)
        size = self.config.engine
        self.batch = Batch(
            self.engine, size.max_batch, size.extend_chunk_tokens, self.on_stepped, self.on_step_failed
        )
        self.worker = Worker(self.batch.step)
        self.worker.start()
        self.server = KvServer(
            self.name, self.boot.secret, self.boot.host, self.config.kv_stream,
            on_segment=lambda received: self.worker.post(partial(self._on_segment, received)),
            on_failed=lambda request_id, reason: log.warning("KV of %s: %s", request_id, reason),
        )  # fmt: skip
        await self.server.start()
        return self.server.address

    async def close(self) -> None:
        if hasattr(self, "server"):
            await self.server.close()
        if hasattr(self, "worker"):
            self.worker.stop()

    def load(self) -> Heartbeat:
        return Heartbeat(
            self.batch.active, self.batch.waiting, self.config.engine.max_batch, self.cached_tokens()
        )

    def facts(self) -> tuple[int, int, str]:
        return self.loaded.vocab, self.loaded.max_tokens, self.loaded.fingerprint

    def cached_tokens(self) -> int:
        """Tokens in this role's prefix cache."""
        return 0

    async def connect(self, peer: Peer) -> None:
        """Decode roles open no KV connections; P does."""

    def tick(self) -> None:
        self.worker.post(self._lapse)

    # -- slots -----------------------------------------------------------------------------------------------------

    def slot_parts(
        self, request_id: str, prompt: list[int], sampling: SamplingParams, output: tuple[int, ...], seq: Any
    ) -> tuple[Any, ...]:
        """The arguments every kind of slot begins with."""
        stop = StopRule(sampling, self.loaded.tokenizer)
        return request_id, prompt, sampling, list(output), seq, stop, sample

    def adopt_slot(self, slot: Slot, gateway: str) -> None:
        """Start serving a slot; its KV may be here, on the way, or late."""
        request_id = slot.request_id
        self.slots[request_id] = slot
        self._gateways[request_id] = gateway
        self._born_s.setdefault(request_id, now_s())
        if (first := self._firsts.pop(request_id, None)) is not None:
            slot.add_first(first)
        self._load_arrived(slot)

    def gateway_of(self, request_id: str) -> str:
        """The gateway that answers for the request."""
        return self._gateways[request_id]

    def drop(self, request_id: str) -> None:
        """Forget the request and free its KV. Safe to call twice."""
        slot = self.slots.pop(request_id, None)
        self._dropped.append(request_id)
        for table in (self._arrivals, self._gateways, self._born_s, self._firsts):
            table.pop(request_id, None)
        self.recorder.take(request_id)
        if slot is not None:
            slot.ended = True
            self.batch.discard(slot)
            self.engine.release(slot.seq)

    def fail(self, request_id: str, error: PddError) -> None:
        """Tell the gateway that this role cannot do its part."""
        gateway = self._gateways.get(request_id)
        if gateway is not None:
            self.send(gateway, Failed(request_id, error.code, f"{self.name}: {error}"))
        self.drop(request_id)

    def _on_first(self, message: FirstToken) -> None:
        slot = self.slots.get(message.request_id)
        if slot is None and message.request_id not in self._dropped:
            self._firsts[message.request_id] = message.token.id
            self._born_s.setdefault(message.request_id, now_s())
        elif slot is not None:
            slot.add_first(message.token.id)
            self.settle(slot)

    # -- KV comes in -----------------------------------------------------------------------------------------------

    def _on_segment(self, received: Received) -> None:
        request_id = received.request_id
        if request_id in self._dropped:
            return
        self._born_s.setdefault(request_id, now_s())
        self._arrivals.setdefault(request_id, Arrivals()).add(received)
        if (slot := self.slots.get(request_id)) is not None:
            self._load_arrived(slot)

    def _load_arrived(self, slot: Slot) -> None:
        arrivals = self._arrivals.setdefault(slot.request_id, Arrivals())
        if slot.kv_whole:
            return
        while (segment := arrivals.next_at(slot.seq.kv_tokens)) is not None:
            try:
                self.engine.load(slot.seq, KvSegment.from_bytes(segment.meta, segment.payload))
            except PddError as error:
                self.on_kv_lost(slot.request_id, str(error))
                return
        if slot.seq.kv_tokens >= slot.kv_target:
            self._whole(slot)

    def _whole(self, slot: Slot) -> None:
        self._arrivals[slot.request_id].close()
        slot.kv_whole = True
        self.recorder.note(slot.request_id, lifecycle.KV_READY, tokens=slot.seq.kv_tokens)
        self.batch.add(slot)
        self.on_kv_whole(slot)

    def on_kv_lost(self, request_id: str, reason: str) -> None:
        """The KV will not come: recompute it from ids, or give up (`handoff.on_lost_kv`)."""
        slot = self.slots.get(request_id)
        if slot is None or slot.kv_whole:
            return
        self.recorder.note(request_id, lifecycle.KV_LOST, reason=reason)
        if self.config.handoff.on_lost_kv == "fail":
            self.fail(request_id, TransferError(f"KV of {request_id} did not come: {reason}"))
        else:
            self._whole(slot)

    def _lapse(self) -> None:
        now = now_s()
        for request_id, slot in list(self.slots.items()):
            waited_s = now - self._born_s[request_id]
            if not slot.kv_whole and not slot.ended and waited_s > self.config.handoff.kv_timeout_s:
                self.on_kv_lost(request_id, f"not whole after {waited_s:.1f} s")
        for request_id, born_s in list(self._born_s.items()):
            if request_id not in self.slots and now - born_s > EARLY_LIMIT_S:
                self.drop(request_id)

    # -- for subclasses --------------------------------------------------------------------------------------------

    def on_kv_whole(self, slot: Slot) -> None:
        """The prompt's KV is here (or will be recomputed in place)."""

    def on_stepped(self, slot: Slot, fed: int, started_s: float, ended_s: float) -> None:
        """The slot took part in a step."""
        self.settle(slot)

    def on_step_failed(self, slot: Slot, error: Exception) -> None:
        """The slot's step raised."""
        log.error("step of %s failed: %s", slot.request_id, error, exc_info=error)
        self.fail(slot.request_id, PddError(f"step failed: {error}"))

    def settle(self, slot: Slot) -> None:
        """Look whether the slot is done, and say so."""
        raise NotImplementedError
