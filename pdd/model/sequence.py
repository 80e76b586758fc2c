"""The KV of one sequence in a model whose every layer keeps a key and a value a token.

Invariant: rows `[0, kv_tokens)` of every layer's buffers are valid; a step writes behind them and counts them
only when the whole forward has ended, so a step that raises leaves the sequence as it was.

Sliding-window layers keep every row too: a range can then be cut, shipped and rewound at any token, at the
price of rows that are no longer read.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_CAPACITY_TOKENS = 256

Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""


class PlainSequence:
    """Growing buffers `[KV heads, capacity, dim]`, one pair a layer."""

    cut_tokens = 1
    can_rewind = True

    def __init__(self, layers: int) -> None:
        self.kv_tokens = 0
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    # -- a step ----------------------------------------------------------------------------------------------

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put new rows `[KV heads, tokens, dim]` behind the valid ones."""
        start = self.kv_tokens
        end = start + keys.shape[1]
        self._room(self._keys, layer, keys, end)[:, start:end] = keys
        self._room(self._values, layer, values, end)[:, start:end] = values

    def read(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Views `[1, KV heads, end - start, dim]` of keys and values, this step's among them."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None and values is not None
        return keys[None, :, start:end], values[None, :, start:end]

    def advance(self, tokens: int) -> None:
        """Count the rows of a step that has ended."""
        self.kv_tokens += tokens

    def _room(self, buffers: list[Tensor | None], layer: int, like: Tensor, end: int) -> Tensor:
        buffer = buffers[layer]
        if buffer is None or end > buffer.shape[1]:
            capacity = max(MIN_CAPACITY_TOKENS, 1 << (end - 1).bit_length())
            grown = like.new_empty(like.shape[0], capacity, like.shape[2])
            if buffer is not None:
                grown[:, : self.kv_tokens] = buffer[:, : self.kv_tokens]
            buffers[layer] = buffer = grown
        return buffer

    # -- ranges ----------------------------------------------------------------------------------------------

    @property
    def continuable(self) -> bool:
        """Whether a step may follow."""
        return True

    def has_boundary(self, end: int) -> bool:
        """Whether `export` can give what is needed to continue from `end`."""
        return end <= self.kv_tokens

    def export(self, start: int, end: int, boundary: bool) -> dict[str, Tensor]:
        """Copies of the rows `[start, end)`, on the CPU, by name."""
        tensors = {}
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            assert keys is not None and values is not None
            tensors[f"{layer}.k"] = _copy(keys[:, start:end])
            tensors[f"{layer}.v"] = _copy(values[:, start:end])
        return tensors

    def load(self, tensors: dict[str, Tensor], end: int, boundary: bool) -> None:
        """Append rows up to `end`; names and shapes were checked against `layout`."""
        for layer in range(len(self._keys)):
            self.write(layer, tensors[f"{layer}.k"], tensors[f"{layer}.v"])
        self.kv_tokens = end

    def layout(self, start: int, end: int, boundary: bool) -> dict[str, Kind]:
        """Shape and dtype of what `export` gives, from the widths of this (once stepped) sequence."""
        found: dict[str, Kind] = {}
        for layer, pair in enumerate(zip(self._keys, self._values, strict=True)):
            for name, buffer in zip("kv", pair, strict=True):
                assert buffer is not None
                found[f"{layer}.{name}"] = (buffer.shape[0], end - start, buffer.shape[2]), buffer.dtype
        return found

    def rewind(self, kv_tokens: int) -> None:
        """Forget the rows from `kv_tokens` on."""
        self.kv_tokens = kv_tokens

    def snapshot(self) -> int:
        """Enough to come back here with `restore`; rows are only ever written behind it."""
        return self.kv_tokens

    def restore(self, snapshot: int) -> None:
        """Back to `snapshot`."""
        self.kv_tokens = snapshot

    def release(self) -> None:
        """Free the buffers."""
        self.kv_tokens = 0
        self._keys = [None] * len(self._keys)
        self._values = [None] * len(self._values)


def _copy(rows: Tensor) -> Tensor:
    return torch.empty(rows.shape, dtype=rows.dtype, device="cpu").copy_(rows)
