"""TCP packets as a TUN device with offloads hands them over: one IP packet, or many in one (GSO).

Invariant: `Packet.cut(i, j)` is a valid packet that holds exactly segments i to j of the original. Offloads
let one read and one write move up to 64 KB; loss and tail drop still act on packets of MTU size.
Layout: 10 bytes of struct virtio_net_hdr, then IPv4, then TCP (linux/virtio_net.h).
"""

from __future__ import annotations

import struct

VNET = struct.Struct("<BBHHHH")
VNET_BYTES = VNET.size
GSO_TCP4 = 1
ENDS = 0x09  # FIN and PSH belong to the last segment only


class Packet:
    """What one read of the TUN device gave. `size_bytes`: on the wire, with each segment's own headers."""

    __slots__ = ("data", "segments", "segment_bytes", "size_bytes", "_gso_bytes", "_header_bytes")

    def __init__(self, data: bytes) -> None:
        self.data = data
        _, gso_type, header_bytes, gso_bytes, csum_start, _ = VNET.unpack_from(data)
        total = len(data) - VNET_BYTES
        self.segments, self.segment_bytes, self.size_bytes = 1, total, total
        if gso_type & 0x7F != GSO_TCP4 or not gso_bytes:
            return
        self._header_bytes = csum_start + (data[VNET_BYTES + csum_start + 12] >> 4) * 4
        self._gso_bytes = gso_bytes
        self.segments = max(1, -(-(total - self._header_bytes) // gso_bytes))
        self.segment_bytes = self._header_bytes + gso_bytes
        self.size_bytes = total + (self.segments - 1) * self._header_bytes

    def without(self, lost: list[int], kept: int) -> list[bytes]:
        """The data to write when only the first `kept` segments go on, less the `lost` ones."""
        if not lost and kept == self.segments:
            return [self.data]
        out, start = [], 0
        for index in [*(i for i in lost if i < kept), kept]:
            if index > start:
                out.append(self.cut(start, index))
            start = index + 1
        return out

    def cut(self, start: int, end: int) -> bytes:
        """Segments `start` to `end` as one packet."""
        if start == 0 and end == self.segments:
            return self.data
        flags, gso_type, hdr_len, gso, csum_start, csum_offset = VNET.unpack_from(self.data)
        head = bytearray(self.data[VNET_BYTES : VNET_BYTES + self._header_bytes])
        body = VNET_BYTES + self._header_bytes
        payload = self.data[body + start * gso : min(body + end * gso, len(self.data))]
        self._fix_ip(head, start, len(head) + len(payload))
        self._fix_tcp(head, csum_start, csum_offset, start * gso, len(payload), end < self.segments)
        if end - start == 1:
            gso_type = gso = 0
        return VNET.pack(flags, gso_type, hdr_len, gso, csum_start, csum_offset) + bytes(head) + payload

    def _fix_ip(self, head: bytearray, start: int, total: int) -> None:
        ident = (int.from_bytes(head[4:6]) + start) & 0xFFFF
        head[2:4] = total.to_bytes(2)
        head[4:6] = ident.to_bytes(2)
        head[10:12] = b"\0\0"
        head[10:12] = (_ones_sum(head[: (head[0] & 15) * 4]) ^ 0xFFFF).to_bytes(2)

    def _fix_tcp(
        self, head: bytearray, at: int, csum_offset: int, skip: int, payload_bytes: int, more: bool
    ) -> None:
        sequence = (int.from_bytes(head[at + 4 : at + 8]) + skip) & 0xFFFFFFFF
        head[at + 4 : at + 8] = sequence.to_bytes(4)
        if more:
            head[at + 13] &= ~ENDS & 0xFF
        # The kernel finishes the checksum from this sum of the pseudo header (CHECKSUM_PARTIAL).
        length = len(head) - at + payload_bytes
        pseudo = bytes(head[12:20]) + bytes((0, head[9])) + length.to_bytes(2)
        head[at + csum_offset : at + csum_offset + 2] = _ones_sum(pseudo).to_bytes(2)


def _ones_sum(data: bytes | bytearray) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
