"""Bad input at every door of a running cluster: one clear error each, nothing lost, the cluster goes on."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
from clusters import alone, config, prompt

from pdd.cluster import Cluster
from pdd.errors import ClusterError, ConfigError, PddError, RequestError, SecretError
from pdd.net.control import ControlSocket
from pdd.net.messages import Message, Shutdown
from pdd.net.stream import KvPool
from pdd.request import SamplingParams
from pdd.roles.boot import stdin_line


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.from_config(config()) as up:
        yield up


def goes_on(cluster: Cluster) -> None:
    ids = prompt(9, 120)
    assert cluster.generate(ids, max_tokens=10).ids == alone(ids, SamplingParams(max_tokens=10))


@pytest.mark.parametrize(
    ("ids", "sampling", "field"),
    [
        ([], {}, "prompt"),
        ([1] * 8000, {"max_tokens": 500}, "prompt"),
        ([1, 512], {}, "prompt[1]"),
        ([1, -1], {}, "prompt[1]"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"stop": ("",)}, "stop"),
        ([1], {"temprature": 1.0}, "temprature"),
    ],
)
def test_a_request_that_nobody_could_serve(
    cluster: Cluster, ids: list[int], sampling: dict, field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        cluster.generate(ids, **sampling)
    assert field in str(caught.value) and "\n" not in str(caught.value)
    goes_on(cluster)


def test_an_id_that_was_used_before(cluster: Cluster) -> None:
    request = cluster.request([1, 2, 3], max_tokens=2)
    cluster.submit(request).result()
    with pytest.raises(RequestError, match="request_id"):
        cluster.submit(request)


def ports(cluster: Cluster) -> list[tuple[str, int]]:
    found = []
    for addresses in cluster.addresses.values():
        for address in filter(None, addresses):
            host, port = address.removeprefix("tcp://").rsplit(":", 1)
            found.append((host, int(port)))
    return found


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(4096), b"", struct.pack(">I", 2**31) * 8, b"\xff" * 10],
    ids=["http", "noise", "silence", "huge lengths", "truncated greeting"],
)
def test_garbage_on_every_listening_socket(cluster: Cluster, data: bytes) -> None:
    assert len(ports(cluster)) == 6, "four control sockets and two KV servers"
    for place in ports(cluster):
        with socket.create_connection(place, timeout=5) as connection:
            connection.sendall(data)
    goes_on(cluster)


def test_a_wrong_secret_on_the_kv_stream_is_refused(cluster: Cluster) -> None:
    pool = KvPool("p9", "md0", cluster.addresses["md0"][1], b"x" * 32, cluster.config.kv_stream)
    with pytest.raises(SecretError):
        asyncio.run(pool.start())
    goes_on(cluster)


def test_an_order_with_a_wrong_secret_is_not_obeyed(cluster: Cluster) -> None:
    async def order() -> None:
        stranger = ControlSocket("client", b"x" * 32, messages=Message)
        for name, (control, _) in cluster.addresses.items():
            stranger.connect(name, control)
            await stranger.send(name, Shutdown())
        await asyncio.sleep(0.3)
        stranger.close()

    asyncio.run(order())
    goes_on(cluster)


def test_a_role_with_a_wrong_secret_is_not_taken_in(cluster: Cluster) -> None:
    other = config("cluster.start_timeout_s=3")
    command = [sys.executable, "-m", "pdd.roles", "gateway", "--name", "gw-a", "--datacenter", "a"]
    process = subprocess.run(
        [*command, "--join", cluster._client.address],
        input=stdin_line(b"x" * 32, other), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    # Its parent's end of stdin closes at once, which ends it too; either way it is never part of the cluster.
    assert "Traceback" not in process.stderr
    goes_on(cluster)


def test_impossible_clusters_are_one_line() -> None:
    with pytest.raises(ConfigError, match="cluster.relay_decode"):
        config("cluster.relay_decode=[z]")
    with pytest.raises(ConfigError, match="wan.backend"):
        config("wan.backend=pigeon")
    with pytest.raises(ConfigError, match="handoff.modus"):
        config("+handoff.modus=catchup")


def test_a_model_that_cannot_be_loaded_is_one_line() -> None:
    with pytest.raises(PddError) as caught, Cluster.from_config(config("model=hf", "model.path=/nowhere")):
        pass
    assert "model.path" in str(caught.value) and "\n" not in str(caught.value)


def test_a_closed_cluster_says_so() -> None:
    cluster = Cluster.from_config(config())
    with pytest.raises(ClusterError, match="not up"):
        cluster.generate([1, 2, 3])
