"""From answers to numbers: one row a request, then one value a metric (symbols: docs/metrics.md).

Invariant: times are the gateway's, when the user got each token; a value that is not defined is NaN in a row
and None in a summary, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from pdd.errors import PddError
from pdd.lifecycle import ARRIVAL, RELAY_CAPPED, REPLAYED, SINGULAR
from pdd.request import Completion, Request


def rows(
    results: Sequence[Completion | PddError],
    requests: Sequence[Request] | None = None,
    expected: Mapping[str, Sequence[int]] | None = None,
    **columns: Any,
) -> pd.DataFrame:
    """One row a request, in the order of `results`.

    requests: as sent, in the same order; without them a failed request has no id. expected: the right output
    ids by request id, for `token_mismatch`. columns: constants of every row, such as system and seed.
    """
    ids = (
        [request.id for request in requests]
        if requests
        else [getattr(one, "request_id", "") for one in results]
    )
    table = [
        {**columns, "request_id": request_id, **_row(one, (expected or {}).get(request_id))}
        for request_id, one in zip(ids, results, strict=True)
    ]
    return pd.DataFrame(table, columns=[*columns, "request_id", *_row(PddError())])


def _row(result: Completion | PddError, expected: Sequence[int] | None = None) -> dict[str, Any]:
    done = result if isinstance(result, Completion) else None
    return {
        "error": "" if isinstance(result, Completion) else result.code,
        "error_text": "" if done else str(result),
        "token_mismatch": bool(done and expected is not None and done.ids != list(expected)),
        **(_shape(done) if done else dict.fromkeys(_shape(_EMPTY))),
        **(_times(done) if done else dict.fromkeys(_times(_EMPTY), math.nan)),
        **(_work(done) if done else dict.fromkeys(_work(_EMPTY), math.nan)),
    }


def _shape(done: Completion) -> dict[str, Any]:
    names = {event.name for event in done.events}
    return {
        "pipeline": done.pipeline,
        "relayed": done.pipeline.startswith("P-RLD"),
        "mode": done.mode,
        "finish_reason": done.finish_reason,
        "singular": SINGULAR in names,
        "capped": RELAY_CAPPED in names,
        "replayed": REPLAYED in names,
    }


def _times(done: Completion) -> dict[str, float]:
    """Seconds from arrival, and gaps between consecutive tokens in ms."""
    start_s, at_s = arrival_s(done), done.emitted_s
    gaps_ms = np.diff(at_s) * 1e3
    take = done.takeover_position
    return {
        "arrival_s": start_s,
        "ttft_s": at_s[0] - start_s if at_s else math.nan,
        "second_token_s": at_s[1] - start_s if len(at_s) > 1 else math.nan,
        "tpot_ms": float(gaps_ms.mean()) if len(gaps_ms) else math.nan,
        "gap_p50_ms": float(np.median(gaps_ms)) if len(gaps_ms) else math.nan,
        "stall_max_ms": float(gaps_ms.max()) if len(gaps_ms) else math.nan,
        "takeover_gap_ms": float(gaps_ms[take - 1]) if take and take < len(at_s) else math.nan,
        "latency_s": at_s[-1] - start_s if at_s else math.nan,
    }


def _work(done: Completion) -> dict[str, float]:
    by = {role: sum(token.author.startswith(role) for token in done.tokens) for role in ("p", "rld", "md")}
    sent = [transfer for transfer in done.transfers if transfer.ok]
    size = max(1, done.prompt_tokens)
    return {
        "prompt_tokens": done.prompt_tokens,
        "output_tokens": len(done.tokens),
        **{f"{role}_tokens": count for role, count in by.items()},
        "takeover_position": math.nan if done.takeover_position is None else done.takeover_position,
        "hit_rate_p": done.hit_tokens_p / size,
        "hit_rate_md": done.hit_tokens_md / size,
        "wan_kv_bytes": sum(transfer.bytes for transfer in sent if transfer.path == "wan"),
        "lan_kv_bytes": sum(transfer.bytes for transfer in sent if transfer.path == "lan"),
        "failed_transfers": len(done.transfers) - len(sent),
        "ids_bytes": done.ids_bytes,
        "disagreements": done.disagreements,
    }


_EMPTY = Completion("", 0, [], [], "", "", "")


def arrival_s(done: Completion) -> float:
    """When the gateway got the request, on the cluster's clock; NaN if the event is missing."""
    return next((event.at_s for event in done.events if event.name == ARRIVAL), math.nan)


def summarise(
    table: pd.DataFrame, relayed_ids: Collection[str] | None = None
) -> dict[str, float | int | None]:
    """One system's metrics over all its rows (pooled over seeds; names of design.md section 6).

    relayed_ids: requests that `relayed_ttft_p90_s` is over, those that `pdd` relayed; default: those relayed
    here.
    """
    good = table[table["error"] == ""]
    relayed = good["relayed"].astype(bool)
    common = relayed if relayed_ids is None else good["request_id"].isin(relayed_ids)
    made = good[["p_tokens", "rld_tokens", "md_tokens"]].to_numpy(float).sum()
    values = {
        "requests": len(table),
        "errors": len(table) - len(good),
        "token_mismatches": int(table["token_mismatch"].sum()),
        "ttft_p50_s": good["ttft_s"].quantile(0.5),
        "ttft_p90_s": good["ttft_s"].quantile(0.9),
        "ttft_mean_s": good["ttft_s"].mean(),
        "second_token_p50_s": good["second_token_s"].quantile(0.5),
        "second_token_p90_s": good["second_token_s"].quantile(0.9),
        "tpot_p50_ms": good["tpot_ms"].quantile(0.5),
        "gap_p50_ms": good["gap_p50_ms"].quantile(0.5),
        "stall_max_p50_ms": good["stall_max_ms"].quantile(0.5),
        "takeover_gap_p50_ms": good["takeover_gap_ms"].quantile(0.5),
        "wan_kv_bytes": int(good["wan_kv_bytes"].sum()),
        "ids_bytes": int(good["ids_bytes"].sum()),
        "rld_token_share": good["rld_tokens"].sum() / made if made else math.nan,
        "relayed_share": relayed.mean() if len(good) else math.nan,
        "relayed_requests": int(common.sum()),
        "relayed_ttft_p50_s": good.loc[common, "ttft_s"].quantile(0.5),
        "relayed_ttft_p90_s": good.loc[common, "ttft_s"].quantile(0.9),
        "disagreements": int(good["disagreements"].sum()),
        "singular": int(good["singular"].astype(bool).sum()),
    }
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> float | int | None:
    if isinstance(value, int):
        return value
    return None if math.isnan(value) else float(value)


def relayed_ids(table: pd.DataFrame, system: str = "pdd") -> set[str]:
    """Ids of the requests that `system` relayed."""
    relayed = table["relayed"].map(bool)  # a request in error has None
    return set(table.loc[(table["system"] == system) & relayed, "request_id"])


STATISTICS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "p50": lambda draws: np.quantile(draws, 0.5, axis=-1),
    "p90": lambda draws: np.quantile(draws, 0.9, axis=-1),
    "mean": lambda draws: np.mean(draws, axis=-1),
}


def bootstrap(
    values: Sequence[float], statistic: str, repetitions: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of `statistic` over requests; NaNs are left out, (NaN, NaN) without
    values.
    """
    kept = np.asarray(values, float)
    kept = kept[~np.isnan(kept)]
    if not len(kept):
        return math.nan, math.nan
    draws = np.random.default_rng(seed).choice(kept, (repetitions, len(kept)))
    low, high = np.quantile(STATISTICS[statistic](draws), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def intervals(table: pd.DataFrame, column: str = "ttft_s", by: str = "system") -> pd.DataFrame:
    """For each value of `by` and each statistic: `value`, bootstrap `low` and `high`, and `requests` behind
    it.
    """
    out = []
    for name, group in table[table["error"] == ""].groupby(by, sort=False):
        values = group[column].dropna().to_numpy(float)
        for statistic, compute in STATISTICS.items():
            value = float(compute(values)) if len(values) else math.nan
            low, high = bootstrap(values, statistic)
            out.append((name, statistic, value, low, high, len(values)))
    return pd.DataFrame(out, columns=[by, "statistic", "value", "low", "high", "requests"])
