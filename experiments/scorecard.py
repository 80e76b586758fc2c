"""The paper's numbers beside ours, and what may be said of each pair.

Invariant: a verdict follows from the two numbers and the method alone; nothing is waved through by hand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

COLUMNS = ("figure", "quantity", "unit", "paper", "ours", "ratio", "method", "verdict")
REPRODUCED, CLOSE = 0.10, 0.25


def verdict(paper: float, ours: float) -> str:
    """How near ours comes: reproduced (10%), close (25%), shape (same side of 1), contradicted.

    Ratios between systems are what a small model can reproduce, so the side of 1 is the order of two systems.
    """
    if math.isnan(ours) or math.isnan(paper):
        return "not identifiable"
    off = abs(ours / paper - 1) if paper else math.inf
    if off <= REPRODUCED:
        return "reproduced"
    if off <= CLOSE:
        return "close"
    return "shape" if (ours > 1) == (paper > 1) else "contradicted"


def scores(figure: str, method: str, rows: Iterable[tuple[str, str, float, float]]) -> pd.DataFrame:
    """Rows (quantity, unit, paper, ours) with ratio and verdict.

    A value in units of its own scale (seconds of another machine) has no verdict: only ratios (unit `x`) and
    shares are comparable.
    """
    table = [
        (figure, quantity, unit, paper, ours, ours / paper if paper else math.nan, method,
         verdict(paper, ours) if unit == "x" else "other scale")
        for quantity, unit, paper, ours in rows
    ]  # fmt: skip
    return pd.DataFrame(table, columns=list(COLUMNS))


def collect(out_dir: Path) -> pd.DataFrame:
    """All figures' scores as one table, also written to `scorecard.csv`."""
    parts = [pd.read_csv(path) for path in sorted((out_dir / "scores").glob("*.csv"))]
    table = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=list(COLUMNS))
    table.to_csv(out_dir / "scorecard.csv", index=False)
    return table
