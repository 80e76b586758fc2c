"""Processes started are processes ended, whatever happens to the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from clusters import alive, children, folders

SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from clusters import config, prompt
from pdd.cluster import Cluster
with Cluster.from_config(config({override!r})) as cluster:
    cluster.submit(cluster.request(prompt(1, 600), max_tokens=300))
    print("up", flush=True)
    time.sleep(60)
"""


def backends() -> list[str]:
    root = os.geteuid() == 0 and os.path.exists("/dev/net/tun")
    return ["proxy", *(["netns"] if root else [])]


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_and_no_folder_is_left(how: signal.Signals, backend: str) -> None:
    before, spaces = folders(), namespaces()
    script = SCRIPT.format(tests=str(Path(__file__).parent), override=f"wan.backend={backend}")
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert parent.stdout is not None and parent.stdout.readline() == b"up\n"
    family = children(parent.pid)
    assert len(family) >= 4
    parent.send_signal(how)
    parent.wait(20)
    until = time.monotonic() + 10
    while time.monotonic() < until and (alive(family) or folders() > before or namespaces() > spaces):
        time.sleep(0.1)
    assert not alive(family)
    assert folders() <= before
    assert namespaces() <= spaces


def namespaces() -> set[str]:
    folder = Path("/var/run/netns")
    return {path.name for path in folder.glob("pdd-*")} if folder.is_dir() else set()
