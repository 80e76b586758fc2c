"""A range of tokens' KV as tensors, and as bytes on a wire.

Invariant: `from_bytes` gives back exactly what `to_bytes` was given, or raises; nothing from a wire is
trusted before version, shapes, sizes and checksum agree.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from pdd.errors import WireError

VERSION = 1
_DTYPES = {
    name: getattr(torch, name) for name in ("float32", "float64", "bfloat16", "float16")
}  # the dtypes of `ModelConfig`


class KvTensor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Name, dtype and shape of one tensor of a payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


class KvHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a payload holds: KV of the token positions [start, end) of the model with `fingerprint`.

    boundary: it also holds what is needed to continue from `end`. checksum: CRC-32 of the payload.
    """

    version: int
    fingerprint: str
    start: int
    end: int
    boundary: bool
    tensors: tuple[KvTensor, ...]
    checksum: int

    @property
    def dtype(self) -> str:
        """Dtype of the first tensor, the model's own."""
        return self.tensors[0].dtype if self.tensors else "float32"


@dataclass
class KvSegment:
    """KV of [start, end): CPU tensors by name."""

    fingerprint: str
    start: int
    end: int
    boundary: bool
    tensors: dict[str, Tensor] = field(repr=False)

    @property
    def tokens(self) -> int:
        """Positions covered."""
        return self.end - self.start

    @property
    def nbytes(self) -> int:
        """Payload bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def to_bytes(self) -> tuple[bytes, list[memoryview]]:
        """Header and payload. The buffers are views of the tensors: change nothing until they are sent."""
        parts = [_view(tensor) for tensor in self.tensors.values() if tensor.numel()]
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        kinds = tuple(
            KvTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        )
        header = KvHeader(VERSION, self.fingerprint, self.start, self.end, self.boundary, kinds, checksum)
        return msgspec.msgpack.encode(header), parts

    @classmethod
    def from_bytes(cls, header: bytes, payload: Any) -> KvSegment:
        """The segment of a header and its payload: one buffer, or several in order. A writable one is not
        copied.

        Raises:
            WireError: another version, an impossible shape, a wrong size or a wrong checksum.
        """
        if isinstance(payload, (list, tuple)):
            payload = _joined(payload)
        head = _header(header)
        data = memoryview(payload).cast("B")
        size = sum(kind.nbytes for kind in head.tensors)
        if size != data.nbytes:
            raise WireError(f"kv payload: {data.nbytes} bytes; the header says {size}")
        if zlib.crc32(data) != head.checksum:
            raise WireError(
                f"kv payload: wrong checksum for tokens {head.start} to {head.end}; send it again"
            )
        if data.readonly:
            data = memoryview(bytearray(data))
        tensors, offset = {}, 0
        for kind in head.tensors:
            tensors[kind.name] = _tensor(data, offset, kind)
            offset += kind.nbytes
        return cls(head.fingerprint, head.start, head.end, head.boundary, tensors)


def _header(data: bytes) -> KvHeader:
    try:
        head = msgspec.msgpack.decode(data, type=KvHeader)
    except msgspec.MsgspecError as error:
        raise WireError(f"kv header: not a header of this version ({error})") from None
    if head.version != VERSION:
        raise WireError(f"kv header: version {head.version}; this side speaks {VERSION}")
    if not 0 <= head.start < head.end:
        raise WireError(f"kv header: tokens {head.start} to {head.end} are not a range")
    if len({kind.name for kind in head.tensors}) != len(head.tensors):
        raise WireError("kv header: a tensor is named twice")
    for kind in head.tensors:
        if kind.dtype not in _DTYPES or any(size < 0 for size in kind.shape):
            raise WireError(
                f"kv header: tensor {kind.name} of {kind.dtype} {list(kind.shape)} is not possible"
            )
    return head


def _view(tensor: Tensor) -> memoryview:
    raw: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _joined(parts: Sequence[Any]) -> bytearray:
    joined = bytearray()
    for part in parts:
        joined += memoryview(part).cast("B")
    return joined


def _tensor(data: memoryview, offset: int, kind: KvTensor) -> Tensor:
    dtype = _DTYPES[kind.dtype]
    if not kind.nbytes:
        return torch.empty(kind.shape, dtype=dtype)
    if offset % dtype.itemsize:  # a payload of mixed dtypes may leave a tensor unaligned
        data, offset = memoryview(bytearray(data[offset : offset + kind.nbytes])), 0
    return torch.frombuffer(data, dtype=dtype, count=math.prod(kind.shape), offset=offset).view(kind.shape)
