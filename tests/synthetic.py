"""Made-up completions with a plausible life, for tests of metrics and figures."""

from __future__ import annotations

from pdd import lifecycle
from pdd.request import Completion, Event, Token, Transfer

STEP_S = 0.01


def completion(
    request_id: str = "r",
    arrival_s: float = 100.0,
    output: int = 20,
    relay: int = 0,
    transfer_s: float = 0.4,
    prefill_s: float = 0.2,
    mode: str = "catchup",
    stall_s: float = 0.0,
    ids: list[int] | None = None,
) -> Completion:
    """One answer of `output` tokens, the first `relay` by rld0; KV takes `transfer_s` to md0 after prefill.

    A direct request (relay 0) has its first token when the KV is there. `stall_s` comes before MD's first.
    """
    start, end = arrival_s + 0.01, arrival_s + 0.01 + prefill_s
    there = end + transfer_s
    made: list[float] = []
    for position in range(output):
        begin = (end + 0.02 if relay else there + 0.01) if position == 0 else made[-1]
        made.append(begin + STEP_S + (stall_s if relay and position == relay else 0.0))
    authors = ["rld0"] * relay + ["md0"] * (output - relay)
    events = [
        ("arrival", arrival_s, "gw-a"), ("routed", arrival_s + 0.002, "gw-a"), ("prefill_start", start, "p0"),
        ("prefill_end", end, "p0"), ("kv_ready", there, "md0"), ("extend_start", there, "md0"),
        ("extend_end", there + 0.005, "md0"), ("done", made[-1] + 0.001, "gw-a"),
    ]  # fmt: skip
    transfers = [Transfer(request_id, "p0", "md0", "wan", 0, 64, 4000, end, end + 0.05, there + 0.01, True)]
    if relay:
        transfers.append(Transfer(request_id, "p0", "rld0", "lan", 0, 64, 4000, end, end, end + 0.01, True))
        events += [("kv_ready", end + 0.01, "rld0"), ("relay_stopped", made[relay - 1], "rld0")]
        events += [("takeover", made[relay], "md0")] if relay < output else []
    tokens = [
        Token(position, (ids or list(range(output)))[position], author, at_s)
        for position, (author, at_s) in enumerate(zip(authors, made, strict=True))
    ]
    return Completion(
        request_id=request_id,
        prompt_tokens=1000,
        tokens=tokens,
        emitted_s=[at_s + 0.001 for at_s in made],
        text="",
        finish_reason="length",
        pipeline="P-RLD-MD" if relay else "P-MD",
        mode=mode if relay else "",
        hit_tokens_p=900,
        hit_tokens_md=640,
        takeover_position=relay if 0 < relay < output else None,
        ids_bytes=3 * relay,
        events=[
            Event(request_id, name, at_s, role) for name, at_s, role in sorted(events, key=lambda e: e[1])
        ],
        transfers=transfers,
    )


assert {event.name for event in completion(relay=2).events} <= set(lifecycle.NAMES)
