"""Frames: what is encoded comes back, what is damaged is a WireError, nothing is allocated unchecked."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.errors import WireError
from pdd.net import frames
from pdd.net.frames import Ack, Auth, Begin, Drop, Header, Hello, Limits, Nack, Refuse, Warm, Warmed, Welcome

_U63 = st.integers(0, 2**63 - 1)
_TEXT = st.text(max_size=30)
_BLOB = st.binary(max_size=60)
_BEGIN = st.builds(
    Begin,
    _U63,
    _TEXT,
    _U63,
    _U63,
    st.booleans(),
    _BLOB,
    _U63,
    st.integers(0, 9),
    st.integers(1, 9),
    _U63,
    _U63,
)
HEADERS = st.one_of(
    st.builds(Hello, _TEXT, _BLOB),
    st.builds(Auth, _TEXT, _BLOB, _BLOB),
    st.builds(Welcome, _BLOB),
    st.builds(Refuse, _TEXT, _TEXT),
    st.builds(Warm, st.booleans()),
    st.just(Warmed()),
    _BEGIN,
    st.builds(Ack, _U63, st.integers(0, 9)),
    st.builds(Nack, _U63, st.integers(0, 9), _TEXT),
    st.builds(Drop, _U63),
)


def _joined(header: Header | None, payload: list[bytes]) -> bytes:
    return b"".join(bytes(part) for part in frames.encode(header, [memoryview(part) for part in payload]))


@given(HEADERS)
def test_headers_come_back(header: Header) -> None:
    raw = _joined(header, [])
    prefix = frames.parse_prefix(raw[: frames.PREFIX.size], Limits())
    body = raw[frames.PREFIX.size :]
    assert prefix.header_bytes == len(body) and prefix.payload_bytes == 0
    assert prefix.crc == zlib.crc32(body)
    assert frames.parse_header(prefix, body) == header


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=6))
def test_data_comes_back(payload: list[bytes]) -> None:
    raw = _joined(None, payload)
    prefix = frames.parse_prefix(raw[: frames.PREFIX.size], Limits())
    assert prefix.kind == frames.DATA
    assert raw[frames.PREFIX.size :] == b"".join(payload)
    assert (prefix.payload_bytes, prefix.crc) == (len(b"".join(payload)), zlib.crc32(b"".join(payload)))


@given(st.binary(min_size=frames.PREFIX.size, max_size=frames.PREFIX.size))
def test_random_bytes_are_no_prefix(raw: bytes) -> None:
    if raw[:4] != frames.MAGIC:
        with pytest.raises(WireError, match="magic"):
            frames.parse_prefix(raw, Limits())


@given(HEADERS, st.data())
def test_a_damaged_header_never_passes_unnoticed(header: Header, data: st.DataObject) -> None:
    raw = bytearray(_joined(header, []))
    index = data.draw(st.integers(0, len(raw) - 1))
    raw[index] ^= data.draw(st.integers(1, 255))
    try:
        prefix = frames.parse_prefix(raw[: frames.PREFIX.size], Limits())
        body = bytes(raw[frames.PREFIX.size :])
        noticed = (
            prefix.header_bytes != len(body) or prefix.payload_bytes != 0 or zlib.crc32(body) != prefix.crc
        )
        if not noticed:
            assert frames.parse_header(prefix, body) is None
    except WireError:
        pass


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ((b"HTTP", 1, 7, 0, 9, 0, 0), "magic"),
        ((b"PDDK", 2, 7, 0, 9, 0, 0), "version: 2"),
        ((b"PDDK", 1, 77, 0, 9, 0, 0), "kind: 77"),
        ((b"PDDK", 1, 7, 1, 9, 0, 0), "reserved 1"),
        ((b"PDDK", 1, 7, 0, 2**32 - 1, 0, 0), "header bytes: 4294967295"),
        ((b"PDDK", 1, 7, 0, 0, 0, 0), "header bytes: 0"),
        ((b"PDDK", 1, 0, 0, 5, 0, 0), "header bytes: 5"),
        ((b"PDDK", 1, 0, 0, 0, 2**32 - 1, 0), "payload bytes: 4294967295"),
    ],
)
def test_impossible_prefixes_name_the_field(fields: tuple[object, ...], match: str) -> None:
    with pytest.raises(WireError, match=match):
        frames.parse_prefix(frames.PREFIX.pack(*fields), Limits())


def test_a_greeting_may_be_small_only() -> None:
    prefix = frames.PREFIX.pack(b"PDDK", 1, frames.kind_of(Auth), 0, 2000, 0, 0)
    frames.parse_prefix(prefix, Limits())
    with pytest.raises(WireError, match="at most 1024"):
        frames.parse_prefix(prefix, frames.GREETING)


def test_a_header_of_another_kind_is_refused() -> None:
    body = _joined(Ack(1, 0), [])[frames.PREFIX.size :]
    with pytest.raises(WireError, match="Ack came under kind 10"):
        frames.parse_header(frames.Prefix(frames.kind_of(Drop), len(body), 0, 0), body)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"start": 5}, "range"),
        ({"start": -1}, "range"),
        ({"total_bytes": 1001}, "total bytes: 1001"),
        ({"total_bytes": -1}, "total bytes"),
        ({"stripe": 2}, "stripe: 2 of 2"),
        ({"stripes": 10**9}, "stripe: 1 of"),
        ({"offset": -1}, "stripe: -1"),
        ({"offset": 60, "stripe_bytes": 50}, "outside the 100 bytes"),
    ],
)
def test_impossible_segments_name_the_field(change: dict[str, int], match: str) -> None:
    fields = {"transfer": 1, "request_id": "r", "start": 0, "end": 5, "last": True, "meta": b""}
    fields |= {"total_bytes": 100, "stripe": 1, "stripes": 2, "offset": 50, "stripe_bytes": 50}
    frames.check_begin(Begin(**fields), 1000)  # type: ignore[arg-type]
    with pytest.raises(WireError, match=match):
        frames.check_begin(Begin(**(fields | change)), 1000)  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=50), max_size=8), st.integers(0, 400), st.integers(0, 400))
def test_slices_are_those_of_the_whole(parts: list[bytes], low: int, high: int) -> None:
    views = frames.byte_views(parts)
    whole = b"".join(parts)
    assert b"".join(frames.slice_views(views, low, high)) == whole[low : max(low, high)]


@given(st.integers(0, 10**7), st.integers(1, 16), st.integers(4096, 1 << 20))
def test_stripes_cover_the_segment_once(total: int, stripes: int, frame_bytes: int) -> None:
    cuts = list(frames.stripes_of(total, stripes, frame_bytes))
    assert 1 <= len(cuts) <= stripes
    position = 0
    for offset, size in cuts:
        assert offset == position
        assert size >= frame_bytes or len(cuts) == 1
        position += size
    assert position == total
