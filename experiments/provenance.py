"""Where a result came from: code, packages, machine; and the key under which it may be reused.

Invariant: two results with the same key were made by the same resolved configuration and the same code.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from experiments.compose import ROOT
from pdd.config import RunConfig, to_plain

PACKAGES = (
    "hydra-core", "matplotlib", "msgspec", "numpy", "pandas", "papermill", "pdd", "pyarrow", "pyzmq",
    "seaborn", "torch", "transformers",
)  # fmt: skip
NOT_RUN = ("figures", "notebook", "publish", "scorecard", "compare", "sweep")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can move a result."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def host() -> dict[str, Any]:
    """The machine in numbers that matter for a measurement; no names or addresses."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def git_state() -> dict[str, Any]:
    """Commit and dirty flag of this source tree; None where it is no git checkout."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=normal")
    return {"commit": commit or None, "dirty": bool(changes) if changes is not None else None}


def _git(*args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *args], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def config_hash(config: RunConfig) -> str:
    """Hash of the resolved configuration without where its results are put."""
    plain = to_plain(config)
    plain.pop("runs_dir")
    return _digest(json.dumps(plain, sort_keys=True).encode())


def code_hash() -> str:
    """Hash of the code that an experiment can execute; what only draws or compares does not count."""
    files = [path for path in (ROOT / "pdd").rglob("*.py") if path.parent.name != "figures"]
    files += [path for path in (ROOT / "experiments").glob("*.py") if path.stem not in NOT_RUN]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def result_key(config: RunConfig) -> str:
    """The key under which a finished run may be reused: configuration, code, and packages."""
    parts = [config_hash(config), code_hash(), json.dumps(versions(), sort_keys=True)]
    return _digest("\n".join(parts).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
