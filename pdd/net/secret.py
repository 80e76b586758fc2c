"""What proves that a peer belongs to the cluster: keyed BLAKE2b over control bodies and over stream
challenges.

Invariant: the secret itself never crosses a socket, and a proof made for one direction is worthless in the
other.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets

from pdd.errors import ConfigError

MAC_BYTES = 16
PROOF_BYTES = 32
NONCE_BYTES = 16


def new_secret() -> bytes:
    """A fresh random secret of 32 bytes."""
    return secrets.token_bytes(32)


def new_nonce() -> bytes:
    """A challenge of `NONCE_BYTES` that was never used before."""
    return secrets.token_bytes(NONCE_BYTES)


def mac(secret: bytes, body: bytes) -> bytes:
    """The `MAC_BYTES` that go before a control body."""
    return hashlib.blake2b(body, key=_key(secret), digest_size=MAC_BYTES, person=b"pdd-control").digest()


def prove(secret: bytes, nonce: bytes, name: str, side: str) -> bytes:
    """The answer to a challenge. side: `client` or `server`, so that no answer can be mirrored."""
    digest = hashlib.blake2b(key=_key(secret), digest_size=PROOF_BYTES, person=f"pdd-{side}".encode())
    digest.update(nonce)
    digest.update(name.encode())
    return digest.digest()


def same(left: bytes, right: bytes) -> bool:
    """Equality in constant time."""
    return hmac.compare_digest(left, right)


def require_secret(host: str, secret: bytes) -> None:
    """Refuse to listen beyond loopback without a secret.

    Raises:
        ConfigError: `host` is not a loopback address and `secret` is empty.
    """
    if not secret and not _is_loopback(host):
        raise ConfigError(f"secret: nothing given but {host!r} is not loopback; give a shared secret")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _key(secret: bytes) -> bytes:
    # BLAKE2b takes keys of at most 64 bytes; a longer secret is hashed so that none of it is lost.
    return secret if len(secret) <= 64 else hashlib.blake2b(secret).digest()
