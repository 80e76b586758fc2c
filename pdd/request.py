"""What is asked and what is answered, as typed plain data.

Invariant: a `SamplingParams` that exists is valid, and a token of a `Completion` is known by its position in
the output (0 is the first token after the prompt), never by who made it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdd.errors import RequestError


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How tokens are drawn. Noise is keyed by (seed, position), so any role draws the same token.

    temperature 0 is greedy. top_k 0 and top_p 1 mean "all". logprobs: how many top alternatives to report
    (None: no logprobs). stop: strings; the answer's text ends before one. stop_ids end the answer after the id.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, field: str, right: str) -> None:
            if not ok:
                raise RequestError(f"{field}: {getattr(self, field)!r} is not possible; give {right}")

        need(self.max_tokens >= 1, "max_tokens", "a whole number of at least 1")
        need(0.0 <= self.temperature <= 100.0, "temperature", "a number from 0 to 100")
        need(self.top_k >= 0, "top_k", "0 (all) or more")
        need(0.0 < self.top_p <= 1.0, "top_p", "a number above 0, at most 1")
        need(0 <= self.seed < 2**63, "seed", "a whole number from 0 to 2**63 - 1")
        need(all(self.stop), "stop", "texts that are not empty")
        need(self.repetition_penalty > 0, "repetition_penalty", "a number above 0")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "a number from -2 to 2")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "a number from -2 to 2")
        need(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "0 to 20, or none")


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One output token: its position in the output, id, author role, and time on the cluster's clock."""

    position: int
    id: int
    author: str
    made_s: float
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """One KV segment's way from P to a decode role, over `path` (`wan`, `lan`)."""

    request_id: str
    source: str
    target: str
    path: str
    start: int
    end: int
    bytes: int
    queued_s: float
    started_s: float
    ended_s: float
    ok: bool
    error: str = ""


class Event(msgspec.Struct, frozen=True, array_like=True):
    """A named moment of a request's life (names: `pdd.lifecycle`), in seconds on the cluster's one clock."""

    request_id: str
    name: str
    at_s: float
    role: str
    detail: dict[str, Any] = {}


class Request(msgspec.Struct, frozen=True):
    """A prompt as token ids, and how to answer it."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()


class Completion(msgspec.Struct):
    """An answer: tokens with their authors, why it ended, and how it came about.

    pipeline: `P-MD`, `P-RLD-MD`, or `P-RLD` (excluded by the paper but for singular traffic).
    emitted_s: when the gateway handed each token to the user; TTFT and gaps are taken here.
    takeover_position: the output position of MD's first authoritative token, None if MD never took over.
    disagreements: RLD ids that differ from MD's own prediction during the extend.
    """

    request_id: str
    prompt_tokens: int
    tokens: list[Token]
    emitted_s: list[float]
    text: str
    finish_reason: str
    pipeline: str
    mode: str = ""
    hit_tokens_p: int = 0
    hit_tokens_md: int = 0
    takeover_position: int | None = None
    disagreements: int = 0
    ids_bytes: int = 0
    events: list[Event] = []
    transfers: list[Transfer] = []

    @property
    def ids(self) -> list[int]:
        """The output token ids in order."""
        return [token.id for token in self.tokens]

    def __repr__(self) -> str:
        authors = ", ".join(
            f"{sum(token.author.startswith(role) for token in self.tokens)} by {role.upper()}"
            for role in ("p", "rld", "md")
            if any(token.author.startswith(role) for token in self.tokens)
        )
        return (
            f"Completion({self.request_id}: {self.prompt_tokens} prompt tokens, {self.hit_tokens_md} cached at MD, "
            f"{len(self.tokens)} tokens ({authors}) through {self.pipeline}, ended by {self.finish_reason}: "
            f"{self.text[:60]!r})"
        )


def check_prompt(prompt: tuple[int, ...], sampling: SamplingParams, vocab: int, max_tokens: int) -> None:
    """Refuse a prompt that no role could serve.

    Raises:
        RequestError: empty, an id outside [0, vocab), or prompt + max_tokens beyond the model's context.
    """
    if not prompt:
        raise RequestError("prompt: [] is empty; give at least one token id")
    for index, token in enumerate(prompt):
        if type(token) is not int or not 0 <= token < vocab:
            raise RequestError(f"prompt[{index}]: {token!r} is outside the vocabulary; give 0 to {vocab - 1}")
    if len(prompt) + sampling.max_tokens > max_tokens:
        raise RequestError(
            f"prompt: {len(prompt)} tokens and max_tokens {sampling.max_tokens} exceed the context; "
            f"give at most {max_tokens} together"
        )
