"""A submitted request in the client's hands.

Invariant: a handle ends exactly once, with a completion or a typed error, and no wait on it outlives its deadline.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from pdd.errors import DeadlineError, PddError
from pdd.request import Completion, Request, Token

GRACE_S = 10.0
"""How much longer than the gateway's own deadline a client waits before it gives the gateway up."""


class Handle:
    """Filled by the cluster's thread, read by the caller's."""

    def __init__(self, request: Request, timeout_s: float, cancel: Callable[[str], None]) -> None:
        self.request = request
        self._timeout_s = timeout_s + GRACE_S
        self._cancel = cancel
        self._tokens: queue.SimpleQueue[Token | None] = queue.SimpleQueue()
        self._done = threading.Event()
        self._outcome: Completion | PddError | None = None

    def add(self, tokens: tuple[Token, ...]) -> None:
        """New tokens came."""
        for token in tokens:
            self._tokens.put(token)

    def end(self, outcome: Completion | PddError) -> None:
        """The answer is whole, or failed."""
        if not self._done.is_set():
            self._outcome = outcome
            self._tokens.put(None)
            self._done.set()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def outcome(self, timeout_s: float | None = None) -> Completion | PddError:
        """The completion, or the typed error as a value."""
        if not self._done.wait(self._timeout_s if timeout_s is None else timeout_s):
            self.cancel()
            return DeadlineError(f"{self.request.id}: the cluster did not answer in time")
        assert self._outcome is not None
        return self._outcome

    def result(self, timeout_s: float | None = None) -> Completion:
        """Wait for the completion.

        Raises:
            PddError: the request's typed error, or `DeadlineError`.
        """
        outcome = self.outcome(timeout_s)
        if isinstance(outcome, PddError):
            raise outcome
        return outcome

    def tokens(self) -> Iterator[Token]:
        """The tokens as they come; ends with the answer, or raises its error."""
        while True:
            try:
                token = self._tokens.get(timeout=self._timeout_s)
            except queue.Empty:
                self.cancel()
                raise DeadlineError(f"{self.request.id}: no token in {self._timeout_s:g} s") from None
            if token is None:
                self.result()
                return
            yield token

    def cancel(self) -> None:
        """Give the request up: everything it holds in the cluster is freed."""
        self._cancel(self.request.id)
