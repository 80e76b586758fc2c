"""Text to ids and back: a byte tokenizer of our own for the tiny models, and a thin wrapper for any of
transformers.

Invariant: `decode` never raises on ids inside the vocabulary, whatever a random model draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Protocol

SPECIALS = 4
"""Ids 256 to 259 stand for nothing readable; they decode to an empty text."""


class Tokenizer(Protocol):
    """What PDD asks of a tokenizer. `stop_ids` end an answer whatever a request says."""

    stop_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`."""
        ...


class ByteTokenizer:
    """Ids 0-255 are bytes, four specials follow, the rest are readable syllables such as ` ba` or `no`."""

    stop_ids: tuple[int, ...] = ()

    def __init__(self, vocab: int) -> None:
        syllables = [a + b + c for c, a, b in product(("", " "), "bdfgklmnprstvz", "aeiou")]
        extra = vocab - 256 - SPECIALS
        pieces = [syllables[at % len(syllables)].encode() for at in range(extra)]
        self._pieces = [bytes([byte]) for byte in range(256)] + [b""] * SPECIALS + pieces

    def encode(self, text: str) -> list[int]:
        """The bytes of `text` in UTF-8."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are not UTF-8 become replacement characters."""
        return b"".join(map(self._pieces.__getitem__, ids)).decode(errors="replace")


class HubTokenizer:
    """A tokenizer of transformers. `stop_ids` are the model's end-of-sequence ids."""

    def __init__(self, inner: Any, stop_ids: tuple[int, ...]) -> None:
        self._inner = inner
        self.stop_ids = stop_ids

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        return list(self._inner.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        return str(
            self._inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
