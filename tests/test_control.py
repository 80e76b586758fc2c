"""ControlSocket: what arrives is valid and from a holder of the secret; the rest is counted, harmless."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from aio import aio

from pdd.errors import ConfigError, WireError
from pdd.net import control
from pdd.net import secret as keys
from pdd.net.control import ControlSocket
from pdd.net.messages import Eager, Message, Shutdown, Tokens
from pdd.request import Token

SECRET = b"the cluster's own"


def _socket(name: str, secret: bytes = SECRET, **more: Any) -> ControlSocket:
    return ControlSocket(name, secret, messages=Message, **more)


async def _recv(end: ControlSocket) -> tuple[str, Any]:
    async with asyncio.timeout(5):
        return await end.recv()


@aio
async def test_messages_arrive_typed_in_order_and_with_their_sender() -> None:
    one, two = _socket("p0"), _socket("md0")
    one.connect("md0", two.address)
    sent = [Eager("r", index, (index, 7)) for index in range(50)]
    sent_bytes = [await one.send("md0", message) for message in sent]
    assert [await _recv(two) for _ in sent] == [("p0", message) for message in sent]
    assert sent_bytes == [one.wire_bytes(message) for message in sent]
    assert not two.rejected
    one.close()
    two.close()


@aio
async def test_hundred_ids_take_at_most_1500_bytes() -> None:
    end = _socket("relay-decode-0")
    ids = Eager("request-0123456789abcdef", 100, tuple(range(150_000, 150_100)))
    assert 400 < end.wire_bytes(ids) <= 1500
    end.close()


@aio
async def test_wire_bytes_are_what_a_plain_tcp_peer_counts() -> None:
    end = _socket("p0")
    small, large = Shutdown(), Eager("r", 0, tuple(range(1000)))
    for message in (small, large):
        body = msgspec.msgpack.encode((end.name, message))
        framing = 2 + (2 if len(body) < 256 else 9)
        assert end.wire_bytes(message) == framing + keys.MAC_BYTES + len(body)
    end.close()


@aio
async def test_wrong_secret_is_refused_and_good_peers_go_on(caplog: pytest.LogCaptureFixture) -> None:
    good, bad, end = _socket("p0"), _socket("p1", b"another"), _socket("md0")
    good.connect("md0", end.address)
    bad.connect("md0", end.address)
    with caplog.at_level(logging.WARNING, "pdd.net"):
        await bad.send("md0", Shutdown())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await end.recv()
        await good.send("md0", Eager("r", 0, (1,)))
        assert (await _recv(end))[0] == "p0"
    assert end.rejected == {"wrong_secret": 1}
    assert len(caplog.records) == 1 and "wrong MAC" in caplog.text
    for each in (good, bad, end):
        each.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(("p0", [99])),
        msgspec.msgpack.encode(("p0", [38, "r", "zero", [1]])),
        msgspec.msgpack.encode([4]),
        b"\x91" * 5000,
    ],
)
@aio
async def test_a_body_that_is_no_message_is_refused_and_the_next_one_read(body: bytes) -> None:
    end = _socket("md0")
    raw = zmq.Context.instance().socket(zmq.PUSH)
    raw.connect(end.address)
    raw.send_multipart([keys.mac(SECRET, body), body])
    good = msgspec.msgpack.encode(("p0", Shutdown()))
    raw.send_multipart([b"no mac", good])
    raw.send_multipart([keys.mac(SECRET, good)])
    raw.send_multipart([keys.mac(SECRET, good), good])
    assert await _recv(end) == ("p0", Shutdown())
    assert end.rejected == {"undecodable": 1, "garbage": 2}
    raw.close(0)
    end.close()


@aio
async def test_a_flood_is_counted_but_not_logged_line_by_line(caplog: pytest.LogCaptureFixture) -> None:
    bad, end, good = _socket("p1", b"another"), _socket("md0"), _socket("p0")
    bad.connect("md0", end.address)
    good.connect("md0", end.address)
    for _ in range(200):
        await bad.send("md0", Shutdown())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await end.recv()
    await good.send("md0", Shutdown())
    assert (await _recv(end))[0] == "p0"
    assert end.rejected["wrong_secret"] == 200
    assert len(caplog.records) < 30
    for each in (good, bad, end):
        each.close()


@aio
async def test_a_peer_that_moves_is_followed() -> None:
    one, old = _socket("p0"), _socket("md0")
    one.connect("md0", old.address)
    await one.send("md0", Shutdown())
    await _recv(old)
    old.close()
    new = _socket("md0")
    one.connect("md0", new.address)
    await one.send("md0", Eager("r", 3, (9,)))
    assert await _recv(new) == ("p0", Eager("r", 3, (9,)))
    one.disconnect("md0")
    with pytest.raises(WireError, match="'md0' is not connected"):
        await one.send("md0", Shutdown())
    one.close()
    new.close()


@aio
async def test_a_peer_that_does_not_read_makes_send_fail_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HIGH_WATER", 10)
    one = _socket("p0")
    one.connect("md0", "tcp://127.0.0.1:9")
    with pytest.raises(WireError, match="does not read"):
        for _ in range(100):
            await one.send("md0", Shutdown())
    one.close(0)


@aio
async def test_ipc_carries_messages_and_its_file_goes(tmp_path: Path) -> None:
    one, two = _socket("p0"), _socket("md0", ipc_dir=tmp_path)
    assert two.ipc_address is not None
    one.connect("md0", two.ipc_address)
    await one.send("md0", Shutdown())
    assert await _recv(two) == ("p0", Shutdown())
    one.close()
    two.close()
    assert list(tmp_path.iterdir()) == []


@aio
async def test_impossible_addresses_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give a shared secret"):
        ControlSocket("p0", b"", "0.0.0.0", messages=Message)
    with pytest.raises(ConfigError, match="cannot be bound"):
        ControlSocket("p0", SECRET, "203.0.113.7", messages=Message)
    with pytest.raises(ConfigError, match="too long"):
        _socket("p0", ipc_dir=tmp_path / ("x" * 120))
    end = _socket("p0")
    with pytest.raises(ConfigError, match="is no address"):
        end.connect("md0", "nowhere")
    end.close()


@aio
async def test_large_messages_pass() -> None:
    one, two = _socket("p0"), _socket("md0")
    one.connect("md0", two.address)
    tokens = Tokens("r", tuple(Token(index, index, "rld0", 0.5, -1.0) for index in range(20_000)))
    await one.send("md0", tokens)
    assert (await _recv(two))[1] == tokens
    one.close()
    two.close()


_LAST_WORDS = """
import asyncio, sys
from pdd.net.control import ControlSocket
from pdd.net.messages import Eager, Message
async def main():
    end = ControlSocket("p0", b"the cluster's own", messages=Message)
    end.connect("md0", sys.argv[1])
    for index in range(500):
        await end.send("md0", Eager("r", index, (index,)))
    end.close(2000)
asyncio.run(main())
"""


@aio
async def test_last_words_of_an_ending_process_arrive() -> None:
    end = _socket("md0")
    child = subprocess.Popen([sys.executable, "-c", _LAST_WORDS, end.address])
    got = []
    async with asyncio.timeout(15):
        while len(got) < 500:
            got.append((await end.recv())[1].start)
    assert got == list(range(500))
    assert child.wait(5) == 0
    end.close()
