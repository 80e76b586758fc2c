"""Workloads: exact repetition, independent streams, and the distributions asked for."""

from __future__ import annotations

import dataclasses
import hashlib

import msgspec
import numpy as np
import pytest

from pdd.config import WorkloadConfig
from pdd.workload.hitrates import hit_rates
from pdd.workload.lengths import output_tokens
from pdd.workload.requests import Workload, build

SMALL = WorkloadConfig(rate_rps=2.0, prompt_tokens=64, contexts=3, output_mean_tokens=8, output_cap_tokens=30)


def small(**changes: object) -> Workload:
    return build(dataclasses.replace(SMALL, **changes), vocab=500, seed=7, requests=20)


def suffix(one: object) -> tuple[int, ...]:
    return one.request.prompt[int(one.hit_rate * 64) :]


def test_a_build_is_repeated_to_the_last_bit() -> None:
    built = small(temperature=0.7)
    plain = [[one.arrival_s, one.hit_rate, one.request] for one in built.requests]
    digest = hashlib.sha256(msgspec.json.encode([built.contexts, plain])).hexdigest()
    assert digest == "7db3617398bb630418653c63348009603d7a81935696604a95651a1490ebb4f2"
    assert build(SMALL, 500, 7, 20) == build(SMALL, 500, 7, 20) != build(SMALL, 500, 8, 20)


def test_each_aspect_has_its_own_stream() -> None:
    base = small()
    faster = small(rate_rps=9.0)
    assert [one.request for one in faster.requests] == [one.request for one in base.requests]
    assert faster.requests[3].arrival_s == pytest.approx(base.requests[3].arrival_s * 2 / 9)
    flat = small(hit_rate="uniform")
    assert [one.arrival_s for one in flat.requests] == [one.arrival_s for one in base.requests]
    assert [one.request.sampling for one in flat.requests] == [one.request.sampling for one in base.requests]
    assert flat.contexts == base.contexts
    short = small(output="constant")
    assert [one.request.prompt for one in short.requests] == [one.request.prompt for one in base.requests]
    assert [len(suffix(one)) for one in short.requests] != [len(suffix(one)) for one in flat.requests]


def test_prompts_share_exactly_the_stated_prefix_with_a_context() -> None:
    built = build(SMALL, vocab=10**6, seed=1, requests=50)
    for one in built.requests:
        prompt, shared = one.request.prompt, int(one.hit_rate * 64)
        longest = max(
            next((at for at, (a, b) in enumerate(zip(prompt, c, strict=True)) if a != b), 64)
            for c in built.contexts
        )
        assert len(prompt) == 64
        assert longest == min(shared, 63)
    assert [request.sampling.max_tokens for request in built.warm_up()] == [1, 1, 1]
    assert [request.prompt for request in built.warm_up()] == built.contexts
    assert built.timed()[4] == (built.requests[4].arrival_s, built.requests[4].request)


def test_a_whole_hit_still_leaves_one_fresh_id() -> None:
    one = build(dataclasses.replace(SMALL, hit_low=1.0, hit_high=1.0), 10**6, 0, 1).requests[0]
    assert one.hit_rate == 1.0 and one.request.prompt not in build(SMALL, 10**6, 0, 1).contexts


def test_arrivals_are_poisson_at_the_rate() -> None:
    built = build(dataclasses.replace(SMALL, prompt_tokens=2, rate_rps=4.0), 10, 3, 4000)
    gaps = np.diff([0.0] + [one.arrival_s for one in built.requests])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.06)


def test_the_default_beta_is_the_papers_skew() -> None:
    """Mean hit 90% on 2-99%, 20-30% of the requests below H = 0.95 (facts: T2; modelling.md)."""
    shares = hit_rates(WorkloadConfig(), 20_000, np.random.default_rng(0))
    assert 0.02 <= shares.min() and shares.max() <= 0.99
    assert shares.mean() == pytest.approx(0.90, abs=0.01)
    assert 0.20 < (shares < 0.95).mean() < 0.30
    narrow = WorkloadConfig(hit_rate="uniform", hit_low=0.85, hit_high=0.95)
    flat = hit_rates(narrow, 5000, np.random.default_rng(0))
    assert flat.min() >= 0.85 and flat.max() <= 0.95 and flat.mean() == pytest.approx(0.90, abs=0.002)


def test_lengths_have_the_mean_and_the_cap() -> None:
    config = WorkloadConfig()
    drawn = output_tokens(config, 20_000, np.random.default_rng(0))
    assert drawn.min() >= 1 and drawn.max() == config.output_cap_tokens
    assert drawn.mean() == pytest.approx(96 * 0.984 + 0.5, rel=0.03)
    constant = output_tokens(WorkloadConfig(output="constant"), 3, np.random.default_rng(0))
    assert constant.tolist() == [96, 96, 96]


def test_few_requests_have_the_shape_of_many() -> None:
    """20 requests hold the tail that a skewed distribution hides: mean 90%, a quarter below 95% (facts: T2)."""
    hits = [one.hit_rate for one in build(WorkloadConfig(), 500, 3, 20).requests]
    assert sum(hits) / 20 == pytest.approx(0.90, abs=0.02)
    assert sum(hit < 0.95 for hit in hits) in (4, 5, 6)
