"""Completions as a Chrome/Perfetto trace: one process a role, one thread a request.

Invariant: times are microseconds from the earliest event of the trace, and every slice has a length of 0 or
more. Open the file at ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pdd import lifecycle
from pdd.request import Completion, Event

SPANS = {
    lifecycle.PREFILL_START: (lifecycle.PREFILL_END, "prefill"),
    lifecycle.EXTEND_START: (lifecycle.EXTEND_END, "extend"),
}
ENDS = {end for end, _ in SPANS.values()}
GATEWAY = "gateway"


def trace(results: Sequence[Completion]) -> dict[str, Any]:
    """The trace as plain data (Trace Event Format, JSON object form)."""
    entries: list[dict[str, Any]] = []
    for done in results:
        entries += _slices(done) + _transfers(done) + _tokens(done)
    origin_s = min((entry["ts"] for entry in entries), default=0.0)
    roles = {name: number + 1 for number, name in enumerate(sorted({entry["pid"] for entry in entries}))}
    threads = {done.request_id: number + 1 for number, done in enumerate(results)}
    for entry in entries:
        entry["ts"] = (entry["ts"] - origin_s) * 1e6
        entry["pid"], entry["tid"] = roles[entry["pid"]], threads[entry["tid"]]
    return {"traceEvents": _names(roles, threads, entries) + entries, "displayTimeUnit": "ms"}


def write_trace(results: Sequence[Completion], path: Path) -> Path:
    """Write `trace(results)` to `path` as JSON."""
    path.write_text(json.dumps(trace(results)), "utf-8")
    return path


def _entry(name: str, role: str, request_id: str, at_s: float, phase: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "ph": phase, "pid": role, "tid": request_id, "ts": at_s, **more}


def _slice(
    name: str, role: str, request_id: str, start_s: float, end_s: float, **args: Any
) -> dict[str, Any]:
    lasts = max(0.0, end_s - start_s) * 1e6
    return _entry(name, role, request_id, start_s, "X", dur=lasts, cat="pdd", args=args)


def _slices(done: Completion) -> list[dict[str, Any]]:
    """Prefill and extend as slices, other events as instants."""
    out = []
    open_: dict[tuple[str, str], Event] = {}
    for event in sorted(done.events, key=lambda one: one.at_s):
        if event.name in SPANS:
            open_[event.role, SPANS[event.name][0]] = event
        elif event.name in ENDS:
            if (start := open_.pop((event.role, event.name), None)) is not None:
                name = SPANS[start.name][1]
                out.append(_slice(name, event.role, done.request_id, start.at_s, event.at_s, **start.detail))
        else:
            out.append(_instant(event.name, event.role, done.request_id, event.at_s, event.detail))
    return out + [
        _instant(event.name, event.role, done.request_id, event.at_s, event.detail)
        for event in open_.values()
    ]


def _instant(name: str, role: str, request_id: str, at_s: float, detail: dict[str, Any]) -> dict[str, Any]:
    return _entry(name, role, request_id, at_s, "i", s="t", cat="pdd", args=detail)


def _transfers(done: Completion) -> list[dict[str, Any]]:
    """Transfers overlap in a thread, so they are async slices at the sender: queued, then moving."""
    out = []
    for number, one in enumerate(done.transfers):
        args = {"bytes": one.bytes, "path": one.path, "start": one.start, "end": one.end, "ok": one.ok}
        spans = (
            (f"queue {one.path}", one.queued_s, one.started_s),
            (f"KV to {one.target}", one.started_s, one.ended_s),
        )
        for name, start_s, end_s in spans:
            more = {"cat": "kv", "id": f"{done.request_id}/{number}"}
            out.append(_entry(name, one.source, done.request_id, start_s, "b", args=args, **more))
            out.append(_entry(name, one.source, done.request_id, max(start_s, end_s), "e", **more))
    return out


def _tokens(done: Completion) -> list[dict[str, Any]]:
    """Each token twice: when its author made it, and when the user got it."""
    out = []
    for token, emitted_s in zip(done.tokens, done.emitted_s, strict=True):
        detail = {"position": token.position, "id": token.id, "author": token.author}
        out.append(_instant("token", token.author, done.request_id, token.made_s, detail))
        out.append(_instant("emit", GATEWAY, done.request_id, emitted_s, detail))
    return out


def _names(
    roles: dict[str, int], threads: dict[str, int], entries: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    used = sorted({(entry["pid"], entry["tid"]) for entry in entries})
    ids = {number: request_id for request_id, number in threads.items()}
    processes = [
        {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": {"name": name}}
        for name, number in roles.items()
    ]
    return processes + [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": ids[tid]}}
        for pid, tid in used
    ]
