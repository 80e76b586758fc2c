"""Our engine beside transformers `generate` and plain forwards: same weights, same prompts, one process, one
run.

Invariant: the two sides of a ratio are measured one right after the other, in alternating order, and a ratio
is the median over such pairs; so a machine that slows down in the middle does not favour a side.

Conditions: `model.threads` threads, prompt 512, 128 new tokens with the prefill counted in, greedy; prefill
of 4096 tokens in the engine's chunks against one plain forward; 100 ids on top of 4096 cached tokens.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import DynamicCache

from experiments.folder import RunFolder
from pdd.config import RunConfig
from pdd.errors import ConfigError
from pdd.model.engine import Engine
from pdd.model.load import load

PROMPT_TOKENS = 512
NEW_TOKENS = 128
PREFILL_TOKENS = 4096
EXTEND_TOKENS = 100
CONTEXT_TOKENS = 2048
BUDGET_S = {"smoke": 30.0, "reduced": 150.0, "paper": 900.0}
MIN_PAIRS = 3
METRICS = ("b1_tok_s", "b8_tok_s", "prefill_tok_s", "extend100_ms")
UNITS = {"b1_tok_s": NEW_TOKENS, "b8_tok_s": 8 * NEW_TOKENS, "prefill_tok_s": PREFILL_TOKENS}

Timed = Callable[[], float]


class Ours:
    """The engine's side. Each method returns the seconds of one measurement."""

    def __init__(self, config: RunConfig, ids: list[int]) -> None:
        self.loaded = load(config.model)
        self.engine = Engine(self.loaded, config.engine)
        self.ids = ids
        self.last: list[int] = []
        self._cached = self.engine.new()
        self.engine.extend(self._cached, ids[:PREFILL_TOKENS])
        self._mark = self.engine.snapshot(self._cached)

    def generate(self, batch: int) -> float:
        """Prefill and NEW_TOKENS greedy tokens of `batch` prompts."""
        began_s = time.perf_counter()
        seqs = [self.engine.new() for _ in range(batch)]
        drawn = [
            int(self.engine.extend(seq, prompt).argmax())
            for seq, prompt in zip(seqs, prompts(self.ids, batch), strict=True)
        ]
        self.last = [drawn[0]]
        for _ in range(NEW_TOKENS - 1):
            drawn = self.engine.decode(seqs, drawn).argmax(dim=-1).tolist()
            self.last.append(drawn[0])
        return time.perf_counter() - began_s

    def prefill(self, tokens: int = PREFILL_TOKENS) -> float:
        """A prompt of `tokens` ids, in chunks."""
        began_s = time.perf_counter()
        self.engine.extend(self.engine.new(), self.ids[:tokens])
        return time.perf_counter() - began_s

    def extend(self) -> float:
        """EXTEND_TOKENS ids on top of PREFILL_TOKENS."""
        ids = self.ids[PREFILL_TOKENS:][:EXTEND_TOKENS]
        began_s = time.perf_counter()
        self.engine.extend(self._cached, ids, all_logits=True)
        took_s = time.perf_counter() - began_s
        self.engine.restore(self._cached, self._mark)
        return took_s


class Theirs:
    """transformers' side, on its own copy of the model with its own attention."""

    def __init__(self, config: RunConfig, ids: list[int]) -> None:
        self.model = load(config.model).model
        if self.model.config.model_type != "deepseek_v4":
            self.model.set_attn_implementation("sdpa")
        self.ids = ids
        self.last: list[int] = []
        self._device = next(self.model.parameters()).device
        self._cached = DynamicCache(config=self.model.config)
        self._forward(ids[:PREFILL_TOKENS], self._cached, 1)

    def generate(self, batch: int) -> float:
        """`generate` of the same prompts, all NEW_TOKENS of them."""
        rows = torch.tensor(prompts(self.ids, batch), device=self._device)
        began_s = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
            )
        took_s = time.perf_counter() - began_s
        self.last = out[0, PROMPT_TOKENS:].tolist()
        return took_s

    def prefill(self) -> float:
        """One plain forward over the prompt."""
        return self._forward(self.ids[:PREFILL_TOKENS], DynamicCache(config=self.model.config), 1)

    def extend(self) -> float:
        """One plain forward over the same cache."""
        return self._forward(self.ids[PREFILL_TOKENS:][:EXTEND_TOKENS], copy.deepcopy(self._cached), 0)

    def _forward(self, ids: list[int], cache: DynamicCache, keep: int) -> float:
        rows = torch.tensor([ids], device=self._device)
        began_s = time.perf_counter()
        with torch.inference_mode():
            self.model(rows, cache=cache, use_cache=True, logits_to_keep=keep)
        return time.perf_counter() - began_s


def prompts(ids: list[int], batch: int) -> list[list[int]]:
    """`batch` different prompts of PROMPT_TOKENS."""
    return [ids[at * 7 :][:PROMPT_TOKENS] for at in range(batch)]


def run(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
    """Measure pairs until `scale.repetitions` or the scale's time budget is reached.

    Raises:
        ConfigError: the model's context is too short for the conditions above.
    """
    if config.model.max_tokens < PREFILL_TOKENS + EXTEND_TOKENS:
        raise ConfigError(
            f"model.max_tokens: {config.model.max_tokens} is too short here; "
            f"give {PREFILL_TOKENS + EXTEND_TOKENS} or more"
        )
    seed = config.scale.seeds[0]
    ids = np.random.default_rng(seed).integers(0, 256, PREFILL_TOKENS + EXTEND_TOKENS).tolist()
    ours, theirs = Ours(config, ids), Theirs(config, ids)
    pairs = _pairs(config, folder, ours, theirs)
    folder.write_table("pairs", pairs)
    steps = _steps(ours, min(config.scale.repetitions, 10))
    folder.write_table("steps", steps)
    return _metrics(pairs, steps)


def _pairs(config: RunConfig, folder: RunFolder, ours: Ours, theirs: Theirs) -> pd.DataFrame:
    sides: dict[str, tuple[Timed, Timed]] = {
        "b1_tok_s": (lambda: ours.generate(1), lambda: theirs.generate(1)),
        "b8_tok_s": (lambda: ours.generate(8), lambda: theirs.generate(8)),
        "prefill_tok_s": (ours.prefill, theirs.prefill),
        "extend100_ms": (ours.extend, theirs.extend),
    }
    rows: list[dict[str, Any]] = []
    until_s = time.perf_counter() + BUDGET_S[config.scale.name]
    bar = folder.progress(config.scale.repetitions, "engine_bench")
    ours.generate(1), theirs.generate(1)  # warm
    for repetition in range(config.scale.repetitions):
        if repetition >= MIN_PAIRS and time.perf_counter() > until_s:
            break
        for metric, (mine, other) in sides.items():
            first_s, second_s = (mine(), other()) if repetition % 2 else reversed((other(), mine()))
            equal = ours.last == theirs.last if metric == "b1_tok_s" else None
            rows.append(
                {
                    "repetition": repetition,
                    "metric": metric,
                    "ours_s": first_s,
                    "generate_s": second_s,
                    "equal": equal,
                }
            )
        bar.update(1)
    bar.close()
    return pd.DataFrame(rows)


def _steps(ours: Ours, repetitions: int) -> pd.DataFrame:
    """Step times on CONTEXT_TOKENS of context: what MD and RLD see."""
    engine, ids = ours.engine, ours.ids
    seqs = [engine.new() for _ in range(8)]
    for seq in seqs:
        engine.extend(seq, ids[:CONTEXT_TOKENS])
    rows = []
    for repetition in range(repetitions):
        for batch in (1, 4, 8):
            began_s = time.perf_counter()
            engine.decode(seqs[:batch], ids[:batch])
            rows.append({"repetition": repetition, "step": f"decode_b{batch}_ms", "ms": _ms_since(began_s)})
        mark = engine.snapshot(seqs[0])
        began_s = time.perf_counter()
        engine.extend(seqs[0], ids[:EXTEND_TOKENS], all_logits=True)
        rows.append({"repetition": repetition, "step": "extend100_ms", "ms": _ms_since(began_s)})
        engine.restore(seqs[0], mark)
        prefill_ms = ours.prefill(CONTEXT_TOKENS) * 1e3
        rows.append({"repetition": repetition, "step": "prefill2048_ms", "ms": prefill_ms})
    return pd.DataFrame(rows)


def _ms_since(began_s: float) -> float:
    return (time.perf_counter() - began_s) * 1e3


def _metrics(pairs: pd.DataFrame, steps: pd.DataFrame) -> dict[str, Any]:
    metrics: dict[str, Any] = {"ours": {}, "generate": {}, "ratios": {}, "ratios_iqr": {}}
    for metric in METRICS:
        rows = pairs[pairs.metric == metric]
        for side in ("ours", "generate"):
            median_s = float(rows[f"{side}_s"].median())
            metrics[side][metric] = UNITS[metric] / median_s if metric in UNITS else median_s * 1e3
        # Above 1 is good for rates, below 1 for the extend's time.
        ratio = rows.generate_s / rows.ours_s if metric in UNITS else rows.ours_s / rows.generate_s
        metrics["ratios"][metric] = float(ratio.median())
        metrics["ratios_iqr"][metric] = [float(ratio.quantile(0.25)), float(ratio.quantile(0.75))]
    metrics["pairs"] = int(pairs.repetition.nunique())
    metrics["greedy_equal"] = bool(pairs.equal.dropna().all())
    metrics["ours_at_2k"] = {step: float(ms) for step, ms in steps.groupby("step").ms.median().items()}
    return metrics
