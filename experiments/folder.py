"""The folder of one run: run.json, Parquet tables, and a traceback if it failed.

Invariant: a folder belongs to one run only, and run.json is whole at any moment: it is replaced, not
rewritten.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm import tqdm

from experiments.compose import ROOT
from experiments.provenance import config_hash, git_state, host, result_key, versions
from pdd.config import RunConfig, to_plain


class RunFolder:
    """Where one experiment puts what it finds."""

    def __init__(self, path: Path, config: RunConfig) -> None:
        self.path = path
        self._begun_s = time.monotonic()
        self._record: dict[str, Any] = {
            "experiment": config.experiment.name,
            "status": "running",
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "wall_s": None,
            "error": None,
            "metrics": None,
            "seeds": list(config.scale.seeds),
            "scale": config.scale.name,
            "config_hash": config_hash(config),
            "result_key": result_key(config),
            "git": git_state(),
            "versions": versions(),
            "host": host(),
            "config": to_plain(config),
        }
        self._write()

    @classmethod
    def create(cls, config: RunConfig) -> RunFolder:
        """A new folder `<runs_dir>/<experiment>/<UTC time>-<hash>`; no two share one in the same second."""
        parent = ROOT / config.runs_dir / config.experiment.name
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
            path = parent / f"{stamp}-{secrets.token_hex(4)}"
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return cls(path, config)

    def write_table(self, name: str, frame: pd.DataFrame) -> Path:
        """Write `frame` as NAME.parquet; nested values are kept as JSON text."""
        path = self.path / f"{name}.parquet"
        partial = path.with_suffix(".partial")
        frame.to_parquet(partial, index=False)
        os.replace(partial, path)
        return path

    def progress(self, total: int, label: str) -> tqdm[Any]:
        """A progress bar on a terminal; quiet in a log."""
        return tqdm(total=total, desc=label, disable=not sys.stderr.isatty(), leave=False, file=sys.stderr)

    def finish(self, metrics: dict[str, Any]) -> None:
        """Mark the run as ended well."""
        self._end("ok", metrics=metrics)

    def fail(self, error: BaseException, status: str = "failed") -> None:
        """Mark the run as failed or interrupted, with the traceback beside run.json."""
        (self.path / "traceback.txt").write_text("".join(traceback.format_exception(error)))
        self._end(status, error=f"{type(error).__name__}: {error}".rstrip(": "))

    def _end(self, status: str, **more: Any) -> None:
        self._record.update(status=status, wall_s=round(time.monotonic() - self._begun_s, 3), **more)
        self._write()

    def _write(self) -> None:
        partial = self.path / "run.json.partial"
        partial.write_text(json.dumps(self._record, indent=1, allow_nan=False) + "\n")
        os.replace(partial, self.path / "run.json")


def shown(path: Path) -> str:
    """A path as users see it: relative to the source tree where it is inside."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def read_run(path: Path) -> dict[str, Any]:
    """The run.json of a run folder.

    Raises:
        FileNotFoundError: there is none.
    """
    record: dict[str, Any] = json.loads((path / "run.json").read_text())
    return record


def read_table(path: str | Path, name: str) -> pd.DataFrame:
    """One table of a run folder."""
    return pd.read_parquet(Path(path) / f"{name}.parquet")


def fresh_result(config: RunConfig) -> Path | None:
    """The newest finished run with the same configuration, code and packages, if there is one."""
    key = result_key(config)
    for path in sorted((ROOT / config.runs_dir / config.experiment.name).glob("*/run.json"), reverse=True):
        try:
            record = read_run(path.parent)
        except (OSError, ValueError):
            continue
        if record.get("status") == "ok" and record.get("result_key") == key:
            return path.parent
    return None
