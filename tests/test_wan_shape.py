"""The link as pure classes on a virtual clock: rate, fairness, delay, order, loss, cross traffic."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.config import WanConfig
from pdd.net.wan.fair import FairLink, Flow
from pdd.net.wan.fifo import FifoLink
from pdd.net.wan.packets import VNET, VNET_BYTES, Packet
from pdd.net.wan.shape import CrossTraffic, LinkShape, LossGap

Log = list[tuple[float, Flow, bytes]]


def _shape(forward: bool = True, **change: float) -> LinkShape:
    config = {"rate_mbps": 80.0, "rtt_ms": 20.0, "queue_ms": 100.0} | change
    return LinkShape.of(WanConfig(**config), forward)  # type: ignore[arg-type]


def _drive(link: FairLink, until_s: float, now_s: float = 0.0) -> Log:
    """Run the link alone, waking exactly when it asks."""
    log: Log = []
    while now_s <= until_s:
        link.serve(now_s)
        log += [(now_s, flow, bytes(item)) for flow, item in link.due(now_s) if isinstance(item, memoryview)]
        wake_s = link.wake_s()
        if wake_s is None:
            break
        now_s = max(wake_s, now_s + 1e-6)
    return log


def _push(link: FairLink, flow: Flow, size: int, now_s: float = 0.0) -> None:
    link.push(flow, memoryview(bytes(size)), now_s)


def test_fair_link_keeps_rate_and_delay() -> None:
    link = FairLink(_shape(), 0, 0.0)
    _push(link, Flow(), 1_000_000)
    log = _drive(link, 5.0)
    assert sum(len(data) for _, _, data in log) == 1_000_000
    assert log[0][0] == pytest.approx(0.010 + 0.001, abs=0.0005)
    assert log[-1][0] == pytest.approx(0.1 + 0.010, rel=0.01)


def test_small_message_does_not_wait_for_the_bulk_of_another_flow() -> None:
    link = FairLink(_shape(), 0, 0.0)
    bulk, small = Flow(), Flow()
    _push(link, bulk, 900_000)
    _push(link, small, 64)
    log = _drive(link, 5.0)
    assert next(at_s for at_s, flow, _ in log if flow is small) < 0.010 + 0.004
    assert log[-1][1] is bulk


@given(flows=st.integers(2, 16), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_flows_share_evenly_and_keep_their_order(flows: int, seed: int) -> None:
    link = FairLink(_shape(jitter_ms=8.0, loss=0.01), seed, 0.0)
    sent = {Flow(): random.Random(seed + i).randbytes(200_000) for i in range(flows)}
    for flow, data in sent.items():
        for at in range(0, len(data), 50_000):
            link.push(flow, memoryview(data)[at : at + 50_000], 0.0)
    log = _drive(link, 60.0)
    for flow, data in sent.items():
        assert b"".join(part for _, owner, part in log if owner is flow) == data
    half_s = flows * 200_000 / 10e6 / 2 + 0.010
    done = [sum(len(part) for at_s, owner, part in log if owner is flow and at_s < half_s) for flow in sent]
    assert max(done) - min(done) < 130_000


def test_cut_holds_bytes_and_restore_lets_them_go() -> None:
    link = FairLink(_shape(), 0, 0.0)
    _push(link, Flow(), 1000)
    link.serve(0.0)
    link.cut(0.005)
    assert link.wake_s() is None and link.due(9.0) == []
    link.restore(2.005)
    (at_s, _, data) = _drive(link, 5.0, 2.005)[0]
    assert at_s == pytest.approx(2.0101, abs=0.001) and len(data) == 1000


def test_update_changes_the_rate_of_a_live_link() -> None:
    link = FairLink(_shape(), 0, 0.0)
    link.update(_shape(rate_mbps=8.0), 0.0)
    _push(link, Flow(), 100_000)
    assert _drive(link, 5.0)[-1][0] == pytest.approx(0.1 + 0.010, rel=0.02)


def test_cross_traffic_takes_its_rate_from_the_forward_direction_only() -> None:
    times = {}
    for forward in (True, False):
        link = FairLink(_shape(forward, cross_mbps=40.0), 1, 0.0)
        _push(link, Flow(), 5_000_000)
        times[forward] = _drive(link, 60.0)[-1][0]
    assert times[False] == pytest.approx(0.51, rel=0.02)
    assert times[True] == pytest.approx(1.01, rel=0.08)


def test_cross_traffic_after_long_idleness_is_bounded() -> None:
    cross = CrossTraffic(_shape(cross_mbps=40.0), random.Random(0), 0.0)
    assert cross.busy_until(0.0, 1e6) < 1e6 + 0.1


def test_loss_gap_has_the_asked_rate_and_is_seeded() -> None:
    draws = []
    for _ in range(2):
        gap = LossGap(0.01, random.Random(3))
        draws.append([len(gap.lost(7)) for _ in range(20_000)])
    assert draws[0] == draws[1]
    assert sum(draws[0]) / 140_000 == pytest.approx(0.01, rel=0.1)
    assert LossGap(0.0, random.Random(3)).lost(10**6) == []


def _super_packet(segments: int, gso: int = 1000, tail: int = 500) -> bytes:
    payload = random.Random(1).randbytes((segments - 1) * gso + tail)
    tcp = struct.pack("!HHIIBBHHH", 1, 2, 2**32 - 1500, 7, 5 << 4, 0x19, 100, 0, 0)
    ip = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 40 + len(payload), 65535, 0, 64, 6, 0, b"\x0a\0\0\1", b"\x0a\0\0\2"
    )
    return VNET.pack(1, 1, 40, gso, 20, 16) + ip + tcp + payload


def test_packet_counts_segments_and_wire_bytes() -> None:
    packet = Packet(_super_packet(5))
    assert (packet.segments, packet.segment_bytes, packet.size_bytes) == (5, 1040, 4500 + 5 * 40)
    plain = Packet(VNET.pack(0, 0, 0, 0, 0, 0) + bytes(60))
    assert (plain.segments, plain.size_bytes) == (1, 60)


def test_packet_cut_leaves_exactly_the_other_segments() -> None:
    data = _super_packet(5)
    whole = data[VNET_BYTES + 40 :]
    left, right = Packet(data).without([2], 5)
    assert left[VNET_BYTES + 40 :] == whole[:2000] and right[VNET_BYTES + 40 :] == whole[3000:]
    sequence = int.from_bytes(right[VNET_BYTES + 24 : VNET_BYTES + 28])
    assert sequence == (2**32 - 1500 + 3000) % 2**32
    assert int.from_bytes(right[VNET_BYTES + 2 : VNET_BYTES + 4]) == len(right) - VNET_BYTES
    assert left[VNET_BYTES + 33] == 0x10 and right[VNET_BYTES + 33] == 0x19
    header = struct.unpack("!10H", right[VNET_BYTES : VNET_BYTES + 20])
    total = sum(header)
    assert (total & 0xFFFF) + (total >> 16) == 0xFFFF
    assert Packet(data).without([0, 1, 2, 3, 4], 5) == []
    (single,) = Packet(data).without([1], 2)
    assert VNET.unpack_from(single)[1] == 0 and len(single) == VNET_BYTES + 1040


def test_fifo_link_drops_what_overflows_and_keeps_rate() -> None:
    link = FifoLink(_shape(queue_ms=50.0, mtu_bytes=1500), 0, 0.0)
    data = VNET.pack(0, 0, 0, 0, 0, 0) + bytes(1000)
    for _ in range(1000):
        link.offer(Packet(data), 0.0)
    assert link.packets + link.dropped == 1000
    assert link.packets == pytest.approx(500, abs=2)
    assert link.due(0.0100) == []
    assert len(link.due(0.010 + 0.0251)) == pytest.approx(250, abs=2)
    link.cut()
    link.offer(Packet(data), 1.0)
    assert link.dropped == pytest.approx(501, abs=2)


def test_fifo_link_cuts_a_super_packet_where_the_buffer_ends() -> None:
    link = FifoLink(_shape(queue_ms=0.25), 0, 0.0)
    link.offer(Packet(_super_packet(5)), 0.0)
    assert (link.packets, link.dropped) == (3, 2)
    (data,) = link.due(1.0)
    assert len(data) == VNET_BYTES + 40 + 3000
