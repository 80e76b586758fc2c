"""How a role process comes to life: its place and its configuration.

Invariant: nothing secret stands on a command line. The first line of stdin (or two files) brings secret and
configuration; when stdin ends, the parent is gone and the role ends too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pdd.config import RunConfig, from_plain, to_plain
from pdd.errors import ConfigError

ROLES = ("gateway", "prefill", "relay_decode", "main_decode")


@dataclass(frozen=True)
class Boot:
    """Place, peers to join and settings of one role process.

    host: address to listen on. join: control address of the registrar. ipc_dir: folder for sockets that do not cross
    the network ("" on a host of its own).
    """

    role: str
    name: str
    datacenter: str
    host: str
    join: str
    ipc_dir: str
    secret: bytes
    config: RunConfig


def stdin_line(secret: bytes, config: RunConfig) -> str:
    """The line a parent writes to the role's stdin."""
    return json.dumps({"secret": secret.hex(), "config": to_plain(config)}) + "\n"


def parse(argv: list[str]) -> Boot:
    """Read the command line, then secret and configuration from stdin or from files.

    Raises:
        ConfigError: anything missing or impossible, in one line.
    """
    parser = argparse.ArgumentParser(prog="python -m pdd.roles", description="One PDD role as one process.")
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--name", required=True, help="unique name in the cluster, such as md0")
    parser.add_argument("--datacenter", required=True, help="name of the datacenter this process stands in")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--join", required=True, help="control address of the cluster to join")
    parser.add_argument(
        "--ipc-dir", default="", help="folder for local sockets, shared by one host's processes"
    )
    parser.add_argument("--secret-file", help="file with the cluster's secret in hex (default: stdin)")
    parser.add_argument("--config-file", help="JSON file with the resolved configuration (default: stdin)")
    args = parser.parse_args(argv)
    secret, config = _from_files(args) if args.secret_file else _from_stdin(args.ipc_dir)
    return Boot(
        role=args.role,
        name=args.name,
        datacenter=args.datacenter,
        host=args.host,
        join=args.join,
        ipc_dir=args.ipc_dir,
        secret=secret,
        config=config,
    )


def _from_files(args: argparse.Namespace) -> tuple[bytes, RunConfig]:
    try:
        secret = bytes.fromhex(Path(args.secret_file).read_text().strip())
        config = json.loads(Path(args.config_file).read_text()) if args.config_file else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"--secret-file/--config-file: {error}; give readable hex and JSON files") from None
    return secret, from_plain(RunConfig, config)


def _from_stdin(ipc_dir: str) -> tuple[bytes, RunConfig]:
    try:
        data = json.loads(sys.stdin.readline())
        secret, config = bytes.fromhex(data["secret"]), from_plain(RunConfig, data["config"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError("stdin: no line with secret and config; start with --secret-file instead") from None
    threading.Thread(target=_end_with_parent, args=(ipc_dir,), daemon=True).start()
    return secret, config


def _end_with_parent(ipc_dir: str) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    # Siblings end at the same time and may still write into the folder: look again for a while.
    until_s = time.monotonic() + 2.0
    while ipc_dir and os.path.isdir(ipc_dir) and time.monotonic() < until_s:
        shutil.rmtree(ipc_dir, ignore_errors=True)
        time.sleep(0.1)
    os._exit(0)
