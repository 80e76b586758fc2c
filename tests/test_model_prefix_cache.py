"""The prefix cache: a hit continues with the same bits, leases hold, budgets bind."""

from __future__ import annotations

import pytest
import torch
from tiny_models import engine, prompt

from pdd.model.engine import Engine
from pdd.model.prefix_cache import PrefixCache


def filled(eng: Engine, ids: list[int], budget_tokens: int = 100_000) -> PrefixCache:
    cache, seq = PrefixCache(eng, budget_tokens, 64), eng.new()
    eng.extend(seq, ids)
    cache.insert(ids, seq)
    eng.release(seq)
    return cache


@pytest.mark.parametrize("name", ["tiny_qwen3", "windowed", "tiny_deepseek_v4"])
def test_a_hit_continues_like_the_whole_prompt(name: str) -> None:
    eng, ids = engine(name, chunk_tokens=128), prompt(500)
    cache = filled(eng, ids)
    other = ids[:400] + prompt(100, seed=1)
    match = cache.match(other)
    assert match.tokens == 384
    seq, cold = eng.new(), eng.new()
    cache.load_into(seq, match)
    cache.release(match)
    assert seq.kv_tokens == match.tokens
    rows = eng.extend(seq, other[match.tokens :], all_logits=True)
    torch.testing.assert_close(
        rows, eng.extend(cold, other, all_logits=True)[match.tokens :], atol=1e-4, rtol=0
    )


def test_v4_pages_are_whole_blocks_and_end_in_a_boundary() -> None:
    eng, ids = engine("tiny_deepseek_v4", chunk_tokens=512), prompt(500)
    cache = filled(eng, ids)
    assert cache.page_tokens == 128 and cache.cached_tokens == 384
    first = cache.match(ids)
    assert first.tokens == 384, "the last block boundary before the end is kept"
    assert cache.match(ids[:300]).tokens == 0, "no step has ended at 128 or 256"
    seq = eng.new()
    eng.extend(seq, ids[:256])
    assert cache.insert(ids[:256], seq) == 256
    assert cache.match(ids[:300]).tokens == 256, "a page that was there gets its boundary later"


def test_output_of_a_decode_is_cached_too() -> None:
    eng, ids = engine("tiny_deepseek_v4", chunk_tokens=128), prompt(250)
    cache, seq = PrefixCache(eng, 10_000, 64), eng.new()
    eng.extend(seq, ids)
    for token in prompt(10, seed=2):
        eng.decode([seq], [token])
    whole = ids + prompt(10, seed=2)
    cache.insert(whole, seq)
    assert cache.match(whole).tokens == 256


def test_leased_pages_stay_and_the_others_go() -> None:
    eng, ids = engine("tiny_qwen3"), prompt(256)
    cache = filled(eng, ids, budget_tokens=256)
    match = cache.match(ids)
    seq = eng.new()
    eng.extend(seq, prompt(256, seed=1))
    cache.insert(prompt(256, seed=1), seq)
    assert cache.cached_tokens == 256 and cache.match(prompt(256, seed=1)).tokens == 0
    cache.clear()
    assert cache.cached_tokens == 256
    fresh = eng.new()
    cache.load_into(fresh, match)
    assert fresh.kv_tokens == 256
    cache.release(match)
    cache.release(match)
    cache.insert(prompt(256, seed=1), seq)
    assert cache.match(prompt(256, seed=1)).tokens == 256
    with pytest.raises(ValueError, match="256"):
        cache.load_into(fresh, cache.match(ids))


def test_budget_zero_keeps_nothing() -> None:
    cache = filled(engine("tiny_qwen3"), prompt(200), budget_tokens=0)
    assert cache.cached_tokens == 0 and cache.match(prompt(200)).tokens == 0


def test_insert_covers_only_ids_whose_kv_is_there() -> None:
    eng, ids = engine("tiny_qwen3"), prompt(200)
    cache, seq = PrefixCache(eng, 1000, 64), eng.new()
    eng.extend(seq, ids[:130])
    assert cache.insert(ids, seq) == 0
    assert cache.cached_tokens == 128


def test_segments_from_a_stream() -> None:
    eng, ids = engine("tiny_qwen3"), prompt(200)
    cache, seq = PrefixCache(eng, 1000, 64), eng.new()
    eng.extend(seq, ids)
    assert cache.insert_segments(ids, [eng.export(seq, 0, 70), eng.export(seq, 70, 200)]) == 0
    match, copy = cache.match(ids), eng.new()
    cache.load_into(copy, match)
    eng.rewind(seq, match.tokens)
    assert torch.equal(eng.extend(seq, [1]), eng.extend(copy, [1]))
