"""Kill each role, cut the WAN: every request ends by its deadline with the right tokens or one typed error."""

from __future__ import annotations

import time

import pytest
from clusters import alive, alone, config, prompt

from pdd.cluster import Cluster
from pdd.errors import PddError, RoleDiedError
from pdd.request import Completion, SamplingParams

SAMPLING = SamplingParams(max_tokens=300)
IDS = prompt(1, 600)  # 2.4 MB of KV: a second on the link


def cut_for_two_seconds(cluster: Cluster) -> None:
    cluster.wan.cut()
    time.sleep(2)
    cluster.wan.restore()


FAULTS = {
    "p0": (0.12, lambda cluster: cluster.kill("p0")),
    "rld0": (0.5, lambda cluster: cluster.kill("rld0")),
    "md0": (0.5, lambda cluster: cluster.kill("md0")),
    "md0 after takeover": (1.6, lambda cluster: cluster.kill("md0")),
    "gw-a": (0.4, lambda cluster: cluster.kill("gw-a")),
    "wan for 2 s": (0.4, cut_for_two_seconds),
    "wan for good": (0.4, lambda cluster: cluster.wan.cut()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_relayed_request_survives_or_fails_with_one_typed_error(fault: str) -> None:
    delay_s, strike = FAULTS[fault]
    with Cluster.from_config(config()) as cluster:
        pids = list(cluster.pids.values())
        handle = cluster.submit(cluster.request(IDS, max_tokens=SAMPLING.max_tokens))
        time.sleep(delay_s)
        strike(cluster)
        outcome = handle.outcome()
    assert isinstance(outcome, Completion if fault != "gw-a" else RoleDiedError), outcome
    if isinstance(outcome, Completion):
        assert outcome.ids == alone(IDS, SAMPLING)
    assert not alive(pids)
    assert not cluster.run_dir.exists()


def test_lost_kv_can_be_made_an_error_instead_of_a_recompute() -> None:
    with Cluster.from_config(
        config("system=cdc_pd", "handoff.on_lost_kv=fail", "wan.rate_mbps=5")
    ) as cluster:
        handle = cluster.submit(cluster.request(IDS, max_tokens=20))
        time.sleep(0.5)
        cluster.kill("p0")
        outcome = handle.outcome()
    assert isinstance(outcome, PddError) and outcome.code == "kv_lost", outcome


def test_a_second_main_decode_takes_over_for_a_dead_one() -> None:
    with Cluster.from_config(config("system=cdc_pd", "cluster=two_each")) as cluster:
        handle = cluster.submit(cluster.request(IDS, max_tokens=SAMPLING.max_tokens))
        tokens = handle.tokens()
        author = [next(tokens) for _ in range(5)][-1].author
        cluster.kill(author)
        outcome = handle.result()
    assert outcome.ids == alone(IDS, SAMPLING)
    assert {token.author for token in outcome.tokens} == {"md0", "md1"}
    assert "replayed" in {event.name for event in outcome.events}


def test_a_deadline_is_kept_when_nobody_decodes() -> None:
    slow = config("system=cdc_pd", "wan.rate_mbps=1", "cluster.request_timeout_s=3")
    with Cluster.from_config(slow) as cluster:
        began_s = time.monotonic()
        outcome = cluster.submit(cluster.request(IDS, max_tokens=5)).outcome()
        assert isinstance(outcome, PddError) and outcome.code == "deadline", outcome
        assert time.monotonic() - began_s < 5
        # What the kernel had taken of the first one's KV still has to drain.
        small = cluster.request(IDS[:20], max_tokens=3)
        assert cluster.submit(small, timeout_s=20).result().ids, "the cluster goes on"


def test_a_cancelled_request_frees_its_place() -> None:
    with Cluster.from_config(config()) as cluster:
        handle = cluster.submit(cluster.request(IDS, max_tokens=300))
        time.sleep(0.4)
        handle.cancel()
        outcome = handle.outcome()
        assert isinstance(outcome, PddError) and outcome.code == "cancelled"
        time.sleep(0.8)
        assert all(role["active"] == 0 for role in cluster.stats()["roles"].values())
