"""How every figure looks: colours and markers by system, type, widths, and how a figure is saved.

Invariant: a system has one colour (Okabe and Ito's, safe for colour-blind readers) and one marker everywhere,
and no colour carries meaning alone. Only fonts that ship with matplotlib; no TeX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

COLUMN_IN = 3.4
TEXT_IN = 7.0

RC: Any = {  # a dict; matplotlib types its keys as literals
    "font.family": "STIXGeneral",
    "mathtext.fontset": "stix",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.5,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "hatch.linewidth": 0.5,
    "figure.dpi": 200,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,
}

SYSTEMS: dict[str, tuple[str, str, str]] = {
    "idc_pd": ("IDC-PD", "#000000", "s"),
    "cdc_pd_nocache": ("CDC-PD, no DRC", "#E69F00", "v"),
    "cdc_pd": ("CDC-PD", "#D55E00", "^"),
    "pdd": ("PDD", "#0072B2", "o"),
    "pdd_oneshot": ("PDD One-Shot", "#56B4E9", "D"),
    "pdd_catchup": ("PDD Catch-Up", "#009E73", "P"),
    "p_rld": ("P-RLD", "#CC79A7", "X"),
    "prfaas": ("PrfaaS", "#9A8700", "*"),
}

STAGES: dict[str, tuple[str, str, str]] = {
    "wait": ("wait", "#BBBBBB", ""),
    "prefill": ("prefill", "#0072B2", ""),
    "transfer_queue": ("transfer queue", "#F0E442", "xxx"),
    "transfer": ("transfer", "#D55E00", "///"),
    "extend": ("extend", "#009E73", ""),
    "first_step": ("first step", "#CC79A7", ""),
}

PAPER = "#777777"

P = ParamSpec("P")


def styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw under `RC`, leaving the caller's settings as they were."""

    @functools.wraps(draw)
    def inside(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with mpl.rc_context(RC):
            return draw(*args, **kwargs)

    return inside


def figure(width_in: float, height_in: float) -> Figure:
    """An empty figure with constrained layout; it needs no window system and no pyplot."""
    return Figure(figsize=(width_in, height_in), layout="constrained")


def label(system: str) -> str:
    """The system's name as the paper prints it; an unknown system keeps its own."""
    return SYSTEMS.get(system, (system, "", ""))[0]


def color(system: str) -> str:
    """The system's colour; grey for an unknown one."""
    return SYSTEMS.get(system, ("", "#777777", ""))[1]


def marker(system: str) -> str:
    """The system's marker."""
    return SYSTEMS.get(system, ("", "", "o"))[2]


def in_order(systems: Iterable[str]) -> list[str]:
    """Distinct systems in the order of `SYSTEMS`, unknown ones last by name."""
    known = list(SYSTEMS)
    return sorted(set(systems), key=lambda name: (known.index(name) if name in known else len(known), name))


def plain_log(ax: Axes, which: str) -> None:
    """A log scale on axis `x` or `y`, ticks at 1, 2, 5 in plain numbers; distances on it are ratios."""
    ax.set(**{f"{which}scale": "log"})
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def no_grid(ax: Axes, axis: str) -> None:
    """Leave grid lines on the other axis only."""
    ax.grid(False, axis=axis)  # type: ignore[arg-type]
    ax.tick_params(axis=axis, length=0)  # type: ignore[arg-type]


def save(fig: Figure, stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.pdf, equal bytes for equal figures."""
    paths = [stem.with_suffix(".png"), stem.with_suffix(".pdf")]
    with mpl.rc_context(RC):
        fig.savefig(paths[0], metadata={"Software": None})
        fig.savefig(paths[1], metadata={"CreationDate": None, "Producer": None, "Creator": None})
    return paths
