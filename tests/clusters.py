"""Helpers for tests that run real processes: small clusters, a one-process reference, and a look for leftovers."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from experiments.compose import compose
from pdd.config import EngineConfig, ModelConfig, RunConfig
from pdd.model.engine import Engine
from pdd.model.load import LoadedModel, load
from pdd.model.sampling import StopRule, sample
from pdd.request import SamplingParams

BASE = ("engine.batched=false", "wan.rate_mbps=20", "cluster.request_timeout_s=25", "cluster.dead_after_s=2")
VOCAB = 512


def config(*overrides: str) -> RunConfig:
    """A small cluster over a slow link, with batch-1 stepping."""
    return compose([*BASE, *overrides])


def prompt(seed: int, tokens: int) -> list[int]:
    """Random ids."""
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(tokens)]


@cache
def model(name: str = "tiny_qwen3") -> LoadedModel:
    """The model in this process."""
    return load(ModelConfig(name=name))


def alone(ids: Sequence[int], sampling: SamplingParams, name: str = "tiny_qwen3") -> list[int]:
    """The answer of one process: one prefill, then step by step."""
    loaded = model(name)
    engine, stop = Engine(loaded, EngineConfig()), StopRule(sampling, loaded.tokenizer)
    seq, output, fresh = engine.new(), [], list(ids)
    while stop.finish_reason(output) is None:
        output.append(sample(engine.extend(seq, fresh), sampling, list(ids), output).id)
        fresh = output[-1:]
    engine.release(seq)
    return output


def alive(pids: Sequence[int]) -> list[int]:
    """Those of `pids` that still run (a zombie does not)."""
    return [pid for pid in pids if _state(pid) not in ("", "Z", "X")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def folders() -> set[str]:
    """Temporary folders of clusters."""
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("pdd-")}


def children(pid: int) -> list[int]:
    """Every living descendant of a process."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _parent(int(entry.name)) == pid:
            found += [int(entry.name), *children(int(entry.name))]
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1
