"""The gateway: takes requests, routes them, and hands the user every token once and in order.

Invariant: each request ends with one `Answer` or one `Failed`, at the latest at its deadline, whoever dies meanwhile.
It computes nothing and holds no KV: policy decides, roles work, the gateway only keeps the books (`Flight`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from pdd import lifecycle
from pdd.errors import DeadlineError, PddError, RequestError, RoleDiedError
from pdd.lifecycle import now_s
from pdd.net.messages import (
    Adopt,
    Answer,
    Cancel,
    DecodeJob,
    DropTransfer,
    Failed,
    Finished,
    FirstToken,
    Heartbeat,
    KvLost,
    Match,
    Matched,
    PeerDown,
    PrefillDone,
    PrefillJob,
    RelayJob,
    RelayPaused,
    RelayStopped,
    Submit,
    Target,
    Tokens,
)
from pdd.policy.placement import Candidate, least_loaded, longest_match
from pdd.policy.router import RouteQuery, route
from pdd.request import Event
from pdd.roles.base import REGISTRAR, Role
from pdd.roles.boot import Boot
from pdd.roles.flight import Flight

log = logging.getLogger("pdd.roles")

SETTLE_S = 2.0
"""How long an answer waits for the books of those who took part (its tokens have long been streamed)."""

RETRY_LIMIT = 3
"""Attempts to serve a request whose roles die, before it fails."""


class Gateway(Role):
    """The gateway process of one datacenter."""

    def __init__(self, boot: Boot) -> None:
        super().__init__(boot)
        self._flights: dict[str, Flight] = {}
        self._beats: dict[str, tuple[float, Heartbeat]] = {}
        self.handlers |= {
            Submit: self._on_submit,
            Cancel: lambda client, message: self._on_cancel(message),
            Matched: self._on_matched,
            Heartbeat: self._on_heartbeat,
            PrefillDone: self._on_prefill_done,
            FirstToken: lambda sender, message: self._on_tokens(sender, message.request_id, (message.token,)),
            Tokens: lambda sender, message: self._on_tokens(sender, message.request_id, message.tokens),
            RelayPaused: lambda sender, message: None,
            RelayStopped: self._on_relay_stopped,
            Finished: self._on_finished,
            Failed: self._on_failed,
        }

    def load(self) -> Heartbeat:
        return Heartbeat(len(self._flights), 0, 1)

    # -- who is there ----------------------------------------------------------------------------------------------

    def _on_heartbeat(self, sender: str, beat: Heartbeat) -> None:
        self._beats[sender] = (now_s(), beat)
        self.down.discard(sender)

    def _alive(self, role: str) -> list[str]:
        """Living peers of a role; P and RLD only from this datacenter, where they stand side by side."""
        return [
            peer.name
            for peer in self.peers.values()
            if peer.role == role
            and peer.name not in self.down
            and (role == "main_decode" or peer.datacenter == self.boot.datacenter)
        ]

    def _candidates(self, role: str, flight: Flight) -> list[Candidate]:
        return [
            Candidate(name, flight.hits.get(name, 0), self._load_of(name))
            for name in self._alive(role)
            if role == "relay_decode" or name in flight.hits
        ]

    def _load_of(self, name: str) -> float:
        return self._beats[name][1].load if name in self._beats else 0.0

    # -- arrival, match, route -------------------------------------------------------------------------------------

    def _on_submit(self, client: str, submit: Submit) -> None:
        flight = Flight(submit, client, submit.request_id)
        flight.deadline_s = flight.arrived_s + submit.timeout_s
        if submit.request_id in self._flights:
            reason = f"request_id: {submit.request_id!r} is being served already; give a new one"
            self.send(client, Failed(submit.request_id, RequestError.code, reason))
            return
        self._note(flight, lifecycle.ARRIVAL, flight.arrived_s)
        self.spawn(self._watch_deadline(flight))
        self._ask(flight)

    def _note(self, flight: Flight, name: str, at_s: float | None = None, **detail: Any) -> None:
        moment = now_s() if at_s is None else at_s
        flight.events.append(Event(flight.request_id, name, moment, self.name, detail))

    def _ask(self, flight: Flight) -> None:
        """Ask every P and MD how much of the prompt it holds."""
        self._flights[flight.wire_id] = flight
        prefills, mains = self._alive("prefill"), self._alive("main_decode")
        if not prefills:
            self._fail(flight, RoleDiedError(f"no P is alive in datacenter {self.boot.datacenter}"))
            return
        flight.asked = {*prefills, *mains}
        lease_s = max(self.config.cluster.lease_s, flight.deadline_s - now_s())
        for name in flight.asked:
            self.send(name, Match(flight.wire_id, flight.submit.prompt, lease_s))
        self.spawn(self._route_without_the_silent(flight, flight.attempt))

    async def _route_without_the_silent(self, flight: Flight, attempt: int) -> None:
        await asyncio.sleep(self.config.cluster.dead_after_s)
        if flight.attempt == attempt and not flight.routed and flight.wire_id in self._flights:
            self._start(flight)

    def _on_matched(self, sender: str, message: Matched) -> None:
        flight = self._flights.get(message.request_id)
        if flight is None or flight.routed:
            return
        flight.hits[sender] = message.tokens
        if flight.asked - self.down <= flight.hits.keys():
            self._start(flight)

    def _start(self, flight: Flight) -> None:
        """Choose P, MD, and whether an RLD decodes meanwhile; give everyone the job."""
        flight.routed = True
        prefills, mains = self._candidates("prefill", flight), self._candidates("main_decode", flight)
        relays = self._candidates("relay_decode", flight)
        if not prefills or not (mains or relays):
            self._fail(
                flight, RoleDiedError(f"no {'MD' if prefills else 'P'} answered for {flight.request_id}")
            )
            return
        flight.prefill = longest_match(prefills, "P").name
        flight.main = longest_match(mains, "MD").name if mains else ""
        query = RouteQuery(
            prompt_tokens=len(flight.submit.prompt),
            hit_p_tokens=flight.hits[flight.prefill],
            hit_md_tokens=flight.hits.get(flight.main, 0),
            relay_available=bool(relays) and flight.submit.relay,
        )
        way = route(self.config.router, query)
        if way.relay or not flight.main:
            flight.relay = least_loaded(relays, "RLD").name
            flight.ends_at = way.ends_at if flight.main else "rld"
        self._release_unused(flight)
        self._note(flight, lifecycle.ROUTED, pipeline=flight.pipeline, hit_tokens=query.hit_md_tokens)
        self._give_jobs(flight)

    def _release_unused(self, flight: Flight) -> None:
        used = {flight.prefill, "" if flight.ends_at == "rld" else flight.main}
        for name in flight.asked - used - self.down:
            self.send(name, Cancel(flight.wire_id, "another was chosen"))
        if flight.ends_at == "rld":
            flight.main = ""

    def _give_jobs(self, flight: Flight) -> None:
        submit, left_s = flight.submit, flight.deadline_s - now_s()
        from_prefill = self.config.system.first_token == "prefill" and not flight.emitted
        targets = []
        if flight.relay:
            job = RelayJob(
                flight.wire_id,
                submit.prompt,
                submit.sampling,
                flight.main,
                from_prefill,
                flight.output,
                left_s,
            )
            self.send(flight.relay, job)
            targets.append(Target(flight.relay, 0))
        if flight.main:
            main = DecodeJob(
                flight.wire_id, submit.sampling, flight.relay, from_prefill, flight.output, False, left_s
            )
            self.send(flight.main, main)
            targets.append(Target(flight.main, flight.hits[flight.main]))
        flight.owed = {flight.prefill, *(target.name for target in targets)}
        self.send(
            flight.prefill, PrefillJob(flight.wire_id, submit.sampling, tuple(targets), from_prefill, left_s)
        )

    # -- tokens and ends -------------------------------------------------------------------------------------------

    def _on_tokens(self, sender: str, request_id: str, tokens: tuple[Any, ...]) -> None:
        flight = self._flights.get(request_id)
        if flight is None or sender not in (flight.prefill, flight.relay, flight.main):
            return
        fresh = flight.take(tokens)
        if fresh:
            self.send(flight.client, Tokens(flight.request_id, tuple(fresh)))
        self._look_done(flight)

    def _on_relay_stopped(self, sender: str, message: RelayStopped) -> None:
        flight = self._flights.get(message.request_id)
        if flight is None:
            return
        flight.relay_stopped = True
        flight.mode = message.mode or flight.mode
        if message.reason:
            self._ended(flight, message.position, message.reason)

    def _ended(self, flight: Flight, total: int, reason: str) -> None:
        flight.total, flight.reason = total, reason
        if flight.relay and flight.main and flight.takeover_position is None and not flight.kv_done:
            self._singular(flight)
        self._look_done(flight)

    def _singular(self, flight: Flight) -> None:
        """RLD has finished the answer before its KV reached MD (facts: singular traffic)."""
        flight.singular = True
        background = self.config.handoff.singular == "background"
        self._note(flight, lifecycle.SINGULAR, background=background)
        self.send(flight.prefill, DropTransfer(flight.wire_id, background))
        flight.owed.discard(flight.main)
        if background:
            flight.owed.discard(flight.prefill)
        else:
            self.send(flight.main, Cancel(flight.wire_id, "singular"))

    def _on_finished(self, sender: str, message: Finished) -> None:
        flight = self._flights.get(message.request_id)
        if flight is None:
            return
        flight.owed.discard(sender)
        flight.events.extend(message.events)
        flight.disagreements += message.disagreements
        flight.ids_bytes += message.ids_bytes
        if message.takeover_position is not None:
            flight.takeover_position = message.takeover_position
        if message.reason and flight.total is None:
            self._ended(flight, message.position, message.reason)
        self._look_done(flight)

    def _on_prefill_done(self, sender: str, message: PrefillDone) -> None:
        flight = self._flights.get(message.request_id)
        if flight is None:
            return
        flight.owed.discard(sender)
        flight.kv_done = all(transfer.ok for transfer in message.transfers)
        flight.events.extend(message.events)
        flight.transfers.extend(message.transfers)
        self._look_done(flight)

    def _look_done(self, flight: Flight) -> None:
        if not flight.complete:
            return
        if flight.done_s is None:
            flight.done_s = flight.emitted_s[-1] if flight.emitted_s else now_s()
            self._note(flight, lifecycle.DONE, flight.done_s, reason=flight.reason)
            self.spawn(self._answer_at_last(flight))
        if not (flight.owed - self.down):
            self._answer(flight)

    async def _answer_at_last(self, flight: Flight) -> None:
        await asyncio.sleep(SETTLE_S)
        self._answer(flight)

    def _answer(self, flight: Flight) -> None:
        if self._flights.pop(flight.wire_id, None) is None:
            return
        self.send(flight.client, Answer(flight.completion("")))

    # -- failures --------------------------------------------------------------------------------------------------

    async def _watch_deadline(self, flight: Flight) -> None:
        await asyncio.sleep(max(0.0, flight.deadline_s - now_s()))
        if flight.wire_id in self._flights and not flight.complete:
            limit_s = flight.submit.timeout_s
            self._fail(flight, DeadlineError(f"{flight.request_id}: no whole answer within {limit_s:g} s"))

    def _fail(self, flight: Flight, error: PddError) -> None:
        if self._flights.pop(flight.wire_id, None) is None:
            return
        self._release_all(flight, error.code)
        self.send(flight.client, Failed(flight.request_id, error.code, str(error)))

    def _release_all(self, flight: Flight, reason: str) -> None:
        for name in {*flight.asked, flight.relay} - {""}:
            self.send(name, Cancel(flight.wire_id, reason))

    def _on_cancel(self, message: Cancel) -> None:
        for flight in [one for one in self._flights.values() if one.request_id == message.request_id]:
            self._flights.pop(flight.wire_id)
            self._release_all(flight, message.reason)

    def _on_failed(self, sender: str, message: Failed) -> None:
        flight = self._flights.get(message.request_id)
        if flight is None or flight.complete:
            return
        log.warning("%s: %s", message.request_id, message.reason)
        self._fail(flight, _typed(message))

    def tick(self) -> None:
        limit_s = now_s() - self.config.cluster.dead_after_s
        for name, (heard_s, _) in list(self._beats.items()):
            if heard_s < limit_s and name not in self.down and name != REGISTRAR:
                self.on_peer_down(self.name, PeerDown(name, "no sign of life"))

    def on_peer_down(self, sender: str, message: PeerDown) -> None:
        if message.name in self.down:
            return
        super().on_peer_down(sender, message)
        log.warning("%s is down: %s", message.name, message.reason)
        for flight in list(self._flights.values()):
            if not flight.complete:
                self._bear_loss(flight, message.name)
            else:
                self._look_done(flight)

    def _bear_loss(self, flight: Flight, name: str) -> None:
        """Go on without `name`, if the request can; else replay it from its prompt and the ids already emitted."""
        if not flight.routed:
            if flight.asked - self.down <= flight.hits.keys():
                self._start(flight)
        elif name == flight.prefill and not flight.kv_done:
            flight.owed.discard(name)
            for target in {flight.relay, flight.main} - {""}:
                self.send(target, KvLost(flight.wire_id, f"{name} died"))
        elif name == flight.main:
            self._bear_loss_of_main(flight)
        elif name == flight.relay:
            self._bear_loss_of_relay(flight)

    def _bear_loss_of_main(self, flight: Flight) -> None:
        flight.owed.discard(flight.main)
        if flight.relay and not flight.relay_stopped and flight.relay not in self.down:
            flight.main = ""
            self.send(flight.relay, Adopt(flight.wire_id))
        else:
            self._replay(flight)

    def _bear_loss_of_relay(self, flight: Flight) -> None:
        flight.owed.discard(flight.relay)
        if not flight.main or flight.main in self.down:
            self._replay(flight)
        elif not flight.relay_stopped:
            flight.relay_stopped = True
            flight.early.clear()
            flight.mode = "lost"
            stopped = RelayStopped(flight.wire_id, len(flight.emitted), 0, flight.output, "lost", "")
            self.send(flight.main, stopped)

    def _replay(self, flight: Flight) -> None:
        self._flights.pop(flight.wire_id, None)
        self._release_all(flight, "replay")
        if flight.attempt + 1 >= RETRY_LIMIT:
            self._flights[flight.wire_id] = flight
            self._fail(flight, RoleDiedError(f"{flight.request_id}: roles died in {RETRY_LIMIT} attempts"))
            return
        flight.next_attempt()
        self._note(flight, lifecycle.REPLAYED, attempt=flight.attempt, tokens=len(flight.emitted))
        self._ask(flight)


def _typed(message: Failed) -> PddError:
    from pdd.errors import error_of

    return error_of(message.code, message.reason)


__all__ = ["Gateway"]
