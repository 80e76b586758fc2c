"""Handing over RLD's tokens to MD across the WAN: as KV, or as ids that MD recomputes (Table 5, in small).

Invariant: `*_ms` runs from RLD's first move (the copy out of the cache, or the send) to the moment when MD
holds the KV of all handed-over tokens and can step; both ways are repeated in pairs on the same link, and
both must go on with the token that RLD would have made.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import Any

import pandas as pd

from experiments.compose import ROOT
from experiments.folder import RunFolder
from pdd.config import RunConfig, to_plain
from pdd.errors import ClusterError, ConfigError
from pdd.net.secret import new_secret
from pdd.net.wan import WanBackend, open_wan

OPTIONS = {"context_tokens": 2048, "tokens": 100, "cross_share": 0.7}
STEP_TIMEOUT_S = 60.0
CONDITIONS = ("quiet", "cross_traffic")


def run(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
    """`{condition: {ids_bytes, kv_bytes, ids_ms, kv_ms, kv_copy_ms, ...}}`, times as min, mean, max, std.

    cross_traffic: other senders' packets come at random (Poisson) at `cross_share` of the link's rate and do
    not back off. A row for each repetition goes to the table `handoffs`.
    """
    options = _options(config)
    with open_wan(config.wan, ("a", "b"), folder.path) as wan:
        rows = asyncio.run(_measure(config, options, wan, folder))
    frame = pd.DataFrame(rows)
    folder.write_table("handoffs", frame)
    metrics: dict[str, Any] = {name: _summary(frame[frame.condition == name]) for name in CONDITIONS}
    metrics["next_token_mismatches"] = int((~frame.equal).sum())
    return metrics


def _options(config: RunConfig) -> dict[str, Any]:
    given = config.experiment.options
    for key in given:
        if key not in OPTIONS:
            raise ConfigError(f"experiment.options.{key}: unknown key; known here: {', '.join(OPTIONS)}")
    options = {**OPTIONS, **given}
    for key in ("context_tokens", "tokens"):
        if type(options[key]) is not int or options[key] < 1:
            raise ConfigError(f"experiment.options.{key}: {options[key]!r} is not possible; give 1 or more")
    if not 0 < options["cross_share"] < 1:
        raise ConfigError(f"experiment.options.cross_share: {options['cross_share']!r}; give a share below 1")
    if options["context_tokens"] + options["tokens"] + 2 > config.model.max_tokens:
        raise ConfigError(
            f"experiment.options.context_tokens: {options['context_tokens']} and {options['tokens']} tokens "
            f"exceed model.max_tokens ({config.model.max_tokens}); give fewer"
        )
    if config.model.name.startswith("tiny_deepseek_v4"):
        raise ConfigError(
            f"model.name: {config.model.name!r} cannot be cut at any token; give tiny_qwen3 or tiny_llama"
        )
    return options


class _Process:
    """One end, in its datacenter."""

    def __init__(self, end: str, process: asyncio.subprocess.Process) -> None:
        self._end = end
        self._process = process

    @classmethod
    async def start(cls, end: str, datacenter: str, wan: WanBackend) -> _Process:
        command = [*wan.enter(datacenter), sys.executable, "-m", "experiments.handoff_ends", end]
        pipe = asyncio.subprocess.PIPE
        return cls(end, await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, cwd=ROOT))

    async def tell(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")
        await self._process.stdin.drain()

    async def answer(self) -> dict[str, Any]:
        """The next answer.

        Raises:
            ClusterError: the process ended, or `STEP_TIMEOUT_S` passed.
        """
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise ClusterError(f"{self._end}: no answer within {STEP_TIMEOUT_S:g} s") from None
        if not line:
            raise ClusterError(f"{self._end}: ended with code {await self._process.wait()}; see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """A command and its answer."""
        await self.tell({"do": do, **arguments})
        return await self.answer()

    async def stop(self) -> None:
        """End the process."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


async def _measure(
    config: RunConfig, options: dict[str, Any], wan: WanBackend, folder: RunFolder
) -> list[dict[str, Any]]:
    ends: list[_Process] = []
    try:
        for end, datacenter in (("rld", "a"), ("md", "b")):
            ends.append(await _Process.start(end, datacenter, wan))
        setup = _setup(config, options)
        for process, end, datacenter in zip(ends, ("rld", "md"), "ab", strict=True):
            await process.tell({**setup, "end": end, "host": wan.bind_host(datacenter)})
        for process in ends:
            await process.answer()
        rld, md = ends
        where = await md.ask("listen")
        ways = {key: wan.address("a", "b", where[key]) for key in ("control", "kv")}
        await rld.ask("connect", **ways)
        return await _repeat(config, options, wan, folder, rld, md)
    finally:
        for process in ends:
            await process.stop()


def _setup(config: RunConfig, options: dict[str, Any]) -> dict[str, Any]:
    parts = {key: to_plain(getattr(config, key)) for key in ("model", "engine", "kv_stream")}
    sizes = {key: options[key] for key in ("context_tokens", "tokens")}
    return {**parts, **sizes, "secret": new_secret().hex(), "seed": config.scale.seeds[0]}


async def _repeat(
    config: RunConfig,
    options: dict[str, Any],
    wan: WanBackend,
    folder: RunFolder,
    rld: _Process,
    md: _Process,
) -> list[dict[str, Any]]:
    repetitions = config.scale.repetitions
    loads = {"quiet": 0.0, "cross_traffic": options["cross_share"] * config.wan.rate_mbps}
    bar = folder.progress(2 * repetitions * len(loads), "handoff")
    rows: list[dict[str, Any]] = []
    for condition, cross_mbps in loads.items():
        wan.update(dataclasses.replace(config.wan, cross_mbps=cross_mbps))
        for number in range(-1, repetitions):
            for way in ("kv", "ids"):
                row = await _hand_over(way, number, rld, md)
                # The first pair only warms caches and connections.
                if number >= 0:
                    rows.append({"condition": condition, "repetition": number, **row})
                    bar.update(1)
    bar.close()
    return rows


async def _hand_over(way: str, number: int, rld: _Process, md: _Process) -> dict[str, Any]:
    await md.tell({"do": way, "number": number})
    sent = await rld.ask(way, number=number)
    taken = await md.answer()
    arrive_ms = 1e3 * (taken["arrived_s"] - sent["start_s"])
    take_ms = 1e3 * (taken["ready_s"] - taken["arrived_s"])
    return {
        "way": way,
        "bytes": sent["sent_bytes"],
        "total_ms": arrive_ms + take_ms,
        "export_ms": sent.get("export_ms", 0.0),
        "transfer_ms": arrive_ms - sent.get("export_ms", 0.0),
        "load_ms": take_ms if way == "kv" else 0.0,
        "extend_ms": take_ms if way == "ids" else 0.0,
        "step_ms": taken["step_ms"],
        "next_id": taken["after_id"],
        "equal": taken["after_id"] == sent["after_id"],
    }


def _summary(frame: pd.DataFrame) -> dict[str, Any]:
    ids, kv = frame[frame.way == "ids"], frame[frame.way == "kv"]
    return {
        "ids_bytes": int(ids.bytes.max()),
        "kv_bytes": int(kv.bytes.max()),
        "ids_ms": _spread(ids.total_ms),
        "kv_ms": _spread(kv.total_ms),
        "kv_copy_ms": _spread(kv.export_ms + kv.load_ms),
        "kv_transfer_ms": _spread(kv.transfer_ms),
        "ids_transfer_ms": _spread(ids.transfer_ms),
        "extend_ms": _spread(ids.extend_ms),
    }


def _spread(values: pd.Series[float]) -> dict[str, float]:
    return {
        "min": float(values.min()),
        "mean": float(values.mean()),
        "max": float(values.max()),
        "std": float(values.std(ddof=0)),
    }
