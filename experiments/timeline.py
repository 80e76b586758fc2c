"""One low-hit request through cross-DC PD, PDD One-Shot and PDD Catch-Up, event by event (Fig. 4).

Invariant: every system is given the same request on warm connections, with the same part of its prompt in
the caches; the one shown is the last repetition, none is picked.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pandas as pd

from experiments.compose import with_system
from experiments.folder import RunFolder
from experiments.oneprocess import OneProcess
from experiments.options import read_options
from experiments.tables import ServedTables
from pdd.analysis import metrics
from pdd.analysis.perfetto import write_trace
from pdd.analysis.timeline import spans
from pdd.cluster import Cluster
from pdd.config import RunConfig
from pdd.request import Completion, Request, SamplingParams

DEFAULTS: dict[str, Any] = {
    "prompt_tokens": 2048,
    "hit_share": 0.1,
    "output_tokens": 224,
    "repetitions": {"smoke": 2, "reduced": 5, "paper": 9},
}


def run(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
    """`{"systems": {system: metrics}}`; tables requests, spans (of the request shown), events, and so on.

    `trace.json` in the run folder opens in Perfetto.
    """
    options = read_options(config, DEFAULTS)
    yardstick = OneProcess(config)
    request, history = _request(config, options, yardstick.loaded.vocab)
    systems = config.experiment.systems or (config.system.name,)
    repetitions = max(1, options["repetitions"])
    bar = folder.progress(len(systems) * repetitions, "timeline")
    served: dict[str, list[Completion]] = {}
    for system in systems:
        with Cluster.from_config(with_system(config, system)) as cluster:
            served[system] = [_serve(cluster, request, history, bar) for _ in range(repetitions)]
    bar.close()
    expected = yardstick.expected(request, [done.ids for answers in served.values() for done in answers])
    return _write(folder, served, expected)


def _request(config: RunConfig, options: dict[str, Any], vocab: int) -> tuple[Request, tuple[int, ...]]:
    """The request, and the part of its prompt that the caches shall hold."""
    rng = np.random.default_rng(config.scale.seeds[0])
    prompt = tuple(rng.integers(0, vocab, options["prompt_tokens"]).tolist())
    params = SamplingParams(max_tokens=options["output_tokens"])
    return Request("shown", prompt, params), prompt[: int(options["hit_share"] * len(prompt))]


def _serve(cluster: Cluster, request: Request, history: tuple[int, ...], bar: Any) -> Completion:
    cluster.reset_caches()
    if history:
        cluster.warm([history])
    fresh = cluster.request(request.prompt, max_tokens=request.sampling.max_tokens)
    done = cluster.submit(fresh).result()
    bar.update(1)
    return done


def _write(folder: RunFolder, served: dict[str, list[Completion]], expected: list[int]) -> dict[str, Any]:
    tables, requests, shown = ServedTables(), [], []
    for system, answers in served.items():
        right = {done.request_id: expected for done in answers}
        rows = metrics.rows(answers, None, right, system=system)
        requests.append(rows.rename_axis("repetition").reset_index())
        shown.append(spans(answers[-1], system=system))
        tables.add(answers[-1:], system=system)
    table = pd.concat(requests, ignore_index=True)
    folder.write_table("requests", table)
    folder.write_table("spans", pd.concat(shown, ignore_index=True))
    tables.write(folder)
    write_trace([_named(some[-1], system) for system, some in served.items()], folder.path / "trace.json")
    return {
        "systems": {
            str(system): metrics.summarise(part) for system, part in table.groupby("system", sort=False)
        }
    }


def _named(done: Completion, system: str) -> Completion:
    """The answer under its system's name: a trace tells requests apart by id."""
    named = copy.copy(done)
    named.request_id = system
    return named
