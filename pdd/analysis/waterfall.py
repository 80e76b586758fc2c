"""Where the time to first token goes, stage by stage.

Invariant: the stages of a request are not negative and sum to its TTFT exactly. An event that is missing, or
that lies outside its turn (streamed KV arrives during prefill), gives its stage the time that is left for it,
down to none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from pdd.analysis.metrics import arrival_s
from pdd.lifecycle import EXTEND_END, KV_READY, PREFILL_END, PREFILL_START
from pdd.request import Completion

STAGES = ("wait", "prefill", "transfer_queue", "transfer", "extend", "first_step")


def stages_s(done: Completion) -> dict[str, float]:
    """Seconds a stage of the first token's way, by the role that made it; NaN throughout without a token.

    wait: arrival to prefill start (match, routing, P's queue). prefill: to P's last chunk. transfer_queue:
    until the last KV segment for the author started to move. transfer: until the KV was whole there. extend:
    until the last extend before the token. first_step: to the user (one decode step and the way to the
    gateway).
    """
    if not done.tokens:
        return dict.fromkeys(STAGES, math.nan)
    start_s, end_s = arrival_s(done), done.emitted_s[0]
    bounds, last = [], start_s
    for moment in _moments(done):
        last = min(max(last, moment), end_s)
        bounds.append(last)
    bounds.append(end_s)
    starts = [start_s, *bounds[:-1]]
    return {stage: after - before for stage, before, after in zip(STAGES, starts, bounds, strict=True)}


def _moments(done: Completion) -> tuple[float, ...]:
    """When each stage but the last ended; -inf where nothing tells."""
    author, made_s = done.tokens[0].author, done.tokens[0].made_s
    sent = [one for one in done.transfers if one.ok and one.target == author and one.started_s <= made_s]
    last = max(sent, key=lambda one: one.ended_s, default=None)
    ready_s = _last_at(done, KV_READY, made_s, author)
    if ready_s == -math.inf and last is not None:
        ready_s = last.ended_s
    return (
        _last_at(done, PREFILL_START, made_s),
        _last_at(done, PREFILL_END, made_s),
        last.started_s if last is not None else -math.inf,
        ready_s,
        _last_at(done, EXTEND_END, made_s, author),
    )


def _last_at(done: Completion, name: str, before_s: float, role: str = "") -> float:
    return max(
        (
            event.at_s
            for event in done.events
            if event.name == name and event.at_s <= before_s and role in ("", event.role)
        ),
        default=-math.inf,
    )


def waterfall(results: Iterable[Completion], **columns: Any) -> pd.DataFrame:
    """One row a completion and stage: request_id, relayed, stage, seconds, and the constant `columns`."""
    table = [
        {
            **columns,
            "request_id": done.request_id,
            "relayed": done.pipeline.startswith("P-RLD"),
            "stage": stage,
            "seconds": value,
        }
        for done in results
        for stage, value in stages_s(done).items()
    ]
    return pd.DataFrame(table, columns=[*columns, "request_id", "relayed", "stage", "seconds"])


def mean_by_stage(table: pd.DataFrame, by: Sequence[str] = ("system",)) -> pd.DataFrame:
    """Mean seconds a stage, one row a group and one column a stage in the order of `STAGES`."""
    wide = table.pivot_table(index=list(by), columns="stage", values="seconds", aggfunc="mean", sort=False)
    return wide.reindex(columns=list(STAGES)).reset_index().rename_axis(columns=None)
