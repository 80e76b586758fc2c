"""Run a command inside a network namespace: `python enter.py /proc/PID/fd/N -- command ...`.

Invariant: needs nothing but the standard library, and becomes the command (same process id).
"""

from __future__ import annotations

import ctypes
import os
import sys

CLONE_NEWNET = 0x40000000


def main(arguments: list[str]) -> None:
    """Enter the namespace file, then exec."""
    if len(arguments) < 3 or arguments[1] != "--":
        sys.exit("enter: give NAMESPACE_FILE -- COMMAND [ARGUMENT ...]")
    try:
        fd = os.open(arguments[0], os.O_RDONLY | os.O_CLOEXEC)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.execvp(arguments[2], arguments[2:])
    except OSError as error:
        sys.exit(f"enter: {arguments[0]}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
