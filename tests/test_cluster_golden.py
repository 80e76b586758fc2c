"""The golden test: tokens through P, RLD and MD equal those of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from clusters import alone, config, prompt

from pdd.cluster import Cluster
from pdd.request import Completion, SamplingParams


@pytest.fixture(scope="module", params=["pdd_catchup", "pdd_oneshot", "cdc_pd"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with Cluster.from_config(config(f"system={request.param}", "wan.rate_mbps=60")) as up:
        yield up


def serve(cluster: Cluster, ids: list[int], **sampling: object) -> Completion:
    completion = cluster.generate(ids, **sampling)
    assert completion.ids == alone(ids, SamplingParams(**sampling))
    assert completion.disagreements == 0
    assert [token.position for token in completion.tokens] == list(range(len(completion.tokens)))
    assert len(completion.emitted_s) == len(completion.tokens)
    return completion


def test_greedy_multi_turn_with_part_of_the_prompt_in_the_drc(cluster: Cluster) -> None:
    ids = prompt(1, 500)
    first = serve(cluster, ids, max_tokens=100)
    assert len(set(first.ids)) > 40, "a constant answer would prove nothing"
    second = serve(cluster, [*ids, *first.ids, *prompt(2, 200)], max_tokens=100)
    relays = cluster.config.system.name != "cdc_pd"
    assert second.hit_tokens_md >= 448
    assert (second.takeover_position is not None) == relays
    wan = [transfer for transfer in second.transfers if transfer.path == "wan"]
    assert wan[0].start == second.hit_tokens_md, "only the suffix that MD lacks may cross"


def test_sampling_with_penalties_crosses_a_handoff(cluster: Cluster) -> None:
    serve(
        cluster, prompt(3, 450), max_tokens=90, temperature=0.9, top_p=0.9, top_k=80, seed=11,
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3,
    )  # fmt: skip


def test_stop_string_across_the_takeover(cluster: Cluster) -> None:
    ids = prompt(4, 450)
    whole = cluster.generate(ids, max_tokens=90)
    at = whole.takeover_position or 30
    stop = cluster.decode(whole.ids[at - 1 : at + 1])
    again = serve(cluster, ids, max_tokens=90, stop=(stop,))
    assert again.finish_reason == "stop"
    assert stop not in again.text


def test_takeover_at_the_last_token(cluster: Cluster) -> None:
    ids = prompt(5, 450)
    at = cluster.generate(ids, max_tokens=90).takeover_position or 20
    for tokens in (at, at + 1, at + 2):
        serve(cluster, ids[:-1] + [tokens], max_tokens=tokens)


def test_logprobs_are_reported_by_every_author(cluster: Cluster) -> None:
    completion = serve(cluster, prompt(6, 450), max_tokens=80, logprobs=2)
    assert all(token.logprob is not None and len(token.top) == 2 for token in completion.tokens)


def test_streaming_gives_the_same_tokens(cluster: Cluster) -> None:
    ids = prompt(7, 300)
    streamed = [token.id for token in cluster.generate(ids, stream=True, max_tokens=50)]
    assert streamed == alone(ids, SamplingParams(max_tokens=50))
