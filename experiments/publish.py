"""What a notebook calls with its figure: save it as png, pdf and csv, and show it.

Invariant: a figure's three files come from the same frame in one call.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from IPython.display import Image
from matplotlib.figure import Figure

from experiments.compose import ROOT
from pdd.figures.style import save


def publish(
    name: str, fig: Figure, frame: pd.DataFrame, out_dir: str, scores: pd.DataFrame | None = None
) -> Image:
    """Write NAME.png, .pdf and .csv (and scores/NAME.csv) under `out_dir`, relative to the source tree."""
    folder = ROOT / out_dir
    folder.mkdir(parents=True, exist_ok=True)
    png, _ = save(fig, folder / name)
    frame.to_csv(folder / f"{name}.csv", index=False)
    if scores is not None:
        (folder / "scores").mkdir(exist_ok=True)
        scores.to_csv(folder / "scores" / f"{name}.csv", index=False)
    return Image(filename=str(png))


def outputs(name: str, out_dir: Path) -> list[Path]:
    """The files of a notebook that are there: NAME and NAME_* unless that is another notebook's name."""
    others = [path.stem for path in (ROOT / "notebooks").glob("*.ipynb") if len(path.stem) > len(name)]
    found = [
        path
        for folder in (out_dir, out_dir / "scores")
        for path in (*folder.glob(f"{name}.*"), *folder.glob(f"{name}_*.*"))
    ]
    return [path for path in sorted(found) if not path.stem.startswith(tuple(others))]
