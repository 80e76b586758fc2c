"""MD (MainDecode): keeps history in its decode-side radix cache (DRC), gathers the missing KV, takes over, finishes.

Invariant: whatever MD publishes follows ids that are authoritative, and an answer that MD finishes, prompt and
output, enters the DRC.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial

from pdd import lifecycle
from pdd.errors import TransferError
from pdd.lifecycle import now_s
from pdd.model.prefix_cache import Match as CacheMatch
from pdd.model.prefix_cache import PrefixCache
from pdd.net.messages import (
    DecodeJob,
    Eager,
    Finished,
    KvReady,
    Match,
    Matched,
    RelayStopped,
    Reset,
    ResetDone,
    StopAt,
    Tokens,
)
from pdd.policy.handoff import CATCHUP, MainView, main_move
from pdd.request import Token
from pdd.roles.boot import Boot
from pdd.roles.decode import DecodeRole
from pdd.roles.main_slot import MainSlot
from pdd.roles.pace import Pace
from pdd.roles.slot import Slot


@dataclass
class Lease:
    """A matched prompt: what the DRC holds of it, leased until `until_s`."""

    prompt: list[int]
    match: CacheMatch | None
    until_s: float


class MainDecode(DecodeRole):
    """The MD process."""

    slots: dict[str, MainSlot]  # type: ignore[assignment]

    def __init__(self, boot: Boot) -> None:
        super().__init__(boot)
        self._leases: dict[str, Lease] = {}
        self._early: dict[str, list[tuple[Eager | RelayStopped, float]]] = {}
        self._paces: dict[str, Pace] = {}
        self._reported: set[str] = set()
        # The tree is matched on the loop (a router waits) and filled on the engine's thread.
        self._drc_lock = threading.Lock()
        self.handlers |= {
            Match: self._on_match,
            DecodeJob: lambda gateway, job: self.worker.post(partial(self._on_job, gateway, job)),
            Eager: lambda _, message: self.worker.post(partial(self._on_relay, message, now_s())),
            RelayStopped: lambda _, message: self.worker.post(partial(self._on_relay, message, now_s())),
            Reset: lambda sender, _: self.worker.post(partial(self._on_reset, sender)),
        }

    async def open(self) -> str:
        address = await super().open()
        engine = self.config.engine
        budget = engine.drc_tokens if self.config.system.drc else 0
        self.drc = PrefixCache(self.engine, budget, engine.page_tokens)
        return address

    def cached_tokens(self) -> int:
        return self.drc.cached_tokens

    # -- match and job ---------------------------------------------------------------------------------------------

    def _on_match(self, gateway: str, message: Match) -> None:
        prompt = list(message.prompt)
        with self._drc_lock:
            match = self.drc.match(prompt[:-1])
        self._leases[message.request_id] = Lease(prompt, match, now_s() + message.lease_s)
        self.send(gateway, Matched(message.request_id, match.tokens))

    def _on_job(self, gateway: str, job: DecodeJob) -> None:
        lease = self._leases.get(job.request_id)
        if lease is None:
            self._gateways[job.request_id] = gateway
            self.fail(job.request_id, TransferError(f"lease of {job.request_id} has lapsed; match again"))
            return
        seq = self.engine.new()
        if lease.match is not None:
            self.drc.load_into(seq, lease.match)
        parts = self.slot_parts(job.request_id, lease.prompt, job.sampling, job.output, seq)
        slot = MainSlot(
            *parts,
            name=self.name,
            relay=job.relay,
            publish=self._publish,
            rewind=self.engine.rewind if self.engine.can_rewind else None,
        )
        slot.awaits_first = job.first_token and not job.output
        self._paces[job.request_id] = Pace(self._round_trip_s(job.relay))
        self.adopt_slot(slot, gateway)
        for message, at_s in self._early.pop(job.request_id, []):
            self._on_relay(message, at_s)
        if job.recompute:
            self.on_kv_lost(job.request_id, "none was sent")

    def _round_trip_s(self, relay: str) -> float:
        """What the configuration says of the way to RLD, until this request has measured it."""
        far = relay in self.peers and self.peers[relay].path == "wan"
        return self.config.wan.rtt_ms / 1e3 if far else 1e-3

    def on_kv_lost(self, request_id: str, reason: str) -> None:
        slot = self.slots.get(request_id)
        if slot is not None and slot.finish is not None:  # RLD has answered; only the DRC would have profited
            self.drop(request_id)
        else:
            super().on_kv_lost(request_id, reason)

    # -- relay -----------------------------------------------------------------------------------------------------

    def on_kv_whole(self, slot: Slot) -> None:
        assert isinstance(slot, MainSlot)
        if slot.relay and slot.authority is None:
            self._paces[slot.request_id].asked()
            self.send(slot.relay, KvReady(slot.request_id))
            self._plan(slot)

    def _on_relay(self, message: Eager | RelayStopped, at_s: float) -> None:
        slot = self.slots.get(message.request_id)
        if slot is None:
            if message.request_id in self._leases:
                self._early.setdefault(message.request_id, []).append((message, at_s))
            return
        self._paces[message.request_id].heard(len(message.ids), at_s)
        slot.on_ids(message.start, message.ids)
        if isinstance(message, RelayStopped) and slot.authority is None:
            slot.on_relay_stopped(message.position, message.reason, message.mode)
        self.settle(slot)

    def _plan(self, slot: MainSlot) -> None:
        """The next move of a handoff: how much to extend over, and where RLD shall stop."""
        slot.part_tokens = None
        if not slot.kv_whole or slot.authority is not None:
            return
        pace = self._paces[slot.request_id]
        view = MainView(
            known_tokens=slot.known,
            filled_tokens=slot.filled,
            extends=pace.extends,
            last_outstanding=pace.last_outstanding,
            stop_named=slot.stop_named,
            relay_stopped=False,
            extend_floor_s=pace.step_s,
            tpot_s=pace.tpot_s,
            rtt_s=pace.round_trip_s,
        )
        # RLD chooses the mode; until it says One-Shot by stopping, MD acts as in Catch-Up.
        move = main_move(self.config.handoff, CATCHUP, view)
        slot.part_tokens = move.extend_tokens
        if move.stop_at is not None:
            slot.stop_named = True
            self.send(slot.relay, StopAt(slot.request_id, move.stop_at))

    # -- steps and ends --------------------------------------------------------------------------------------------

    def on_stepped(self, slot: Slot, fed: int, started_s: float, ended_s: float) -> None:
        assert isinstance(slot, MainSlot)
        if slot.request_id in self._paces:
            self._paces[slot.request_id].stepped(ended_s - started_s, slot.known - slot.filled + fed)
        if fed > 1:
            self.recorder.note(slot.request_id, lifecycle.EXTEND_START, started_s, tokens=fed)
            self.recorder.note(slot.request_id, lifecycle.EXTEND_END, ended_s, tokens=fed)
        # Ids that came during the step wait in the inbox: plan after them.
        self.worker.post(partial(self.settle, slot))

    def _publish(self, slot: MainSlot, tokens: tuple[Token, ...]) -> None:
        if slot.relay and tokens[0].position == slot.takeover_position:
            self.recorder.note(
                slot.request_id, lifecycle.TAKEOVER, position=tokens[0].position, mode=slot.mode
            )
        self.send(self.gateway_of(slot.request_id), Tokens(slot.request_id, tokens))

    def settle(self, slot: Slot) -> None:
        assert isinstance(slot, MainSlot)
        if slot.request_id not in self.slots:
            return
        self._plan(slot)
        if slot.finish is None:
            return
        if slot.request_id not in self._reported and not slot.relay_reason:
            self._report(slot)
        if slot.complete and (slot.kv_whole or self.config.handoff.singular == "abort"):
            self._report(slot)
            self._remember(slot)
            self.drop(slot.request_id)

    def _report(self, slot: MainSlot) -> None:
        if slot.request_id in self._reported:
            return
        self._reported.add(slot.request_id)
        events = tuple(self.recorder.take(slot.request_id))
        finished = Finished(
            slot.request_id,
            slot.finish or "",
            len(slot.output),
            slot.takeover_position,
            slot.disagreements,
            0,
            events,
        )
        self.send(self.gateway_of(slot.request_id), finished)

    def _remember(self, slot: MainSlot) -> None:
        if not slot.kv_whole or not self.config.system.drc:
            return
        ids = (slot.prompt + slot.output)[: slot.seq.kv_tokens]
        with self._drc_lock:
            self.drc.insert(ids, slot.seq)

    def drop(self, request_id: str) -> None:
        lease = self._leases.pop(request_id, None)
        if lease is not None and lease.match is not None:
            with self._drc_lock:
                self.drc.release(lease.match)
        for table in (self._early, self._paces):
            table.pop(request_id, None)
        self._reported.discard(request_id)
        super().drop(request_id)

    def _lapse(self) -> None:
        super()._lapse()
        now = now_s()
        for request_id, lease in list(self._leases.items()):
            if request_id not in self.slots and now > lease.until_s:
                self.drop(request_id)

    def _on_reset(self, sender: str) -> None:
        with self._drc_lock:
            self.drc.clear()
        self.send(sender, ResetDone())
