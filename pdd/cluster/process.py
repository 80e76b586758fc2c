"""A role process as its parent sees it.

Invariant: a process that was started is ended: asked first, then killed; and if this parent dies, the end of the
child's stdin ends it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pdd.cluster.places import Place
from pdd.config import RunConfig
from pdd.roles.boot import stdin_line


class RoleProcess:
    """`python -m pdd.roles ...` inside its datacenter. Its stderr goes to `<name>.log` in `run_dir`."""

    def __init__(
        self,
        place: Place,
        config: RunConfig,
        *,
        secret: bytes,
        join: str,
        host: str,
        prefix: list[str],
        run_dir: Path,
    ) -> None:
        self.place = place
        self.log_path = run_dir / f"{place.name}.log"
        command = [
            *prefix, sys.executable, "-m", "pdd.roles", place.role, "--name", place.name, "--datacenter",
            place.datacenter, "--host", host, "--join", join, "--ipc-dir", str(run_dir),
        ]  # fmt: skip
        threads = str(config.model.threads)
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
            )
        assert self._process.stdin is not None
        self._process.stdin.write(stdin_line(secret, config).encode())
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.poll()

    def last_words(self) -> str:
        """The last line of its log, for an error message."""
        lines = self.log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.exit_code}, nothing logged"

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, timeout_s: float) -> None:
        """Wait for the end that was asked for; then close stdin, then kill."""
        assert self._process.stdin is not None
        if not self.wait(timeout_s):
            self._process.stdin.close()
            if not self.wait(1.0):
                self._process.kill()
                self._process.wait()
        if not self._process.stdin.closed:
            self._process.stdin.close()
