"""The owner's end of a shaper process: start it, ask it, end it.

Invariant: the process reads its stdin until end of file and then exits, so it cannot outlive the owner even
after kill -9; every question has a deadline.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pdd.errors import ClusterError

ANSWER_S = 20.0
ROOT = Path(__file__).resolve().parents[3]


class Worker:
    """A child `python -m module <json>` that answers one line of JSON to each line of JSON."""

    def __init__(self, module: str, start: dict[str, Any], log: Path) -> None:
        self._lock = threading.Lock()
        self._buffer = b""
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with log.open("ab") as errors:
            # A session of its own: Ctrl-C is for the owner, which then ends this process in good order.
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(start)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        try:
            self._answer()
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send one command and return its answer.

        Raises:
            ClusterError: the process is gone, late, or refuses.
        """
        with self._lock:
            stdin = self._process.stdin
            if stdin is None or stdin.closed:
                raise ClusterError("wan: the shaper is stopped; open a new one")
            try:
                stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
                stdin.flush()
            except OSError as error:
                raise self._dead() from error
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        answer = json.loads(self._read_line())
        if "error" in answer:
            raise ClusterError(f"wan: the shaper refused: {answer['error']}")
        return answer

    def _read_line(self) -> bytes:
        fd = self._process.stdout.fileno()  # type: ignore[union-attr]
        deadline_s = time.monotonic() + ANSWER_S
        while b"\n" not in self._buffer:
            left_s = deadline_s - time.monotonic()
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise ClusterError(f"wan: the shaper (pid {self.pid}) did not answer within {ANSWER_S:g} s")
            data = os.read(fd, 65536)
            if not data:
                raise self._dead()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _dead(self) -> ClusterError:
        try:
            code: int | None = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            code = None
        text = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
        last = text.splitlines()[-1] if text else "it left no message"
        return ClusterError(f"wan: the shaper ended (exit code {code}); {last}")

    def stop(self) -> None:
        """End the process: close its stdin, then terminate, then kill; each with a deadline."""
        stdin, stdout = self._process.stdin, self._process.stdout
        for stream in (stdin, stdout):
            if stream is not None:
                _close(stream)
        for push in (None, self._process.terminate, self._process.kill):
            if push is not None:
                push()
            try:
                self._process.wait(3.0)
                return
            except subprocess.TimeoutExpired:
                continue


def _close(stream: Any) -> None:
    try:
        stream.close()
    except OSError:
        return
