"""Fig. 4: the same request through cross-DC PD, PDD One-Shot and PDD Catch-Up, from measured events.

Invariant: all panels share one time axis, so that lengths can be compared by eye.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pdd.figures.completion_timeline import lanes, legend
from pdd.figures.style import TEXT_IN, figure, in_order, label, styled


@styled
def draw(spans: pd.DataFrame) -> Figure:
    """A panel a system. spans: system, lane, kind, start_s, end_s (`pdd.analysis.timeline.spans`)."""
    systems = in_order(spans["system"])
    rows = [spans.loc[spans["system"] == system, "lane"].nunique() for system in systems]
    fig = figure(TEXT_IN, 0.8 + 0.23 * sum(rows) + 0.25 * len(systems))
    axes = fig.subplots(len(systems), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for ax, system in zip(axes, systems, strict=True):
        mine = spans[spans["system"] == system]
        lanes(ax, mine)
        ax.set_title(f"{label(system)}: {describe(mine)}")
        _mark_stall(ax, mine)
    axes[-1].set_xlabel("time from arrival (s)")
    axes[-1].set_xlim(0, spans["end_s"].max() * 1.01)
    legend(fig, spans)
    return fig


def describe(spans: pd.DataFrame) -> str:
    """First token, end, and largest gap that the user sees, in words."""
    seen = seen_s(spans)
    first, end = seen.iloc[0], seen.iloc[-1]
    return f"first token {first:.2f} s, largest gap {seen.diff().max() * 1e3:.0f} ms, end {end:.2f} s"


def seen_s(spans: pd.DataFrame) -> pd.Series:
    """When the user got each token, in seconds from arrival, sorted."""
    return spans.loc[spans["kind"] == "emit", "end_s"].sort_values(ignore_index=True)


def _mark_stall(ax: Axes, spans: pd.DataFrame) -> None:
    """An arrow across the largest gap between tokens, if a reader would see it: twice the median gap."""
    seen = seen_s(spans)
    gaps = seen.diff()
    if len(seen) < 2 or gaps.max() < 2 * gaps.median():
        return
    at = int(gaps.argmax())
    low = spans["lane"].nunique() - 1
    ax.annotate(
        "",
        (seen[at - 1], low),
        (seen[at], low),
        arrowprops={"arrowstyle": "<->", "color": "#D55E00", "lw": 0.8},
    )


def table(spans: pd.DataFrame) -> pd.DataFrame:
    """The figure's numbers: a row a system with first token, largest gap, end, and tokens by author."""
    out = []
    for system in in_order(spans["system"]):
        mine = spans[spans["system"] == system]
        seen = seen_s(mine)
        authors = mine.loc[mine["kind"] == "token", "lane"]
        out.append(
            {
                "system": system,
                "ttft_s": seen.iloc[0],
                "stall_max_ms": seen.diff().max() * 1e3,
                "end_s": seen.iloc[-1],
                "rld_tokens": int((authors == "RLD").sum()),
                "md_tokens": int((authors == "MD").sum()),
            }
        )
    return pd.DataFrame(out)
