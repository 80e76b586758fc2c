"""Backend `none`: no emulation; the machines' own network is the WAN.

Invariant: addresses pass through unchanged, and what this backend cannot do is an error, never ignored.
"""

from __future__ import annotations

from pathlib import Path

from pdd.config import WanConfig
from pdd.errors import ClusterError
from pdd.net.wan.backend import LinkStats, WanBackend


class UnshapedWan(WanBackend):
    """All datacenters listen on loopback when one machine plays them all."""

    def __init__(self, config: WanConfig, datacenters: tuple[str, ...], run_dir: Path) -> None:
        super().__init__(config, datacenters)

    def bind_host(self, datacenter: str) -> str:
        self._check_datacenter(datacenter)
        return "127.0.0.1"

    def enter(self, datacenter: str) -> list[str]:
        self._check_datacenter(datacenter)
        return []

    def address(self, source: str, target: str, host_port: str) -> str:
        self._check_datacenter(source, target)
        return host_port

    def update(self, config: WanConfig) -> None:
        raise _cannot("change")

    def cut(self) -> None:
        raise _cannot("cut")

    def restore(self) -> None:
        raise _cannot("restore")

    def stats(self) -> dict[tuple[str, str], LinkStats]:
        return {}

    def stop(self) -> None:
        return


def _cannot(verb: str) -> ClusterError:
    return ClusterError(f"wan.backend: 'none' cannot {verb} a link that it does not make; use proxy or netns")
