"""The tiny random models: real architectures that run on a CPU in milliseconds a token.

Invariant: the weights depend on name, seed and shape only. The head is untied and the initializer range wide,
since otherwise greedy output is one id for ever and equality of tokens would prove nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, DeepseekV4Config, LlamaConfig, PreTrainedConfig, Qwen3Config

VOCAB = 512
V4_BLOCK_TOKENS = 128
"""Tokens that the heavily compressed layers fold into one entry (facts: DeepSeek-V4's m')."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_DENSE = _COMMON | {"num_key_value_heads": 2, "intermediate_size": 768}
_V4 = _COMMON | {
    "num_key_value_heads": 1,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "partial_rotary_factor": 0.5,
    "sliding_window": 128,
    "hc_mult": 2,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": V4_BLOCK_TOKENS},
}


def tiny_config(name: str, max_tokens: int) -> PreTrainedConfig:
    """The architecture of tiny model `name` for contexts of up to `max_tokens`."""
    if name == "tiny_qwen3":
        return Qwen3Config(**_DENSE, max_position_embeddings=max_tokens)
    if name == "tiny_llama":
        return LlamaConfig(**_DENSE, max_position_embeddings=max_tokens)
    sparse = name == "tiny_deepseek_v4_sparse"
    # Smooth: every expert is active and the indexer keeps every entry, so rounding makes nothing jump.
    return DeepseekV4Config(
        **_V4,
        max_position_embeddings=max_tokens,
        n_routed_experts=8 if sparse else 2,
        num_experts_per_tok=2,
        index_topk=16 if sparse else max_tokens,
    )


def build_tiny(name: str, seed: int, max_tokens: int) -> Any:
    """A random model in float32, seeded without touching the caller's generators."""
    config = tiny_config(name, max_tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if config.model_type == "deepseek_v4":
            _fill_hash_routes(model, config)
    return model


def _fill_hash_routes(model: Any, config: Any) -> None:
    """Give each token id its own experts: transformers leaves that table to the checkpoint."""
    experts, active = config.n_routed_experts, config.num_experts_per_tok
    for layer in model.model.layers:
        if layer.mlp.is_hash:
            order = torch.rand(config.vocab_size, experts).argsort(dim=-1)
            layer.mlp.gate.tid2eid.copy_(order[:, :active])
