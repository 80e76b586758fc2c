"""Attention over each sequence's own KV buffer, registered with transformers.

Invariant: a query at position p sees exactly the positions up to p (and, in a sliding layer, the last
`window` of them). Sequences of a batch never see each other and are never padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from pdd.errors import ConfigError
from pdd.model.sequence import PlainSequence

ATTENTION = "pdd"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")

SPLIT_TOKENS = 64
"""From here on an extend on a CPU takes prefix and new part apart (measured: 5 to 25% faster than a mask)."""


class Step(Cache):
    """One forward pass over `seqs`, `tokens` new positions each; it stands in for transformers' cache.

    A mask is made once a step and shared by all layers of a kind.
    """

    def __init__(self, seqs: Sequence[PlainSequence], tokens: int) -> None:
        super().__init__(layers=[])
        self.seqs = seqs
        self.tokens = tokens
        self._masks: dict[int | None, Tensor] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values `[B, heads, tokens, dim]`; attention reads them from the buffers."""
        for row, seq in enumerate(self.seqs):
            seq.write(layer_idx, key_states[row], value_states[row])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions cached before this step."""
        return max(seq.kv_tokens for seq in self.seqs)

    def mask(self, window: int | None, like: Tensor) -> Tensor:
        """Additive lower-right causal mask `[tokens, keys]` over the keys that the step can see."""
        if window not in self._masks:
            past = self.seqs[0].kv_tokens
            first = first_visible(past, window)
            mask = like.new_zeros(self.tokens, past + self.tokens - first)
            new = mask[:, past - first :]
            new.masked_fill_(new.new_ones(new.shape, dtype=torch.bool).triu_(1), float("-inf"))
            if window is not None:
                hidden = mask.new_ones(mask.shape, dtype=torch.bool).tril_(past - first - window)
                mask.masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask
        return self._masks[window]


def first_visible(position: int, window: int | None) -> int:
    """First position that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    pdd_step: Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` `[B, heads, tokens, dim]`; returns `[B, tokens, heads, dim]`.

    Outside a step of the engine (plain forward, `generate`) it is transformers' own SDPA.
    """
    if pdd_step is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if any(kwargs.get(name) is not None for name in _UNSUPPORTED):
        raise ConfigError(
            f"model: its attention needs one of {', '.join(_UNSUPPORTED)}, which the engine lacks"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    if pdd_step.tokens == 1:
        return _decode(pdd_step, layer, query, scaling, sliding_window), None
    return _extend(pdd_step, layer, query, scaling, sliding_window), None


def _decode(step: Step, layer: int, query: Tensor, scale: float | None, window: int | None) -> Tensor:
    batch, heads, _, dim = query.shape
    rows = []
    for row, seq in enumerate(step.seqs):
        keys, values = seq.read(layer, first_visible(seq.kv_tokens, window), seq.kv_tokens + 1)
        # The query heads that share a KV head stand in as its rows: no copy of keys, no mask.
        packed = query[row].view(1, keys.shape[1], -1, dim)
        rows.append(F.scaled_dot_product_attention(packed, keys, values, scale=scale))
    out = rows[0] if batch == 1 else torch.cat(rows)
    return out.reshape(batch, 1, heads, -1)


def _extend(step: Step, layer: int, query: Tensor, scale: float | None, window: int | None) -> Tensor:
    seq = step.seqs[0]
    past, tokens = seq.kv_tokens, step.tokens
    keys, values = seq.read(layer, first_visible(past, window), past + tokens)
    if window is None and 0 < past and tokens >= SPLIT_TOKENS and _has_flash(query, values):
        out = _split(query, keys, values, past, scale)
    elif past == 0 and (window is None or tokens <= window):
        out = F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scale, enable_gqa=True
        )
    else:
        mask = step.mask(window, query)[None, None]
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
    return out.transpose(1, 2).contiguous()


def _has_flash(query: Tensor, values: Tensor) -> bool:
    return query.device.type == "cpu" and query.shape[3] == values.shape[3]


def _split(query: Tensor, keys: Tensor, values: Tensor, past: int, scale: float | None) -> Tensor:
    """Attention over the prefix (no mask) and over the new square (causal), joined by their log-sum-exps."""
    _, heads, tokens, dim = query.shape
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    packed = query.reshape(1, keys.shape[1], -1, dim)
    old, old_lse = flash(packed, keys[:, :, :past], values[:, :, :past], 0.0, False, scale=scale)
    new, new_lse = flash(query, keys[:, :, past:], values[:, :, past:], 0.0, True, scale=scale)
    share = torch.sigmoid(old_lse.reshape(1, heads, tokens) - new_lse.reshape(1, heads, tokens))
    return torch.lerp(new, old.reshape(1, heads, tokens, dim), share[..., None].to(new.dtype))


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
