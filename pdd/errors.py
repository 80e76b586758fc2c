"""Every error a user can meet, by type.

Invariant: the message is one clear line that names the field, the value and what would be right.
`code` is what crosses the wire; `error_of` turns it back into the type.
"""

from __future__ import annotations


class PddError(Exception):
    """Base of all errors that PDD raises on purpose."""

    code = "internal"


class ConfigError(PddError):
    """A setting is unknown or impossible."""

    code = "config"


class RequestError(PddError):
    """A request that no cluster could serve: empty prompt, too long, ids outside the vocabulary."""

    code = "bad_request"


class SecretError(PddError):
    """A peer does not hold the cluster's secret."""

    code = "wrong_secret"


class WireError(PddError):
    """Bytes from a socket that are not a valid message or frame."""

    code = "bad_wire"


class TransferError(PddError):
    """A KV transfer failed: lost, late, aborted or with a wrong checksum."""

    code = "kv_lost"


class RoleDiedError(PddError):
    """A role that the request needs is gone and no other can take its place."""

    code = "role_died"


class DeadlineError(PddError):
    """The request did not end before its deadline."""

    code = "deadline"


class CancelledError(PddError):
    """The client gave the request up."""

    code = "cancelled"


class ClusterError(PddError):
    """The cluster could not be started, or is closed."""

    code = "cluster"


_TYPES = {cls.code: cls for cls in PddError.__subclasses__()}


def error_of(code: str, message: str) -> PddError:
    """The typed error that `code` stands for."""
    return _TYPES.get(code, PddError)(message)
