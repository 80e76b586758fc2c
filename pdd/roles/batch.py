"""Continuous batching for a decode role: which slots step now, and as what.

Invariant: a slot that has joined steps until it has ended; at most `max_batch` slots are in the batch, the others
wait in order. A long extend goes chunk by chunk between decode steps, so that it stalls no other answer for long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from pdd.lifecycle import now_s
from pdd.policy.admission import admit
from pdd.roles.slot import Slot


class Batch:
    """Steps the slots of one role on its engine.

    on_stepped: called after a slot's ids were fed and its logits accepted, with (slot, ids fed, start, end in s).
    on_failed: called when a slot's step raised; the slot is out of the batch.
    """

    def __init__(
        self,
        engine: Any,
        max_batch: int,
        extend_chunk_tokens: int,
        on_stepped: Callable[[Slot, int, float, float], None],
        on_failed: Callable[[Slot, Exception], None],
    ) -> None:
        self._engine = engine
        self._max_batch = max_batch
        self._chunk = extend_chunk_tokens
        self._on_stepped = on_stepped
        self._on_failed = on_failed
        self._running: list[Slot] = []
        self._waiting: deque[Slot] = deque()
        self._extended = False

    @property
    def active(self) -> int:
        """Slots in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Slots that wait for a place."""
        return len(self._waiting)

    def add(self, slot: Slot) -> None:
        """Let the slot step as soon as there is a place."""
        self._waiting.append(slot)

    def discard(self, slot: Slot) -> None:
        """Take the slot out, wherever it is."""
        if slot in self._running:
            self._running.remove(slot)
        elif slot in self._waiting:
            self._waiting.remove(slot)

    def step(self) -> bool:
        """One extend chunk or one decode step, in turns while there is work for both. Tells whether there was any."""
        while self._waiting and admit(len(self._running), self._max_batch):
            self._running.append(self._waiting.popleft())
        work = [(slot, ids) for slot in self._running if (ids := slot.pending())]
        work = [item for item in work if item[0].urgent] or work
        extends = [item for item in work if len(item[1]) > 1]
        decodes = [item for item in work if len(item[1]) == 1]
        if extends and not (decodes and self._extended):
            self._extended = True
            # Shortest first: a takeover never waits behind a recomputed prompt.
            self._extend(*min(extends, key=lambda item: len(item[1])))
        elif decodes:
            self._extended = False
            self._decode([slot for slot, _ in decodes], [ids[0] for _, ids in decodes])
        return bool(work)

    def _extend(self, slot: Slot, ids: list[int]) -> None:
        started_s = now_s()
        ids = ids[: self._chunk]
        try:
            rows = self._engine.extend(slot.seq, ids, all_logits=slot.verifies)
            slot.accept(rows, len(ids))
        except Exception as error:
            self._fail(slot, error)
            return
        self._on_stepped(slot, len(ids), started_s, now_s())

    def _decode(self, slots: list[Slot], ids: list[int]) -> None:
        started_s = now_s()
        try:
            rows = self._engine.decode([slot.seq for slot in slots], ids)
        except Exception as error:
            for slot in slots:
                self._fail(slot, error)
            return
        for slot, row in zip(slots, rows, strict=True):
            try:
                slot.accept(row[None] if slot.verifies else row, 1)
            except Exception as error:
                self._fail(slot, error)
                continue
            self._on_stepped(slot, 1, started_s, now_s())

    def _fail(self, slot: Slot, error: Exception) -> None:
        self.discard(slot)
        self._on_failed(slot, error)
