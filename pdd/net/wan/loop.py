"""A small event loop for the shaper processes: sockets, commands on stdin, and sub-millisecond sleeps.

Invariant: the loop ends when stdin closes or the parent is gone, so no shaper outlives its owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import selectors
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

Handler = Callable[[int], None]
Command = Callable[[dict[str, Any]], dict[str, Any]]
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
LOOK_S = 1.0
# A sleeping process wakes about this much late; the shapers deliver this much early instead.
EARLY_S = 0.0001


class Loop:
    """Calls handlers of ready sockets, then `tick(now_s)`, which says when it wants to run next."""

    def __init__(self, tick: Callable[[float], float | None], commands: dict[str, Command]) -> None:
        self._selector = selectors.DefaultSelector()
        self._interest: dict[int, int] = {}
        self._tick = tick
        self._commands = commands
        self._line = b""
        self._parent = os.getppid()
        self._running = True

    def watch(self, fd: int, events: int, handler: Handler) -> None:
        """Have `handler(ready events)` called; `events` 0 forgets the fd."""
        before = self._interest.get(fd, 0)
        if events == before:
            return
        if not before:
            self._selector.register(fd, events, handler)
        elif not events:
            self._selector.unregister(fd)
        else:
            self._selector.modify(fd, events, handler)
        self._interest[fd] = events
        if not events:
            del self._interest[fd]

    def run(self) -> None:
        """Serve until stdin closes, the parent dies or SIGTERM comes."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._end())
        os.set_blocking(0, False)
        _sleep_sharply()
        _go_first()
        self.watch(0, READ, self._read_commands)
        self._reply({"ok": True})
        while self._running and os.getppid() == self._parent:
            self._wait(self._tick(time.monotonic()))

    def _end(self) -> None:
        self._running = False

    def _wait(self, until_s: float | None) -> None:
        # epoll rounds to whole milliseconds, select does not; so select waits for the selector itself.
        left_s = LOOK_S if until_s is None else min(LOOK_S, until_s - time.monotonic())
        if left_s > 0:
            select.select([self._selector], [], [], left_s)
        for key, events in self._selector.select(0):
            if self._interest.get(key.fd):
                key.data(events)

    def _read_commands(self, _: int) -> None:
        data = os.read(0, 65536)
        if not data:
            return self._end()
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            self._answer(json.loads(line))

    def _answer(self, command: dict[str, Any]) -> None:
        try:
            self._reply(self._commands[command.pop("op")](command))
        except (OSError, ValueError, KeyError) as error:
            self._reply({"error": f"{type(error).__name__}: {error}"})

    def _reply(self, answer: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _sleep_sharply() -> None:
    """Ask Linux for timers within a microsecond, not the usual 50."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1000, 0, 0, 0)  # PR_SET_TIMERSLACK, in ns


def _go_first() -> None:
    """A real link does not wait for a processor; where the rights allow it, neither does this one."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -15)
