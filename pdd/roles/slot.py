"""A request in a decode batch: its ids, its KV, and what is still to be fed to the model.

Invariant: the sequence to compute is always `prompt + output`; `seq.kv_tokens` of it are done. One pending id is a
decode step, several are an extend, and there is no other kind of work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from pdd.lifecycle import now_s
from pdd.request import SamplingParams, Token

Send = Callable[[str, Any], None]


class Draw(Protocol):
    """A drawn token (`pdd.model.sampling`)."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


class Stop(Protocol):
    """Says when an output is complete (`pdd.model.sampling`)."""

    def finish_reason(self, output_ids: list[int]) -> str | None: ...


Sampler = Callable[[Any, SamplingParams, list[int], list[int]], Draw]


class Slot:
    """Base of RLD's and MD's view of a request.

    seq: the model's KV of this request; only its length, `kv_tokens`, is known outside `pdd.model`.
    draw: draws a token from logits `[V]`, keyed by the request's seed and the position.
    """

    verifies = False
    urgent = False
    """Whether a user would see this slot wait: it then steps alone, for the few steps that a takeover takes."""

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        output: list[int],
        seq: Any,
        stop: Stop,
        draw: Sampler,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.sampling = sampling
        self.output = list(output)
        self.seq = seq
        self.stop = stop
        self._draw = draw
        self.kv_whole = False
        self.ended = False

    @property
    def kv_target(self) -> int:
        """KV positions that P ships: all of the prompt but its last id, whose step gives the first token."""
        return len(self.prompt) - 1

    def pending(self) -> list[int]:
        """Ids to feed now; empty when there is nothing to do."""
        if self.ended or not self.kv_whole or not self.may_step():
            return []
        done = self.seq.kv_tokens
        if done < len(self.prompt):
            return self.prompt[done:] + self.output
        return self.output[done - len(self.prompt) :]

    def may_step(self) -> bool:
        """Whether the role's rules let this slot step now."""
        return True

    def add_first(self, token_id: int) -> None:
        """Token 0 came from P (`first_token=prefill`)."""
        raise NotImplementedError

    def accept(self, rows: Any, fed: int) -> None:
        """Take logits after `fed` ids: `[fed, V]` if `verifies`, else `[V]` of the last one."""
        raise NotImplementedError

    def draw(self, row: Any, output: list[int]) -> Draw:
        """The token after `output`."""
        return self._draw(row, self.sampling, self.prompt, output)

    def token(self, position: int, drawn: Draw, author: str) -> Token:
        """The drawn token as it travels to the gateway."""
        return Token(position, drawn.id, author, now_s(), drawn.logprob, drawn.top)
