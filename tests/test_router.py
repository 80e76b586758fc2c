"""Routing, placement and admission: pure decisions."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.config import RouterConfig
from pdd.errors import ConfigError, RoleDiedError
from pdd.policy import router
from pdd.policy.admission import admit
from pdd.policy.placement import Candidate, least_loaded, longest_match
from pdd.policy.router import Route, RouteQuery, register, route

QUERIES = st.builds(
    RouteQuery, st.just(1000), st.integers(0, 1000), st.integers(0, 1000), relay_available=st.booleans()
)


@given(QUERIES)
def test_direct_never_relays(query: RouteQuery) -> None:
    assert route(RouterConfig(kind="direct"), query) == Route(False, "md")


@given(QUERIES, st.floats(0, 1))
def test_hit_rate_relays_below_the_threshold_only(query: RouteQuery, threshold: float) -> None:
    config = RouterConfig(kind="hit_rate", threshold=threshold)
    relay = query.relay_available and query.hit_md_tokens / 1000 < threshold
    assert route(config, query) == Route(relay, "md")
    assert not route(config, dataclasses.replace(query, hit_md_tokens=1000)).relay


def test_the_key_can_be_the_hit_rate_of_p() -> None:
    query = RouteQuery(1000, hit_p_tokens=990, hit_md_tokens=100)
    assert route(RouterConfig(hit_of="md"), query).relay
    assert not route(RouterConfig(hit_of="p"), query).relay


def test_length_relays_a_long_missing_suffix() -> None:
    config = RouterConfig(kind="length", suffix_tokens=256)
    assert not route(config, RouteQuery(10_000, 0, 10_000 - 256)).relay
    assert route(config, RouteQuery(10_000, 0, 10_000 - 257)).relay


def test_the_excluded_pipeline_ends_at_rld_only_when_relayed() -> None:
    config = RouterConfig(relayed_pipeline="p_rld")
    assert route(config, RouteQuery(100, 0, 0)) == Route(True, "rld")
    assert route(config, RouteQuery(100, 0, 0, relay_available=False)) == Route(False, "md")
    assert route(config, RouteQuery(100, 100, 100)) == Route(False, "md")


def test_a_new_rule_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "RULES", dict(router.RULES))

    @register("odd")
    def odd(config: RouterConfig, query: RouteQuery) -> bool:
        return query.prompt_tokens % 2 == 1

    config = RouterConfig()
    object.__setattr__(config, "kind", "odd")
    assert route(config, RouteQuery(3, 0, 0)).relay and not route(config, RouteQuery(2, 0, 0)).relay
    with pytest.raises(ConfigError, match="'odd' is registered already"):
        register("odd")(odd)
    object.__setattr__(config, "kind", "even")
    with pytest.raises(ConfigError, match="'even' is not registered; known: direct, hit_rate, length, odd"):
        route(config, RouteQuery(2, 0, 0))


def test_placement_prefers_match_then_load_then_name_in_any_order() -> None:
    ranked = [
        Candidate("md1", 64, 0.9),
        Candidate("md3", 0, 0.1),
        Candidate("md0", 0, 0.5),
        Candidate("md2", 0, 0.5),
    ]
    for start in range(4):
        left = ranked[start:]
        assert longest_match(left) == longest_match(left[::-1]) == left[0]
    assert least_loaded(ranked).name == "md3"
    with pytest.raises(RoleDiedError, match="no MD is alive"):
        longest_match([])


@given(st.integers(0, 20), st.integers(1, 16), st.integers(0, 20))
def test_admission_fills_the_batch_and_never_beyond(active: int, limit: int, waiting: int) -> None:
    joins = admit(active, limit, waiting)
    assert 0 <= joins <= waiting
    assert active + joins <= max(active, limit)
    assert joins == waiting or active + joins >= limit
