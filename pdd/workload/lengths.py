"""How long answers are. Invariant: each length is a whole number from 1 to the cap."""

from __future__ import annotations

import numpy as np

from pdd.config import WorkloadConfig
from pdd.workload.strata import uniforms


def output_tokens(config: WorkloadConfig, requests: int, rng: np.random.Generator) -> np.ndarray:
    """Output lengths in tokens [requests], int64.

    `exponential`: mean `output_mean_tokens` before the cut at `output_cap_tokens`, which takes 2% off the
    mean at the defaults (facts: set-up, mean 1000; in small 96); stratified. `constant`: the mean itself.
    """
    if config.output == "constant":
        return np.full(requests, config.output_mean_tokens)
    drawn = np.ceil(-config.output_mean_tokens * np.log1p(-uniforms(requests, rng))).astype(np.int64)
    return np.clip(drawn, 1, config.output_cap_tokens)
