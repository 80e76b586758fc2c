"""The visible stall: the gap at takeover beside the gap between tokens, for systems that relay.

Invariant: gaps are between tokens as the user got them, in ms, one dot a relayed request.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pdd.figures.style import TEXT_IN, color, figure, in_order, label, marker, no_grid, plain_log, styled

PARTS = {
    "gap_p50_ms": "median gap",
    "takeover_gap_ms": "gap at takeover",
    "stall_max_ms": "largest gap",
}


@styled
def draw(requests: pd.DataFrame) -> Figure:
    """requests: system, relayed, and the columns of `PARTS`; direct requests are left out."""
    taken = requests[requests["relayed"].map(bool) & requests["takeover_gap_ms"].notna()]
    systems = in_order(taken["system"])
    fig = figure(TEXT_IN, 2.3)
    axes = fig.subplots(1, max(1, len(systems)), sharey=True, squeeze=False)[0]
    for ax, system in zip(axes, systems, strict=False):
        mine = taken[taken["system"] == system]
        _strip(ax, mine, system)
        ax.set_title(f"{label(system)} (n = {len(mine)})")
    axes[0].set_ylabel("gap between tokens (ms)")
    plain_log(axes[0], "y")
    return fig


def _strip(ax: Axes, mine: pd.DataFrame, system: str) -> None:
    rng = np.random.default_rng(0)
    for place, column in enumerate(PARTS):
        values = mine[column].to_numpy(float)
        at = place + rng.uniform(-0.16, 0.16, len(values))
        ax.plot(at, values, marker(system), color=color(system), markersize=3, alpha=0.5, markeredgewidth=0)
        middle = float(np.median(values))
        ax.hlines(middle, place - 0.3, place + 0.3, color="#000000", linewidth=1.2)
        ax.annotate(f"{middle:.0f}", (place + 0.32, middle), va="center", fontsize=7.5)
    ax.set_xticks(range(len(PARTS)), [name.replace(" ", "\n", 1) for name in PARTS.values()])
    ax.set_xlim(-0.5, len(PARTS) - 0.3)
    no_grid(ax, "x")
