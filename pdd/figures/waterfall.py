"""Where TTFT goes: mean seconds a stage, stacked, a bar a system.

Invariant: the stages of a bar sum to the system's mean TTFT.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from pdd.figures.style import STAGES, TEXT_IN, figure, in_order, label, no_grid, styled


@styled
def draw(stages: pd.DataFrame, title: str = "mean TTFT by stage") -> Figure:
    """stages: system and a column of seconds for each stage (`analysis.waterfall.mean_by_stage`)."""
    systems = in_order(stages["system"])
    wide = stages.set_index("system").loc[systems]
    fig = figure(TEXT_IN, 0.9 + 0.28 * len(systems))
    ax = fig.subplots()
    left = np.zeros(len(systems))
    for stage, (name, colour, hatch) in STAGES.items():
        values = wide[stage].fillna(0.0).to_numpy(float)
        ax.barh(range(len(systems)), values, left=left, height=0.66, color=colour, hatch=hatch, label=name,
                edgecolor="white", linewidth=0.3)  # fmt: skip
        left = left + values
    for row, total in enumerate(left):
        ax.text(total, row, f" {total:.3g} s", va="center", fontsize=7.5)
    ax.set_yticks(range(len(systems)), [label(system) for system in systems])
    ax.set_ylim(len(systems) - 0.5, -0.5)
    ax.set_xlim(0, left.max() * 1.1)
    ax.set_xlabel("seconds from arrival")
    ax.set_title(title)
    no_grid(ax, "y")
    fig.legend(loc="outside upper right", ncols=len(STAGES), columnspacing=1.0, handlelength=1.2)
    return fig
