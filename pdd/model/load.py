"""From a `ModelConfig` to a model that is ready to step.

Invariant: two processes with the same `ModelConfig` (and, for `hf`, the same files) get the same weights and
the same fingerprint, and KV is only ever loaded under an equal fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pdd.config import ModelConfig
from pdd.errors import ConfigError
from pdd.model.attention import ATTENTION
from pdd.model.tiny import build_tiny, tiny_config
from pdd.model.tokenizer import ByteTokenizer, HubTokenizer, Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM with its tokenizer.

    vocab: ids are 0 to vocab - 1. max_tokens: prompt and output together. fingerprint: 32 hex digits.
    """

    model: Any
    config: Any
    tokenizer: Tokenizer
    vocab: int
    max_tokens: int
    fingerprint: str
    threads: int


def load(config: ModelConfig) -> LoadedModel:
    """Load or make the model on its device, in its dtype, for inference with `config.threads` threads.

    Raises:
        ConfigError: no such model, device or tokenizer, or a model that does not fit the engine.
    """
    torch.set_num_threads(config.threads)
    device = _device(config.device)
    dtype = getattr(torch, config.dtype)
    if config.name == "hf":
        model, tokenizer, identity = _from_hub(config, dtype)
    else:
        if config.name.startswith("tiny_deepseek_v4") and config.dtype == "float64":
            raise ConfigError("model.dtype: 'float64' is not possible with DeepSeek-V4; give float32 or less")
        model = build_tiny(config.name, config.seed, config.max_tokens).to(dtype)
        tokenizer = ByteTokenizer(model.config.vocab_size)
        identity = f"{config.name} {config.seed}"
    model = model.to(device).eval().requires_grad_(False)
    if model.config.model_type != "deepseek_v4":  # V4 brings its own attention (sinks, compressed entries)
        model.set_attn_implementation(ATTENTION)
    text = model.config.get_text_config(decoder=True)
    limit = min(config.max_tokens, getattr(text, "max_position_embeddings", None) or config.max_tokens)
    print_ = _fingerprint(model.config, identity)
    return LoadedModel(model, model.config, tokenizer, text.vocab_size, limit, print_, config.threads)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ConfigError(
            f"model.device: {name!r} is not usable here; give cpu, or cuda with a GPU"
        ) from None
    return device


def _from_hub(config: ModelConfig, dtype: torch.dtype) -> tuple[Any, Tokenizer, str]:
    path = config.path or ""
    local = Path(path).expanduser()
    if not local.is_dir() and not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        raise ConfigError(
            f"model.path: {path!r} is neither a folder nor a name such as owner/model; give one of the two"
        )
    source = str(local) if local.is_dir() else path
    try:
        AutoConfig.from_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
        inner = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # transformers raises a different type for each missing piece
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"model.path: {path!r} cannot be loaded as a causal LM ({reason})") from None
    return model, HubTokenizer(inner, _stop_ids(model)), _files(local) if local.is_dir() else path


def _stop_ids(model: Any) -> tuple[int, ...]:
    """End-of-sequence ids of the generation settings, or of the model."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = model.config.get_text_config(decoder=True).eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (list, tuple)) else (ids,)


def _files(folder: Path) -> str:
    """Names and sizes of the weight files, so that two hosts agree wherever the folder lies."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    return json.dumps([(file.name, file.stat().st_size) for file in files])


def _fingerprint(config: Any, identity: str) -> str:
    """Hash of architecture and identity. Device, dtype and place are left out: KV may cross those."""
    plain = config.to_dict()
    for key in ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "_attn_implementation"):
        plain.pop(key, None)
    text = json.dumps(plain, sort_keys=True, default=str) + identity
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """Only the tokenizer (with the model's stop ids), for a client that does not compute.

    Raises:
        ConfigError: as `load`.
    """
    if config.name != "hf":
        return ByteTokenizer(tiny_config(config.name, config.max_tokens).vocab_size)
    return load(config).tokenizer
