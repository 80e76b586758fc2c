"""The netns backend: kernel TCP through the packet shaper, and nothing left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import wan_tools as tools

from pdd.config import WanConfig
from pdd.errors import ClusterError
from pdd.net.wan import WanBackend, open_wan
from pdd.net.wan import netns as module

MISSING = module.what_is_missing()
needs_netns = pytest.mark.skipif(bool(MISSING), reason=f"netns needs {MISSING}")
CONFIG = WanConfig(backend="netns", rate_mbps=100.0, rtt_ms=20.0)
TOOLS = str(Path(tools.__file__))
ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def _echo(wan: WanBackend, datacenter: str) -> Iterator[str]:
    command = [*wan.enter(datacenter), sys.executable, TOOLS, "serve", wan.bind_host(datacenter)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.stdout.close()
        process.wait(5)


def _measure(wan: WanBackend, source: str, address: str) -> dict[str, Any]:
    command = [*wan.enter(source), sys.executable, TOOLS, "measure", address]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30, check=True).stdout
    answer: dict[str, Any] = json.loads(out)
    return answer


@needs_netns
def test_rtt_order_and_every_pair(tmp_path: Path) -> None:
    with open_wan(dataclasses.replace(CONFIG, loss=0.02), ("a", "b", "c"), tmp_path) as wan:
        with _echo(wan, "b") as address:
            assert wan.address("a", "b", address) == address
            for source in ("a", "c"):
                # The tool compares all bytes of a stream that meets losses, so cut packets are checked here.
                assert _measure(wan, source, address)["rtt_ms"] == pytest.approx(20.0, abs=2.0)
        stats = wan.stats()
    assert stats["a", "b"].bytes > tools.STREAM_BYTES < stats["b", "c"].bytes
    assert stats["a", "c"].bytes == 0
    assert sum(link.lost for link in stats.values()) > 0


@needs_netns
def test_update_and_cut(tmp_path: Path) -> None:
    with open_wan(CONFIG, ("a", "b"), tmp_path) as wan, _echo(wan, "b") as address:
        wan.update(dataclasses.replace(CONFIG, rtt_ms=50.0))
        assert _measure(wan, "a", address)["rtt_ms"] == pytest.approx(50.0, abs=3.5)
        wan.cut()
        connect = f"import socket; socket.create_connection({tuple(address.split(':'))!r}, 0.5)"
        command = [*wan.enter("a"), sys.executable, "-c", connect]
        assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=20).returncode != 0
        assert wan.stats()["a", "b"].dropped > 0
        wan.restore()
        assert _measure(wan, "a", address)["rtt_ms"] == pytest.approx(50.0, abs=3.5)


@needs_netns
def test_one_datacenter_has_an_address(tmp_path: Path) -> None:
    with open_wan(CONFIG, ("a",), tmp_path) as wan, _echo(wan, "a") as address:
        assert _measure(wan, "a", address)["rtt_ms"] < 5.0


@needs_netns
def test_enter_says_what_is_wrong(tmp_path: Path) -> None:
    with open_wan(CONFIG, ("a", "b"), tmp_path) as wan:
        words = wan.enter("a")
    done = subprocess.run([*words, "true"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1 and done.stderr.startswith("enter: /proc/")


def _namespaces() -> set[str]:
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue
    return found


@needs_netns
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_owner(sign: signal.Signals, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, TOOLS, "hold", "netns", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout
    held = json.loads(owner.stdout.readline())
    file = next(word for word in held["enter"] if word.startswith("/proc/"))
    inside = subprocess.run(
        [*held["enter"], sys.executable, "-c", "import os; print(os.readlink('/proc/self/ns/net'))"],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    ).stdout.strip()
    assert inside not in _namespaces()
    owner.send_signal(sign)
    owner.wait(10)
    owner.stdout.close()
    # Nothing but the shaper's open file held the namespace: with it gone, the kernel removes both.
    assert tools.gone(held["pid"]) and not os.path.exists(file) and inside not in _namespaces()


def test_missing_right_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="missing here: root; wan.backend=proxy works without"):
        open_wan(CONFIG, ("a", "b"), tmp_path)
