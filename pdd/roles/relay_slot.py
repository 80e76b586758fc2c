"""RLD's side of a request: decode eagerly, stream ids to MD, stop where MD takes over.

Invariant: an id that RLD has sent to the gateway is authoritative, and RLD sends none at or after the position that
it acknowledged in `RelayStopped`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdd.net.messages import Eager, RelayPaused, RelayStopped, Tokens
from pdd.policy.handoff import RelayMove, RelayView, stops_at
from pdd.roles.slot import Send, Slot


class RelaySlot(Slot):
    """Eager decoding until MD, the stop rule, the cap or the answer's own end (paper: Eager Output Tokens).

    main: the MD that takes over, "" if the answer ends here.
    on_ready: RLD's move when MD has the KV, from (ids made, paused) and its load now (`policy.handoff.on_kv_ready`).
    cap_of: the output cap at RLD's load now.
    eager_batch_tokens: ids that wait for each other while MD has no KV.
    """

    def __init__(
        self,
        *slot: Any,
        name: str,
        gateway: str,
        main: str,
        send: Send,
        on_ready: Callable[[int, bool], RelayMove],
        cap_of: Callable[[], int],
        eager_batch_tokens: int,
    ) -> None:
        super().__init__(*slot)
        self.name = name
        self.gateway = gateway
        self.main = main
        self._send = send
        self._on_ready = on_ready
        self._cap_of = cap_of
        self._eager_batch_tokens = eager_batch_tokens
        self.mode = ""
        self.paused = False
        self.awaits_first = False
        self._told_main = len(self.output)
        self._stop_at: int | None = None

    def may_step(self) -> bool:
        return not self.paused and not self.awaits_first

    def accept(self, rows: Any, fed: int) -> None:
        if self.pending():  # a chunk of a longer extend: only the last one draws
            return
        drawn = self.draw(rows, self.output)
        position = len(self.output)
        self.output.append(drawn.id)
        self._send(self.gateway, Tokens(self.request_id, (self.token(position, drawn, self.name),)))
        self._after_token()

    def add_first(self, token_id: int) -> None:
        """Token 0 came from P (`first_token=prefill`)."""
        self.awaits_first = False
        if not self.output:
            self.output.append(token_id)
            self._after_token()

    def _after_token(self) -> None:
        reason = self.stop.finish_reason(self.output)
        if reason is not None:
            self.end(reason)
        elif self._stop_at is not None and len(self.output) >= self._stop_at:
            self.end("")
        elif self.main:
            self._tell_main()
            self._pause_at_cap()

    def _tell_main(self) -> None:
        fresh = len(self.output) - self._told_main
        if fresh >= (1 if self.mode else self._eager_batch_tokens):
            self._flush()

    def _flush(self) -> None:
        if len(self.output) > self._told_main:
            ids = tuple(self.output[self._told_main :])
            self._send(self.main, Eager(self.request_id, self._told_main, ids))
            self._told_main = len(self.output)

    def _pause_at_cap(self) -> None:
        if len(self.output) < self._cap_of():
            return
        if self.mode or self._stop_at is not None:  # MD has the KV: nothing to wait for
            self.end("")
        else:
            self.paused = True
            self._flush()
            self._send(self.gateway, RelayPaused(self.request_id, len(self.output)))

    def on_kv_ready(self) -> None:
        """MD holds the prompt's KV: choose the mode by the load now (paper: switching)."""
        if self.ended:
            return
        move = self._on_ready(len(self.output), self.paused)
        self.mode = move.mode
        if move.stop:
            self.end("")
        else:
            self._flush()

    def on_stop_at(self, position: int) -> None:
        """Catch-Up: MD has caught up and names where it goes on."""
        view = RelayView(len(self.output), load=0.0, paused=self.paused or not self.output)
        self._stop_at = stops_at(view, position)
        if not self.ended and len(self.output) >= self._stop_at:
            self.end("")

    def adopt(self) -> None:
        """MD is gone: finish the answer here, without a cap."""
        self.main = ""
        self.paused = False
        self._stop_at = None

    def end(self, reason: str) -> None:
        """Stop for good: MD goes on if `reason` is "", else the answer is complete."""
        self.ended = True
        position = len(self.output)
        ids = tuple(self.output[self._told_main :])
        stopped = RelayStopped(self.request_id, position, self._told_main, ids, self.mode, reason)
        if self.main:
            self._send(self.main, stopped)
        self._send(self.gateway, stopped)
