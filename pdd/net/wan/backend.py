"""What every WAN backend offers, and `open_wan`, which starts the one that the config names.

Invariant: a backend that exists is running; `stop()` (or leaving its `with` block, or the death of its
process) removes every process, socket and namespace that it made.
"""

from __future__ import annotations

import abc
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from pdd.config import WanConfig
from pdd.errors import ClusterError, ConfigError


class LinkStats(NamedTuple):
    """What one direction of a datacenter pair has carried so far.

    bytes: delivered; packets: of `mtu_bytes` or less; lost: by the link's loss rate (in `proxy` late by one
    RTT, not gone); dropped: because the queue was full or the link cut.
    """

    bytes: int
    packets: int
    lost: int = 0
    dropped: int = 0


class WanBackend(abc.ABC):
    """The link between each pair of datacenters, and how processes are put into them."""

    def __init__(self, config: WanConfig, datacenters: tuple[str, ...]) -> None:
        if not datacenters or len(set(datacenters)) != len(datacenters):
            raise ConfigError(f"datacenters: {datacenters!r} is not possible; give different names")
        self.config = config
        self.datacenters = datacenters

    @abc.abstractmethod
    def bind_host(self, datacenter: str) -> str:
        """The IP address on which processes of the datacenter listen."""

    @abc.abstractmethod
    def enter(self, datacenter: str) -> list[str]:
        """Words to put before a command line so that it runs inside the datacenter; may be empty."""

    @abc.abstractmethod
    def address(self, source: str, target: str, host_port: str) -> str:
        """Where a process of `source` reaches the listener `host_port` ("host:port") of `target`.

        A leading "tcp://" is kept. Inside one datacenter the answer is the question.
        """

    @abc.abstractmethod
    def update(self, config: WanConfig) -> None:
        """Give the live links a new rate, RTT, jitter, loss, queue and cross traffic."""

    @abc.abstractmethod
    def cut(self) -> None:
        """Let nothing through, without closing any connection, until `restore()`."""

    @abc.abstractmethod
    def restore(self) -> None:
        """End a `cut()`."""

    @abc.abstractmethod
    def stats(self) -> dict[tuple[str, str], LinkStats]:
        """Totals since the start for each (source, target)."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Take everything down; a second call does nothing."""

    def __enter__(self) -> WanBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _check_datacenter(self, *names: str) -> None:
        for name in names:
            if name not in self.datacenters:
                known = ", ".join(self.datacenters)
                raise ClusterError(f"datacenter: {name!r} is not part of this WAN; known here: {known}")

    def _check_update(self, config: WanConfig) -> None:
        for key in ("backend", "mtu_bytes"):
            ours, theirs = getattr(self.config, key), getattr(config, key)
            if ours != theirs:
                raise ConfigError(f"wan.{key}: {theirs!r} is not possible on a live link; give {ours!r}")


def split_address(host_port: str) -> tuple[str, str, int]:
    """("tcp://" or "", host, port) of an address.

    Raises:
        ClusterError: it is not "host:port".
    """
    scheme, _, rest = host_port.rpartition("://")
    host, _, port = rest.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ClusterError(f"address: {host_port!r} is not an address; give host:port")
    return (f"{scheme}://" if scheme else ""), host, int(port)


def open_wan(config: WanConfig, datacenters: tuple[str, ...], run_dir: Path) -> WanBackend:
    """Start the backend that `config.backend` names; logs of its process go to `run_dir`.

    Raises:
        ClusterError: the backend cannot run on this machine; the message says what is missing.
    """
    kinds: dict[str, Any] = {"proxy": _proxy, "netns": _netns, "none": _none}
    return kinds[config.backend]()(config, tuple(datacenters), Path(run_dir))


def _proxy() -> type[WanBackend]:
    from pdd.net.wan.proxy import ProxyWan

    return ProxyWan


def _netns() -> type[WanBackend]:
    from pdd.net.wan.netns import NetnsWan

    return NetnsWan


def _none() -> type[WanBackend]:
    from pdd.net.wan.unshaped import UnshapedWan

    return UnshapedWan
