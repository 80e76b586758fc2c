"""The proxy backend on real sockets: what was asked is delivered, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import wan_tools as tools

from pdd.config import WanConfig
from pdd.errors import ClusterError, ConfigError
from pdd.net.wan import open_wan

CONFIG = WanConfig(rate_mbps=100.0, rtt_ms=20.0)
TOOLS = str(Path(tools.__file__))


def _echo() -> str:
    return tools.serve("127.0.0.1")


def _mbps(seconds: float) -> float:
    return (2 << 20) * 8 / 1e6 / (seconds - CONFIG.rtt_ms / 1000)


def test_rtt_and_rate_within_a_tenth(tmp_path: Path) -> None:
    with open_wan(CONFIG, ("a", "b"), tmp_path) as wan:
        address = wan.address("a", "b", _echo())
        with tools.connect(address) as sock:
            times = tools.rtts_ms(sock, 15)
            rates = [_mbps(tools.there_and_back_s(sock, os.urandom(2 << 20))) for _ in range(3)]
        assert times[len(times) // 2] == pytest.approx(20.0, rel=0.1)
        # A busy machine can make any one too slow; none may be too fast.
        assert 75.0 < max(rates) < 103.0
        stats = wan.stats()
    assert stats["a", "b"].bytes == stats["b", "a"].bytes == (6 << 20) + 15
    assert stats["a", "b"].packets >= (6 << 20) // CONFIG.mtu_bytes


def test_connection_costs_a_handshake(tmp_path: Path) -> None:
    with open_wan(dataclasses.replace(CONFIG, rtt_ms=60.0), ("a", "b"), tmp_path) as wan:
        address = wan.address("a", "b", _echo())
        began_s = time.monotonic()
        with tools.connect(address) as sock:
            tools.rtts_ms(sock, 1)
        assert time.monotonic() - began_s == pytest.approx(0.120, abs=0.02)


def test_small_message_beside_bulk(tmp_path: Path) -> None:
    with open_wan(CONFIG, ("a", "b"), tmp_path) as wan:
        address = wan.address("a", "b", _echo())
        with tools.connect(address) as large, tools.connect(address) as small:
            thread = threading.Thread(target=tools.there_and_back_s, args=(large, bytes(6 << 20)))
            thread.start()
            time.sleep(0.1)
            times = tools.rtts_ms(small, 8)
            assert thread.is_alive()
            thread.join()
    assert times[4] < 30.0


def test_update_cut_restore(tmp_path: Path) -> None:
    with open_wan(CONFIG, ("a", "b"), tmp_path) as wan, tools.connect(wan.address("a", "b", _echo())) as sock:
        tools.rtts_ms(sock, 1)
        wan.update(dataclasses.replace(CONFIG, rtt_ms=60.0))
        assert tools.rtts_ms(sock, 3)[1] == pytest.approx(60.0, rel=0.1)
        wan.cut()
        sock.sendall(b"y")
        sock.settimeout(0.4)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        wan.restore()
        assert sock.recv(1) == b"y"
        with pytest.raises(ConfigError, match="wan.backend"):
            wan.update(WanConfig(backend="none"))


def test_end_of_stream_reset_and_refusal_cross(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(5)
    with open_wan(CONFIG, ("a", "b"), tmp_path) as wan:
        address = wan.address("a", "b", f"127.0.0.1:{listener.getsockname()[1]}")
        near = tools.connect(address)
        near.sendall(b"hello")
        near.shutdown(socket.SHUT_WR)
        far, _ = listener.accept()
        assert tools.read(far, 5) == b"hello" and far.recv(1) == b""
        far.sendall(b"bye")
        far.close()
        assert tools.read(near, 3) == b"bye" and near.recv(1) == b""
        near.close()
        near = tools.connect(address)
        far, _ = listener.accept()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        near.close()
        with pytest.raises(ConnectionResetError):
            far.settimeout(5)
            far.recv(1)
        listener.close()
        near = tools.connect(address)
        with pytest.raises(ConnectionResetError):
            near.recv(1)


def test_addresses(tmp_path: Path) -> None:
    with open_wan(CONFIG, ("a", "b", "c"), tmp_path) as wan:
        assert wan.address("a", "a", "127.0.0.1:5") == "127.0.0.1:5"
        one = wan.address("a", "b", "tcp://127.0.0.1:5")
        assert one.startswith("tcp://127.0.0.1:") and one == wan.address("a", "b", "tcp://127.0.0.1:5")
        assert one != wan.address("c", "b", "tcp://127.0.0.1:5")
        assert wan.bind_host("c") == "127.0.0.1" and wan.enter("c") == []
        with pytest.raises(ClusterError, match="'d' is not part"):
            wan.address("a", "d", "127.0.0.1:5")
        with pytest.raises(ClusterError, match="host:port"):
            wan.address("a", "b", "nowhere")
    with pytest.raises(ClusterError, match="stopped"):
        wan.cut()
    with pytest.raises(ConfigError, match="datacenters"):
        open_wan(CONFIG, ("a", "a"), tmp_path)


def test_dead_relay_is_one_clear_error(tmp_path: Path) -> None:
    with open_wan(CONFIG, ("a", "b"), tmp_path) as wan:
        os.kill(wan.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(ClusterError, match="the shaper ended"):
            wan.stats()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_relay_ends_with_its_owner(sign: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, TOOLS, "hold", "proxy", str(tmp_path)]
    owner = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout
    pid = json.loads(owner.stdout.readline())["pid"]
    assert Path(f"/proc/{pid}").exists()
    owner.send_signal(sign)
    owner.wait(10)
    owner.stdout.close()
    assert tools.gone(pid)


def test_none_passes_addresses_and_refuses_the_rest(tmp_path: Path) -> None:
    with open_wan(WanConfig(backend="none"), ("a", "b"), tmp_path) as wan:
        assert wan.address("a", "b", "10.0.0.1:5") == "10.0.0.1:5"
        with pytest.raises(ClusterError, match="'none' cannot cut"):
            wan.cut()


ROOT = Path(__file__).resolve().parents[1]
