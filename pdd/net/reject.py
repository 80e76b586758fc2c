"""Counting and logging of what a socket refused.

Invariant: every refusal is counted; at most `LINES` of a kind are logged in `WINDOW_S`, so that a flood of
garbage cannot fill the disk.
"""

from __future__ import annotations

import logging
from collections import Counter

from pdd.lifecycle import now_s

LINES = 20
WINDOW_S = 10.0

_log = logging.getLogger("pdd.net")


class Rejections:
    """`count[kind]`: how many; `note` adds one and logs one line."""

    def __init__(self, owner: str) -> None:
        self.count: Counter[str] = Counter()
        self._owner = owner
        self._windows: dict[str, tuple[float, int]] = {}

    def note(self, kind: str, reason: str) -> None:
        """Count a refusal of `kind` and log it, unless too many of that kind were logged just now."""
        self.count[kind] += 1
        since_s, lines = self._windows.get(kind, (now_s(), 0))
        if now_s() - since_s > WINDOW_S:
            since_s, lines = now_s(), 0
        self._windows[kind] = (since_s, lines + 1)
        if lines < LINES:
            _log.warning("%s: refused (%s): %s", self._owner, kind, reason)
        elif lines == LINES:
            _log.warning("%s: refused (%s): more of these are counted but not logged", self._owner, kind)
