"""The engine against transformers `generate`: however ids are fed, the same tokens come out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import SMOOTH, engine, greedy, loaded, prompt, reference

from pdd.config import EngineConfig, ModelConfig
from pdd.errors import ConfigError
from pdd.model.attention import Step
from pdd.model.engine import Engine
from pdd.model.load import load

PLAIN = ("tiny_qwen3", "tiny_llama", "windowed")
ALL = (*SMOOTH, "windowed")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("chunk_tokens", [512, 96])
def test_greedy_equals_generate(name: str, chunk_tokens: int) -> None:
    eng, ids = engine(name, chunk_tokens=chunk_tokens), prompt(301, seed=1)
    seq = eng.new()
    row = eng.extend(seq, ids)
    found = greedy(eng, seq, row, 120)
    assert found == reference(name, ids, 120)
    assert len(set(found)) >= 60, "equality on a constant proves nothing"
    assert seq.kv_tokens == 301 + 120


@pytest.mark.parametrize("name", ALL)
def test_extend_over_output_predicts_the_same_tokens(name: str) -> None:
    """What MD does at takeover: prompt from P, RLD's ids in one causal step, then its own tokens."""
    eng, ids = engine(name), prompt(200, seed=2)
    wanted = reference(name, ids, 100)
    seq = eng.new()
    eng.extend(seq, ids[:-1])
    rows = eng.extend(seq, ids[-1:] + wanted[:79], all_logits=True)
    assert rows.shape == (80, 512)
    assert rows.argmax(-1).tolist() == wanted[:80]
    assert greedy(eng, seq, eng.extend(seq, wanted[79:80]), 20) == wanted[80:]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=5, deadline=None)
@given(cuts=st.sets(st.integers(1, 279), max_size=6), chunk_tokens=st.sampled_from([32, 100, 512]))
def test_any_pieces_give_the_same_logits(name: str, cuts: set[int], chunk_tokens: int) -> None:
    ids = prompt(280, seed=3)
    whole, pieces = engine(name), engine(name, chunk_tokens=chunk_tokens)
    wanted = whole.extend(whole.new(), ids, all_logits=True)
    seq, rows, edges = pieces.new(), [], [0, *sorted(cuts), 280]
    for start, end in zip(edges, edges[1:], strict=False):
        rows.append(pieces.extend(seq, ids[start:end], all_logits=True))
    torch.testing.assert_close(torch.cat(rows), wanted, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ALL)
def test_ragged_batch_equals_single_steps(name: str) -> None:
    lengths = [1, 64, 255, 256]
    for batched in (True, False):
        eng = engine(name, batched=batched)
        seqs, singles = [eng.new() for _ in lengths], [eng.new() for _ in lengths]
        for at, length in enumerate(lengths):
            eng.extend(seqs[at], prompt(length, seed=at))
            eng.extend(singles[at], prompt(length, seed=at))
        for step in range(2):
            ids = prompt(len(lengths), seed=100 + step)
            rows = eng.decode(seqs, ids)
            wanted = torch.stack([eng.decode([seq], [id_])[0] for seq, id_ in zip(singles, ids, strict=True)])
            torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=0)
        assert [seq.kv_tokens for seq in seqs] == [length + 2 for length in lengths]


def test_unbatched_steps_are_bit_equal_to_single_ones() -> None:
    eng = engine("tiny_qwen3", batched=False)
    pair, alone = [eng.new(), eng.new()], eng.new()
    for seq, seed in zip((*pair, alone), (0, 1, 0), strict=True):
        eng.extend(seq, prompt(50, seed))
    assert torch.equal(eng.decode(pair, [7, 8])[0], eng.decode([alone], [7])[0])


@pytest.mark.parametrize("name", PLAIN)
def test_rewind_forgets(name: str) -> None:
    eng, ids = engine(name), prompt(150)
    seq = eng.new()
    eng.extend(seq, ids)
    eng.extend(seq, prompt(70, seed=9))
    eng.rewind(seq, 100)
    row = eng.extend(seq, ids[100:])
    fresh = eng.new()
    torch.testing.assert_close(row, eng.extend(fresh, ids), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="151"):
        eng.rewind(seq, 151)


def test_v4_cannot_rewind_but_restores_a_snapshot() -> None:
    eng, ids = engine("tiny_deepseek_v4"), prompt(250)
    assert not eng.can_rewind and eng.cut_tokens == 128
    seq = eng.new()
    eng.extend(seq, ids)
    mark = eng.snapshot(seq)
    first = eng.extend(seq, prompt(140, seed=5))
    with pytest.raises(ValueError, match="snapshot"):
        eng.rewind(seq, 250)
    for _ in range(2):  # a snapshot is usable more than once
        eng.restore(seq, mark)
        assert seq.kv_tokens == 250
        assert torch.equal(eng.extend(seq, prompt(140, seed=5)), first)


def test_sparse_v4_steps_like_generate() -> None:
    """Indexer and router binding: one chunk and single steps still match; extends are only reported."""
    eng, ids = engine("tiny_deepseek_v4_sparse"), prompt(260, seed=4)
    seq = eng.new()
    found = greedy(eng, seq, eng.extend(seq, ids), 40)
    assert found == reference("tiny_deepseek_v4_sparse", ids, 40)


@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_deepseek_v4"])
def test_impossible_ids_are_refused_and_nothing_is_lost(name: str) -> None:
    eng = engine(name)
    seq = eng.new()
    eng.extend(seq, prompt(40))
    with pytest.raises(ValueError, match="empty"):
        eng.extend(seq, [])
    with pytest.raises(ValueError, match="1024"):
        eng.extend(seq, [1] * 985)
    assert seq.kv_tokens == 40


def test_a_step_that_raises_leaves_the_sequence_as_it_was() -> None:
    eng = engine("tiny_qwen3")
    seq, other = eng.new(), eng.new()
    for each in (seq, other):
        eng.extend(each, prompt(40))
    with pytest.raises(IndexError):
        eng.extend(seq, [5, 99999])
    assert torch.equal(eng.decode([seq], [3]), eng.decode([other], [3]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes(dtype: str) -> None:
    eng = Engine(load(ModelConfig(dtype=dtype, max_tokens=512)), EngineConfig(chunk_tokens=64))
    seq, ids = eng.new(), prompt(200)
    row = eng.extend(seq, ids)
    with torch.inference_mode():
        plain = eng.loaded.model(torch.tensor([ids])).logits[0, -1].float()
    assert row.dtype == torch.float32
    torch.testing.assert_close(row, plain, atol=0.5 if dtype == "bfloat16" else 1e-5, rtol=0)


def test_kv_bytes_per_token() -> None:
    assert engine("tiny_qwen3").kv_bytes_per_token == 4 * 2 * 2 * 64 * 4
    assert engine("tiny_deepseek_v4").kv_bytes_per_token < 300, "compressed entries only"


def test_a_model_that_steps_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that is off by one raises nothing in transformers; the engine's first steps show it."""
    monkeypatch.setattr(Step, "mask", lambda self, window, like: like.new_zeros(self.tokens, 1))
    with pytest.raises(ConfigError, match="answers differently"):
        engine("tiny_llama")


def test_a_v4_step_that_raises_midway_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    eng = engine("tiny_deepseek_v4")
    seq, other = eng.new(), eng.new()
    for each in (seq, other):
        eng.extend(each, prompt(130))
    head = eng.loaded.model.lm_head
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="midway"):
        patch.setattr(head, "forward", _raise_midway)
        eng.extend(seq, prompt(20))
    assert torch.equal(eng.extend(seq, [3, 4]), eng.extend(other, [3, 4]))


def _raise_midway(_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("midway")


def test_unknown_layers_are_refused() -> None:
    model = loaded("windowed")
    kinds = model.config.layer_types
    model.config.layer_types = ["linear_attention", "full_attention", "full_attention"]
    try:
        with pytest.raises(ConfigError, match="linear_attention"):
            Engine(model, EngineConfig())
    finally:
        model.config.layer_types = kinds
