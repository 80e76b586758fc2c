"""Backend `proxy`: an unprivileged relay process through which all connections between datacenters run.

Invariant: every byte between two datacenters goes through that pair's shaped link; there is one forwarder for
each (source, target, listener). What a TCP relay cannot do: drop a packet. A packet that the loss rate picks
delays its own flow by one RTT instead, and a full queue stops the sender instead of dropping.
"""

from __future__ import annotations

from pathlib import Path

from pdd.config import WanConfig, to_plain
from pdd.net.wan.backend import LinkStats, WanBackend, split_address
from pdd.net.wan.worker import Worker


class ProxyWan(WanBackend):
    """All datacenters live on this machine's loopback; the relay stands between them."""

    def __init__(self, config: WanConfig, datacenters: tuple[str, ...], run_dir: Path) -> None:
        super().__init__(config, datacenters)
        start = {"config": to_plain(config), "datacenters": list(datacenters)}
        self._worker = Worker("pdd.net.wan.relay", start, run_dir / "wan_proxy.log")
        self._forwarders: dict[tuple[str, str, str], str] = {}

    @property
    def pid(self) -> int:
        """The relay's process id."""
        return self._worker.pid

    def bind_host(self, datacenter: str) -> str:
        self._check_datacenter(datacenter)
        return "127.0.0.1"

    def enter(self, datacenter: str) -> list[str]:
        self._check_datacenter(datacenter)
        return []

    def address(self, source: str, target: str, host_port: str) -> str:
        self._check_datacenter(source, target)
        scheme, host, port = split_address(host_port)
        if source == target:
            return host_port
        key = (source, target, f"{host}:{port}")
        if key not in self._forwarders:
            answer = self._worker.ask("open", source=source, target=target, host=host, port=port)
            self._forwarders[key] = f"127.0.0.1:{answer['port']}"
        return scheme + self._forwarders[key]

    def update(self, config: WanConfig) -> None:
        self._check_update(config)
        self._worker.ask("update", config=to_plain(config))
        self.config = config

    def cut(self) -> None:
        self._worker.ask("cut")

    def restore(self) -> None:
        self._worker.ask("restore")

    def stats(self) -> dict[tuple[str, str], LinkStats]:
        rows = self._worker.ask("stats")["links"]
        return {(source, target): LinkStats(*numbers) for source, target, *numbers in rows}

    def stop(self) -> None:
        self._worker.stop()
