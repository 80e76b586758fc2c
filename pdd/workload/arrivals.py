"""When requests arrive. Invariant: times are sorted, start above 0, and depend on rate, count and stream
alone.
"""

from __future__ import annotations

import numpy as np


def poisson(rate_rps: float, requests: int, rng: np.random.Generator) -> np.ndarray:
    """Arrival times in seconds [requests] of a Poisson process with `rate_rps` requests a second."""
    return np.cumsum(rng.exponential(1.0 / rate_rps, requests))
