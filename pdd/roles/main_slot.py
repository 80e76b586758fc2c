"""MD's side of a request: extend over RLD's ids, check them, take over, and publish what is authoritative.

Invariant: `output[:known]` are authoritative ids; anything after is MD's own and is published only when RLD has
acknowledged its stop (`authority`), from that position on. If an RLD id differs from MD's own, RLD's wins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pdd.lifecycle import now_s
from pdd.request import Token
from pdd.roles.slot import Draw, Slot

Publish = Callable[["MainSlot", tuple[Token, ...]], None]

RUN_AHEAD_TOKENS = 64
"""How far MD decodes past the ids it knows while RLD still runs; a bound on work that a disagreement would waste."""


class MainSlot(Slot):
    """A request at MD, relayed or direct.

    relay: the RLD that decodes meanwhile, "" for a direct request, whose every id is MD's.
    part_tokens: how many of RLD's ids the next extend takes (Catch-Up hands over in parts); None: all.
    rewind: cuts the sequence's KV back to a length; None where the model cannot (then MD never runs ahead).
    """

    def __init__(
        self,
        *slot: Any,
        name: str,
        relay: str,
        publish: Publish,
        rewind: Callable[[Any, int], None] | None,
    ) -> None:
        super().__init__(*slot)
        self.name = name
        self.relay = relay
        self.verifies = bool(relay)
        self._publish = publish
        self._rewind = rewind
        self.known = len(self.output)
        self.authority: int | None = None if relay else self.known
        self.published = self.known
        self.takeover_position: int | None = None
        self.disagreements = 0
        self.relay_reason = ""
        self.finish: str | None = None
        self.mode = ""
        self._made: dict[int, Token] = {}
        self._guess: Draw | None = None
        self.awaits_first = False
        self.part_tokens: int | None = None
        self.stop_named = False

    # -- stepping --------------------------------------------------------------------------------------------------

    def _may_run_ahead(self, position: int) -> bool:
        if self.authority is not None:
            return not self.relay_reason and position >= self.authority
        return self._rewind is not None and position < self.known + RUN_AHEAD_TOKENS

    @property
    def urgent(self) -> bool:  # type: ignore[override]
        """From the moment RLD knows where to stop until MD has published: nobody else makes this user's tokens."""
        return self.stop_named and self.takeover_position is None and self.finish is None

    def may_step(self) -> bool:
        return not self.awaits_first

    @property
    def filled(self) -> int:
        """Known output ids whose KV is here."""
        return min(self.known, max(0, self.seq.kv_tokens - len(self.prompt)))

    def pending(self) -> list[int]:
        ids = super().pending()
        if self.part_tokens is not None:
            of_prompt = max(0, len(self.prompt) - self.seq.kv_tokens)
            ids = ids[: max(1, of_prompt + self.part_tokens)]
        if self.finish is not None and ids:  # only the cache is being completed: the last id needs no KV
            ids = ids[: max(0, len(self.prompt) + len(self.output) - 1 - self.seq.kv_tokens)]
        return ids

    def accept(self, rows: Any, fed: int) -> None:
        start = self.seq.kv_tokens - fed + 1 - len(self.prompt)
        if not self.verifies:
            if not self.pending() and self.seq.kv_tokens == len(self.prompt) + len(self.output):
                self._next(rows, len(self.output))
            return
        for row in range(fed):
            position = start + row
            if 0 <= position < len(self.output):
                self._check(rows[row], position)
            elif position == len(self.output):
                self._next(rows[row], position)

    def _check(self, row: Any, position: int) -> None:
        if position < self.known and self.draw(row, self.output[:position]).id != self.output[position]:
            self.disagreements += 1

    def _next(self, row: Any, position: int) -> None:
        if self.finish is not None:
            return
        drawn = self.draw(row, self.output)
        if self._may_run_ahead(position):
            self._append(drawn, position)
        else:
            self._guess = drawn

    def _append(self, drawn: Draw, position: int) -> None:
        self.output.append(drawn.id)
        self._made[position] = self.token(position, drawn, self.name)
        self._release()

    # -- RLD's ids -------------------------------------------------------------------------------------------------

    def on_ids(self, start: int, ids: tuple[int, ...]) -> None:
        """Ids from RLD, from output position `start` on; what is known already is passed over."""
        for offset, token_id in enumerate(ids):
            position = start + offset
            if position == self.known:
                self._learn(position, token_id)

    def _learn(self, position: int, token_id: int) -> None:
        own = self.output[position] if position < len(self.output) else None
        if own is None and self._guess is not None:
            own = self._guess.id
        self._guess = None
        if own is not None and own != token_id:
            self.disagreements += 1
            self._cut(position)
        if position == len(self.output):
            self.output.append(token_id)
        self._made.pop(position, None)
        self.known = position + 1
        self.published = max(self.published, self.known)

    def _cut(self, position: int) -> None:
        for dropped in range(position, len(self.output)):
            self._made.pop(dropped, None)
        del self.output[position:]
        if self.seq.kv_tokens > len(self.prompt) + position:
            assert self._rewind is not None, "MD ran ahead of ids that it cannot take back"
            self._rewind(self.seq, len(self.prompt) + position)

    def on_relay_stopped(self, position: int, reason: str, mode: str) -> None:
        """RLD's ids end before `position`; its last ids were given to `on_ids` first."""
        self.authority = position
        self.relay_reason = reason
        self.mode = mode
        self.published = min(self.published, position)
        if reason:
            self._cut(position)
            self.finish = reason
        elif self._guess is not None and len(self.output) == position:
            guess, self._guess = self._guess, None
            self._append(guess, position)
        else:
            self._release()

    def add_first(self, token_id: int) -> None:
        """Token 0 came from P (`first_token=prefill`) and is authoritative."""
        self.awaits_first = False
        if self.known == 0:
            self._learn(0, token_id)
            if self.authority == 0:
                self.authority = 1
            if self.authority is not None:
                self.finish = self.stop.finish_reason(self.output)

    # -- publishing ------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Publish own tokens that have become authoritative, up to the answer's end."""
        if self.authority is None or self.known < self.authority:
            return
        fresh: list[Token] = []
        while self.finish is None and self.published < len(self.output):
            position = self.published
            if position >= self.authority:
                # An id of a dead RLD that its user never got is published by MD in its name.
                lost = Token(position, self.output[position], self.relay, now_s())
                fresh.append(self._made.pop(position, lost))
                self.finish = self.stop.finish_reason(self.output[: position + 1])
            self.published += 1
        if self.finish is not None and len(self.output) > self.published:
            self._cut(self.published)
        if fresh:
            if self.takeover_position is None and self.relay:
                self.takeover_position = fresh[0].position
            self.known = self.published
            self._publish(self, tuple(fresh))

    @property
    def complete(self) -> bool:
        """The answer has ended and its KV is as whole as it will get: it may enter the DRC."""
        return self.finish is not None and (not self.kv_whole or not self.pending())
