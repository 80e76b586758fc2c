"""How MD takes over from RLD: One-Shot and Catch-Up, decided from numbers alone (facts: 1.4).

Invariant: a relayed request always reaches MD. In Catch-Up, MD names a stop as soon as what is left could not
shrink by another extend, so that no ratio of extend time, TPOT and round trip lets RLD run away.

Positions are output positions; `known` ids are those that MD has from RLD, `filled` those whose KV MD has as
well. Life of a handoff: KV is whole at MD -> `on_kv_ready` at RLD -> `main_move` at MD before each extend ->
`stops_at` at RLD when it is told a stop -> `main_move` with `relay_stopped` -> takeover.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdd.config import HandoffConfig

ONESHOT, CATCHUP = "oneshot", "catchup"


@dataclass(frozen=True)
class RelayView:
    """RLD's side: output tokens made, share of its slots asked for, and whether it waits at its cap."""

    made_tokens: int
    load: float
    paused: bool = False


@dataclass(frozen=True)
class RelayMove:
    """The mode RLD chose, and whether it stops at once."""

    mode: str
    stop: bool


@dataclass(frozen=True)
class MainView:
    """MD's side before an extend.

    extends: extends done since the KV was whole. last_outstanding: ids outstanding before the previous
    extend, None before the first. extend_floor_s: the time of the shortest extend. rtt_s: from MD to RLD and
    back.
    """

    known_tokens: int
    filled_tokens: int
    extends: int
    last_outstanding: int | None
    stop_named: bool
    relay_stopped: bool
    extend_floor_s: float
    tpot_s: float
    rtt_s: float

    @property
    def outstanding(self) -> int:
        """Known ids whose KV MD lacks."""
        return self.known_tokens - self.filled_tokens


@dataclass(frozen=True)
class MainMove:
    """What MD does next: extend over so many ids, name a stop position to RLD (or not), and take over (or
    not).
    """

    extend_tokens: int
    stop_at: int | None
    takes_over: bool


def choose_mode(config: HandoffConfig, rld_load: float) -> str:
    """`oneshot` or `catchup`. Adaptive: Catch-Up while RLD has capacity to spare, else One-Shot."""
    if config.mode != "adaptive":
        return config.mode
    return CATCHUP if rld_load < config.busy_load else ONESHOT


def cap_tokens(config: HandoffConfig, rld_load: float) -> int:
    """RLD's output cap for a request; it falls in a straight line from no load to full load [our reading]."""
    share = min(1.0, max(0.0, rld_load))
    return round(config.cap_tokens - share * (config.cap_tokens - config.cap_floor_tokens))


def first_part(config: HandoffConfig, outstanding: int) -> int:
    """Ids of Catch-Up's first extend: all, or above `split_tokens` the first half (the split is [A]'s)."""
    return outstanding if outstanding <= config.split_tokens else (outstanding + 1) // 2


def stop_position(
    known_end: int,
    remaining: int,
    extend_floor_s: float,
    tpot_s: float,
    rtt_s: float,
    shrinks: bool = True,
) -> int | None:
    """Where RLD shall stop, or None while MD is too far behind (modelling.md: the stop rule).

    While one extend runs, RLD makes ceil(extend_floor / TPOT) more ids; MD cannot come nearer than that, so
    from one id above it a stop is named: where RLD will be one round trip and two extends after the id that MD
    last saw left, one to fill what is known and one to be ahead. Earlier, and MD would still be extending while
    nobody decodes; later, and RLD's extra ids (the paper: about 10%) would grow.
    shrinks: False if the last extend left no less than it found; then a stop is named whatever remains.
    """
    if shrinks and remaining > math.ceil(extend_floor_s / tpot_s) + 1:
        return None
    return known_end + max(1, math.ceil((rtt_s + 2 * extend_floor_s) / tpot_s))


def on_kv_ready(config: HandoffConfig, view: RelayView) -> RelayMove:
    """RLD's choice when MD's KV is whole. At its cap it makes nothing new, so it hands over at once."""
    mode = ONESHOT if view.paused else choose_mode(config, view.load)
    return RelayMove(mode, mode == ONESHOT)


def stops_at(view: RelayView, position: int) -> int:
    """Where RLD stops when told `position`: there, or where it is if it is past it or paused."""
    return view.made_tokens if view.paused else max(view.made_tokens, position)


def main_move(config: HandoffConfig, mode: str, view: MainView) -> MainMove:
    """MD's next move.

    One-Shot: extend over all that is known until RLD has stopped. Catch-Up: extend part by part, then name a
    stop. Both: once RLD has stopped, extend over the rest and take over.
    """
    if view.relay_stopped:
        return MainMove(view.outstanding, None, view.outstanding == 0)
    if mode == ONESHOT:
        return MainMove(view.outstanding, None, False)
    part = first_part(config, view.outstanding) if view.extends == 0 else view.outstanding
    stop = None if view.stop_named else _stop(view)
    return MainMove(part if stop is None else view.outstanding, stop, False)


def _stop(view: MainView) -> int | None:
    shrinks = view.last_outstanding is None or view.outstanding < view.last_outstanding
    return stop_position(
        view.known_tokens, view.outstanding, view.extend_floor_s, view.tpot_s, view.rtt_s, shrinks
    )
