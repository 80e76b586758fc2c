"""`python -m pdd.roles ROLE ...`: one role process, started by a cluster or by hand on its own host."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from pdd.errors import PddError
from pdd.roles.base import Role
from pdd.roles.boot import Boot, parse


def build(boot: Boot) -> Role:
    """The role object; the model's rooms are only imported by roles that compute."""
    if boot.role == "gateway":
        from pdd.roles.gateway import Gateway

        return Gateway(boot)
    if boot.role == "prefill":
        from pdd.roles.prefill import Prefill

        return Prefill(boot)
    if boot.role == "relay_decode":
        from pdd.roles.relay_decode import RelayDecode

        return RelayDecode(boot)
    from pdd.roles.main_decode import MainDecode

    return MainDecode(boot)


def main(argv: list[str]) -> int:
    """Run the role until it is shut down; a user's mistake is one line and exit code 2."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent ends us in order
    # Sockets wait for the interpreter while the engine's thread computes: hand it over often.
    sys.setswitchinterval(0.0005)
    try:
        boot = parse(argv)
        logging.basicConfig(level=logging.WARNING, format=f"{boot.name}: %(message)s", stream=sys.stderr)
        asyncio.run(build(boot).run())
    except PddError as error:
        print(f"{argv[0] if argv else 'role'}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
