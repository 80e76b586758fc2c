"""What a direction of a link does to traffic, apart from any queue: rate, delay, jitter, loss, cross traffic.

Invariant: pure. Time is an argument, chance comes from a seeded generator, so equal calls give equal answers.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from pdd.config import WanConfig

CATCH_UP_S = 1.0


@dataclass(frozen=True)
class LinkShape:
    """One direction in bytes and seconds. `delay_s` is half the RTT; `jitter_s` the width of its spread."""

    rate_bytes_s: float
    delay_s: float
    jitter_s: float
    loss: float
    queue_s: float
    cross_bytes_s: float
    mtu_bytes: int

    @classmethod
    def of(cls, config: WanConfig, forward: bool) -> LinkShape:
        """The shape that `config` asks for; only the forward direction bears cross traffic."""
        return cls(
            rate_bytes_s=config.rate_mbps * 125_000,
            delay_s=config.rtt_ms / 2000,
            jitter_s=config.jitter_ms / 1000,
            loss=config.loss,
            queue_s=config.queue_ms / 1000,
            cross_bytes_s=config.cross_mbps * 125_000 if forward else 0.0,
            mtu_bytes=config.mtu_bytes,
        )

    def packets(self, size_bytes: int) -> int:
        """How many packets carry `size_bytes` of a stream."""
        return max(1, -(-size_bytes // self.mtu_bytes))


class CrossTraffic:
    """Competing packets of `mtu_bytes` that come at random (Poisson) at a mean rate and do not back off.

    As UDP beside TCP, they keep their rate, and ours gets what is left.
    """

    def __init__(self, shape: LinkShape, rng: random.Random, now_s: float) -> None:
        self._size_s = shape.mtu_bytes / shape.rate_bytes_s
        self._gap_s = shape.mtu_bytes / shape.cross_bytes_s if shape.cross_bytes_s else math.inf
        self._rng = rng
        self._next_s = now_s + self._draw() if shape.cross_bytes_s else math.inf

    def _draw(self) -> float:
        return self._rng.expovariate(1.0) * self._gap_s

    def busy_until(self, free_s: float, now_s: float) -> float:
        """When the link, free of all else at `free_s`, has carried what came by `now_s`."""
        if self._next_s > now_s:
            return free_s
        if now_s - self._next_s > CATCH_UP_S:
            # The queue is stationary: a second of history says as much as an hour of idleness.
            self._next_s = now_s - CATCH_UP_S
        while self._next_s <= now_s:
            free_s = max(free_s, self._next_s) + self._size_s
            self._next_s += self._draw()
        return free_s


class LossGap:
    """Which packets are lost, each with the same chance; draws only once for each loss."""

    def __init__(self, loss: float, rng: random.Random) -> None:
        self._loss = loss
        self._rng = rng
        self._left = self._draw()

    def _draw(self) -> float:
        if not self._loss:
            return math.inf
        return math.floor(math.log(1.0 - self._rng.random()) / math.log1p(-self._loss))

    def lost(self, packets: int) -> list[int]:
        """Indices of the lost ones among the next `packets`."""
        lost = []
        base = 0
        while self._left < packets - base:
            lost.append(base + int(self._left))
            base = lost[-1] + 1
            self._left = self._draw()
        self._left -= packets - base
        return lost


class Delay:
    """Propagation: half the RTT, spread evenly over `jitter_s` around it, never below 0."""

    def __init__(self, shape: LinkShape, rng: random.Random) -> None:
        self._shape = shape
        self._rng = rng

    def draw_s(self) -> float:
        """The next packet's delay; keeping packets in order is the caller's part."""
        if not self._shape.jitter_s:
            return self._shape.delay_s
        return max(0.0, self._shape.delay_s + self._shape.jitter_s * (self._rng.random() - 0.5))
