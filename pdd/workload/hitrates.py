"""Which share of a prompt is history. Invariant: each share lies within [hit_low, hit_high]."""

from __future__ import annotations

import numpy as np
from scipy import stats

from pdd.config import WorkloadConfig
from pdd.workload.strata import uniforms


def hit_rates(config: WorkloadConfig, requests: int, rng: np.random.Generator) -> np.ndarray:
    """Shares [requests] in [hit_low, hit_high].

    `beta`: Beta(beta_a, beta_b) stretched over the range; the paper's is skewed, 2-99%, mean 90% (facts: T2),
    and (.79, .081) has that mean and 75% of its mass above 95%. `uniform`: flat on the range, the paper's narrow
    case. Stratified, so that few requests have the shape too.
    """
    drawn = uniforms(requests, rng)
    if config.hit_rate == "beta":
        drawn = stats.beta.ppf(drawn, config.beta_a, config.beta_b)
    return config.hit_low + (config.hit_high - config.hit_low) * drawn
