"""The one thread of a role that touches the engine.

Invariant: jobs run in the order they were posted and never at the same time as a step, so engine, slots and
sequences need no locks.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("pdd.roles")

Job = Callable[[], None]


class Worker:
    """Runs posted jobs, and `step` again and again while it says there is work."""

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, job: Job) -> None:
        """Run `job` on the engine's thread, soon."""
        self._inbox.put(job)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after the step it is in."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        busy = False
        while True:
            try:
                job = self._inbox.get_nowait() if busy else self._inbox.get()
            except queue.Empty:
                busy = self._guard(self._step)
                continue
            if job is None:
                return
            self._guard(job)
            busy = True

    def _guard(self, work: Callable[[], object]) -> bool:
        try:
            return bool(work())
        except (
            Exception
        ) as error:  # the owner of the failing request is told where it fails; this is the last net
            log.error("engine: %s", error, exc_info=error)
            return False
