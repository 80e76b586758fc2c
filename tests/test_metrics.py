"""Metrics, waterfall and trace of made-up answers whose right numbers are known."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import completion

from pdd import lifecycle, paper
from pdd.analysis.metrics import bootstrap, intervals, relayed_ids, rows, summarise
from pdd.analysis.perfetto import trace, write_trace
from pdd.analysis.waterfall import STAGES, mean_by_stage, stages_s, waterfall
from pdd.errors import DeadlineError
from pdd.request import Completion, Event, Request, Token, Transfer

RELAYED = completion("a", relay=5, stall_s=0.08)
DIRECT = completion("b", arrival_s=200.0)


def test_a_relayed_answers_row() -> None:
    row = rows([RELAYED], system="pdd", seed=3).iloc[0]
    assert (row["system"], row["seed"], row["request_id"], row["relayed"]) == ("pdd", 3, "a", True)
    assert row["ttft_s"] == pytest.approx(0.01 + 0.2 + 0.02 + 0.01 + 0.001)
    assert row["second_token_s"] == pytest.approx(row["ttft_s"] + 0.01)
    assert row["takeover_gap_ms"] == pytest.approx(90) == row["stall_max_ms"]
    assert row["gap_p50_ms"] == pytest.approx(10)
    assert row["tpot_ms"] == pytest.approx((19 * 10 + 80) / 19)
    assert (row["p_tokens"], row["rld_tokens"], row["md_tokens"], row["ids_bytes"]) == (0, 5, 15, 15)
    assert (row["wan_kv_bytes"], row["lan_kv_bytes"], row["failed_transfers"]) == (4000, 4000, 0)
    assert (row["hit_rate_p"], row["hit_rate_md"]) == (0.9, 0.64)


def test_what_is_not_defined_is_nan() -> None:
    table = rows([completion("one", output=1), DIRECT])
    assert table.loc[0, ["second_token_s", "tpot_ms", "stall_max_ms", "takeover_gap_ms"]].isna().all()
    assert math.isnan(table.loc[1, "takeover_gap_ms"]) and not table.loc[1, "relayed"]


def test_errors_and_mismatches_are_counted_and_kept_out_of_the_times() -> None:
    requests = [Request(name, (1,)) for name in ("a", "b", "c")]
    right = {"a": RELAYED.ids, "b": [9, *DIRECT.ids[1:]], "c": []}
    table = rows([RELAYED, DIRECT, DeadlineError("c: late")], requests, right, system="pdd")
    assert table["request_id"].tolist() == ["a", "b", "c"]
    assert table["error"].tolist() == ["", "", "deadline"] and table["token_mismatch"].tolist() == [
        False,
        True,
        False,
    ]
    summary = summarise(table)
    assert (summary["requests"], summary["errors"], summary["token_mismatches"]) == (3, 1, 1)
    assert summary["ttft_p50_s"] == pytest.approx(table["ttft_s"].iloc[:2].median())
    assert summary["rld_token_share"] == 5 / 40 and summary["relayed_share"] == 0.5
    assert summary["wan_kv_bytes"] == 8000
    assert relayed_ids(table) == {"a"}
    assert json.loads(json.dumps(summary)) == summary


def test_relayed_ttft_is_over_the_requests_that_pdd_relayed() -> None:
    direct = rows([completion("a"), DIRECT], system="cdc_pd")
    assert summarise(direct)["relayed_ttft_p90_s"] is None
    assert summarise(direct, {"a"})["relayed_ttft_p90_s"] == pytest.approx(direct["ttft_s"][0])


def test_a_failed_transfer_is_counted_but_not_its_bytes() -> None:
    done = completion("a")
    done.transfers.append(Transfer("a", "p0", "md0", "wan", 64, 99, 777, 1.0, 1.0, 2.0, False, "cancelled"))
    row = rows([done]).iloc[0]
    assert (row["wan_kv_bytes"], row["failed_transfers"]) == (4000, 1)


def test_all_requests_in_error_still_give_a_summary() -> None:
    summary = summarise(rows([DeadlineError("late")], system="x"))
    assert (summary["errors"], summary["ttft_p50_s"], summary["rld_token_share"]) == (1, None, None)


def test_bootstrap_covers_the_value_and_narrows_with_more_requests() -> None:
    few, many = (np.random.default_rng(1).exponential(1.0, size) for size in (20, 2000))
    for statistic in ("p50", "p90", "mean"):
        low, high = bootstrap(few, statistic)
        closer_low, closer_high = bootstrap(many, statistic)
        assert low < high and closer_high - closer_low < (high - low) / 2
        assert bootstrap(few, statistic) == (low, high)
    assert all(math.isnan(edge) for edge in bootstrap([math.nan], "p50"))
    table = intervals(rows([RELAYED, completion("c", relay=3, prefill_s=0.5)], system="pdd"))
    assert table["statistic"].tolist() == ["p50", "p90", "mean"] and (table["requests"] == 2).all()
    assert ((table["low"] <= table["value"]) & (table["value"] <= table["high"])).all()


def test_stages_of_a_direct_and_a_relayed_answer() -> None:
    direct = stages_s(DIRECT)
    assert direct == pytest.approx(
        {
            "wait": 0.01,
            "prefill": 0.2,
            "transfer_queue": 0.05,
            "transfer": 0.35,
            "extend": 0.005,
            "first_step": 0.016,
        }
    )
    relayed = stages_s(RELAYED)
    assert relayed["transfer"] == pytest.approx(0.01) and relayed["extend"] == 0
    table = waterfall([RELAYED, DIRECT], system="pdd")
    wide = mean_by_stage(table)
    assert wide.columns.tolist() == ["system", *STAGES]
    assert wide["prefill"].tolist() == pytest.approx([0.2])
    assert all(math.isnan(value) for value in stages_s(Completion("x", 1, [], [], "", "", "")).values())


MOMENTS = st.floats(0, 10)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.tuples(st.sampled_from(lifecycle.NAMES), MOMENTS, st.sampled_from(["p0", "rld0", "md0"])),
        max_size=15,
    ),
    st.lists(st.tuples(MOMENTS, MOMENTS, MOMENTS, st.booleans()), max_size=4),
    MOMENTS,
    MOMENTS,
)
def test_stages_sum_to_ttft_whatever_the_events(
    events: list, transfers: list, made_s: float, way_s: float
) -> None:
    done = Completion("r", 1, [Token(0, 1, "md0", made_s)], [made_s + way_s], "", "length", "P-MD")
    done.events = [Event("r", lifecycle.ARRIVAL, 0.0, "gw")] + [Event("r", *event) for event in events]
    done.transfers = [Transfer("r", "p0", "md0", "wan", 0, 1, 1, *one) for one in transfers]
    stages = stages_s(done)
    assert all(value >= 0 for value in stages.values())
    assert sum(stages.values()) == pytest.approx(rows([done])["ttft_s"][0], abs=1e-9)


def test_the_trace_is_loadable_and_names_roles_and_requests(tmp_path: Path) -> None:
    loaded = json.loads(write_trace([RELAYED, DIRECT], tmp_path / "trace.json").read_text())
    entries = loaded["traceEvents"]
    names = {entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    assert {"p0", "rld0", "md0", "gw-a", "a", "b"} <= names
    timed = [entry for entry in entries if entry["ph"] != "M"]
    assert min(entry["ts"] for entry in timed) == 0
    assert all(isinstance(entry["pid"], int) and isinstance(entry["tid"], int) for entry in entries)
    assert {entry["ph"] for entry in timed} == {"X", "i", "b", "e"}
    slices = {entry["name"]: entry for entry in timed if entry["ph"] == "X"}
    assert slices["prefill"]["dur"] == pytest.approx(0.2e6)
    begun = [(entry["cat"], entry["id"], entry["name"]) for entry in timed if entry["ph"] == "b"]
    ended = [(entry["cat"], entry["id"], entry["name"]) for entry in timed if entry["ph"] == "e"]
    assert sorted(begun) == sorted(ended) and len(begun) == 6
    assert sum(entry["name"] == "token" for entry in timed) == 40
    assert trace([])["traceEvents"] == []


def test_paper_values_are_the_printed_ones() -> None:
    ttft = paper.ttft_s().set_index(["system", "statistic"])["paper_s"]
    assert (ttft["cdc_pd", "p90"], ttft["pdd", "p50"], ttft["idc_pd", "p90"]) == (18.3, 4.2, 10.4)
    handoff = paper.handoff().set_index("way")
    assert handoff.loc["ids", "mean_ms"] == 305.2 and handoff.loc["kv", "payload_kb"] == 4649
    assert isinstance(paper.tables()["table8"], dict) and isinstance(handoff, pd.DataFrame)
