"""Which share of a prompt is history. Invariant: each share lies within [hit_low, hit_high]."""

from __future__ import annotations

import numpy as np

from pdd.config import WorkloadConfig


def hit_rates(config: WorkloadConfig, requests: int, rng: np.random.Generator) -> np.ndarray:
    """Shares [requests] in [hit_low, hit_high].

    `beta`: Beta(beta_a, beta_b) stretched over the range; the paper's is skewed, 2-99%, mean 90% (facts: T2),
    and modelling.md fits (.79, .081). `uniform`: flat on the range, the paper's narrow case.
    """
    flat = config.hit_rate == "uniform"
    drawn = rng.random(requests) if flat else rng.beta(config.beta_a, config.beta_b, requests)
    return config.hit_low + (config.hit_high - config.hit_low) * drawn
