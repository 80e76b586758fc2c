"""Are relayed answers the answers? Every token of PDD and its baselines against one process (must show 1).

Invariant: greedy answers are held against transformers `generate`, sampled ones, penalties and stop strings
against our own one-process sampler; a request that failed counts as an error, never as equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from experiments.compose import with_model, with_system
from experiments.dialogues import (
    TURNS,
    Dialogue,
    Sizes,
    ended_at,
    is_plain_greedy,
    stopped_near,
)
from experiments.folder import RunFolder
from experiments.oneprocess import OneProcess
from experiments.options import read_options
from experiments.tables import ServedTables
from pdd.analysis import metrics
from pdd.cluster import Cluster
from pdd.config import RunConfig
from pdd.errors import PddError
from pdd.model.load import load
from pdd.request import Completion, Request

DEFAULTS: dict[str, Any] = {
    "batched": False,
    "dialogues": {"smoke": 4, "reduced": 18, "paper": 60},
    "direct_dialogues": {"smoke": 0, "reduced": 4, "paper": 60},
    "aimed": {"smoke": 2, "reduced": 10, "paper": 40},
    "at_once": 3,
}
V4_SIZES = Sizes(prompt=(140, 300), added=(60, 160), output=(6, 24))
RATES_MBPS = (140.0, 90.0, 220.0, 60.0, 400.0)
"""The link's rates in turn, changed live: takeovers come early and late."""
V4_RATES_MBPS = (20.0, 10.0, 30.0, 14.0, 40.0)
"""V4's KV is a twentieth of the others'."""
AIMS = 4
"""Tries to let a takeover fall on the last token: when it comes varies by some steps."""
Answer = tuple[Request, Completion | PddError]


class Yardstick:
    """The right output ids of a request; computed once for all systems."""

    def __init__(self, config: RunConfig) -> None:
        self.ours = OneProcess(config)
        self.theirs = load(config.model).model
        if not config.model.name.startswith("tiny_deepseek_v4"):
            self.theirs.set_attn_implementation("sdpa")
        self._known: dict[tuple[tuple[int, ...], Any], list[int]] = {}

    def __call__(self, request: Request) -> list[int]:
        key = (request.prompt, request.sampling)
        if key not in self._known:
            plain = is_plain_greedy(request.sampling)
            self._known[key] = self._generate(request) if plain else self.ours.decode(request)
        return self._known[key]

    def _generate(self, request: Request) -> list[int]:
        rows = torch.tensor([request.prompt])
        with torch.inference_mode():
            out = self.theirs.generate(
                rows,
                attention_mask=torch.ones_like(rows),
                max_new_tokens=request.sampling.max_tokens,
                do_sample=False,
            )
        ids: list[int] = out[0, len(request.prompt) :].tolist()
        return ids


def run(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
    """`{model: {relayed, mismatches, errors, distinct_ids, takeovers, ...}}`; table `requests`."""
    options = read_options(config, DEFAULTS)
    engine = dataclasses.replace(config.engine, batched=options["batched"])
    config = dataclasses.replace(config, engine=engine)
    models = config.experiment.models or (config.model.name,)
    systems = config.experiment.systems or (config.system.name,)
    bar = folder.progress(len(models) * len(systems), "exactness")
    tables, tried = ServedTables(), []
    for model in models:
        yardstick = Yardstick(with_model(config, model))
        for system in systems:
            bar.set_postfix_str(f"{model} {system}")
            answers = _serve(with_system(with_model(config, model), system), options, yardstick)
            if answers:
                tried.append(_judge(answers, yardstick, model, system))
            tables.add([done for _, done in answers], model=model, system=system)
            bar.update(1)
    bar.close()
    table = pd.concat(tried, ignore_index=True)
    folder.write_table("requests", table)
    tables.write(folder)
    return {str(model): _summary(part) for model, part in table.groupby("model", sort=False)}


def _serve(config: RunConfig, options: dict[str, Any], yardstick: Yardstick) -> list[Answer]:
    """All dialogues, some at once, turn after turn; then questions aimed at the positions of takeovers."""
    direct = config.router.kind == "direct"
    count = options["direct_dialogues" if direct else "dialogues"]
    sizes = V4_SIZES if config.model.name.startswith("tiny_deepseek_v4") else Sizes()
    seed, vocab = config.scale.seeds[0], yardstick.ours.loaded.vocab
    dialogues = [Dialogue(number, seed, vocab, sizes) for number in range(count)]
    answers: list[Answer] = []
    if not count:
        return answers
    rates = V4_RATES_MBPS if sizes is V4_SIZES else RATES_MBPS
    with Cluster.from_config(config) as cluster:
        for first in range(0, count, options["at_once"]):
            some = dialogues[first : first + options["at_once"]]
            rate_mbps = rates[first // options["at_once"] % len(rates)]
            cluster.wan.update(dataclasses.replace(config.wan, rate_mbps=rate_mbps))
            for turn in range(TURNS):
                asked = [one.request(turn, "q") for one in some]
                answers += _ask(cluster, asked)
                for one, request in zip(some, asked, strict=True):
                    one.answered(request, yardstick(request))
        answers += _aim(cluster, answers, options["aimed"], yardstick)
    return answers


def _ask(cluster: Cluster, requests: Sequence[Request]) -> list[Answer]:
    handles = [cluster.submit(request) for request in requests]
    return [(request, handle.outcome()) for request, handle in zip(requests, handles, strict=True)]


def _aim(cluster: Cluster, answers: list[Answer], count: int, yardstick: Yardstick) -> list[Answer]:
    """Ask again from cold caches, alone; then so that the handoff falls on its end or stop string."""
    taken = [(one, done) for one, done in answers if _took_over(done) and one.id.endswith("t0")]
    out: list[Answer] = []
    for number, (request, _) in enumerate(taken[:count]):
        alone = Request(f"{request.id}-alone", request.prompt, request.sampling)
        out.append(_ask_cold(cluster, alone))
        done = out[-1][1]
        if not isinstance(done, Completion) or not done.takeover_position:
            continue
        at = done.takeover_position
        if number % 2:
            question = stopped_near(request, yardstick(request), at, cluster.decode)
            out += [_ask_cold(cluster, question)] if question else []
        else:
            out += _aim_at_end(cluster, request, at)
    return out


def _aim_at_end(cluster: Cluster, request: Request, place: int) -> list[Answer]:
    """End the answer at the place of the last takeover or just after, until MD makes its last token only."""
    out: list[Answer] = []
    for tokens in range(place + 1, place + 1 + AIMS):
        out.append(_ask_cold(cluster, ended_at(request, tokens)))
        done = out[-1][1]
        if isinstance(done, Completion) and done.takeover_position == len(done.tokens) - 1:
            break
    return out


def _ask_cold(cluster: Cluster, request: Request) -> Answer:
    cluster.reset_caches()
    return _ask(cluster, [request])[0]


def _took_over(done: Completion | PddError) -> bool:
    return isinstance(done, Completion) and bool(done.takeover_position)


def _judge(answers: list[Answer], yardstick: Yardstick, model: str, system: str) -> pd.DataFrame:
    requests = [request for request, _ in answers]
    expected = {request.id: yardstick(request) for request in requests}
    outcomes = [done for _, done in answers]
    table = metrics.rows(outcomes, requests, expected, model=model, system=system)
    table["greedy"] = [is_plain_greedy(request.sampling) for request in requests]
    table["stop_string"] = [bool(request.sampling.stop) for request in requests]
    table["distinct_ids"] = [len(set(expected[request.id])) for request in requests]
    table["margin"] = [
        yardstick.ours.margin(request, done.ids, expected[request.id])
        if isinstance(done, Completion) and done.ids != expected[request.id]
        else float("nan")
        for request, done in answers
    ]
    return table


def _summary(table: pd.DataFrame) -> dict[str, Any]:
    good = table[table["error"] == ""]
    relayed = good[good["relayed"].astype(bool)]
    taken = relayed[relayed["takeover_position"].notna()]
    at, size = taken["takeover_position"], taken["output_tokens"]
    stops = taken[taken["stop_string"] & (taken["finish_reason"] == "stop")]
    return {
        "requests": len(table),
        "errors": len(table) - len(good),
        "relayed": len(relayed),
        "mismatches": int(table["token_mismatch"].sum()),
        "relayed_mismatches": int(relayed["token_mismatch"].sum()),
        "disagreements": int(good["disagreements"].sum()),
        "takeovers": len(taken),
        "takeover_positions": int(at.nunique()),
        "takeovers_at_last_token": int((at == size - 1).sum()),
        "stops_across_handoff": int((stops["output_tokens"] - stops["takeover_position"] <= 3).sum()),
        "drc_partly_hit": int(((relayed["hit_rate_md"] > 0) & (relayed["hit_rate_md"] < 1)).sum()),
        "greedy": int(table["greedy"].sum()),
        "distinct_ids_p50": float(table["distinct_ids"].median()),
        "largest_margin_of_mismatch": float(table["margin"].max()),
    }
