"""Steps of a model over sequences: prefill chunks, decode with continuous batching, extend, and KV in and
out.

Invariant: after a call, `seq.kv_tokens` leading positions have their KV, and each position was computed
causally over exactly the ids before it, in whatever pieces they were fed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pdd.config import EngineConfig
from pdd.errors import ConfigError, WireError
from pdd.model.attention import Step
from pdd.model.compressed import CompressedSequence
from pdd.model.kv import KvSegment
from pdd.model.load import LoadedModel
from pdd.model.sequence import PlainSequence

KvSequence = PlainSequence | CompressedSequence
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
PROBE_TOKENS = 8
PROBE_TOLERANCE = 0.1
"""Mean difference of logits over their spread: bfloat16 rounding is below it, a wrong mask above."""


class Engine:
    """One model and the steps that the roles ask of it. To be used from one thread at a time.

    cut_tokens: KV can be cut and reused at multiples of this. can_rewind: a sequence can be cropped.
    kv_bytes_per_token: what a token adds to the KV, on average.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.loaded = loaded
        self.config = config
        self._model = loaded.model
        self._device = next(loaded.model.parameters()).device
        self._compressed = loaded.config.model_type == "deepseek_v4"
        text = loaded.config.get_text_config(decoder=True)
        kinds = set(getattr(text, "layer_types", None) or _PLAIN_LAYERS)
        if not self._compressed and not kinds <= _PLAIN_LAYERS:
            unknown = ", ".join(sorted(kinds - _PLAIN_LAYERS))
            raise ConfigError(
                f"model: layers of kind {unknown} in {loaded.config.model_type} are not supported; "
                "give a model with full or sliding-window attention, or DeepSeek-V4"
            )
        self._layers = text.num_hidden_layers
        # Plain models never read this: a 4-d mask keeps transformers from building one each step.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=self._device)
        self._template = self._probe()
        self.cut_tokens = self._template.cut_tokens
        self.can_rewind = self._template.can_rewind
        span = self._template.kv_tokens
        probe = self._template.export(0, span, boundary=False)
        self.kv_bytes_per_token = -(-sum(tensor.nbytes for tensor in probe.values()) // span)

    # -- sequences -------------------------------------------------------------------------------------------

    def new(self) -> KvSequence:
        """An empty sequence."""
        return CompressedSequence(self.loaded.config) if self._compressed else PlainSequence(self._layers)

    def release(self, seq: KvSequence) -> None:
        """Free a sequence's KV."""
        seq.release()

    def rewind(self, seq: KvSequence, kv_tokens: int) -> None:
        """Forget the KV from position `kv_tokens` on.

        Raises:
            ValueError: the model cannot (`can_rewind`), or there is less KV than that.
        """
        if not 0 <= kv_tokens <= seq.kv_tokens:
            raise ValueError(f"kv_tokens: {kv_tokens} is not within the sequence's {seq.kv_tokens}")
        seq.rewind(kv_tokens)

    def snapshot(self, seq: KvSequence) -> Any:
        """A mark to come back to with `restore`, cheap for every model; valid until the release."""
        return seq.snapshot()

    def restore(self, seq: KvSequence, snapshot: Any) -> None:
        """Put the sequence back to where `snapshot` was taken of it."""
        seq.restore(snapshot)

    # -- steps -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def extend(self, seq: KvSequence, ids: Sequence[int], all_logits: bool = False) -> Tensor:
        """Feed `ids` on top of the cache, in pieces of at most `chunk_tokens`.

        Returns:
            Logits `[V]` after the last id, or `[len(ids), V]` with `all_logits`; float32, on the CPU.

        Raises:
            ValueError: no ids, more than the context holds, or a sequence whose KV lacks its boundary.
        """
        if not len(ids):
            raise ValueError("ids: [] is empty; give at least one")
        self._check(seq, len(ids))
        rows, at = [], 0
        for size in self._pieces(seq.kv_tokens, len(ids)):
            piece = torch.tensor([ids[at : at + size]], device=self._device)
            at += size
            rows.append(self._forward([seq], piece, 0 if all_logits else 1)[0])
        if all_logits:
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        return rows[-1][-1]

    @torch.inference_mode()
    def decode(self, seqs: Sequence[KvSequence], ids: Sequence[int]) -> Tensor:
        """Feed one id to each sequence; together if `config.batched` and the attention allows it.

        Returns:
            Logits `[B, V]`; float32, on the CPU.
        """
        for seq in seqs:
            self._check(seq, 1)
        if len(seqs) == 1 or (self.config.batched and not self._compressed):
            return self._forward(seqs, torch.tensor(ids, device=self._device)[:, None], 1)[:, 0]
        rows = [
            self._forward([seq], torch.tensor([[token]], device=self._device), 1)[0]
            for seq, token in zip(seqs, ids, strict=True)
        ]
        return torch.cat(rows)

    def _forward(self, seqs: Sequence[KvSequence], ids: Tensor, keep: int) -> Tensor:
        """Logits `[B, keep or all, V]` of ids `[B, n]`."""
        tokens = ids.shape[1]
        starts = torch.tensor([seq.kv_tokens for seq in seqs], device=self._device)
        positions = starts[:, None] + torch.arange(tokens, device=self._device)
        if self._compressed:
            own: dict[str, Any] = {"cache": seqs[0].cache}  # type: ignore[union-attr]
        else:
            step = Step(seqs, tokens)  # type: ignore[arg-type]
            own = {"cache": step, "pdd_step": step, "attention_mask": self._no_mask}
        marks = [seq.snapshot() for seq in seqs]
        try:
            out = self._model(
                input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=keep, **own
            )
        except BaseException:  # half a step must not be seen by the next one
            for seq, mark in zip(seqs, marks, strict=True):
                seq.restore(mark)
            raise
        for seq in seqs:
            seq.advance(tokens)
        logits: Tensor = out.logits
        return logits.to("cpu", torch.float32)

    def _pieces(self, start: int, tokens: int) -> Iterator[int]:
        """Sizes of the forward passes over [start, start + tokens).

        Where KV is cut at blocks, a piece ends at the last block boundary too, so that a prefix can be kept
        there.
        """
        chunk, end, cut = self.config.chunk_tokens, start + tokens, self.cut_tokens
        last_cut = end // cut * cut
        while start < end:
            stop = min(end, start + chunk)
            if cut > 1:
                stop = min(end, (start // chunk + 1) * chunk)
                stop = last_cut if start < last_cut < stop else stop
            yield stop - start
            start = stop

    def _check(self, seq: KvSequence, tokens: int) -> None:
        if seq.kv_tokens + tokens > self.loaded.max_tokens:
            raise ValueError(
                f"ids: {seq.kv_tokens} + {tokens} tokens exceed the context of {self.loaded.max_tokens}"
            )
        if not seq.continuable:
            raise ValueError(
                f"sequence: the KV up to {seq.kv_tokens} came without the state to continue from there"
            )

    @torch.inference_mode()
    def _probe(self) -> KvSequence:
        """A stepped sequence, whose shapes segments are held against.

        A model that the engine cannot step must fail here: on a wrong cache or mask transformers raises
        nothing and answers nonsense. So the first steps are held against a plain forward.

        Raises:
            ConfigError: the model cannot be stepped, or answers differently in steps.
        """
        seq = self.new()
        self.cut_tokens = seq.cut_tokens
        ids = torch.arange(max(PROBE_TOKENS, seq.cut_tokens), device=self._device)[None] % self.loaded.vocab
        kind = self.loaded.config.model_type
        try:
            if self._compressed:
                self._forward([seq], ids, 1)
                return seq
            rows = [self._forward([seq], piece, 0)[0] for piece in ids.split((5, 2, 1), dim=1)]
            plain = self._model(input_ids=ids, use_cache=False).logits[0].to("cpu", torch.float32)
        except Exception as error:
            raise ConfigError(f"model: {kind} cannot be stepped by this engine ({error})") from error
        apart = float((torch.cat(rows) - plain).abs().mean(dim=-1).max() / plain.std())
        if not apart < PROBE_TOLERANCE:
            raise ConfigError(f"model: {kind} answers differently in steps (logits apart by {apart:.2g} std)")
        return seq

    # -- KV in and out ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def export(self, seq: KvSequence, start: int, end: int, boundary: bool = True) -> KvSegment:
        """Copy the KV of positions [start, end) to the CPU.

        boundary: with what is needed to continue from `end`. Plain layers need nothing; compressed and window
            layers have it where the sequence stands, and at the block boundaries where a step has ended.

        Raises:
            ValueError: not a range of the sequence, or no boundary state at `end`.
        """
        if not 0 <= start < end <= seq.kv_tokens:
            raise ValueError(f"range: [{start}, {end}) is not within the sequence's {seq.kv_tokens} tokens")
        if boundary and not seq.has_boundary(end):
            raise ValueError(f"end: no boundary state is kept at {end}; export up to {seq.kv_tokens}")
        tensors = seq.export(start, end, boundary)
        return KvSegment(self.loaded.fingerprint, start, end, boundary or not self._compressed, tensors)

    @torch.inference_mode()
    def load(self, seq: KvSequence, segment: KvSegment) -> None:
        """Append a segment's KV to a sequence that ends where it starts.

        Raises:
            WireError: another model's KV, a gap or an overlap, or tensors of another shape.
        """
        if segment.fingerprint != self.loaded.fingerprint:
            raise WireError(f"kv: fingerprint {segment.fingerprint}; this model is {self.loaded.fingerprint}")
        if segment.start != seq.kv_tokens:
            raise WireError(f"kv: starts at token {segment.start}; the sequence ends at {seq.kv_tokens}")
        if segment.end > self.loaded.max_tokens:
            raise WireError(f"kv: ends at token {segment.end}; the context holds {self.loaded.max_tokens}")
        layout = self._template.layout(segment.start, segment.end, segment.boundary)
        wanted = {name: shape for name, (shape, _) in layout.items()}
        found = {name: tuple(tensor.shape) for name, tensor in segment.tensors.items()}
        if found != wanted:
            name = min(found.items() ^ wanted.items())[0]
            raise WireError(f"kv: tensor {name} is {found.get(name)}; this model's is {wanted.get(name)}")
        tensors = {name: segment.tensors[name].to(self._device, dtype) for name, (_, dtype) in layout.items()}
        seq.load(tensors, segment.end, segment.boundary)
