"""The named events of a request's life, and the one clock they are told on.

Invariant: times are `now_s()` of the machine's monotonic clock, which all processes (and network namespaces) of one
host share; on two hosts each role reports its offset when it joins, and the gateway corrects by it.
"""

from __future__ import annotations

import time
from typing import Any

from pdd.request import Event

ARRIVAL = "arrival"
ROUTED = "routed"
PREFILL_START = "prefill_start"
PREFILL_END = "prefill_end"
KV_READY = "kv_ready"
EXTEND_START = "extend_start"
EXTEND_END = "extend_end"
RELAY_STOPPED = "relay_stopped"
RELAY_CAPPED = "relay_capped"
TAKEOVER = "takeover"
SINGULAR = "singular"
REPLAYED = "replayed"
KV_LOST = "kv_lost"
DONE = "done"

NAMES = (
    ARRIVAL, ROUTED, PREFILL_START, PREFILL_END, KV_READY, EXTEND_START, EXTEND_END, RELAY_STOPPED, RELAY_CAPPED,
    TAKEOVER, SINGULAR, REPLAYED, KV_LOST, DONE,
)  # fmt: skip


def now_s() -> float:
    """Seconds on the host's monotonic clock."""
    return time.monotonic()


class Recorder:
    """Collects the events of one process until they are taken along with a request's last message."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._events: dict[str, list[Event]] = {}

    def note(self, request_id: str, name: str, at_s: float | None = None, **detail: Any) -> None:
        """Record that `name` happened to the request, now or at `at_s`."""
        moment = now_s() if at_s is None else at_s
        self._events.setdefault(request_id, []).append(Event(request_id, name, moment, self.role, detail))

    def take(self, request_id: str) -> list[Event]:
        """The request's events so far; they are forgotten here."""
        return self._events.pop(request_id, [])
