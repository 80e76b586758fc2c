"""RLD (RelayDecode): decodes the first tokens of low-hit requests while their KV is on its way to MD.

Invariant: no KV leaves RLD. What it hands over is token ids.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pdd import lifecycle
from pdd.net.messages import (
    Adopt,
    Eager,
    Finished,
    KvReady,
    RelayJob,
    RelayPaused,
    RelayStopped,
    StopAt,
)
from pdd.policy.handoff import RelayView, cap_tokens, on_kv_ready
from pdd.roles.boot import Boot
from pdd.roles.decode import DecodeRole
from pdd.roles.relay_slot import RelaySlot
from pdd.roles.slot import Slot


class RelayDecode(DecodeRole):
    """The RLD process."""

    slots: dict[str, RelaySlot]  # type: ignore[assignment]

    def __init__(self, boot: Boot) -> None:
        super().__init__(boot)
        self._ids_bytes: dict[str, int] = {}
        self.handlers |= {
            RelayJob: lambda gateway, job: self.worker.post(partial(self._on_job, gateway, job)),
            KvReady: lambda _, message: self._with_slot(message.request_id, RelaySlot.on_kv_ready),
            StopAt: lambda _, message: self._with_slot(
                message.request_id, lambda slot: slot.on_stop_at(message.position)
            ),
            Adopt: lambda _, message: self._with_slot(message.request_id, RelaySlot.adopt),
        }

    def _with_slot(self, request_id: str, act: Any) -> None:
        def job() -> None:
            if (slot := self.slots.get(request_id)) is not None:
                act(slot)
                self.settle(slot)

        self.worker.post(job)

    def _load_now(self) -> float:
        return self.load().load

    def _on_job(self, gateway: str, job: RelayJob) -> None:
        handoff = self.config.handoff
        parts = self.slot_parts(job.request_id, list(job.prompt), job.sampling, job.output, self.engine.new())
        self._ids_bytes[job.request_id] = 0
        slot = RelaySlot(
            *parts,
            name=self.name,
            gateway=gateway,
            main=job.main,
            send=partial(self._send_counted, job.request_id),
            on_ready=lambda made, paused: on_kv_ready(handoff, RelayView(made, self._load_now(), paused)),
            cap_of=lambda: cap_tokens(handoff, self._load_now()),
            eager_batch_tokens=handoff.eager_batch_tokens,
        )
        slot.awaits_first = job.first_token and not job.output
        self.adopt_slot(slot, gateway)

    def _send_counted(self, request_id: str, peer: str, message: Any) -> None:
        if isinstance(message, (Eager, RelayStopped)) and peer == self.slots[request_id].main:
            self._ids_bytes[request_id] += self.control.wire_bytes(message)
        if isinstance(message, RelayPaused):
            self.recorder.note(request_id, lifecycle.RELAY_CAPPED, position=message.position)
        self.send(peer, message)

    def settle(self, slot: Slot) -> None:
        if not slot.ended or slot.request_id not in self.slots:
            return
        assert isinstance(slot, RelaySlot)
        request_id, gateway = slot.request_id, self.gateway_of(slot.request_id)
        position = len(slot.output)
        reason = slot.stop.finish_reason(slot.output) or ""
        self.recorder.note(
            request_id, lifecycle.RELAY_STOPPED, position=position, mode=slot.mode, reason=reason
        )
        events = tuple(self.recorder.take(request_id))
        bytes_ = self._ids_bytes.pop(request_id, 0)
        self.send(gateway, Finished(request_id, reason, position, None, 0, bytes_, events))
        self.drop(request_id)

    def drop(self, request_id: str) -> None:
        self._ids_bytes.pop(request_id, None)
        super().drop(request_id)
