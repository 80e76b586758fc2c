"""The yardstick: the same requests decoded by one engine in one process, without roles, sockets or handoffs.

Invariant: `decode` takes one step a token at batch 1; `expected` may shorten the way there, never the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from pdd.config import RunConfig
from pdd.model.engine import Engine, KvSequence
from pdd.model.load import load
from pdd.model.prefix_cache import PrefixCache
from pdd.model.sampling import StopRule, sample
from pdd.request import Request

CACHE_TOKENS = 1 << 18
SURE_MARGIN = 1e-2
"""Logit margin beyond which an extend and single steps choose alike (their logits differ by 1e-5 here)."""


class OneProcess:
    """Decodes requests one at a time; prompts that share prefixes are prefilled once."""

    def __init__(self, config: RunConfig) -> None:
        self.loaded = load(config.model)
        engine = dataclasses.replace(config.engine, batched=False)
        self.engine = Engine(self.loaded, engine)
        self.cache = PrefixCache(self.engine, CACHE_TOKENS, engine.page_tokens)

    def decode(self, request: Request) -> list[int]:
        """Output ids of one step a token."""
        rule = StopRule(request.sampling, self.loaded.tokenizer)
        seq, logits = self.prefill(request.prompt)
        output: list[int] = []
        while True:
            output.append(sample(logits, request.sampling, request.prompt, output).id)
            if rule.finish_reason(output) is not None:
                self.engine.release(seq)
                return output
            logits = self.engine.decode([seq], [output[-1]])[0]

    def prefill(self, prompt: Sequence[int]) -> tuple[KvSequence, torch.Tensor]:
        """A sequence that holds the prompt's KV, and the logits after it; the prompt's pages are kept."""
        seq = self.engine.new()
        match = self.cache.match(prompt[:-1])
        self.cache.load_into(seq, match)
        self.cache.release(match)
        logits = self.engine.extend(seq, prompt[match.tokens :])
        self.cache.insert(prompt, seq)
        return seq, logits

    def expected(self, request: Request, seen: Iterable[Sequence[int]]) -> list[int]:
        """The output ids of `decode`, faster where one of `seen` (clusters' answers) can be confirmed."""
        for ids in {tuple(ids) for ids in seen if len(ids)}:
            if self._confirms(request, ids):
                return list(ids)
        return self.decode(request)

    def _confirms(self, request: Request, ids: Sequence[int]) -> bool:
        """Whether one extend over `ids` says that greedy stepping makes just these, each by a wide margin."""
        params = request.sampling
        if params.temperature or (params.repetition_penalty, params.presence_penalty) != (1, 0):
            return False
        rule = StopRule(params, self.loaded.tokenizer)
        ends = [rule.finish_reason(ids[:size]) is not None for size in range(1, len(ids) + 1)]
        if params.frequency_penalty or not ends[-1] or any(ends[:-1]):
            return False
        top = self.forced(request.prompt, ids).topk(2, dim=-1)
        sure = (top.values[:, 0] - top.values[:, 1]).min().item() > SURE_MARGIN
        return sure and top.indices[:, 0].tolist() == list(ids)

    def forced(self, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
        """Logits `[n, V]` from which each of `ids` would be drawn, were they the answer to `prompt`."""
        seq, logits = self.prefill(prompt)
        rows = [logits[None]]
        if len(ids) > 1:
            rows.append(self.engine.extend(seq, ids[:-1], all_logits=True))
        self.engine.release(seq)
        return torch.cat(rows)

    def margin(self, request: Request, ids: Sequence[int], expected: Sequence[int]) -> float:
        """How near a tie the first differing position was: the best logit less that of the id drawn, >= 0."""
        width = min(len(ids), len(expected))
        differs = np.flatnonzero(np.array(ids[:width]) != np.array(expected[:width]))
        if not len(differs):
            return float("nan")
        at = int(differs[0])
        row = self.forced(request.prompt, [*expected[:at], ids[at]])[at]
        return float(row.max() - row[ids[at]])
