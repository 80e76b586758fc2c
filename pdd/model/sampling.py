"""Drawing a token from logits, and knowing when an answer is complete.

Invariant: the token depends on (logits, parameters, prompt, output) and nothing else: noise is keyed by the
request's seed and the absolute position, never by worker state, so P, RLD and MD draw the same token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdd.model.tokenizer import Tokenizer
from pdd.request import SamplingParams

TAIL_SPARE_TOKENS = 8
"""Tokens decoded beyond a stop string's bytes: some decode to nothing, the first may be half a letter."""


@dataclass(frozen=True)
class Draw:
    """A drawn token. logprob and top (id, logprob) are the model's own, before penalties and temperature."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def sample(logits_row: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Draw:
    """Draw the token at position `len(prompt) + len(output)` from logits `[V]`.

    Order, as in transformers: penalties, temperature, top-k, top-p. The repetition penalty counts prompt and
    output (transformers), presence and frequency the output only (OpenAI).
    """
    if params.temperature == 0 and params.logprobs is None and not _penalised(params):
        return Draw(int(logits_row.argmax()))
    raw = logits_row.detach().to(torch.float64).numpy()
    scores = _penalise(raw, params, prompt, output) if _penalised(params) else raw
    if params.temperature == 0:
        token = int(scores.argmax())
    else:
        token = _draw(scores / params.temperature, params, len(prompt) + len(output))
    return Draw(token) if params.logprobs is None else _with_logprobs(token, raw, params.logprobs)


def _penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _penalise(
    raw: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    scores = raw.copy()
    if params.repetition_penalty != 1:
        seen = np.unique(np.array([*prompt, *output], dtype=np.int64))
        factor = params.repetition_penalty
        scores[seen] = np.where(scores[seen] < 0, scores[seen] * factor, scores[seen] / factor)
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)
        scores[ids] -= params.presence_penalty + params.frequency_penalty * counts
    return scores


def _draw(scores: np.ndarray, params: SamplingParams, position: int) -> int:
    """Gumbel-max over what top-k and top-p leave."""
    noise = gumbel(params.seed, position, len(scores))
    kept = _kept(scores, params)
    if kept is None:
        return int((scores + noise).argmax())
    return int(kept[(scores[kept] + noise[kept]).argmax()])


def _kept(scores: np.ndarray, params: SamplingParams) -> np.ndarray | None:
    """Ids that top-k and top-p leave, or None for all. Ties go by id, so that every role cuts alike."""
    top_k = params.top_k if 0 < params.top_k < len(scores) else 0
    if not top_k and params.top_p >= 1:
        return None
    order = np.argsort(-scores, kind="stable")[: top_k or None]
    if params.top_p < 1:
        weights = np.exp(scores[order] - scores[order[0]])
        before = np.cumsum(weights) - weights
        order = order[before < params.top_p * weights.sum()]
    return order


def gumbel(seed: int, position: int, size: int) -> np.ndarray:
    """Gumbel noise of every token id at a position: Philox keyed by `seed`, counted from the position's own
    block.

    Raw integers are turned into numbers here, since numpy keeps only its bit streams stable across versions.
    """
    stream = np.random.Philox(key=seed, counter=[0, position, 0, 0])
    uniform = ((stream.random_raw(size) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(-np.log(-np.log(uniform)))


def _with_logprobs(token: int, raw: np.ndarray, count: int) -> Draw:
    peak = raw.max()
    logprobs = raw - peak - np.log(np.exp(raw - peak).sum())
    top = np.argsort(-logprobs, kind="stable")[:count]
    return Draw(token, float(logprobs[token]), tuple((int(at), float(logprobs[at])) for at in top))


class StopRule:
    """Says from the output ids alone when an answer ends, so that it holds across a handoff.

    `finish_reason` is to be asked after each token: it looks at the last token and a short tail, never at the
    whole output.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer) -> None:
        self._max_tokens = params.max_tokens
        self._stop_ids = frozenset((*params.stop_ids, *tokenizer.stop_ids))
        self._stops = params.stop
        self._tokenizer = tokenizer
        longest = max((len(stop.encode()) for stop in params.stop), default=0)
        self._tail_tokens = longest + TAIL_SPARE_TOKENS

    def finish_reason(self, output_ids: Sequence[int]) -> str | None:
        """`stop` (a stop id, or a stop string in the tail), `length` (max_tokens reached), or None."""
        if output_ids and output_ids[-1] in self._stop_ids:
            return "stop"
        if self._stops and self._first_stop(self._decode_tail(output_ids)) is not None:
            return "stop"
        return "length" if len(output_ids) >= self._max_tokens else None

    def text(self, output_ids: Sequence[int]) -> str:
        """The answer's text; it ends before the first stop string."""
        text = self._tokenizer.decode(output_ids)
        cut = self._first_stop(text)
        return text if cut is None else text[:cut]

    def _decode_tail(self, output_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(output_ids[-self._tail_tokens :])

    def _first_stop(self, text: str) -> int | None:
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(found, default=None)
