"""What each WAN backend delivers of what was asked: rate, RTT, jitter, loss, sharing, and the KV stream.

Invariant: every number comes from sockets of processes inside the datacenters, none from the shaper's books.
Conditions: delivered_mbps counts from the first byte sent to the last byte received, less half the asked RTT,
on a warm connection; plain_socket_mbps and kv_stream_mbps count until the receiver's answer is back. Medians
over repetitions. Jitter and loss have a phase of their own, with `jitter_ms` and `loss` of the options.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.folder import RunFolder
from pdd.config import RunConfig, WanConfig, to_plain
from pdd.errors import ClusterError, ConfigError
from pdd.net.wan import WanBackend, open_wan
from pdd.net.wan.netns import what_is_missing

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0
NEAR, FAR = "a", "b"
PHASE_RTT_MS = 20.0
DEFAULTS: dict[str, Any] = {
    "backends": ["proxy", "netns"],
    "size_mib": {"smoke": 6, "reduced": 16, "paper": 64},
    "repetitions": {"smoke": 2, "reduced": 3, "paper": 10},
    "pings": {"smoke": 40, "reduced": 200, "paper": 1000},
    "probes": {"smoke": 2000, "reduced": 8000, "paper": 50000},
    "flows": [1, 4, 16],
    # The widest spread that fits around the delay is PHASE_RTT_MS.
    "jitter_ms": 4.0,
    "loss": 0.02,
}


def options_of(config: RunConfig) -> dict[str, Any]:
    """The experiment's options with defaults for the scale.

    Raises:
        ConfigError: an unknown option or backend.
    """
    options = {
        key: value[config.scale.name] if isinstance(value, dict) else value for key, value in DEFAULTS.items()
    }
    for key, value in config.experiment.options.items():
        if key not in options:
            known = ", ".join(DEFAULTS)
            raise ConfigError(f"experiment.options.{key}: unknown option of wan_selftest; known: {known}")
        options[key] = value
    for name in options["backends"]:
        if name not in ("proxy", "netns"):
            raise ConfigError(f"experiment.options.backends: {name!r} cannot be tested; give proxy, netns")
    return options


def run(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
    """Test each backend; one that this machine cannot run is reported as skipped, with the reason."""
    options = options_of(config)
    bar = folder.progress(len(options["backends"]), "wan_selftest")
    results: dict[str, dict[str, Any]] = {}
    for name in options["backends"]:
        missing = what_is_missing() if name == "netns" else ""
        if missing:
            results[name] = {"skipped": f"needs Linux, root and /dev/net/tun; missing here: {missing}"}
        else:
            wan = dataclasses.replace(config.wan, backend=name)
            results[name] = _test(wan, config, options, folder)
        bar.update(1)
    bar.close()
    return {"backends": results}


def _test(
    config: WanConfig, run_config: RunConfig, options: dict[str, Any], folder: RunFolder
) -> dict[str, Any]:
    secret = secrets.token_hex(16)
    with open_wan(config, (NEAR, FAR), folder.path) as wan, _endpoint(wan, secret) as far:
        orders = _orders(wan, config, run_config, options, secret, far.addresses)
        answers = {"clean": _probe(wan, orders, "clean")}
        # A long RTT, so that a late answer can be told from a busy machine and jitter fits around the delay.
        calm = dataclasses.replace(config, rtt_ms=max(config.rtt_ms, PHASE_RTT_MS), jitter_ms=0.0, loss=0.0)
        orders["rtt_s"] = calm.rtt_ms / 1000
        wan.update(dataclasses.replace(calm, jitter_ms=options["jitter_ms"]))
        answers["jittered"] = _probe(wan, orders, "jittered")
        wan.update(dataclasses.replace(calm, loss=options["loss"]))
        answers["lossy"] = _probe(wan, orders, "lossy")
    _write(folder, config.backend, answers)
    return _metrics(config, options, answers)


class _endpoint:
    """The far end as a process in FAR; `addresses` as seen from NEAR."""

    def __init__(self, wan: WanBackend, secret: str) -> None:
        host = wan.bind_host(FAR)
        self._process = _spawn(wan, FAR, "experiments.wan_endpoint", host)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout
        stdin.write(secret + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise ClusterError(f"wan_selftest: the far end ended with code {self._process.wait(10)}")
        ports = json.loads(line)
        self.addresses = {
            "tcp": wan.address(NEAR, FAR, f"{host}:{ports['tcp']}"),
            "kv": wan.address(NEAR, FAR, ports["kv"]),
            "udp": f"{host}:{ports['udp']}" if wan.config.backend == "netns" else "",
        }

    def __enter__(self) -> _endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._process)


def _end(process: subprocess.Popen[str]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream:
            stream.close()
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _spawn(wan: WanBackend, datacenter: str, module: str, *arguments: str) -> subprocess.Popen[str]:
    command = [*wan.enter(datacenter), sys.executable, "-m", module, *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )


def _orders(
    wan: WanBackend,
    config: WanConfig,
    run_config: RunConfig,
    options: dict[str, Any],
    secret: str,
    addresses: dict[str, str],
) -> dict[str, Any]:
    keys = ("repetitions", "pings", "probes", "flows")
    return {
        **addresses,
        **{key: options[key] for key in keys},
        "size_bytes": int(options["size_mib"] * (1 << 20)),
        "rtt_s": config.rtt_ms / 1000,
        "secret": secret,
        "kv_stream": to_plain(run_config.kv_stream),
    }


def _probe(wan: WanBackend, orders: dict[str, Any], phase: str) -> dict[str, Any]:
    process = _spawn(wan, NEAR, "experiments.wan_probe")
    try:
        out, _ = process.communicate(json.dumps({**orders, "phase": phase}) + "\n", timeout=LIMIT_S)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if process.returncode:
        raise ClusterError(f"wan_selftest: the {phase} probe ended with code {process.returncode}")
    answer: dict[str, Any] = json.loads(out)
    return answer


def _metrics(config: WanConfig, options: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    clean, lossy = answers["clean"], answers["lossy"]
    # An RTT is the sum of two even spreads of width j: a triangle, its middle half j * (2 - sqrt(2)) wide.
    # Only the middle half, because a process that the machine lets wait must not count as jitter.
    low_ms, _, high_ms = statistics.quantiles(answers["jittered"]["rtt_ms"], n=4)
    return {
        "asked_mbps": config.rate_mbps,
        "asked_rtt_ms": config.rtt_ms,
        "rtt_ms": statistics.median(clean["rtt_ms"]),
        **{name: statistics.median(values) for name, values in clean["streams"].items()},
        "asked_jitter_ms": options["jitter_ms"],
        "jitter_ms": (high_ms - low_ms) / (2 - 2**0.5),
        "asked_loss": options["loss"],
        "loss": lossy["lost"] / lossy["crossings"],
        "sharing": clean["sharing"],
        "small_beside_bulk_rtt_ms": statistics.median(clean["beside_bulk_ms"]),
        "congestion_control": clean["congestion_control"],
    }


def _write(folder: RunFolder, backend: str, answers: dict[str, Any]) -> None:
    clean = answers["clean"]
    rtts = [(phase, answer["rtt_ms"]) for phase, answer in answers.items()]
    rtts.append(("beside_bulk", clean["beside_bulk_ms"]))
    frame = pd.DataFrame([{"phase": phase, "rtt_ms": value} for phase, values in rtts for value in values])
    folder.write_table(f"wan_rtt_{backend}", frame.assign(backend=backend))
    streams = pd.DataFrame(clean["streams"]).rename_axis("repetition").reset_index()
    folder.write_table(f"wan_streams_{backend}", streams.assign(backend=backend))
    sharing = pd.DataFrame([{"flows": int(count), **row} for count, row in clean["sharing"].items()])
    folder.write_table(f"wan_sharing_{backend}", sharing.assign(backend=backend))
