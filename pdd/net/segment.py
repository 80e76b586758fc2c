"""What the KV stream carries: a range of tokens' KV with an opaque header.

Invariant: the stream never looks into `meta` or the payload; it only keeps their bytes and order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Segment:
    """KV of the tokens [start, end) to be sent. The payload's buffers must stay unchanged until the send
    ends.

    last: it ends the request's transfer. meta: opaque header of the KV. payload: contiguous buffers, in
    order.
    """

    request_id: str
    start: int
    end: int
    last: bool
    meta: bytes
    payload: Sequence[Any] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return sum(memoryview(part).nbytes for part in self.payload)


@dataclass(frozen=True)
class Received:
    """A segment that arrived whole from `peer`. `payload`: one contiguous buffer that is the callee's now."""

    peer: str
    request_id: str
    start: int
    end: int
    last: bool
    meta: bytes
    payload: bytearray = field(repr=False)
    began_s: float
    ended_s: float

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return len(self.payload)
