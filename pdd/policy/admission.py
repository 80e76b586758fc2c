"""Who joins a decode batch. Invariant: a batch never exceeds its limit, and nobody waits while there is a
place.
"""

from __future__ import annotations


def admit(active: int, max_batch: int, waiting: int = 1) -> int:
    """How many of `waiting` requests join a batch that holds `active` of at most `max_batch` requests.

    First come, first served; true as a bool when one that waits may join.
    """
    return max(0, min(waiting, max_batch - active))
