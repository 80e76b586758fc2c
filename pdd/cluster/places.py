"""Which processes a configuration asks for, and where they stand.

Invariant: a pure function of the configuration; names are role letters and a number (`p0`, `rld0`, `md0`, `gw-a`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdd.config import RunConfig


@dataclass(frozen=True)
class Place:
    """One role process and its datacenter."""

    role: str
    name: str
    datacenter: str


def places(config: RunConfig) -> tuple[Place, ...]:
    """Every process of the cluster. `system.main_decode=local` puts each MD beside a P (IDC-PD)."""
    cluster = config.cluster
    mains = cluster.main_decode
    if config.system.main_decode == "local":
        mains = tuple(cluster.prefill[index % len(cluster.prefill)] for index in range(len(mains)))
    relays = cluster.relay_decode if config.router.kind != "direct" else ()
    numbered = [
        *(Place("prefill", f"p{index}", dc) for index, dc in enumerate(cluster.prefill)),
        *(Place("relay_decode", f"rld{index}", dc) for index, dc in enumerate(relays)),
        *(Place("main_decode", f"md{index}", dc) for index, dc in enumerate(mains)),
    ]
    gateways = (Place("gateway", f"gw-{dc}", dc) for dc in dict.fromkeys(cluster.prefill))
    return (*gateways, *numbered)


def datacenters(config: RunConfig) -> tuple[str, ...]:
    """The distinct datacenters, in order of first use."""
    return tuple(dict.fromkeys(place.datacenter for place in places(config)))
