"""Which instance of a role serves a request (design: longest DRC match, then load, decides the MD).

Invariant: the choice depends on the candidates' values, never on their order, so that a replay chooses alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdd.errors import RoleDiedError


@dataclass(frozen=True)
class Candidate:
    """A living instance: its name, how many of the prompt's tokens it holds, and its load (1 is full)."""

    name: str
    hit_tokens: int
    load: float


def longest_match(candidates: Sequence[Candidate], role: str = "MD") -> Candidate:
    """The candidate with the longest cached prefix; among equals the least loaded, then the first by name.

    Raises:
        RoleDiedError: there is no candidate.
    """
    return min(_some(candidates, role), key=lambda one: (-one.hit_tokens, one.load, one.name))


def least_loaded(candidates: Sequence[Candidate], role: str = "RLD") -> Candidate:
    """The least loaded candidate; among equals the longest match, then the first by name.

    Raises:
        RoleDiedError: there is no candidate.
    """
    return min(_some(candidates, role), key=lambda one: (one.load, -one.hit_tokens, one.name))


def _some(candidates: Sequence[Candidate], role: str) -> Sequence[Candidate]:
    if not candidates:
        raise RoleDiedError(f"placement: no {role} is alive; start one")
    return candidates
