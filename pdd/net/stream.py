"""The KV stream as the roles use it: `KvPool.send(Segment)` on one side, `KvServer`'s callback with a
`Received` on the other.

Invariant: a segment is delivered whole and checked, once; or its `Transfer` says why not.

Files: `frames` (wire format), `wire` (a socket that speaks it), `segment` (what is carried), `server` and
`assembly` (receiving), `pool`, `lane` and `flight` (sending), `secret` (the challenge).
"""

from __future__ import annotations

from pdd.net.pool import KvPool, PoolStats
from pdd.net.segment import Received, Segment
from pdd.net.server import KvServer

__all__ = ["KvPool", "KvServer", "PoolStats", "Received", "Segment"]
