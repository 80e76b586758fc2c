"""Backend `netns`: a network namespace for each datacenter, joined by a user-space packet shaper.

Invariant: the kernel's own TCP runs at both ends, so slow start, congestion control and retransmission are
real; nothing outside the namespaces is touched, and nothing of them remains when the shaper process is gone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pdd.config import WanConfig, to_plain
from pdd.errors import ClusterError
from pdd.net.wan.backend import LinkStats, WanBackend, split_address
from pdd.net.wan.worker import Worker

ENTER = str(Path(__file__).with_name("enter.py"))
MOST_DATACENTERS = 200


class NetnsWan(WanBackend):
    """Datacenter i has the address 10.77.0.(i+1), known inside the namespaces only."""

    def __init__(self, config: WanConfig, datacenters: tuple[str, ...], run_dir: Path) -> None:
        super().__init__(config, datacenters)
        missing = what_is_missing()
        if missing:
            raise _unable(missing)
        if len(datacenters) > MOST_DATACENTERS:
            raise ClusterError(f"datacenters: {len(datacenters)} are too many; at most {MOST_DATACENTERS}")
        self._hosts = {name: f"10.77.0.{index + 1}" for index, name in enumerate(datacenters)}
        start = {
            "config": to_plain(config),
            "datacenters": list(datacenters),
            "addresses": list(self._hosts.values()),
        }
        try:
            self._worker = Worker("pdd.net.wan.shaper", start, run_dir / "wan_netns.log")
        except ClusterError as error:
            raise _unable(str(error)) from error
        files = self._worker.ask("namespaces")["files"]
        self._files: dict[str, str] = dict(zip(datacenters, files, strict=True))

    @property
    def pid(self) -> int:
        """The shaper's process id."""
        return self._worker.pid

    def bind_host(self, datacenter: str) -> str:
        self._check_datacenter(datacenter)
        return self._hosts[datacenter]

    def enter(self, datacenter: str) -> list[str]:
        self._check_datacenter(datacenter)
        return [sys.executable, "-I", "-S", ENTER, self._files[datacenter], "--"]

    def address(self, source: str, target: str, host_port: str) -> str:
        self._check_datacenter(source, target)
        split_address(host_port)
        return host_port

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


def what_is_missing() -> str:
    """Why this machine cannot run the backend, or an empty text."""
    if sys.platform != "linux":
        return f"Linux (this is {sys.platform})"
    if os.geteuid() != 0:
        return "root"
    if not os.path.exists("/dev/net/tun"):
        return "/dev/net/tun"
    return ""


def _unable(missing: str) -> ClusterError:
    return ClusterError(
        f"wan.backend: 'netns' needs Linux, root and /dev/net/tun; missing here: {missing}; "
        "wan.backend=proxy works without"
    )
