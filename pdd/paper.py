"""The paper's own numbers (`paper.json`), as frames that stand beside ours.

Invariant: nothing here is measured or changed; arXiv:2609.13161v1, CC BY 4.0.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

SYSTEMS = {"idc_pd": "IDC-PD", "cdc_pd": "CDC-PD", "pdd": "PDD"}


@cache
def tables() -> dict[str, Any]:
    """Every figure's and table's numbers by name, as printed in the paper."""
    return json.loads((Path(__file__).parent / "paper.json").read_text("utf-8"))


def ttft_s() -> pd.DataFrame:
    """TTFT, columns system, statistic (p50, p90, p99, mean), paper_s: Table 4, for IDC-PD Table 7."""
    rows = [
        (system, statistic, value)
        for system, name in SYSTEMS.items()
        for statistic, value in _ttft_of(name).items()
    ]
    return pd.DataFrame(rows, columns=["system", "statistic", "paper_s"])


def _ttft_of(name: str) -> dict[str, float]:
    stated = tables()["table4_ttft_s"].get(name)
    if stated is not None:
        return stated
    return dict(zip(("p50", "p90", "p99"), tables()["table7"]["ttft_s"][name], strict=True))


def handoff() -> pd.DataFrame:
    """Handing over 100 tokens (Table 5): a row a way (`kv`, `ids`), payload_kb and {min,mean,max,std}_ms."""
    rows = [
        {
            "way": way,
            "payload_kb": row["kb"],
            **{f"{ours}_ms": row[name] for ours, name in _HANDOFF_COLUMNS.items()},
        }
        for way, key in (("kv", "kv"), ("ids", "recompute"))
        for row in (tables()["table5_100tok"][key],)
    ]
    return pd.DataFrame(rows)


_HANDOFF_COLUMNS = {"min": "min", "mean": "avg", "max": "max", "std": "std"}
