"""A cluster as one object: `with Cluster.from_config(config) as c: print(c.generate("hello"))`.

Invariant: leaving the `with` block, an exception, Ctrl-C or the death of this process ends every process and removes
every socket, namespace and folder that the cluster made.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

from tqdm import tqdm

from pdd.cluster.client import Client
from pdd.cluster.handle import Handle
from pdd.cluster.places import datacenters, places
from pdd.cluster.process import RoleProcess
from pdd.cluster.registrar import Registrar, plain
from pdd.config import RunConfig
from pdd.errors import ClusterError, PddError, RequestError
from pdd.lifecycle import now_s
from pdd.model.load import load_tokenizer
from pdd.model.sampling import StopRule
from pdd.net.wan import WanBackend, open_wan
from pdd.request import Completion, Request, SamplingParams, Token, check_prompt

STOP_S = 5.0
WATCH_S = 0.05


class Cluster:
    """P, RLD, MD and gateway processes of one configuration, and a client for them."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.wan: WanBackend
        self.run_dir: Path
        self._processes: dict[str, RoleProcess] = {}
        self._numbers = itertools.count()
        self._turn = itertools.count()
        self._used: set[str] = set()
        self._closing = threading.Event()
        self._up = False

    @classmethod
    def from_config(cls, config: RunConfig) -> Cluster:
        """A cluster that starts when it is entered (`with`) or by `start()`."""
        return cls(config)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> Cluster:
        """Start every process and wait until each knows its peers.

        Raises:
            ClusterError: a process ended or was not ready in time; the message holds its last words.
            ConfigError: the link, model or address cannot be had here.
        """
        self.run_dir = Path(tempfile.mkdtemp(prefix="pdd-"))
        self._stack = contextlib.ExitStack()
        self._stack.callback(shutil.rmtree, self.run_dir, ignore_errors=True)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def _start(self) -> None:
        secret = secrets.token_bytes(32)
        self.wan = self._stack.enter_context(
            open_wan(self.config.wan, datacenters(self.config), self.run_dir)
        )
        self._tokenizer = load_tokenizer(self.config.model)
        expected = places(self.config)
        self._client = Client(secret, self.run_dir, Registrar(expected, self.wan.address), self._with_text)
        self._stack.callback(self._client.close)
        self._stack.callback(self._stop_processes)
        for place in expected:
            self._processes[place.name] = RoleProcess(
                place,
                self.config,
                secret=secret,
                join=self._client.address,
                host=self.wan.bind_host(place.datacenter),
                prefix=self.wan.enter(place.datacenter),
                run_dir=self.run_dir,
            )
        self._wait_ready()
        self.vocab, self.max_tokens = self._client.registrar.facts()
        self._up = True
        self._watcher = threading.Thread(target=self._watch, name="pdd-watch", daemon=True)
        self._watcher.start()

    def _wait_ready(self) -> None:
        registrar, limit_s = self._client.registrar, self.config.cluster.start_timeout_s
        until_s = now_s() + limit_s
        bar = tqdm(
            total=len(registrar.expected),
            desc="starting roles",
            leave=False,
            disable=not sys.stderr.isatty(),
        )
        with bar:
            while not self._client.wait_for(lambda: registrar.all_ready, 0.1):
                bar.update(len(registrar.ready) - bar.n)
                for name, process in self._processes.items():
                    if process.exit_code is not None:
                        raise ClusterError(f"{name} did not start: {process.last_words()}")
                if now_s() > until_s:
                    late = ", ".join(sorted(registrar.expected.keys() - registrar.ready))
                    raise ClusterError(f"not ready within {limit_s:g} s: {late}")

    def _watch(self) -> None:
        """Notice processes that end by themselves, and tell the others."""
        known: set[str] = set()
        while not self._closing.wait(WATCH_S):
            for name, process in self._processes.items():
                if name not in known and process.exit_code is not None:
                    known.add(name)
                    self._client.peer_down(name, f"exit code {process.exit_code}")

    def stop(self) -> None:
        """End everything. Safe to call twice."""
        self._closing.set()
        if hasattr(self, "_watcher"):
            self._watcher.join(5.0)
        self._up = False
        self._stack.close()

    def _stop_processes(self) -> None:
        self._client.shutdown()
        until_s = now_s() + STOP_S
        for process in self._processes.values():
            process.stop(max(0.1, until_s - now_s()))

    def __enter__(self) -> Cluster:
        return self if self._up else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        wan = self.config.wan
        state = "up" if self._up else "down"
        names = " ".join(f"{place.name}@{place.datacenter}" for place in places(self.config))
        return (
            f"Cluster({self.config.system.name}, {state}: {names}; {self.config.model.name}; "
            f"WAN {wan.backend} {wan.rate_mbps:g} Mbps, {wan.rtt_ms:g} ms)"
        )

    # -- requests --------------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: str | Sequence[int], stream: Literal[False] = ..., **sampling: Any
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: str | Sequence[int], stream: Literal[True], **sampling: Any
    ) -> Iterator[Token]: ...

    def generate(
        self, prompt: str | Sequence[int], stream: bool = False, **sampling: Any
    ) -> Completion | Iterator[Token]:
        """Answer a prompt (text or token ids). `sampling`: fields of `SamplingParams`.

        Raises:
            RequestError: the prompt or a sampling field is not possible.
            PddError: the request failed; the type says how.
        """
        handle = self.submit(self.request(prompt, **sampling))
        return handle.tokens() if stream else handle.result()

    def request(self, prompt: str | Sequence[int], **sampling: Any) -> Request:
        """A request with a fresh id, as `submit` takes it."""
        ids = self.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        try:
            params = SamplingParams(**sampling)
        except TypeError as error:
            known = ", ".join(SamplingParams.__struct_fields__)
            raise RequestError(f"sampling: {error}; known: {known}") from None
        return Request(f"r{next(self._numbers)}", tuple(ids), params)

    def submit(self, request: Request, timeout_s: float | None = None, relay: bool = True) -> Handle:
        """Send a request; the handle gives its tokens and its end. `relay` False: whatever the router says, P-MD.

        Raises:
            RequestError: no role could serve it.
            ClusterError: the cluster is not up.
        """
        if not self._up:
            raise ClusterError("the cluster is not up; use it inside `with`")
        if request.id in self._used:
            raise RequestError(f"request_id: {request.id!r} was used before; give a new one")
        check_prompt(request.prompt, request.sampling, self.vocab, self.max_tokens)
        sampling = self._with_model_stops(request.sampling)
        request = Request(request.id, request.prompt, sampling)
        limit_s = timeout_s or self.config.cluster.request_timeout_s
        self._used.add(request.id)
        handle = Handle(request, limit_s, self._cancel)
        gateways = self._gateways()
        self._client.submit(gateways[next(self._turn) % len(gateways)], handle, limit_s, relay)
        return handle

    def _with_model_stops(self, sampling: SamplingParams) -> SamplingParams:
        """A model's own end-of-sequence ids stop every request."""
        fields = {name: getattr(sampling, name) for name in SamplingParams.__struct_fields__}
        stops = tuple(dict.fromkeys((*sampling.stop_ids, *self._tokenizer.stop_ids)))
        return SamplingParams(**{**fields, "stop_ids": stops})

    def _gateways(self) -> list[str]:
        alive = [name for name in self._processes if name.startswith("gw-") and name not in self._client.down]
        return alive or [name for name in self._processes if name.startswith("gw-")]

    def _cancel(self, request_id: str) -> None:
        self._client.cancel(self._gateways(), request_id)

    def _with_text(self, handle: Handle, completion: Completion) -> Completion:
        completion.text = StopRule(handle.request.sampling, self._tokenizer).text(completion.ids)
        return completion

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return self._tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        return self._tokenizer.decode(ids)

    def replay(
        self,
        timed: Iterable[tuple[float, Request]],
        on_done: Callable[[Completion | PddError], None] | None = None,
    ) -> list[Completion | PddError]:
        """Submit each request at its arrival time (s from now), whatever the others do; outcomes in the same order."""
        started_s = now_s()
        handles: list[Handle | PddError] = []
        for arrival_s, request in timed:
            time.sleep(max(0.0, started_s + arrival_s - now_s()))
            try:
                handles.append(self.submit(request))
            except RequestError as error:
                handles.append(error)
        outcomes = []
        for handle in handles:
            outcome = handle if isinstance(handle, PddError) else handle.outcome()
            outcomes.append(outcome)
            if on_done is not None:
                on_done(outcome)
        return outcomes

    def warm(self, histories: Iterable[Sequence[int]]) -> None:
        """Put histories into P's prefix cache and the DRC, past any relay: an answer of one token would end on RLD.

        Raises:
            PddError: one of them failed.
        """
        handles = [self.submit(self.request(history, max_tokens=1), relay=False) for history in histories]
        for handle in handles:
            handle.result()

    # -- upkeep ----------------------------------------------------------------------------------------------------

    def reset_caches(self) -> None:
        """Empty P's prefix caches and the DRCs."""
        names = [
            place.name
            for place in places(self.config)
            if place.role in ("prefill", "main_decode") and place.name not in self._client.down
        ]
        self._client.reset(names, self.config.cluster.request_timeout_s)

    def stats(self) -> dict[str, Any]:
        """Load and cache use of each role by its last heartbeat, and the WAN's totals."""
        roles = {name: plain(beat) for name, (_, beat) in self._client.registrar.beats.items()}
        return {"roles": roles, "wan": {f"{a}->{b}": stats for (a, b), stats in self.wan.stats().items()}}

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by role name."""
        return {name: process.pid for name, process in self._processes.items()}

    @property
    def addresses(self) -> dict[str, tuple[str, str]]:
        """Control and KV address on which each process listens."""
        joined = self._client.registrar.joined
        return {name: (join.peer.control, join.peer.kv) for name, join in joined.items()}

    def kill(self, name: str) -> None:
        """Kill a process at once (for fault tests)."""
        os.kill(self._processes[name].pid, 9)
