"""The cluster's membership: who may join, who knows whom by which address, who is alive.

Invariant: a role is taken in only if it was expected and computes with the same model as the others; every role learns
each peer by the address that is valid from its own datacenter, so that no connection misses the WAN.
"""

from __future__ import annotations

from collections.abc import Callable

from pdd.cluster.places import Place
from pdd.errors import ClusterError
from pdd.lifecycle import now_s
from pdd.net.messages import Book, Heartbeat, Join, Peer, fields_of

_NEEDS = {
    "gateway": ("prefill", "relay_decode", "main_decode"),
    "prefill": ("gateway", "relay_decode", "main_decode"),
    "relay_decode": ("gateway", "main_decode", "prefill"),
    "main_decode": ("gateway", "relay_decode", "prefill"),
}


class Registrar:
    """Books of a cluster. `address`: how (source, target, address) is reached (`WanBackend.address`)."""

    def __init__(self, expected: tuple[Place, ...], address: Callable[[str, str, str], str]) -> None:
        self.expected = {place.name: place for place in expected}
        self.joined: dict[str, Join] = {}
        self.ready: set[str] = set()
        self.beats: dict[str, tuple[float, Heartbeat]] = {}
        self._address = address

    def admit(self, join: Join) -> str:
        """Take a role in; gives "" or the reason why not."""
        place = self.expected.get(join.peer.name)
        if place is None:
            return f"name: {join.peer.name!r} is not expected; known: {', '.join(sorted(self.expected))}"
        if (place.role, place.datacenter) != (join.peer.role, join.peer.datacenter):
            found = f"{join.peer.role} in {join.peer.datacenter}"
            return f"{place.name}: is to be a {place.role} in {place.datacenter}, not a {found}"
        others = {one.fingerprint for one in self.joined.values() if one.fingerprint}
        if join.fingerprint and others and join.fingerprint not in others:
            return f"{place.name}: computes with another model than its peers; give the same model settings"
        self.joined[place.name] = join
        return ""

    @property
    def complete(self) -> bool:
        """Whether every expected role has joined."""
        return self.joined.keys() == self.expected.keys()

    @property
    def all_ready(self) -> bool:
        """Whether every role has connected to its peers."""
        return self.ready >= self.expected.keys()

    def book_for(self, name: str) -> Book:
        """The peers that `name` needs, by the addresses valid for it."""
        me = self.joined[name].peer
        others = (join.peer for other, join in self.joined.items() if other != name)
        return Book(tuple(self._seen_from(me, peer) for peer in others if peer.role in _NEEDS[me.role]))

    def _seen_from(self, me: Peer, peer: Peer) -> Peer:
        near = me.datacenter == peer.datacenter
        kv = peer.kv if me.role == "prefill" else ""
        return Peer(
            name=peer.name,
            role=peer.role,
            datacenter=peer.datacenter,
            control=self._address(me.datacenter, peer.datacenter, peer.control),
            kv=self._address(me.datacenter, peer.datacenter, kv) if kv else "",
            path="lan" if near else "wan",
        )

    def beat(self, name: str, beat: Heartbeat) -> None:
        """A sign of life."""
        self.beats[name] = (now_s(), beat)

    def facts(self) -> tuple[int, int]:
        """Vocabulary and context length, the smallest of all roles with a model."""
        models = [join for join in self.joined.values() if join.vocab]
        if not models:
            raise ClusterError("no role with a model has joined")
        return min(join.vocab for join in models), min(join.max_tokens for join in models)


def plain(beat: Heartbeat) -> dict[str, float]:
    """A heartbeat as plain numbers, with the load."""
    return {**fields_of(beat), "load": beat.load}
