"""The two state machines of a handoff, run against each other under arbitrary timing.

A toy model (the next id is a hash of all ids so far) stands in for the engine; every message between RLD, MD and the
gateway may be late, but never overtakes another of the same pair. Whatever happens, the user must get exactly the
tokens of a single decoder.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.config import HandoffConfig
from pdd.net.messages import Eager, KvReady, RelayPaused, RelayStopped, StopAt, Tokens
from pdd.policy.handoff import RelayView, on_kv_ready
from pdd.request import SamplingParams
from pdd.roles.flight import Flight
from pdd.roles.main_slot import MainSlot
from pdd.roles.relay_slot import RelaySlot

PROMPT = [5, 3, 8, 13]


@dataclass
class Drawn:
    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Seq:
    kv_tokens = 0


class Stop:
    def __init__(self, length: int, stop_id: int | None) -> None:
        self.length, self.stop_id = length, stop_id

    def finish_reason(self, output_ids: list[int]) -> str | None:
        if self.stop_id is not None and output_ids and output_ids[-1] == self.stop_id:
            return "stop"
        return "length" if len(output_ids) >= self.length else None


def next_id(ids: list[int], salt: int = 0) -> int:
    return zlib.crc32(bytes(ids) + bytes([salt])) % 23


def single(length: int, stop_id: int | None) -> list[int]:
    stop, output = Stop(length, stop_id), []
    while stop.finish_reason(output) is None:
        output.append(next_id(PROMPT + output))
    return output


class World:
    """RLD, MD and the gateway with a queue between each pair. `odd`: output positions where MD computes otherwise."""

    def __init__(
        self, length: int, stop_id: int | None, mode: str, cap: int, rewinds: bool, odd: set[int]
    ) -> None:
        self.odd = odd
        self.to_main: deque[Any] = deque()
        self.to_relay: deque[Any] = deque()
        self.to_user: dict[str, deque[Any]] = {"rld0": deque(), "md0": deque()}
        self.user = Flight(None, "client", "r")  # type: ignore[arg-type]
        self.stop_named = False
        stop, handoff = Stop(length, stop_id), HandoffConfig(mode=mode)
        parts = ("r", list(PROMPT), SamplingParams(), [])
        self.relay = RelaySlot(
            *parts, Seq(), stop, lambda row, *_: Drawn(row),
            name="rld0", gateway="gw", main="md0", send=self._from_relay,
            on_ready=lambda made, paused: on_kv_ready(handoff, RelayView(made, 0.0, paused)),
            cap_of=lambda: cap, eager_batch_tokens=3,
        )  # fmt: skip
        self.main = MainSlot(
            *parts, Seq(), stop, lambda row, *_: Drawn(row),
            name="md0", relay="rld0", publish=lambda slot, tokens: self.to_user["md0"].append(tokens),
            rewind=self._rewind if rewinds else None,
        )  # fmt: skip
        self.relay.seq.kv_tokens = self.main.seq.kv_tokens = len(PROMPT) - 1
        self.relay.kv_whole = True

    def _rewind(self, seq: Any, kv_tokens: int) -> None:
        assert kv_tokens < seq.kv_tokens
        seq.kv_tokens = kv_tokens

    def _from_relay(self, peer: str, message: Any) -> None:
        if peer == "md0":
            self.to_main.append(message)
        elif isinstance(message, Tokens):
            self.to_user["rld0"].append(message.tokens)
        elif isinstance(message, RelayStopped) and message.reason:
            self.user.total = message.position
        else:
            assert isinstance(message, (RelayStopped, RelayPaused))

    def kv_arrives(self) -> None:
        self.main.kv_whole = True
        self.to_relay.append(KvReady("r"))

    def act(self, choice: int) -> None:
        [self._step_relay, self._step_main, self._main_hears, self._relay_hears, self._user_hears][choice]()

    def _step_relay(self) -> None:
        if ids := self.relay.pending():
            self.relay.seq.kv_tokens += len(ids)
            self.relay.accept(next_id(self.relay.prompt + self.relay.output), len(ids))

    def _step_main(self) -> None:
        ids = self.main.pending()
        if not ids:
            return
        fed = ids[:4]
        done = self.main.seq.kv_tokens
        whole = self.main.prompt + self.main.output
        rows = []
        for end in range(done + 1, done + len(fed) + 1):
            position = end - len(PROMPT)
            rows.append(next_id(whole[:end], salt=7 if position in self.odd else 0))
        self.main.seq.kv_tokens += len(fed)
        self.main.accept(rows, len(fed))
        if self.main.known - self.main.filled <= 2 and not self.stop_named:
            self.stop_named = True
            self.to_relay.append(StopAt("r", self.main.known + 2))

    def _main_hears(self) -> None:
        if self.to_main:
            message = self.to_main.popleft()
            self.main.on_ids(message.start, message.ids)
            if isinstance(message, RelayStopped):
                self.main.on_relay_stopped(message.position, message.reason, message.mode)
            else:
                assert isinstance(message, Eager)

    def _relay_hears(self) -> None:
        if self.to_relay:
            message = self.to_relay.popleft()
            if isinstance(message, KvReady):
                self.relay.on_kv_ready()
            else:
                self.relay.on_stop_at(message.position)

    def _user_hears(self) -> None:
        for queue in self.to_user.values():
            if queue:
                self.user.take(queue.popleft())
        if self.main.finish is not None and not self.main.relay_reason:
            self.user.total = len(self.main.output)

    def finish(self) -> list[int]:
        for _ in range(3000):
            for choice in range(5):
                self.act(choice)
            if self.user.complete:
                return list(self.user.output)
        raise AssertionError(
            f"no end: {len(self.user.emitted)} tokens, {vars(self.main)}, {vars(self.relay)}"
        )


worlds = st.fixed_dictionaries(
    {
        "length": st.integers(1, 40),
        "stop_id": st.sampled_from([None, 2, 9]),
        "mode": st.sampled_from(["oneshot", "catchup"]),
        "cap": st.integers(1, 50),
        "rewinds": st.booleans(),
    }
)


@settings(max_examples=400, deadline=None)
@given(
    world=worlds, before=st.lists(st.sampled_from([0, 3, 4]), max_size=40), after=st.lists(st.integers(0, 4))
)
def test_user_gets_the_tokens_of_a_single_decoder(world: dict, before: list[int], after: list[int]) -> None:
    run = World(**world, odd=set())
    for choice in before:
        run.act(choice)
    run.kv_arrives()
    for choice in after:
        run.act(choice)
    assert run.finish() == single(world["length"], world["stop_id"])
    assert run.main.disagreements == 0


@settings(max_examples=400, deadline=None)
@given(
    world=worlds,
    before=st.lists(st.sampled_from([0, 3, 4]), max_size=40),
    after=st.lists(st.integers(0, 4)),
    odd=st.sets(st.integers(0, 40), min_size=1),
)
def test_where_md_disagrees_the_relays_ids_win_and_md_goes_on_from_them(
    world: dict, before: list[int], after: list[int], odd: set[int]
) -> None:
    run = World(**world, odd=odd)
    for choice in before:
        run.act(choice)
    run.kv_arrives()
    for choice in after:
        run.act(choice)
    got = run.finish()
    taken_over = run.main.takeover_position if run.main.takeover_position is not None else len(got)
    for position, token in enumerate(got):
        salt = 7 if position >= taken_over and position in odd else 0
        assert token == next_id(PROMPT + got[:position], salt)


def test_a_takeover_happens_and_not_always_at_the_same_place() -> None:
    places = set()
    for early in range(0, 12, 3):
        run = World(40, None, "catchup", 50, True, set())
        for _ in range(early):
            run.act(0)
        run.kv_arrives()
        run.finish()
        places.add(run.main.takeover_position)
    assert len(places) >= 3 and None not in places


def test_oneshot_stops_the_relay_at_once_and_the_cap_pauses_it() -> None:
    run = World(40, None, "oneshot", 6, True, set())
    for _ in range(20):
        run.act(0)
    assert run.relay.paused and len(run.relay.output) == 6
    run.kv_arrives()
    assert run.finish() == single(40, None)
    assert run.main.takeover_position == 6
