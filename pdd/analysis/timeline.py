"""One answer's life as spans on a common axis, for timelines (Fig. 4).

Invariant: times are seconds from the request's arrival; a span's `lane` is who was at work: P, LAN, WAN, RLD,
MD, or the user, who sees what is emitted.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from pdd.analysis.metrics import arrival_s
from pdd.lifecycle import EXTEND_END, EXTEND_START, PREFILL_END, PREFILL_START
from pdd.request import Completion

LANES = ("P", "LAN", "WAN", "RLD", "MD", "user")
COLUMNS = ("request_id", "lane", "kind", "start_s", "end_s")


def lane_of(role: str) -> str:
    """The lane of a process by its name (`p0`, `rld0`, `md0`)."""
    return role.rstrip("0123456789").upper()


def spans(done: Completion, **columns: Any) -> pd.DataFrame:
    """Rows of prefill, queue, transfer, extend, token and emit; tokens and emits have no length.

    columns: constants of every row, such as system.
    """
    zero_s = arrival_s(done)
    table = [
        {**columns, "request_id": done.request_id, "lane": lane, "kind": kind, "start_s": start - zero_s,
         "end_s": end - zero_s}
        for lane, kind, start, end in [*_work(done), *_moves(done), *_tokens(done)]
    ]  # fmt: skip
    return pd.DataFrame(table, columns=[*columns, *COLUMNS])


Span = tuple[str, str, float, float]


def _work(done: Completion) -> list[Span]:
    """Prefill and extend: a start and the next end of the same role."""
    out: list[Span] = []
    for start, end, kind in ((PREFILL_START, PREFILL_END, "prefill"), (EXTEND_START, EXTEND_END, "extend")):
        for event in done.events:
            if event.name == start:
                ends = [
                    e.at_s
                    for e in done.events
                    if (e.name, e.role) == (end, event.role) and e.at_s >= event.at_s
                ]
                if ends:
                    out.append((lane_of(event.role), kind, event.at_s, min(ends)))
    return out


def _moves(done: Completion) -> list[Span]:
    out: list[Span] = []
    for one in done.transfers:
        lane = one.path.upper()
        out.append((lane, "queue", one.queued_s, one.started_s))
        out.append((lane, "transfer" if one.ok else "aborted", one.started_s, one.ended_s))
    return out


def _tokens(done: Completion) -> list[Span]:
    made: list[Span] = [(lane_of(one.author), "token", one.made_s, one.made_s) for one in done.tokens]
    return made + [("user", "emit", at_s, at_s) for at_s in done.emitted_s]
