"""Hold figures' data against the reference: python -m experiments.compare [--update].

Invariant: every column of every csv is compared exactly unless paper_figures/tolerances.yaml gives it a band,
and a missing or extra figure, column or row is drift like any other.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from experiments.compose import ROOT
from pdd.errors import ConfigError

OUT = ROOT / "paper_figures" / "out"
REFERENCE = ROOT / "paper_figures" / "reference"
TOLERANCES = ROOT / "paper_figures" / "tolerances.yaml"
BANDS = {"abs", "ratio", "range"}


def main(argv: list[str] | None = None) -> int:
    """Entry of the command line: 0 if nothing drifted, 1 on drift, 2 if there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m experiments.compare", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--reference", type=Path, default=REFERENCE)
    parser.add_argument("--update", action="store_true", help="make out the reference, and say what moved")
    args = parser.parse_args(argv)
    try:
        scale = _scale(args.out)
        reference = args.reference / scale
        if args.update:
            return _update(args.out, reference)
        drifts = compare(args.out, reference, load_tolerances())
    except ConfigError as error:
        print(f"experiments.compare: {error}", file=sys.stderr)
        return 2
    for line in drifts:
        print(f"drift: {line}", file=sys.stderr)
    print(f"compare: {len(_csvs(reference))} tables at scale {scale}, {len(drifts)} drifts")
    return 1 if drifts else 0


def compare(out: Path, reference: Path, tolerances: dict[str, Any]) -> list[str]:
    """One line for each difference, naming figure, column and row.

    Raises:
        ConfigError: there is no reference.
    """
    ours, theirs = _csvs(out), _csvs(reference)
    if not theirs:
        raise ConfigError(f"{reference}: no reference; make one with --update")
    drifts = [f"{name}: figure is missing" for name in theirs if name not in ours]
    drifts += [f"{name}: figure has no reference" for name in ours if name not in theirs]
    for name in theirs:
        if name in ours:
            drifts += compare_tables(name, ours[name], theirs[name], tolerances.get(name, {}))
    return drifts


def compare_tables(name: str, ours: Path, theirs: Path, rules: dict[str, Any]) -> list[str]:
    """Drifts of one figure. rules: `keys` (columns that name a row) and `columns` (column to band)."""
    mine, right = pd.read_csv(ours), pd.read_csv(theirs)
    if list(mine.columns) != list(right.columns):
        return [f"{name}: columns are {list(mine.columns)}, in the reference {list(right.columns)}"]
    keys = rules.get("keys", [])
    unknown = [column for column in (*keys, *rules.get("columns", {})) if column not in right.columns]
    if unknown:
        return [f"{name}: tolerances name columns that are not there: {', '.join(unknown)}"]
    labels, expected = _labels(mine, keys), _labels(right, keys)
    if labels != expected:
        differ = sorted(set(labels) ^ set(expected)) or ["order"]
        return [f"{name}: rows differ: {', '.join(differ)}"]
    bands = {column: rules.get("columns", {}).get(column, "exact") for column in right.columns}
    return [
        f"{name}: column {column}, row {label}: {a!r}, reference {b!r} (band: {_spoken(bands[column])})"
        for column in right.columns
        for label, a, b in zip(labels, mine[column].tolist(), right[column].tolist(), strict=True)
        if not within(a, b, bands[column])
    ]


def _labels(table: pd.DataFrame, keys: list[str]) -> list[str]:
    if not keys:
        return [str(number) for number in range(len(table))]
    return ["/".join(str(value) for value in row) for row in table[keys].itertuples(index=False)]


def within(ours: Any, right: Any, band: Any) -> bool:
    """Whether a value lies in its band: exact, skip, {abs: x}, {ratio: f} or {range: [low, high]}."""
    if band == "skip":
        return True
    missing = [isinstance(value, float) and math.isnan(value) for value in (ours, right)]
    if any(missing):
        return all(missing)
    if band == "exact":
        return bool(ours == right)
    kind, limit = next(iter(band.items()))
    if kind == "abs":
        return bool(abs(ours - right) <= limit)
    if kind == "range":
        return bool(limit[0] <= ours <= limit[1])
    return bool(ours == right or (ours * right > 0 and 1 / limit <= ours / right <= limit))


def _spoken(band: Any) -> str:
    return band if isinstance(band, str) else " ".join(f"{kind} {limit}" for kind, limit in band.items())


def load_tolerances(path: Path = TOLERANCES) -> dict[str, Any]:
    """The bands of every figure.

    Raises:
        ConfigError: a band of an unknown kind, or one without a reason.
    """
    rules: dict[str, Any] = yaml.safe_load(path.read_text()) or {}
    for figure, rule in rules.items():
        where = f"tolerances.{figure}"
        for key in rule:
            if key not in ("keys", "columns", "reason"):
                raise ConfigError(f"{where}: unknown key {key!r}; known: keys, columns, reason")
        if rule.get("columns") and not rule.get("reason"):
            raise ConfigError(f"{where}: bands need a reason")
        for column, band in rule.get("columns", {}).items():
            if band not in ("exact", "skip") and not (isinstance(band, dict) and set(band) <= BANDS):
                raise ConfigError(f"{where}.{column}: {band!r}; give exact, skip, abs, ratio or range")
    return rules


def _csvs(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.csv"))}


def _scale(out: Path) -> str:
    path = out / "manifest.json"
    if not path.is_file():
        raise ConfigError(f"{out}: no manifest.json; run make figures first")
    scales = {entry["scale"] for entry in json.loads(path.read_text()).values()}
    if len(scales) != 1:
        raise ConfigError(
            f"{path}: figures of scales {', '.join(sorted(scales))}; make them all at one scale"
        )
    return str(scales.pop())


def _update(out: Path, reference: Path) -> int:
    moved = compare(out, reference, {}) if _csvs(reference) else ["there was no reference"]
    for line in moved:
        print(f"moved: {line}")
    reference.mkdir(parents=True, exist_ok=True)
    for old in _csvs(reference).values():
        old.unlink()
    for path in _csvs(out).values():
        shutil.copyfile(path, reference / path.name)
    print(f"compare: {len(_csvs(out))} tables are the reference now ({len(moved)} lines moved)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
