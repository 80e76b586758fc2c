"""Draws depend on seed and position only, follow transformers' filters; answers stop where they should."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from pdd.model.sampling import StopRule, gumbel, sample
from pdd.model.tokenizer import ByteTokenizer
from pdd.request import SamplingParams

TOKENIZER = ByteTokenizer(512)
NOISE_0_0 = [-1.495451611576949, -0.351137118361487, -0.7859067841514995]
NOISE_LAST = [1.5497941197609622, 0.3946574453552454]


def logits(size: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 2


def test_same_seed_and_position_same_token() -> None:
    row, params = logits(), SamplingParams(temperature=1.0, seed=7)
    assert sample(row, params, [1, 2], [3]) == sample(row.clone(), params, [9, 9, 9], [])
    drawn = [sample(row, params, [0] * position, []).id for position in range(200)]
    assert len(set(drawn)) > 10
    other = [
        sample(row, SamplingParams(temperature=1.0, seed=8), [0] * position, []).id for position in range(200)
    ]
    assert drawn != other


def test_noise_is_the_same_on_every_machine_and_version() -> None:
    assert gumbel(0, 0, 3).tolist() == pytest.approx(NOISE_0_0, rel=1e-12)
    assert gumbel(2**63 - 1, 8191, 2).tolist() == pytest.approx(NOISE_LAST, rel=1e-12)


def test_a_rounding_difference_of_logits_changes_nothing() -> None:
    row, params = logits(512), SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=3)
    for position in range(100):
        nudged = row + torch.randn(512) * 1e-6
        assert sample(row, params, [0] * position, []).id == sample(nudged, params, [0] * position, []).id


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    row, params = logits(12), SamplingParams(temperature=temperature, seed=11)
    drawn = [sample(row, params, [0] * position, []).id for position in range(4000)]
    wanted = torch.softmax(row.double() / temperature, 0).numpy() * 4000
    seen = np.bincount(drawn, minlength=12)
    common = wanted > 5
    seen, wanted = (
        np.append(seen[common], seen[~common].sum()),
        np.append(wanted[common], wanted[~common].sum()),
    )
    assert chisquare(seen[wanted > 0], wanted[wanted > 0]).pvalue > 1e-4


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (8, 0.6), (1, 1.0), (0, 1e-9), (100, 0.99)])
def test_support_is_that_of_transformers(top_k: int, top_p: float) -> None:
    row = logits(30, seed=4)
    params = SamplingParams(temperature=1.5, top_k=top_k, top_p=top_p, seed=1)
    scores = (row / 1.5)[None]
    if top_k:
        scores = TopKLogitsWarper(min(top_k, 30))(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    allowed = set(torch.isfinite(scores[0]).nonzero().flatten().tolist())
    drawn = {sample(row, params, [0] * position, []).id for position in range(3000)}
    assert drawn <= allowed
    likely = torch.softmax(scores[0], 0) > 0.005
    assert set(likely.nonzero().flatten().tolist()) <= drawn


def test_penalties() -> None:
    row, prompt, output = logits(20, seed=5), [3, 4, 4], [7, 7, 9]
    params = SamplingParams(repetition_penalty=1.7, logprobs=0)
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), row[None].clone())[0]
    assert sample(row, params, prompt, output).id == int(wanted.argmax())
    flat = torch.zeros(5)
    flat[1], flat[2], flat[3] = 3.0, 2.5, 2.0
    assert sample(flat, SamplingParams(presence_penalty=0.6), [], [1]).id == 2
    assert sample(flat, SamplingParams(presence_penalty=0.6), [1], []).id == 1, "the prompt does not count"
    assert sample(flat, SamplingParams(frequency_penalty=0.2), [], [1, 1]).id == 1
    assert sample(flat, SamplingParams(frequency_penalty=0.2), [], [1, 1, 1]).id == 2
    assert sample(flat, SamplingParams(repetition_penalty=2.0), [1], []).id == 2


def test_logprobs_are_the_models_own() -> None:
    row = logits(40, seed=6)
    wanted = torch.log_softmax(row.double(), 0)
    drawn = sample(row, SamplingParams(temperature=1.0, top_k=3, seed=2, logprobs=4), [1], [])
    assert drawn.logprob == pytest.approx(float(wanted[drawn.id]))
    assert [token for token, _ in drawn.top] == wanted.topk(4).indices.tolist()
    assert [value for _, value in drawn.top] == pytest.approx(wanted.topk(4).values.tolist())
    greedy = sample(row, SamplingParams(logprobs=0), [], [])
    assert greedy.id == int(row.argmax()) and greedy.top == () and greedy.logprob is not None


# -- stopping ------------------------------------------------------------------------------------------------


def test_stop_by_id_string_and_length() -> None:
    rule = StopRule(SamplingParams(max_tokens=20, stop=("END", "café"), stop_ids=(300,)), TOKENIZER)
    ids = TOKENIZER.encode("some text EN")
    assert rule.finish_reason([]) is None
    assert rule.finish_reason(ids) is None
    assert rule.finish_reason([*ids, 300]) == "stop"
    assert rule.finish_reason([300, *ids]) is None, "only the last token ends an answer by its id"
    assert rule.finish_reason(TOKENIZER.encode("some text END")) == "stop"
    assert rule.finish_reason(TOKENIZER.encode("some caf") + [0xC3]) is None, "half a character"
    assert rule.finish_reason(TOKENIZER.encode("some café")) == "stop"
    assert rule.finish_reason([1] * 19) is None
    assert rule.finish_reason([1] * 20) == "length"
    assert rule.finish_reason([1] * 17 + TOKENIZER.encode("END")) == "stop", "a stop wins over the length"
    assert rule.text(TOKENIZER.encode("some END text café")) == "some "
    assert rule.text(TOKENIZER.encode("all of it")) == "all of it"


def test_the_models_own_stop_ids_count() -> None:
    class Ends(ByteTokenizer):
        stop_ids = (5,)

    assert StopRule(SamplingParams(), Ends(512)).finish_reason([1, 5]) == "stop"
    assert StopRule(SamplingParams(), TOKENIZER).finish_reason([1, 5]) is None


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.one_of(st.sampled_from([97, 98, 99]), st.integers(0, 511)), max_size=60),
    stops=st.lists(st.sampled_from(["abc", "ba", "cc", "é", "ba ba", "aaaaaa"]), min_size=1, max_size=3),
)
def test_the_tail_finds_what_the_whole_text_shows(ids: list[int], stops: list[str]) -> None:
    rule = StopRule(SamplingParams(max_tokens=1000, stop=tuple(stops)), TOKENIZER)
    for end in range(1, len(ids) + 1):
        text = TOKENIZER.decode(ids[:end])
        stopped = any(stop in text for stop in stops)
        if (rule.finish_reason(ids[:end]) == "stop") != stopped:
            # Eight and more ids that decode to nothing inside a stop string are what a tail cannot see.
            assert any(256 <= token < 260 for token in ids[:end])
        if stopped:
            assert not any(stop in rule.text(ids[:end]) for stop in stops)
            break


def test_a_long_answer_costs_no_more_a_token() -> None:
    class Counting(ByteTokenizer):
        longest = 0

        def decode(self, ids: object) -> str:
            self.longest = max(self.longest, len(ids))  # type: ignore[arg-type]
            return super().decode(ids)  # type: ignore[arg-type]

    tokenizer = Counting(512)
    StopRule(SamplingParams(max_tokens=10_000, stop=("stop!",)), tokenizer).finish_reason([1] * 5000)
    assert tokenizer.longest < 20


def test_byte_tokenizer() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("Grüße, 世界")) == "Grüße, 世界"
    every = TOKENIZER.decode(range(260, 512))
    assert every.isprintable() and len(every) > 500
    assert TOKENIZER.decode([0xFF, 256, 97]) == "\ufffda"
