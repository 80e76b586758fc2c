"""One answer's life: who was at work when, and what the user saw. Also the panels of Fig. 4.

Invariant: drawn from the spans of `pdd.analysis.timeline` alone; nothing is idealised.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from pdd.figures.style import TEXT_IN, figure, no_grid, styled

KINDS: dict[str, tuple[str, str, str]] = {
    "prefill": ("prefill", "#0072B2", ""),
    "queue": ("KV waits", "#F0E442", "xxx"),
    "transfer": ("KV transfer", "#D55E00", "///"),
    "aborted": ("aborted transfer", "#BBBBBB", "\\\\\\"),
    "extend": ("extend", "#009E73", ""),
}
TICKS = {"RLD": "#CC79A7", "MD": "#56B4E9", "P": "#0072B2", "user": "#000000"}
ORDER = ("P", "LAN", "WAN", "RLD", "MD", "user")
NAMES = {"LAN": "LAN", "WAN": "WAN", "user": "user sees"}


@styled
def draw(spans: pd.DataFrame, title: str = "") -> Figure:
    """A timeline of one request. spans: lane, kind, start_s, end_s (seconds from arrival)."""
    fig = figure(TEXT_IN, 1.9)
    ax = fig.subplots()
    lanes(ax, spans)
    ax.set_title(title)
    ax.set_xlabel("time from arrival (s)")
    legend(fig, spans)
    return fig


def lanes(ax: Axes, spans: pd.DataFrame) -> None:
    """Draw the lanes that have spans, top to bottom in the order of a request's way."""
    used = [lane for lane in ORDER if (spans["lane"] == lane).any()]
    for row, lane in enumerate(used):
        mine = spans[spans["lane"] == lane]
        for kind, (_, colour, hatch) in KINDS.items():
            bars = mine[(mine["kind"] == kind) & (mine["end_s"] > mine["start_s"])]
            if len(bars):
                merged = [(start, end - start) for start, end in _merge(bars)]
                ax.broken_barh(
                    merged,
                    (row - 0.32, 0.64),
                    facecolor=colour,
                    hatch=hatch,
                    edgecolor="white",
                    linewidth=0.3,
                )
        ticks = mine.loc[mine["kind"].isin(("token", "emit")), "end_s"]
        ax.vlines(ticks, row - 0.32, row + 0.32, color=TICKS.get(lane, "#000000"), linewidth=0.9)
    ax.set_yticks(range(len(used)), [NAMES.get(lane, lane) for lane in used])
    ax.set_ylim(len(used) - 0.5, -0.5)
    ax.set_xlim(left=0)
    no_grid(ax, "y")


def _merge(bars: pd.DataFrame) -> list[tuple[float, float]]:
    """Overlapping or touching intervals as one, so that parallel segments are not hatched over each other."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(zip(bars["start_s"], bars["end_s"], strict=True)):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def legend(fig: Figure, spans: pd.DataFrame) -> None:
    """One key for all panels, above them: what bars mean, and whose ticks are whose."""
    used = set(spans.loc[spans["end_s"] > spans["start_s"], "kind"])
    keys: list[Artist] = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=name)
        for kind, (name, colour, hatch) in KINDS.items()
        if kind in used
    ]
    authors = spans.loc[spans["kind"] == "token", "lane"]
    keys += [
        Line2D([], [], color=TICKS[lane], linestyle="", marker="|", label=f"{lane} token")
        for lane in ORDER
        if (authors == lane).any()
    ]
    fig.legend(handles=keys, loc="outside upper right", ncols=len(keys), handlelength=1.2, columnspacing=1.0)
