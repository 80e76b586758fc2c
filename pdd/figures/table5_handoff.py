"""Table 5: handing over 100 tokens as KV over the WAN, or as ids and an extend; quiet and in cross traffic.

Invariant: a dot is one repetition; the paper's row is its printed min, mean and max on other hardware.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pdd import paper
from pdd.figures.style import PAPER, TEXT_IN, figure, no_grid, styled

WAYS = {"kv": ("KV over the WAN", "#D55E00", "^"), "ids": ("ids and extend", "#0072B2", "o")}
CONDITIONS = {"quiet": "quiet", "cross_traffic": "cross traffic"}


@styled
def draw(handoffs: pd.DataFrame) -> Figure:
    """handoffs: a row a repetition with way (`kv`, `ids`), condition (`quiet`, `cross_traffic`), total_ms."""
    fig = figure(TEXT_IN, 2.5)
    ours, theirs = fig.subplots(1, 2, width_ratios=(5, 2))
    _ours(ours, handoffs)
    _theirs(theirs)
    ours.set_title("(a) measured here, small model")
    theirs.set_title("(b) the paper: min, mean, max")
    return fig


def _ours(ax: Axes, handoffs: pd.DataFrame) -> None:
    rng = np.random.default_rng(0)
    labels: list[str] = []
    for condition, spoken in CONDITIONS.items():
        for way, (name, colour, mark) in WAYS.items():
            part = handoffs[(handoffs["way"] == way) & (handoffs["condition"] == condition)]
            values, place = part["total_ms"].to_numpy(float), len(labels)
            labels.append(f"{name}\n{spoken}")
            if not len(values):
                continue
            at = place + rng.uniform(-0.2, 0.2, len(values))
            ax.plot(at, values, mark, color=colour, markersize=3.2, alpha=0.55, markeredgewidth=0)
            ax.hlines(values.mean(), place - 0.32, place + 0.32, color="#000000", linewidth=1.2)
            spread = values.std(ddof=1) if len(values) > 1 else 0.0
            _write(ax, place, values.max(), values.mean(), spread)
    _finish(ax, labels)


def _theirs(ax: Axes) -> None:
    table = paper.handoff().set_index("way")
    for place, (way, (_, _, mark)) in enumerate(WAYS.items()):
        row = table.loc[way]
        ax.vlines(place, row["min_ms"], row["max_ms"], color=PAPER, linewidth=1.2)
        ax.plot(place, row["mean_ms"], mark, color=PAPER, markersize=5)
        _write(ax, place, row["max_ms"], row["mean_ms"], row["std_ms"])
    _finish(ax, [name.replace(" ", "\n", 1) for name, _, _ in WAYS.values()])


def _write(ax: Axes, place: int, top_ms: float, mean_ms: float, std_ms: float) -> None:
    text = f"{mean_ms:.0f} ± {std_ms:.1f}"
    ax.annotate(text, (place, top_ms), (0, 3), textcoords="offset points", ha="center", fontsize=7.5)


def _finish(ax: Axes, labels: list[str]) -> None:
    ax.set_xticks(range(len(labels)), labels, fontsize=7.5)
    ax.set_xlim(-0.6, len(labels) - 0.4)
    ax.set_ylim(0, ax.get_ylim()[1] * 1.1)
    ax.set_ylabel("hand over 100 tokens (ms)")
    no_grid(ax, "x")


def table(handoffs: pd.DataFrame) -> pd.DataFrame:
    """A row a way and condition: payload_kb, {min,mean,max,std}_ms; the paper is the condition `paper`."""
    ours = (
        handoffs.groupby(["way", "condition"], sort=False)
        .agg(
            payload_kb=("bytes", lambda sizes: sizes.mean() / 1e3),
            min_ms=("total_ms", "min"),
            mean_ms=("total_ms", "mean"),
            max_ms=("total_ms", "max"),
            std_ms=("total_ms", "std"),
        )
        .reset_index()
    )
    return pd.concat([ours, paper.handoff().assign(condition="paper")], ignore_index=True)
