"""Which pipeline answers a request: P-MD, P-RLD-MD, or the excluded P-RLD (facts: 1.2, 1.5, F5).

Invariant: a route is a pure function of the configuration and the query, so that roles and simulator decide
alike.

A new rule is one function: decorate it with `@register("name")`, let it say whether the request is relayed,
and allow its name in `RouterConfig.kind`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pdd.config import RouterConfig
from pdd.errors import ConfigError


@dataclass(frozen=True)
class RouteQuery:
    """What the router knows: prompt length, tokens cached at P and at MD, and whether an RLD is alive."""

    prompt_tokens: int
    hit_p_tokens: int
    hit_md_tokens: int
    relay_available: bool = True

    def hit_tokens(self, hit_of: str) -> int:
        """Cached tokens at the role whose hit rate is the key, `md` or `p`."""
        return self.hit_md_tokens if hit_of == "md" else self.hit_p_tokens


@dataclass(frozen=True)
class Route:
    """relay: an RLD decodes first. ends_at: `md`, or `rld` in the pipeline that the paper excludes."""

    relay: bool
    ends_at: str


Rule: TypeAlias = Callable[[RouterConfig, RouteQuery], bool]
RULES: dict[str, Rule] = {}


def register(kind: str) -> Callable[[Rule], Rule]:
    """Make a rule known under `router.kind=kind`. A name is given once."""

    def enter(rule: Rule) -> Rule:
        if kind in RULES:
            raise ConfigError(f"router.kind: {kind!r} is registered already; give another name")
        RULES[kind] = rule
        return rule

    return enter


@register("direct")
def direct(config: RouterConfig, query: RouteQuery) -> bool:
    """Never relay: intra-datacenter PD, and cross-datacenter PD without RLD."""
    return False


@register("hit_rate")
def hit_rate(config: RouterConfig, query: RouteQuery) -> bool:
    """Relay below a hit rate H (facts 1.2; the paper gives no H). Cached tokens are whole pages."""
    return query.hit_tokens(config.hit_of) < config.threshold * query.prompt_tokens


@register("length")
def length(config: RouterConfig, query: RouteQuery) -> bool:
    """Relay when more than `suffix_tokens` are missing: PrfaaS's rule (facts: T3)."""
    return query.prompt_tokens - query.hit_tokens(config.hit_of) > config.suffix_tokens


def route(config: RouterConfig, query: RouteQuery) -> Route:
    """The pipeline of a request. Without a living RLD every request goes P-MD.

    Raises:
        ConfigError: no rule is registered under `config.kind`.
    """
    rule = RULES.get(config.kind)
    if rule is None:
        raise ConfigError(
            f"router.kind: {config.kind!r} is not registered; known: {', '.join(sorted(RULES))}"
        )
    relay = query.relay_available and rule(config, query)
    ends_at = "rld" if relay and config.relayed_pipeline == "p_rld" else "md"
    return Route(relay, ends_at)
