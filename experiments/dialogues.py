"""What the exactness experiment asks: dialogues whose turns grow, sampled in every way.

Invariant: a dialogue depends on its seed and number alone; turn n + 1 begins with turn n and its answer, so
that P's cache and the DRC hold part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdd.request import Request, SamplingParams

TURNS = 2
GREEDY: dict[str, Any] = {"temperature": 0.0}
KINDS: tuple[dict[str, Any], ...] = (
    GREEDY,
    GREEDY,
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
)


@dataclass(frozen=True)
class Sizes:
    """Ranges, both ends in: ids of a first prompt, ids that a later turn adds, output tokens."""

    prompt: tuple[int, int] = (200, 600)
    added: tuple[int, int] = (100, 300)
    output: tuple[int, int] = (24, 110)


class Dialogue:
    """One dialogue: `request(turn)` is its next question, `answered` appends the answer."""

    def __init__(self, number: int, seed: int, vocab: int, sizes: Sizes) -> None:
        self._rng = np.random.default_rng([seed, number])
        self._vocab, self._sizes = vocab, sizes
        self._history: tuple[int, ...] = ()
        self.name = f"d{number:03d}"
        self.kind = KINDS[number % len(KINDS)]

    def request(self, turn: int, stem: str) -> Request:
        """The question of a turn; its id is unique by `stem`, dialogue and turn."""
        span = self._sizes.added if self._history else self._sizes.prompt
        prompt = self._history + self._ids(self._between(span))
        params = SamplingParams(
            max_tokens=self._between(self._sizes.output), seed=self._between((0, 1 << 30)), **self.kind
        )
        return Request(f"{stem}-{self.name}-t{turn}", prompt, params)

    def answered(self, request: Request, ids: Sequence[int]) -> None:
        """Remember question and answer."""
        self._history = request.prompt + tuple(ids)

    def _between(self, span: tuple[int, int]) -> int:
        return int(self._rng.integers(span[0], span[1] + 1))

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(0, self._vocab, count).tolist())


def is_plain_greedy(params: SamplingParams) -> bool:
    """Whether transformers `generate` can be the yardstick: greedy, no penalties, no stops."""
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    return params.temperature == 0 and penalties == (1, 0, 0) and not params.stop


def ended_at(request: Request, tokens: int) -> Request:
    """The same question with at most `tokens` tokens of answer."""
    return _changed(request, f"-to{tokens}", max_tokens=min(tokens, request.sampling.max_tokens))


def stopped_near(
    request: Request, ids: Sequence[int], place: int, decode: Callable[[Sequence[int]], str]
) -> Request | None:
    """The same question with a stop string of the output ids around `place`.

    None if there is no such string: ids may decode to broken characters.
    """
    places = (place + shift for shift in (0, 1, -1, 2))
    texts = [decode(ids[at - 1 : at + 2]) for at in places if at > 0]
    whole = [text for text in texts if text and "\ufffd" not in text]
    return _changed(request, "-stop", stop=(whole[0],)) if whole else None


def _changed(request: Request, suffix: str, **changes: Any) -> Request:
    fields = {name: getattr(request.sampling, name) for name in request.sampling.__struct_fields__}
    return Request(request.id + suffix, request.prompt, SamplingParams(**{**fields, **changes}))
