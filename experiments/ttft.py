"""All systems on the same requests: time to first token, pace, stalls, and WAN bytes (Tables 4 and 7).

Invariant: every system is served the same prompts at the same arrival times after the same warm-up, and every
answer is held against one-process decoding.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.compose import with_system
from experiments.folder import RunFolder
from experiments.oneprocess import OneProcess
from experiments.options import read_options
from experiments.tables import ServedTables
from pdd.analysis import metrics
from pdd.analysis.waterfall import waterfall
from pdd.cluster import Cluster
from pdd.config import RunConfig
from pdd.errors import PddError
from pdd.request import Completion
from pdd.workload.requests import Workload, build

Answers = dict[tuple[str, int], list[Completion | PddError]]
"""By system and seed, in the order of the workload's requests."""


def run(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
    """`{"systems": {system: metrics}}` pooled over seeds; tables requests, stages, events, transfers, tokens.

    `relayed_*` metrics of every system are over the requests that `pdd` relayed (where `pdd` is served).
    """
    read_options(config, {})
    systems = config.experiment.systems or (config.system.name,)
    yardstick = OneProcess(config)
    loads = {
        seed: build(config.workload, yardstick.loaded.vocab, seed, config.scale.requests)
        for seed in config.scale.seeds
    }
    answers: Answers = {}
    total = len(systems) * len(loads) * config.scale.requests
    bar = folder.progress(total, "ttft")
    for system in systems:
        bar.set_postfix_str(system)
        with Cluster.from_config(with_system(config, system)) as cluster:
            for seed, load in loads.items():
                answers[system, seed] = _serve(cluster, load, bar)
    bar.close()
    expected = _expected(yardstick, loads, answers)
    return _write(folder, loads, answers, expected)


def _serve(cluster: Cluster, load: Workload, bar: Any) -> list[Completion | PddError]:
    """Empty the caches, warm the histories one after another, then replay the requests."""
    cluster.reset_caches()
    cluster.warm(load.contexts)
    return cluster.replay(load.timed(), on_done=lambda _: bar.update(1))


def _expected(yardstick: OneProcess, loads: dict[int, Workload], answers: Answers) -> dict[str, list[int]]:
    """The right output ids by request id."""
    found = {}
    for seed, load in loads.items():
        served = [outcomes for (_, other), outcomes in answers.items() if other == seed]
        for number, timed in enumerate(load.requests):
            outcomes = [one[number] for one in served]
            seen = [done.ids for done in outcomes if isinstance(done, Completion)]
            found[timed.request.id] = yardstick.expected(timed.request, seen)
    return found


def _write(
    folder: RunFolder, loads: dict[int, Workload], answers: Answers, expected: dict[str, list[int]]
) -> dict[str, Any]:
    requests, stages, tables = [], [], ServedTables()
    for (system, seed), outcomes in answers.items():
        asked = [timed.request for timed in loads[seed].requests]
        requests.append(metrics.rows(outcomes, asked, expected, system=system, seed=seed))
        done = [one for one in outcomes if isinstance(one, Completion)]
        stages.append(waterfall(done, system=system, seed=seed))
        tables.add(outcomes, system=system, seed=seed)
    table = pd.concat(requests, ignore_index=True)
    folder.write_table("requests", table)
    folder.write_table("stages", pd.concat(stages, ignore_index=True))
    tables.write(folder)
    relayed = metrics.relayed_ids(table) if "pdd" in set(table["system"]) else None
    systems = {
        str(system): metrics.summarise(part, relayed) for system, part in table.groupby("system", sort=False)
    }
    return {"systems": systems}
