"""The wire format of the KV stream: a fixed prefix, a typed header, raw bytes.

Invariant: nothing is allocated before its length was held against a limit, and a frame that decodes is whole:
the CRC-32 of the prefix covers header and payload.

    magic 4s | version u8 | kind u8 | zero u16 | header bytes u32 | payload bytes u32 | crc32 u32 (big endian)
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from pdd.errors import WireError

MAGIC = b"PDDK"
VERSION = 1
PREFIX = struct.Struct("!4sBBHIII")
DATA = 0
MAX_HEADER_BYTES = 4 << 20
MAX_FRAME_BYTES = 16 << 20
MAX_SEGMENT_BYTES = 4 << 30
MAX_STRIPES = 1024


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base: a frozen struct that is encoded as an array."""


class Hello(_Header, frozen=True, tag=1):
    """Server: who I am and my challenge."""

    name: str
    nonce: bytes


class Auth(_Header, frozen=True, tag=2):
    """Client: who I am, my answer and my challenge."""

    name: str
    nonce: bytes
    proof: bytes


class Welcome(_Header, frozen=True, tag=3):
    """Server: your answer is right, here is mine."""

    proof: bytes


class Refuse(_Header, frozen=True, tag=4):
    """Server: no more on this connection."""

    code: str
    reason: str


class Warm(_Header, frozen=True, tag=5):
    """Client: the payload only opens the connection's window. `last` asks for `Warmed`."""

    last: bool


class Warmed(_Header, frozen=True, tag=6):
    """Server: all warm-up bytes are here."""


class Begin(_Header, frozen=True, tag=7):
    """Client: one stripe of a segment follows as data frames, `stripe_bytes` from `offset` of `total_bytes`.

    transfer: the sender's number of this segment, the same when it is retried.
    """

    transfer: int
    request_id: str
    start: int
    end: int
    last: bool
    meta: bytes
    total_bytes: int
    stripe: int
    stripes: int
    offset: int
    stripe_bytes: int


class Ack(_Header, frozen=True, tag=8):
    """Server: this stripe is here and its checksum is right."""

    transfer: int
    stripe: int


class Nack(_Header, frozen=True, tag=9):
    """Server: this stripe is of no use to me."""

    transfer: int
    stripe: int
    reason: str


class Drop(_Header, frozen=True, tag=10):
    """Client: forget what you have of this segment, no more comes."""

    transfer: int


Header: TypeAlias = Hello | Auth | Welcome | Refuse | Warm | Warmed | Begin | Ack | Nack | Drop

_TAGS: dict[int, type[_Header]] = {cls.__struct_config__.tag: cls for cls in Header.__args__}
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def kind_of(header: type[_Header]) -> int:
    """The `kind` of frames with this header."""
    return next(tag for tag, cls in _TAGS.items() if cls is header)


@dataclass(frozen=True)
class Limits:
    """What a reader accepts before it allocates anything."""

    header_bytes: int = MAX_HEADER_BYTES
    payload_bytes: int = MAX_FRAME_BYTES


GREETING = Limits(header_bytes=1024, payload_bytes=0)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The checked fields of a frame's first 20 bytes."""

    kind: int
    header_bytes: int
    payload_bytes: int
    crc: int


def encode(header: Header | None, payload: Sequence[memoryview] = ()) -> list[bytes | memoryview]:
    """A frame as buffers to be written in this order; `header` None makes a data frame."""
    kind, body = (DATA, b"") if header is None else (header.__struct_config__.tag, _encoder.encode(header))
    crc = zlib.crc32(body)
    for view in payload:
        crc = zlib.crc32(view, crc)
    payload_bytes = sum(view.nbytes for view in payload)
    prefix = PREFIX.pack(MAGIC, VERSION, kind, 0, len(body), payload_bytes, crc)
    return [prefix + body, *payload]


def parse_prefix(raw: bytes | bytearray | memoryview, limits: Limits) -> Prefix:
    """The prefix of a frame.

    Raises:
        WireError: another protocol or version, an unknown kind, or a length above `limits`.
    """
    magic, version, kind, zero, header_bytes, payload_bytes, crc = PREFIX.unpack(raw)
    if magic != MAGIC:
        raise WireError(f"magic: {magic!r} is not a KV frame; it starts with {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"version: {version} is not spoken here; use {VERSION}")
    if zero != 0 or (kind != DATA and kind not in _TAGS):
        raise WireError(f"kind: {kind} (reserved {zero}) is unknown; known are 0 to {max(_TAGS)}")
    if header_bytes > limits.header_bytes or (kind == DATA) != (header_bytes == 0):
        raise WireError(
            f"header bytes: {header_bytes} for kind {kind}; at most {limits.header_bytes} allowed"
        )
    if payload_bytes > limits.payload_bytes:
        raise WireError(
            f"payload bytes: {payload_bytes} are too many; at most {limits.payload_bytes} allowed"
        )
    return Prefix(kind, header_bytes, payload_bytes, crc)


def parse_header(prefix: Prefix, body: bytes | bytearray | memoryview) -> Header:
    """The typed header.

    Raises:
        WireError: undecodable, or not of the kind that the prefix announced.
    """
    try:
        header = _decoder.decode(body)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"header: {len(body)} bytes cannot be decoded ({error})") from None
    if header.__struct_config__.tag != prefix.kind:
        raise WireError(f"header: a {type(header).__name__} came under kind {prefix.kind}")
    return header


def check_begin(begin: Begin, max_bytes: int) -> None:
    """Refuse a segment whose numbers make no sense or that is larger than the receiver takes.

    Raises:
        WireError: naming the field.
    """
    if not 0 <= begin.start < begin.end:
        raise WireError(f"range: [{begin.start}, {begin.end}) is no token range; start below end")
    if not 0 <= begin.total_bytes <= max_bytes:
        raise WireError(f"total bytes: {begin.total_bytes} are too many; at most {max_bytes} allowed")
    if not 0 <= begin.stripe < begin.stripes <= MAX_STRIPES:
        raise WireError(f"stripe: {begin.stripe} of {begin.stripes} is none; at most {MAX_STRIPES} allowed")
    if begin.offset < 0 or begin.stripe_bytes < 0 or begin.offset + begin.stripe_bytes > begin.total_bytes:
        raise WireError(
            f"stripe: {begin.offset} + {begin.stripe_bytes} is outside the {begin.total_bytes} bytes"
        )


def slice_views(views: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """The bytes [start, end) of the concatenation of byte `views`, without copying."""
    cut: list[memoryview] = []
    position = 0
    for view in views:
        low, high = max(start - position, 0), min(end - position, view.nbytes)
        if low < high:
            cut.append(view[low:high])
        position += view.nbytes
    return cut


def byte_views(payload: Sequence[Any]) -> list[memoryview]:
    """Any contiguous buffers as views of bytes; empty ones are left out."""
    return [memoryview(part).cast("B") for part in payload if memoryview(part).nbytes]


def stripes_of(total_bytes: int, stripes: int, frame_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of each stripe: at most `stripes`, none below a frame unless it is the only one."""
    count = max(1, min(stripes, total_bytes // frame_bytes))
    for index in range(count):
        low, high = total_bytes * index // count, total_bytes * (index + 1) // count
        yield low, high - low
