"""One request on its way through the cluster, as its gateway sees it.

Invariant: the user gets every output position exactly once and in order; `emitted` is that prefix and never shrinks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdd.lifecycle import now_s
from pdd.net.messages import Submit
from pdd.request import Completion, Event, Token, Transfer


@dataclass
class Flight:
    """State of a request. `wire_id` names the current attempt: a replay gets a new one, so that stale messages of a
    dead attempt are recognised.
    """

    submit: Submit
    client: str
    wire_id: str
    attempt: int = 0
    arrived_s: float = field(default_factory=now_s)
    deadline_s: float = 0.0
    asked: set[str] = field(default_factory=set)
    hits: dict[str, int] = field(default_factory=dict)
    prefill: str = ""
    relay: str = ""
    main: str = ""
    routed: bool = False
    ends_at: str = "md"
    mode: str = ""
    singular: bool = False
    relay_stopped: bool = False
    owed: set[str] = field(default_factory=set)
    emitted: list[Token] = field(default_factory=list)
    emitted_s: list[float] = field(default_factory=list)
    early: dict[int, Token] = field(default_factory=dict)
    total: int | None = None
    reason: str = ""
    takeover_position: int | None = None
    disagreements: int = 0
    ids_bytes: int = 0
    kv_done: bool = False
    done_s: float | None = None
    events: list[Event] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """The client's name for the request."""
        return self.submit.request_id

    @property
    def output(self) -> tuple[int, ...]:
        """The ids that the user already has."""
        return tuple(token.id for token in self.emitted)

    @property
    def pipeline(self) -> str:
        """The path that the answer took."""
        if not self.relay:
            return "P-MD"
        return "P-RLD" if self.singular or self.ends_at == "rld" or not self.main else "P-RLD-MD"

    @property
    def complete(self) -> bool:
        """Whether the user has the whole answer."""
        return self.total is not None and len(self.emitted) >= self.total

    def take(self, tokens: tuple[Token, ...]) -> list[Token]:
        """Add tokens from an author; gives those that can be emitted now, in order."""
        fresh = []
        for token in tokens:
            if token.position >= len(self.emitted):
                self.early.setdefault(token.position, token)
        while len(self.emitted) in self.early and not self.complete:
            token = self.early.pop(len(self.emitted))
            self.emitted.append(token)
            self.emitted_s.append(now_s())
            fresh.append(token)
        return fresh

    def next_attempt(self) -> None:
        """Forget who served the request, and what is on its way from them."""
        self.attempt += 1
        self.wire_id = f"{self.request_id}~{self.attempt}"
        self.asked, self.hits, self.owed, self.early = set(), {}, set(), {}
        self.prefill = self.relay = self.main = ""
        self.routed = self.relay_stopped = self.kv_done = self.singular = False
        self.total = None

    def completion(self, text: str) -> Completion:
        """The answer as the client gets it."""
        return Completion(
            request_id=self.request_id,
            prompt_tokens=len(self.submit.prompt),
            tokens=list(self.emitted),
            emitted_s=list(self.emitted_s),
            text=text,
            finish_reason=self.reason,
            pipeline=self.pipeline,
            mode=self.mode,
            hit_tokens_p=self.hits.get(self.prefill, 0),
            hit_tokens_md=self.hits.get(self.main, 0),
            takeover_position=self.takeover_position,
            disagreements=self.disagreements,
            ids_bytes=self.ids_bytes,
            events=sorted(self.events, key=lambda event: event.at_s),
            transfers=self.transfers,
        )
