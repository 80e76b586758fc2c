"""The requests of a run: prompts that share prefixes with histories, arrival times, output lengths.

Invariant: a build depends on its arguments alone, and each aspect has a random stream of its own, so that a
change of (say) the arrival rate leaves prompts, lengths and hit rates as they were.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdd.config import WorkloadConfig
from pdd.request import Request, SamplingParams
from pdd.workload.arrivals import poisson
from pdd.workload.hitrates import hit_rates
from pdd.workload.lengths import output_tokens

STREAMS = ("arrivals", "lengths", "hits", "contexts", "choices", "suffixes", "sampling")


@dataclass(frozen=True)
class TimedRequest:
    """A request, when it arrives (seconds from the start), and the share of its prompt that is history."""

    arrival_s: float
    request: Request
    hit_rate: float


@dataclass(frozen=True)
class Workload:
    """contexts: histories of `prompt_tokens` ids, to be served before the requests (`warm_up`)."""

    contexts: list[tuple[int, ...]]
    requests: list[TimedRequest]

    def warm_up(self) -> list[Request]:
        """One request a context, one token long, that fills P's prefix cache and the DRC."""
        return [
            Request(f"warm-{number}", context, SamplingParams(max_tokens=1))
            for number, context in enumerate(self.contexts)
        ]

    def timed(self) -> list[tuple[float, Request]]:
        """(arrival in seconds, request), as a cluster replays them."""
        return [(one.arrival_s, one.request) for one in self.requests]


def build(config: WorkloadConfig, vocab: int, seed: int, requests: int) -> Workload:
    """`requests` requests against `config.contexts` histories, ids uniform in [0, vocab).

    Request i repeats the first floor(h_i * prompt_tokens) ids of one history, at least one id is fresh;
    caches hold whole pages, so the true hit is that length rounded down to their page.
    """
    roots = np.random.SeedSequence(seed).spawn(len(STREAMS))
    rng = {name: np.random.default_rng(root) for name, root in zip(STREAMS, roots, strict=True)}
    size = config.prompt_tokens
    contexts = rng["contexts"].integers(0, vocab, (config.contexts, size))
    arrivals = poisson(config.rate_rps, requests, rng["arrivals"])
    hits = hit_rates(config, requests, rng["hits"])
    lengths = output_tokens(config, requests, rng["lengths"])
    choices = rng["choices"].integers(0, config.contexts, requests)
    fresh = rng["suffixes"].integers(0, vocab, (requests, size))
    seeds = rng["sampling"].integers(0, 2**63, requests)
    timed = []
    for number in range(requests):
        shared = min(int(hits[number] * size), size - 1)
        ids = np.concatenate([contexts[choices[number], :shared], fresh[number, shared:]])
        sampling = SamplingParams(
            max_tokens=int(lengths[number]), temperature=config.temperature, seed=int(seeds[number])
        )
        request = Request(f"s{seed}-r{number:04d}", tuple(ids.tolist()), sampling)
        timed.append(TimedRequest(float(arrivals[number]), request, float(hits[number])))
    return Workload([tuple(context) for context in contexts.tolist()], timed)
