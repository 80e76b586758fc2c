"""Handoff decisions, and that Catch-Up always ends, on a small simulation driven by the same functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.config import HandoffConfig
from pdd.policy.handoff import (
    MainView,
    RelayMove,
    RelayView,
    cap_tokens,
    choose_mode,
    first_part,
    main_move,
    on_kv_ready,
    stop_position,
    stops_at,
)

CONFIG = HandoffConfig()


@dataclass
class Handoff:
    """One handoff from whole KV at MD (time 0) on: RLD steps every TPOT, MD extends in a loop."""

    outstanding: int
    tpot_s: float
    floor_s: float
    token_s: float
    rtt_s: float
    config: HandoffConfig = CONFIG
    load: float = 0.0
    mode: str = ""
    extends: int = 0
    end: int = 0
    takeover_s: float = 0.0
    named: int | None = None

    def made(self, at_s: float) -> int:
        """RLD's tokens at a time, had nobody stopped it."""
        return self.outstanding + max(0, math.floor(at_s / self.tpot_s))

    def known(self, at_s: float) -> int:
        return min(max(self.outstanding, self.made(at_s - self.rtt_s / 2)), self.end or 10**9)

    def run(self) -> Handoff:
        one_way_s = self.rtt_s / 2
        move = on_kv_ready(self.config, RelayView(self.made(one_way_s), self.load))
        self.mode = move.mode
        stopped_s = math.inf
        if move.stop:
            self.end, stopped_s = self.made(one_way_s), self.rtt_s
        now_s, filled, last = 0.0, 0, None
        for _ in range(10_000):
            view = MainView(
                known_tokens=self.end if now_s >= stopped_s else self.known(now_s),
                filled_tokens=filled,
                extends=self.extends,
                last_outstanding=last,
                stop_named=self.named is not None,
                relay_stopped=now_s >= stopped_s,
                extend_floor_s=self.floor_s,
                tpot_s=self.tpot_s,
                rtt_s=self.rtt_s,
            )
            step = main_move(self.config, self.mode, view)
            if step.stop_at is not None:
                self.named = step.stop_at
                told_s = now_s + one_way_s
                self.end = stops_at(RelayView(self.made(told_s), self.load), step.stop_at)
                stopped_s = max(told_s, (self.end - self.outstanding) * self.tpot_s) + one_way_s
            if step.takes_over:
                self.takeover_s = now_s
                return self
            if step.extend_tokens:
                now_s += self.floor_s + self.token_s * step.extend_tokens
                filled, last = filled + step.extend_tokens, view.outstanding
                self.extends += 1
            else:
                now_s += self.tpot_s
        raise AssertionError(f"no takeover: {self}")


TIMES = st.floats(1e-3, 1.0)


@settings(deadline=None, max_examples=400)
@given(st.integers(0, 500), TIMES, TIMES, st.floats(0, 0.05), st.floats(1e-4, 1.0))
def test_catchup_always_converges(
    outstanding: int, tpot_s: float, floor_s: float, token_s: float, rtt_s: float
) -> None:
    done = Handoff(outstanding, tpot_s, floor_s, token_s, rtt_s).run()
    assert done.mode == "catchup"
    assert done.named is not None and done.named <= done.end
    # RLD is told one way after MD decided; what it knew then was one way old.
    assert done.end <= done.named + 1 or done.rtt_s < tpot_s


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 500), TIMES, TIMES, st.floats(0.5, 1.0), st.floats(1e-4, 0.3))
def test_rld_makes_few_tokens_more_when_extends_cost_little_a_token(
    outstanding: int, tpot_s: float, floor_s: float, share: float, rtt_s: float
) -> None:
    token_s = tpot_s * 0.01 * share
    done = Handoff(outstanding, tpot_s, floor_s, token_s, rtt_s).run()
    first_s = 2 * floor_s + token_s * outstanding * 1.1
    bound = (first_s + 3 * floor_s + 2 * rtt_s) / tpot_s * 1.2 + 8
    assert done.end - outstanding <= bound


@given(st.integers(0, 500), TIMES, TIMES, st.floats(1e-4, 1.0))
def test_oneshot_stops_rld_at_once(outstanding: int, tpot_s: float, floor_s: float, rtt_s: float) -> None:
    done = Handoff(outstanding, tpot_s, floor_s, 0.0, rtt_s, HandoffConfig(mode="oneshot")).run()
    assert done.named is None
    assert done.end == done.made(rtt_s / 2)
    assert done.extends <= 2 + math.ceil(rtt_s / floor_s)


def test_without_the_stop_rule_a_slow_extend_would_never_catch_up() -> None:
    """Each extend leaves more than it found; the rule still names a stop, at the second look."""
    slow = Handoff(outstanding=40, tpot_s=0.01, floor_s=0.01, token_s=0.03, rtt_s=0.02).run()
    assert slow.named is not None
    assert stop_position(100, 500, 0.01, 0.01, 0.02) is None
    assert stop_position(100, 500, 0.01, 0.01, 0.02, shrinks=False) == 104


@pytest.mark.parametrize(
    ("remaining", "floor_s", "expected"),
    [(0, 0.05, 113), (6, 0.05, 113), (7, 0.05, None), (2, 0.001, 104), (3, 0.001, None)],
)
def test_stop_is_named_a_round_trip_and_two_extends_ahead_of_what_md_knows(
    remaining: int, floor_s: float, expected: int | None
) -> None:
    assert stop_position(100, remaining, floor_s, tpot_s=0.01, rtt_s=0.03) == expected


def test_modes_switch_by_rlds_load() -> None:
    adaptive = HandoffConfig(mode="adaptive", busy_load=0.75)
    assert [choose_mode(adaptive, load) for load in (0.0, 0.74, 0.75, 2.0)] == [
        "catchup", "catchup", "oneshot", "oneshot",
    ]  # fmt: skip
    assert choose_mode(HandoffConfig(mode="catchup"), 5.0) == "catchup"
    assert choose_mode(HandoffConfig(mode="oneshot"), 0.0) == "oneshot"
    assert on_kv_ready(adaptive, RelayView(10, 0.0)) == RelayMove("catchup", False)
    assert on_kv_ready(adaptive, RelayView(10, 0.0, paused=True)) == RelayMove("oneshot", True)


def test_cap_falls_with_load_and_stays_within_its_bounds() -> None:
    config = HandoffConfig(cap_tokens=500, cap_floor_tokens=100)
    assert [cap_tokens(config, load) for load in (-1.0, 0.0, 0.5, 1.0, 9.0)] == [500, 500, 300, 100, 100]


@given(st.integers(0, 10_000), st.integers(1, 200))
def test_the_first_part_is_everything_up_to_the_split(outstanding: int, split: int) -> None:
    part = first_part(HandoffConfig(split_tokens=split), outstanding)
    assert part == outstanding if outstanding <= split else outstanding / 2 <= part < outstanding


def test_rld_stops_where_told_unless_it_is_past_or_paused() -> None:
    assert stops_at(RelayView(10, 0.0), 14) == 14
    assert stops_at(RelayView(15, 0.0), 14) == 15
    assert stops_at(RelayView(10, 0.0, paused=True), 14) == 10
