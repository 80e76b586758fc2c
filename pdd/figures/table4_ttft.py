"""Table 4 (and Table 7's TTFT): time to first token by system, ours beside the paper's.

Invariant: ours carry bootstrap intervals; the paper's are printed values at another scale, so each has its
own log axis and only ratios, that is distances, are compared.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pdd import paper
from pdd.figures.style import TEXT_IN, color, figure, in_order, label, marker, no_grid, plain_log, styled

SHOWN = ("p50", "mean", "p90")
SPOKEN = {"p50": "P50", "p90": "P90", "p99": "P99", "mean": "mean"}


@styled
def draw(ttft: pd.DataFrame) -> Figure:
    """ttft: system, statistic (p50, p90, mean), value, low, high in s (`analysis.metrics.intervals`)."""
    fig = figure(TEXT_IN, 2.4)
    ours, theirs = fig.subplots(1, 2, width_ratios=(3, 2))
    _points(ours, ttft)
    _points(theirs, paper.ttft_s().rename(columns={"paper_s": "value"}))
    ours.set_title("(a) measured here, small model, 95% interval")
    theirs.set_title("(b) the paper, DeepSeek-V4-pro")
    handles, names = ours.get_legend_handles_labels()
    fig.legend(handles, names, loc="outside lower center", ncols=8, columnspacing=1.0, handletextpad=0.3)
    return fig


def _points(ax: Axes, table: pd.DataFrame) -> None:
    systems = in_order(table["system"])
    for number, system in enumerate(systems):
        shift = (number - (len(systems) - 1) / 2) * 0.8 / len(systems)
        mine = table[table["system"] == system].set_index("statistic").reindex(list(SHOWN))
        at = [place + shift for place in range(len(SHOWN))]
        ax.plot(at, mine["value"], marker(system), color=color(system), label=label(system), markersize=4.5)
        if "low" in mine:
            ax.vlines(at, mine["low"], mine["high"], color=color(system), linewidth=1)
    ax.set_xticks(range(len(SHOWN)), [SPOKEN[name] for name in SHOWN])
    ax.set_ylabel("TTFT (s)")
    plain_log(ax, "y")
    no_grid(ax, "x")


def comparison(ttft: pd.DataFrame) -> pd.DataFrame:
    """Ours beside the paper's: value, low, high, paper_s, and each over PDD's (`ratio`, `paper_ratio`)."""
    table = ttft.merge(paper.ttft_s(), on=["system", "statistic"], how="left")
    for value, ratio in (("value", "ratio"), ("paper_s", "paper_ratio")):
        pdd = table[table["system"] == "pdd"].set_index("statistic")[value]
        table[ratio] = table[value] / table["statistic"].map(pdd)
    return table
