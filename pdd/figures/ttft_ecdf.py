"""The whole distribution of TTFT by system.

Invariant: an ECDF shows every request of a system; nothing is smoothed or cut.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pdd.figures.style import TEXT_IN, color, figure, in_order, label, marker, plain_log, styled


@styled
def draw(requests: pd.DataFrame) -> Figure:
    """requests: system, relayed, ttft_s, request_id. (a) all requests, (b) those that `pdd` relayed."""
    fig = figure(TEXT_IN, 2.5)
    axes = fig.subplots(1, 2, sharey=True)
    ours = requests[(requests["system"] == "pdd") & requests["relayed"].map(bool)]
    parts = (requests, requests[requests["request_id"].isin(ours["request_id"])])
    for ax, part, title in zip(
        axes, parts, ("(a) all requests", "(b) requests that PDD relays"), strict=True
    ):
        for number, system in enumerate(in_order(part["system"])):
            _curve(ax, part.loc[part["system"] == system, "ttft_s"], system, number)
        ax.set_title(f"{title} (n = {part['request_id'].nunique()})")
        ax.set_xlabel("TTFT (s)")
        plain_log(ax, "x")
    axes[0].set_ylabel("share of requests")
    axes[0].set_ylim(0, 1.02)
    handles, names = axes[0].get_legend_handles_labels()
    fig.legend(handles, names, loc="outside lower center", ncols=8, columnspacing=1.0, handletextpad=0.4)
    return fig


def _curve(ax: Axes, ttft_s: pd.Series, system: str, number: int) -> None:
    """A step curve; later systems are thinner, so that equal curves do not hide each other."""
    values = np.sort(ttft_s.dropna())
    every = max(1, len(values) // 6)
    ax.step(
        values,
        np.arange(1, len(values) + 1) / max(1, len(values)),
        where="post",
        color=color(system),
        linewidth=max(0.8, 2.6 - 0.35 * number),
        marker=marker(system),
        markersize=3.5,
        markevery=(number * every // 6, every),
        label=label(system),
    )
