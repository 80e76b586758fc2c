"""Random numbers that cover their range evenly. Invariant: each of n equal parts of [0, 1) holds exactly one of n.

A run of 20 requests whose tail is 10% of a skewed distribution would otherwise often miss that tail; with one draw a
stratum a small run has the shape of a large one, and the order is still random.
"""

from __future__ import annotations

import numpy as np


def uniforms(size: int, rng: np.random.Generator) -> np.ndarray:
    """`size` numbers in [0, 1), one from each stratum, in random order (float64)."""
    return (rng.permutation(size) + rng.random(size)) / size
