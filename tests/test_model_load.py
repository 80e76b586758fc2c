"""Loading: same settings same weights, any transformers model from a folder, clear errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import greedy
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pdd.config import EngineConfig, ModelConfig
from pdd.errors import ConfigError
from pdd.model.engine import Engine
from pdd.model.load import load
from pdd.model.sampling import StopRule
from pdd.request import SamplingParams

WORDS = ["<unk>", "<end>", *(f"word{at}" for at in range(198))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer and an end id, saved as anyone's would be."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
        intermediate_size=128, initializer_range=0.15, max_position_embeddings=256,
        bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    inner = FastTokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<end>")
    tokenizer.save_pretrained(path)
    return path


def test_same_settings_same_weights_and_fingerprint() -> None:
    state = torch.random.get_rng_state()
    first, again = load(ModelConfig(max_tokens=512)), load(ModelConfig(max_tokens=512))
    assert torch.equal(torch.random.get_rng_state(), state), "the caller's generator is left alone"
    assert first.fingerprint == again.fingerprint
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    others = [
        ModelConfig(max_tokens=512, seed=1),
        ModelConfig(max_tokens=512, name="tiny_llama"),
        ModelConfig(max_tokens=512, name="tiny_deepseek_v4"),
        ModelConfig(max_tokens=512, name="tiny_deepseek_v4_sparse"),
    ]
    prints = {load(other).fingerprint for other in others} | {first.fingerprint}
    assert len(prints) == 5
    assert load(ModelConfig(max_tokens=512, dtype="bfloat16")).fingerprint == first.fingerprint, (
        "KV crosses dtypes"
    )


def test_tiny_models_never_stop_by_themselves() -> None:
    loaded = load(ModelConfig(max_tokens=512))
    assert loaded.tokenizer.stop_ids == () and loaded.model.generation_config.eos_token_id is None
    assert loaded.vocab == 512 and loaded.max_tokens == 512
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert torch.get_num_threads() == 1


def test_a_model_from_a_folder(folder: Path) -> None:
    loaded = load(ModelConfig(name="hf", path=str(folder)))
    assert (loaded.vocab, loaded.max_tokens, loaded.tokenizer.stop_ids) == (200, 256, (1,))
    ids = loaded.tokenizer.encode("word3 word9 word150 word7")
    assert ids == [5, 11, 152, 9] and loaded.tokenizer.decode([1, *ids]) == "word3 word9 word150 word7"
    engine = Engine(loaded, EngineConfig(chunk_tokens=3))
    seq = engine.new()
    found = greedy(engine, seq, engine.extend(seq, ids), 60)
    with torch.inference_mode():
        out = loaded.model.generate(torch.tensor([ids]), max_new_tokens=60, do_sample=False)[0, 4:].tolist()
    rule = StopRule(SamplingParams(max_tokens=60), loaded.tokenizer)
    ours = next(found[:end] for end in range(1, 61) if rule.finish_reason(found[:end]))
    assert ours == out and len(set(out)) > 20


def test_its_fingerprint_does_not_depend_on_the_place(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    prints = [load(ModelConfig(name="hf", path=str(path))).fingerprint for path in (folder, copy)]
    assert prints[0] == prints[1]


@pytest.mark.parametrize("path", ["/no/such/folder", "./neither", "plain"])
def test_a_missing_path_is_one_line(path: str) -> None:
    with pytest.raises(ConfigError, match="model.path") as caught:
        load(ModelConfig(name="hf", path=path))
    assert "\n" not in str(caught.value) and path in str(caught.value)


def test_a_folder_without_a_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        load(ModelConfig(name="hf", path=str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["tpu9", "cuda:77"])
def test_an_absent_device_is_one_line(device: str) -> None:
    with pytest.raises(ConfigError, match="model.device"):
        load(ModelConfig(device=device))
