"""Serving the histories before the clock runs, so that P's prefix cache and the DRC hold them.

Invariant: after `warm`, every history is in the DRC of a system that has one, whichever way its requests take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdd.cluster import Cluster
from pdd.errors import ClusterError
from pdd.lifecycle import SINGULAR
from pdd.request import Completion

LENGTHS = (1, 64, 256, 1024)
"""Output lengths to try: one token does, unless RLD ends the answer before MD has the KV (singular traffic)."""


def warm(cluster: Cluster, histories: Iterable[Sequence[int]]) -> None:
    """Serve each history, one after another.

    Raises:
        ClusterError: RLD ended even a long answer before MD had the KV; the link is too slow for this workload.
        PddError: a request failed.
    """
    for history in histories:
        if not any(_reached_md(cluster, history, length) for length in LENGTHS):
            raise ClusterError(f"warm-up: MD got no KV while RLD made {LENGTHS[-1]} tokens; use a faster wan")


def _reached_md(cluster: Cluster, history: Sequence[int], tokens: int) -> bool:
    room = cluster.max_tokens - len(history)
    done = cluster.generate(history, max_tokens=min(tokens, room))
    return not relayed_in_vain(done) or tokens >= room


def relayed_in_vain(done: Completion) -> bool:
    """Whether RLD ended the answer before MD had the KV, so that nothing entered the DRC."""
    return any(event.name == SINGULAR for event in done.events)
