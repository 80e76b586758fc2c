"""Every control message, typed. Positions are output positions: 0 is the first token after the prompt.

Invariant: a message is plain data (ids, numbers, names); KV never travels here, and a field that is not declared
is an error. Arrays with whole-number tags keep a message a few bytes larger than its content.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from pdd.request import Completion, Event, SamplingParams, Token, Transfer


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base: a frozen struct that is encoded as an array."""


# -- joining a cluster ---------------------------------------------------------------------------------------------


class Peer(_Message, frozen=True):
    """How to reach a process. `path` is `wan` if a wide-area link lies between, else `lan`."""

    name: str
    role: str
    datacenter: str
    control: str
    kv: str = ""
    path: str = "lan"


class Join(_Message, tag=1, frozen=True):
    """A role asks the registrar to be part of the cluster; `clock_s` is its clock at sending."""

    peer: Peer
    reply_to: str
    vocab: int
    max_tokens: int
    fingerprint: str
    clock_s: float


class Book(_Message, tag=2, frozen=True):
    """The registrar tells a process its peers, as reached from there."""

    peers: tuple[Peer, ...]


class Ready(_Message, tag=3, frozen=True):
    """The sender has connected and warmed every connection to the peers of its last book."""

    name: str


class Shutdown(_Message, tag=4, frozen=True):
    """End now, after closing what is open."""


class Heartbeat(_Message, tag=5, frozen=True):
    """A sign of life with the load. `load` is active / slots; caches in tokens."""

    active: int
    waiting: int
    slots: int
    cached_tokens: int = 0

    @property
    def load(self) -> float:
        """Share of the batch slots that are asked for; above 1 when requests wait."""
        return (self.active + self.waiting) / self.slots


class PeerDown(_Message, tag=6, frozen=True):
    """A process is gone; whoever relied on it must not wait for it."""

    name: str
    reason: str


class Reset(_Message, tag=7, frozen=True):
    """Forget all cached prefixes (between two measured runs). Answered by `ResetDone`."""


class ResetDone(_Message, tag=8, frozen=True):
    """The sender's caches are empty."""


class Refused(_Message, tag=9, frozen=True):
    """The registrar does not take the sender in."""

    code: str
    reason: str


# -- client and gateway --------------------------------------------------------------------------------------------


class Submit(_Message, tag=20, frozen=True):
    """A client's request. Answered by `Tokens`, then one `Answer` or `Failed`. `relay` False: always P-MD."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float
    relay: bool = True


class Answer(_Message, tag=21, frozen=True):
    """The whole answer of a request."""

    completion: Completion


class Failed(_Message, tag=22, frozen=True):
    """The request ended in a typed error (`pdd.errors`). Between roles: the sender could not do its part."""

    request_id: str
    code: str
    reason: str


class Cancel(_Message, tag=23, frozen=True):
    """Nobody waits for this request any more: free what it holds."""

    request_id: str
    reason: str


# -- gateway and roles ---------------------------------------------------------------------------------------------


class Match(_Message, tag=30, frozen=True):
    """How much of this prompt do you hold? The match is leased until the request ends or `lease_s` is over."""

    request_id: str
    prompt: tuple[int, ...]
    lease_s: float


class Matched(_Message, tag=31, frozen=True):
    """`tokens` of the prompt's KV are here and leased."""

    request_id: str
    tokens: int


class Target(_Message, frozen=True):
    """Where P ships KV: positions from `start` on."""

    name: str
    start: int


class PrefillJob(_Message, tag=32, frozen=True):
    """P: prefill the matched prompt and ship its KV. `first_token`: also draw token 0 and hand it to the gateway."""

    request_id: str
    sampling: SamplingParams
    targets: tuple[Target, ...]
    first_token: bool
    timeout_s: float


class PrefillDone(_Message, tag=33, frozen=True):
    """P has done its part; `transfers` lists the KV's way to every target."""

    request_id: str
    events: tuple[Event, ...]
    transfers: tuple[Transfer, ...]


class FirstToken(_Message, tag=34, frozen=True):
    """Token 0 from P (`first_token=prefill`), to the gateway and to the decode roles."""

    request_id: str
    token: Token


class RelayJob(_Message, tag=35, frozen=True):
    """RLD: decode at once. `main` is the MD that takes over, "" if the answer ends here (the excluded pipeline)."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    main: str
    first_token: bool
    output: tuple[int, ...]
    timeout_s: float


class DecodeJob(_Message, tag=36, frozen=True):
    """MD: the matched prompt is yours. `relay` is the RLD that decodes meanwhile, "" if none.

    `output`: ids the user already has (a replay). `recompute`: no KV will come; prefill from ids.
    `round_trip_s`: what a question to RLD and its answer take, for the stop rule.
    """

    request_id: str
    sampling: SamplingParams
    relay: str
    first_token: bool
    output: tuple[int, ...]
    recompute: bool
    timeout_s: float


class Tokens(_Message, tag=37, frozen=True):
    """New tokens for the user, in order."""

    request_id: str
    tokens: tuple[Token, ...]


class Eager(_Message, tag=38, frozen=True):
    """RLD to MD: ids from output position `start` on. This is all that a handoff carries."""

    request_id: str
    start: int
    ids: tuple[int, ...]


class KvReady(_Message, tag=39, frozen=True):
    """MD to RLD: the prompt's KV is whole here; choose how to hand over."""

    request_id: str


class StopAt(_Message, tag=40, frozen=True):
    """MD to RLD: stop before output position `position`, or at once if you are past it."""

    request_id: str
    position: int


class RelayStopped(_Message, tag=41, frozen=True):
    """RLD has stopped: its ids are authoritative before `position`, MD's from there on.

    `ids` are those from `start` on that MD may lack. `reason`: "" when MD goes on, else why the answer ended.
    """

    request_id: str
    position: int
    start: int
    ids: tuple[int, ...]
    mode: str
    reason: str


class RelayPaused(_Message, tag=42, frozen=True):
    """RLD has reached its cap and waits for MD."""

    request_id: str
    position: int


class Finished(_Message, tag=43, frozen=True):
    """The sender made the answer's last token, or gave its part up to MD (`reason` "")."""

    request_id: str
    reason: str
    position: int
    takeover_position: int | None
    disagreements: int
    ids_bytes: int
    events: tuple[Event, ...]


class KvLost(_Message, tag=44, frozen=True):
    """P to a target: the KV of this request will not come."""

    request_id: str
    reason: str


class DropTransfer(_Message, tag=45, frozen=True):
    """Gateway to P: the answer is done (singular traffic). Abort the transfer, or let it go on in the background."""

    request_id: str
    background: bool


class Adopt(_Message, tag=46, frozen=True):
    """Gateway to RLD: MD is gone, finish the answer here."""

    request_id: str


Message: TypeAlias = (
    Join | Book | Ready | Shutdown | Heartbeat | PeerDown | Reset | ResetDone | Refused
    | Submit | Answer | Failed | Cancel
    | Match | Matched | PrefillJob | PrefillDone | FirstToken | RelayJob | DecodeJob | Tokens | Eager | KvReady
    | StopAt | RelayStopped | RelayPaused | Finished | KvLost | DropTransfer | Adopt
)  # fmt: skip


def fields_of(message: Any) -> dict[str, Any]:
    """The message's fields by name, for logs."""
    return {name: getattr(message, name) for name in message.__struct_fields__}
