"""The KV of one sequence of DeepSeek-V4: compressed entries, and the state at the sequence's end.

Invariant: the state of a position is (entries closed up to it, boundary tensors), and the boundary tensors
(window, compressor buffers, overlap) replace whatever stood there before; so a prefix is cut where a boundary
was kept.

transformers makes new tensors in every update of these layers and never writes into old ones. A snapshot is
therefore a copy of references.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from pdd.model.sequence import Kind

BOUNDARY_TABLES = ("buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate")


class CompressedSequence:
    """A transformers cache with sliding-window, CSA and HCA layers."""

    can_rewind = False

    def __init__(self, config: Any) -> None:
        self._config = config
        self.cache = DynamicCache(config=config)
        self.cut_tokens = max(config.compress_rates.values())
        self.kv_tokens = 0
        self._continuable = True
        self._kept: dict[int, dict[str, Tensor]] = {}

    @property
    def _layers(self) -> list[Any]:
        return self.cache.layers

    # -- a step ----------------------------------------------------------------------------------------------

    @property
    def continuable(self) -> bool:
        """Whether a step may follow: the last loaded segment brought a boundary."""
        return self._continuable

    def advance(self, tokens: int) -> None:
        """Count a step that has ended; at a block boundary, keep the state for later exports."""
        self.kv_tokens += tokens
        if self.kv_tokens % self.cut_tokens == 0:
            self._kept[self.kv_tokens] = self._boundary()

    # -- ranges ----------------------------------------------------------------------------------------------

    def has_boundary(self, end: int) -> bool:
        """Whether the state at `end` is known: where the sequence stands, or at a kept block boundary."""
        return end in self._kept or (end == self.kv_tokens and self._continuable)

    def export(self, start: int, end: int, boundary: bool) -> dict[str, Tensor]:
        """Compressed entries closed in [start, end) and, if asked, the boundary tensors at `end`."""
        tensors = {}
        for key, layer, name in self._compressors():
            entries = layer.compressed_kv[name]
            first, last = start // layer.compress_rate, end // layer.compress_rate
            tensors[key] = _copy(entries[:, first:last])
        if boundary:
            tensors |= self._kept[end] if end in self._kept else self._boundary()
        return tensors

    def load(self, tensors: dict[str, Tensor], end: int, boundary: bool) -> None:
        """Append a range's entries; with a boundary, the sequence can be continued from `end`."""
        for key, layer, name in self._compressors():
            layer.update_compressor_states(name, tensors[key])
        self.kv_tokens = end
        self._continuable = boundary
        if not boundary:
            return
        for index, layer in enumerate(self._layers):
            window = tensors[f"{index}.window"]
            layer.lazy_initialization(window, window)
            layer.keys = layer.values = window
            layer.cumulative_length = end
            for table, name in _tables(layer):
                getattr(layer, table)[name] = tensors.get(f"{index}.{table}.{name}")
        if end % self.cut_tokens == 0:
            self._kept[end] = self._boundary()

    def layout(self, start: int, end: int, boundary: bool) -> dict[str, Kind]:
        """Shape and dtype of what `export` gives, from this sequence (stepped over a whole block)."""
        found: dict[str, Kind] = {}
        for key, layer, name in self._compressors():
            entries = layer.compressed_kv[name]
            closed = end // layer.compress_rate - start // layer.compress_rate
            found[key] = (1, closed, entries.shape[2]), entries.dtype
        if boundary:
            for key, tensor in self._boundary().items():
                if (shape := self._boundary_shape(key, tensor, end)) is not None:
                    found[key] = shape, tensor.dtype
        return found

    def _boundary_shape(self, key: str, tensor: Tensor, end: int) -> tuple[int, ...] | None:
        index, table, *_ = key.split(".")
        layer = self._layers[int(index)]
        if table == "window":
            return (1, 1, min(end, layer.sliding_window - 1), tensor.shape[3])
        if table.startswith("buffer"):
            return (1, end % layer.compress_rate, tensor.shape[2])
        # There is no overlap before the first entry.
        return tuple(tensor.shape) if end >= layer.compress_rate else None

    def _boundary(self) -> dict[str, Tensor]:
        """Compact copies of all tensors of the layers but the compressed entries."""
        tensors = {}
        for index, layer in enumerate(self._layers):
            tensors[f"{index}.window"] = _copy(layer.keys)
            for table, name in _tables(layer):
                if (tensor := getattr(layer, table)[name]) is not None:
                    tensors[f"{index}.{table}.{name}"] = _copy(tensor)
        return tensors

    def _compressors(self) -> Iterator[tuple[str, Any, str]]:
        for index, layer in enumerate(self._layers):
            for name in getattr(layer, "compressed_kv", {}):
                yield f"{index}.entries.{name}", layer, name

    # -- going back ------------------------------------------------------------------------------------------

    def rewind(self, kv_tokens: int) -> None:
        """Not possible but to where the sequence stands.

        Raises:
            ValueError: always, when something would have to be forgotten.
        """
        if kv_tokens != self.kv_tokens:
            raise ValueError(
                f"kv_tokens: compressed KV cannot be cropped to {kv_tokens}; restore a snapshot instead"
            )

    def snapshot(self) -> Any:
        """References to all state."""
        layers = [
            {key: dict(value) if isinstance(value, dict) else value for key, value in vars(layer).items()}
            for layer in self._layers
        ]
        return self.kv_tokens, self._continuable, layers

    def restore(self, snapshot: Any) -> None:
        """Back to `snapshot`, which stays usable."""
        self.kv_tokens, self._continuable, layers = snapshot
        for layer, state in zip(self._layers, layers, strict=True):
            for key, value in state.items():
                setattr(layer, key, dict(value) if isinstance(value, dict) else value)
        self._kept = {end: kept for end, kept in self._kept.items() if end <= self.kv_tokens}

    def release(self) -> None:
        """Free the tensors."""
        self.__init__(self._config)  # type: ignore[misc]


def _tables(layer: Any) -> Iterator[tuple[str, str]]:
    for table in BOUNDARY_TABLES:
        for name in getattr(layer, table, {}):
            yield table, name


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
