"""The one schema: every setting of PDD, its default and its allowed range.

Invariant: a `RunConfig` that exists is valid. Each dataclass checks itself on construction, so
no later code checks a setting again, and workers are handed plain data made by `to_plain`.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from pdd.errors import ConfigError

TINY_MODELS = ("tiny_qwen3", "tiny_llama", "tiny_deepseek_v4", "tiny_deepseek_v4_sparse")


def _require(ok: bool, key: str, value: object, right: str) -> None:
    if not ok:
        raise ConfigError(f"{key}: {value!r} is not possible; give {right}")


def _one_of(key: str, value: object, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, key, value, "one of " + ", ".join(allowed))


def _positive(key: str, value: float) -> None:
    _require(value > 0, key, value, "a number above 0")


def _share(key: str, value: float) -> None:
    _require(0.0 <= value <= 1.0, key, value, "a share from 0 to 1")


@dataclass(frozen=True)
class ModelConfig:
    """Which causal LM each role loads. `hf` takes any transformers model by path or name."""

    name: str = "tiny_qwen3"
    path: str | None = None
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        _one_of("model.name", self.name, (*TINY_MODELS, "hf"))
        _require(
            (self.path is not None) == (self.name == "hf"),
            "model.path",
            self.path,
            "a path or name with model.name=hf, and nothing otherwise",
        )
        _one_of("model.dtype", self.dtype, ("float32", "float64", "bfloat16", "float16"))
        _positive("model.threads", self.threads)
        _require(self.max_tokens >= 128, "model.max_tokens", self.max_tokens, "at least 128")


@dataclass(frozen=True)
class EngineConfig:
    """Step sizes of the engine and the token budgets of the prefix caches."""

    chunk_tokens: int = 512
    extend_chunk_tokens: int = 128
    page_tokens: int = 64
    max_batch: int = 16
    batched: bool = True
    prefix_cache_tokens: int = 131072
    drc_tokens: int = 262144

    def __post_init__(self) -> None:
        for key in ("chunk_tokens", "extend_chunk_tokens", "page_tokens", "max_batch"):
            _positive(f"engine.{key}", getattr(self, key))
        for key in ("prefix_cache_tokens", "drc_tokens"):
            _require(getattr(self, key) >= 0, f"engine.{key}", getattr(self, key), "0 or more")


@dataclass(frozen=True)
class SystemConfig:
    """One of the systems under comparison: the same roles, other policies (facts: Table 4, 7).

    main_decode: `remote` puts MD behind the WAN, `local` beside P (IDC-PD).
    kv_streaming: `chunk` ships KV as prefill chunks finish, `after_prefill` as in the paper.
    first_token: who samples token 1. `decode` is the paper's; `prefill` lets P send it at once.
    """

    name: str = "pdd"
    main_decode: str = "remote"
    prefix_cache: bool = True
    drc: bool = True
    kv_streaming: str = "chunk"
    first_token: str = "decode"

    def __post_init__(self) -> None:
        _one_of("system.main_decode", self.main_decode, ("remote", "local"))
        _one_of("system.kv_streaming", self.kv_streaming, ("chunk", "after_prefill"))
        _one_of("system.first_token", self.first_token, ("decode", "prefill"))


@dataclass(frozen=True)
class RouterConfig:
    """Which requests are relayed (paper, section on routing; H is not given there).

    kind: `direct` never relays, `hit_rate` relays below `threshold`, `length` relays a missing
    suffix above `suffix_tokens` (PrfaaS).
    hit_of: whose hit rate is the key, MD's (`md`) or P's (`p`).
    relayed_pipeline: `p_rld_md`, or `p_rld`, the pipeline the paper excludes (Fig. 5).
    """

    kind: str = "hit_rate"
    threshold: float = 0.95
    suffix_tokens: int = 256
    hit_of: str = "md"
    relayed_pipeline: str = "p_rld_md"

    def __post_init__(self) -> None:
        _one_of("router.kind", self.kind, ("direct", "hit_rate", "length"))
        _share("router.threshold", self.threshold)
        _require(self.suffix_tokens >= 0, "router.suffix_tokens", self.suffix_tokens, "0 or more")
        _one_of("router.hit_of", self.hit_of, ("md", "p"))
        _one_of("router.relayed_pipeline", self.relayed_pipeline, ("p_rld_md", "p_rld"))


@dataclass(frozen=True)
class HandoffConfig:
    """How MD takes over from RLD (paper, Extend-Decode Handoff).

    mode: `oneshot`, `catchup`, or `adaptive`: Catch-Up while RLD's load is under `busy_load`.
    split_tokens: with more ids than this outstanding, Catch-Up hands over a first part [A].
    cap_tokens: RLD's output cap per request at no load; it shrinks to `cap_floor_tokens` at full load.
    singular: what happens to the transfer of an answer that RLD finished: `abort` or `background`.
    eager_batch_tokens: ids that RLD sends MD together while MD has no KV (after that, each at once).
    on_lost_kv: MD recomputes the prompt from ids (`recompute`) or the request fails (`fail`).
    """

    mode: str = "adaptive"
    busy_load: float = 0.75
    split_tokens: int = 64
    cap_tokens: int = 512
    cap_floor_tokens: int = 64
    eager_batch_tokens: int = 8
    singular: str = "abort"
    on_lost_kv: str = "recompute"
    kv_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        _one_of("handoff.mode", self.mode, ("oneshot", "catchup", "adaptive"))
        _share("handoff.busy_load", self.busy_load)
        _positive("handoff.split_tokens", self.split_tokens)
        _require(
            1 <= self.cap_floor_tokens <= self.cap_tokens,
            "handoff.cap_floor_tokens",
            self.cap_floor_tokens,
            f"1 to handoff.cap_tokens ({self.cap_tokens})",
        )
        _positive("handoff.eager_batch_tokens", self.eager_batch_tokens)
        _one_of("handoff.singular", self.singular, ("abort", "background"))
        _one_of("handoff.on_lost_kv", self.on_lost_kv, ("recompute", "fail"))
        _positive("handoff.kv_timeout_s", self.kv_timeout_s)


@dataclass(frozen=True)
class WanConfig:
    """The link between two datacenters, and what emulates it.

    The defaults keep the paper's ratios at the tiny model's pace: RTT about half a TPOT (10 ms here, 48 ms there), and
    a whole prompt's KV (8 MB) takes some two or three times its prefill.
    queue_ms: depth of the bottleneck buffer as time at the link's rate.
    cross_mbps: competing traffic that the shaper adds from A to B.
    """

    backend: str = "proxy"
    rate_mbps: float = 60.0
    rtt_ms: float = 4.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    queue_ms: float = 100.0
    cross_mbps: float = 0.0
    mtu_bytes: int = 9000
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("wan.backend", self.backend, ("proxy", "netns", "none"))
        _positive("wan.rate_mbps", self.rate_mbps)
        for key in ("rtt_ms", "jitter_ms", "cross_mbps"):
            _require(getattr(self, key) >= 0, f"wan.{key}", getattr(self, key), "0 or more")
        _require(0 <= self.loss < 0.5, "wan.loss", self.loss, "a share from 0 to below 0.5")
        _positive("wan.queue_ms", self.queue_ms)
        _require(
            self.cross_mbps < self.rate_mbps,
            "wan.cross_mbps",
            self.cross_mbps,
            f"less than wan.rate_mbps ({self.rate_mbps})",
        )
        _require(576 <= self.mtu_bytes <= 65535, "wan.mtu_bytes", self.mtu_bytes, "576 to 65535")


@dataclass(frozen=True)
class KvStreamConfig:
    """The bounded pool of persistent connections that carries KV (paper, Table 2).

    connections: pool size for each pair of processes; transfers wait first in, first out.
    stripes: connections that one large segment is split over.
    warmup_bytes: sent on each new connection, so that TCP's window is open when KV comes.
    """

    connections: int = 8
    stripes: int = 1
    frame_bytes: int = 262144
    warmup_bytes: int = 262144
    congestion_control: str | None = None
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        _positive("kv_stream.connections", self.connections)
        _require(
            1 <= self.stripes <= self.connections,
            "kv_stream.stripes",
            self.stripes,
            f"1 to kv_stream.connections ({self.connections})",
        )
        _require(
            4096 <= self.frame_bytes <= 16 << 20,
            "kv_stream.frame_bytes",
            self.frame_bytes,
            "4096 to 16777216",
        )
        _require(self.warmup_bytes >= 0, "kv_stream.warmup_bytes", self.warmup_bytes, "0 or more")
        _positive("kv_stream.timeout_s", self.timeout_s)


@dataclass(frozen=True)
class ClusterConfig:
    """Where the instances of each role stand: one datacenter name for each instance.

    A gateway stands in every datacenter that has a P. It uses the P and RLD of its own datacenter and any MD.
    """

    prefill: tuple[str, ...] = ("a",)
    relay_decode: tuple[str, ...] = ("a",)
    main_decode: tuple[str, ...] = ("b",)
    request_timeout_s: float = 60.0
    start_timeout_s: float = 120.0
    heartbeat_s: float = 0.25
    dead_after_s: float = 5.0
    lease_s: float = 60.0

    def __post_init__(self) -> None:
        for key in ("prefill", "main_decode"):
            _require(len(getattr(self, key)) > 0, f"cluster.{key}", [], "at least one datacenter")
        missing = set(self.relay_decode) - set(self.prefill)
        _require(not missing, "cluster.relay_decode", sorted(missing), "datacenters that have a P")
        for key in ("request_timeout_s", "start_timeout_s", "heartbeat_s", "lease_s"):
            _positive(f"cluster.{key}", getattr(self, key))
        _require(
            self.dead_after_s > self.heartbeat_s,
            "cluster.dead_after_s",
            self.dead_after_s,
            f"more than cluster.heartbeat_s ({self.heartbeat_s})",
        )


@dataclass(frozen=True)
class WorkloadConfig:
    """Requests replayed identically against every system (paper set-up in small).

    hit_rate: `beta` is the skewed Beta on [hit_low, hit_high]; `uniform` is flat on the same range.
    output: `exponential` around output_mean_tokens, cut at output_cap_tokens; or `constant`.
    contexts: distinct cached histories that prompts share a prefix with.
    """

    rate_rps: float = 1.25
    prompt_tokens: int = 2048
    hit_rate: str = "beta"
    hit_low: float = 0.02
    hit_high: float = 0.99
    beta_a: float = 0.79
    beta_b: float = 0.081
    output: str = "exponential"
    output_mean_tokens: int = 96
    output_cap_tokens: int = 400
    contexts: int = 8
    temperature: float = 0.0

    def __post_init__(self) -> None:
        _positive("workload.rate_rps", self.rate_rps)
        _require(self.prompt_tokens >= 2, "workload.prompt_tokens", self.prompt_tokens, "2 or more")
        _one_of("workload.hit_rate", self.hit_rate, ("beta", "uniform"))
        _require(
            0 <= self.hit_low <= self.hit_high <= 1,
            "workload.hit_low",
            self.hit_low,
            f"a share not above workload.hit_high ({self.hit_high})",
        )
        for key in ("beta_a", "beta_b", "contexts", "output_mean_tokens"):
            _positive(f"workload.{key}", getattr(self, key))
        _one_of("workload.output", self.output, ("exponential", "constant"))
        _require(
            self.output_cap_tokens >= self.output_mean_tokens,
            "workload.output_cap_tokens",
            self.output_cap_tokens,
            f"at least workload.output_mean_tokens ({self.output_mean_tokens})",
        )
        _require(self.temperature >= 0, "workload.temperature", self.temperature, "0 or more")


@dataclass(frozen=True)
class ScaleConfig:
    """How much of an experiment is run: `smoke` under 90 s, `reduced` under 5 min, `paper` whole."""

    name: str = "reduced"
    seeds: tuple[int, ...] = (0, 1)
    requests: int = 40
    repetitions: int = 30

    def __post_init__(self) -> None:
        _one_of("scale.name", self.name, ("smoke", "reduced", "paper"))
        _require(len(self.seeds) > 0, "scale.seeds", self.seeds, "at least one seed")
        _positive("scale.requests", self.requests)
        _positive("scale.repetitions", self.repetitions)


@dataclass(frozen=True)
class ExperimentConfig:
    """What to run: `kind` names a module of `experiments/`; `options` are its own, checked there."""

    name: str = "timeline"
    kind: str = "timeline"
    systems: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    """The whole configuration of one run."""

    experiment: ExperimentConfig = field(default_factory=ExperimentConfig)
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    system: SystemConfig = field(default_factory=SystemConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    wan: WanConfig = field(default_factory=WanConfig)
    kv_stream: KvStreamConfig = field(default_factory=KvStreamConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    runs_dir: str = "runs"


def to_plain(config: Any) -> dict[str, Any]:
    """A dataclass as plain dicts and lists, ready for JSON, msgpack or a worker's command line."""
    return _plain(dataclasses.asdict(config))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def from_plain(cls: type, data: Any, path: str = "") -> Any:
    """Build dataclass `cls` from plain data.

    Raises:
        ConfigError: an unknown key, a wrong type or an impossible value, in one line.
    """
    where = path or "config"
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: {data!r} is not a mapping; give the keys of {cls.__name__}")
    hints = typing.get_type_hints(cls)
    for key in data:
        if key not in hints:
            known = ", ".join(sorted(hints))
            raise ConfigError(f"{_join(path, str(key))}: unknown key; known here: {known}")
    kwargs = {key: _convert(hints[key], item, _join(path, key)) for key, item in data.items()}
    return cls(**kwargs)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _convert(kind: Any, value: Any, path: str) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind):
        return from_plain(typing.cast(type, kind), value, path)
    if origin in (typing.Union, types.UnionType):
        options = [item for item in typing.get_args(kind) if item is not type(None)]
        return None if value is None else _convert(options[0], value, path)
    if origin is tuple:
        _require(isinstance(value, (list, tuple)), path, value, "a list")
        inner = typing.get_args(kind)[0]
        return tuple(_convert(inner, item, path) for item in value)
    if origin is dict:
        _require(isinstance(value, dict), path, value, "a mapping")
        return dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is Any:
        return value
    exact = type(value) is kind and (kind is not float or math.isfinite(value))
    _require(
        exact,
        path,
        value,
        {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}.get(
            kind.__name__, kind.__name__
        ),
    )
    return value
