"""What the tests of pdd/model share: loaded models, prompts and a greedy loop."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from pdd.config import EngineConfig, ModelConfig
from pdd.model.attention import ATTENTION
from pdd.model.engine import Engine, KvSequence
from pdd.model.load import LoadedModel, load
from pdd.model.tokenizer import ByteTokenizer

SMOOTH = ("tiny_qwen3", "tiny_llama", "tiny_deepseek_v4")
WINDOW_TOKENS = 24


@cache
def loaded(name: str) -> LoadedModel:
    """A tiny model, or `windowed`: layers with a short sliding window and full ones by turns."""
    return _windowed() if name == "windowed" else load(ModelConfig(name=name, max_tokens=1024))


def _windowed() -> LoadedModel:
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=256, initializer_range=0.1, tie_word_embeddings=False,
        max_position_embeddings=1024, use_sliding_window=True, sliding_window=WINDOW_TOKENS,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    return LoadedModel(model, config, ByteTokenizer(512), 512, 1024, "windowed", 1)


def engine(name: str, **settings: Any) -> Engine:
    """An engine over the shared model."""
    return Engine(loaded(name), EngineConfig(**settings))


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Random ids of the whole vocabulary."""
    return random.Random(seed).choices(range(512), k=tokens)


def greedy(engine: Engine, seq: KvSequence, row: Tensor, tokens: int) -> list[int]:
    """The next `tokens` ids after logits `row`."""
    ids = []
    for _ in range(tokens):
        ids.append(int(row.argmax()))
        row = engine.decode([seq], ids[-1:])[0]
    return ids


def reference(name: str, ids: list[int], tokens: int) -> list[int]:
    """What transformers `generate` gives, greedily, with its own attention and caches."""
    return list(_reference(name, tuple(ids), tokens))


@cache
def _reference(name: str, ids: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    model = loaded(name).model
    own = model.config._attn_implementation
    if own == ATTENTION:
        model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            out = model.generate(torch.tensor([ids]), max_new_tokens=tokens, do_sample=False)
    finally:
        model.set_attn_implementation(own)
    return tuple(out[0, len(ids) :].tolist())
