"""What MD measures of a relayed request, for Catch-Up's stop rule.

Invariant: numbers only, from this request's own messages and steps; before anything was seen they are cautious guesses.
"""

from __future__ import annotations

from pdd.lifecycle import now_s

GUESS_S = 0.01
MIN_TPOT_S = 1e-3
ENOUGH_TOKENS = 4
"""Ids heard before their pace is believed: two messages that the link bunched together say nothing."""


class Pace:
    """MD's shortest step, RLD's time per output token and the round trip between them, all in s."""

    def __init__(self, round_trip_s: float) -> None:
        self.step_s = GUESS_S
        self.round_trip_s = round_trip_s
        self.extends = 0
        self.last_outstanding: int | None = None
        self._asked_s: float | None = None
        self._answered = False
        self._heard_first_s: float | None = None
        self._heard_last_s = 0.0
        self._heard_tokens = 0

    def asked(self) -> None:
        """`KvReady` was sent to RLD."""
        self._asked_s = now_s()

    def heard(self, tokens: int, now: float) -> None:
        """Ids came from RLD at `now`. The first ones after the question are its answer."""
        if self._asked_s is not None and not self._answered and now > self._asked_s:
            self._answered = True
            self.round_trip_s = now - self._asked_s
        if self._heard_first_s is None:
            self._heard_first_s = now
        else:
            self._heard_tokens += tokens
        self._heard_last_s = now

    def stepped(self, seconds: float, outstanding: int) -> None:
        """A step of this request took so long; before it, so many ids were outstanding."""
        self.step_s = seconds if not self.extends else min(self.step_s, seconds)
        self.extends += 1
        self.last_outstanding = outstanding

    @property
    def tpot_s(self) -> float:
        """RLD's time per output token."""
        if self._heard_first_s is None or self._heard_tokens < ENOUGH_TOKENS:
            return GUESS_S
        return max(MIN_TPOT_S, (self._heard_last_s - self._heard_first_s) / self._heard_tokens)
