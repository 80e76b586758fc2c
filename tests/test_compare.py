"""experiments.compare: any drift is found and named by figure, column and row; bands are what they say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import compare
from pdd.errors import ConfigError

RULES = {"fig": {"reason": "measured", "keys": ["system"], "columns": {"ttft_s": {"ratio": 2}}}}


def lay(folder: Path, **change: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    data = {"system": ["idc_pd", "pdd"], "requests": [4, 4], "ttft_s": [1.0, 2.0], **change}
    pd.DataFrame(data).to_csv(folder / "fig.csv", index=False)
    return folder


def drifts(tmp_path: Path, **change: Any) -> list[str]:
    return compare.compare(lay(tmp_path / "out", **change), lay(tmp_path / "reference"), RULES)


def test_equal_and_within_the_band_is_no_drift(tmp_path: Path) -> None:
    assert drifts(tmp_path) == []
    assert drifts(tmp_path, ttft_s=[1.9, 1.1]) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"ttft_s": [1.0, 4.1]}, "fig: column ttft_s, row pdd: 4.1, reference 2.0 (band: ratio 2)"),
        ({"requests": [4, 5]}, "fig: column requests, row pdd: 5, reference 4 (band: exact)"),
        ({"ttft_s": [1.0, None]}, "fig: column ttft_s, row pdd: nan, reference 2.0 (band: ratio 2)"),
        ({"system": ["idc_pd", "cdc_pd"]}, "fig: rows differ: cdc_pd, pdd"),
        ({"extra": [1, 2]}, "fig: columns are ['system', 'requests', 'ttft_s', 'extra'], in the reference"),
    ],
)
def test_drift_names_figure_column_and_row(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    found = drifts(tmp_path, **change)
    assert len(found) == 1 and found[0].startswith(line)


def test_a_missing_and_an_extra_figure_are_drift(tmp_path: Path) -> None:
    out, reference = lay(tmp_path / "out"), lay(tmp_path / "reference")
    (out / "fig.csv").rename(out / "new.csv")
    assert compare.compare(out, reference, RULES) == [
        "fig: figure is missing",
        "new: figure has no reference",
    ]


def test_the_command_line_updates_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = lay(tmp_path / "out")
    argv = ["--out", str(out), "--reference", str(tmp_path / "reference")]
    assert compare.main(argv) == 2 and "no manifest.json" in capsys.readouterr().err
    manifest = {"fig": {"scale": "smoke"}}
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert compare.main(argv) == 2 and "no reference" in capsys.readouterr().err
    assert compare.main([*argv, "--update"]) == 0
    assert (tmp_path / "reference" / "smoke" / "fig.csv").is_file()
    assert compare.main(argv) == 0
    lay(out, ttft_s=[1.0, 2.5])
    assert compare.main(argv) == 1
    assert "drift: fig: column ttft_s, row 1: 2.5, reference 2.0" in capsys.readouterr().err
    assert compare.main([*argv, "--update"]) == 0
    assert "moved: fig: column ttft_s, row 1: 2.5" in capsys.readouterr().out
    manifest["other"] = {"scale": "reduced"}
    (out / "manifest.json").write_text(json.dumps(manifest))
    assert compare.main(argv) == 2 and "reduced, smoke" in capsys.readouterr().err


def test_the_committed_tolerances_are_sound() -> None:
    rules = compare.load_tolerances()
    assert {"table4_ttft", "table5_handoff", "fig4_timeline", "scorecard"} <= set(rules)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fig: {columns: {a: {ratio: 2}}}", "bands need a reason"),
        ("fig: {reason: r, columns: {a: {near: 2}}}", "give exact, skip, abs, ratio or range"),
        ("fig: {colums: {}}", "unknown key 'colums'"),
    ],
)
def test_unsound_tolerances_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "tolerances.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        compare.load_tolerances(path)


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6), st.floats(1.0, 100.0))
def test_a_ratio_band_is_symmetric(ours: float, right: float, limit: float) -> None:
    inside = abs(math.log(ours / right)) <= math.log(limit)
    if abs(abs(math.log(ours / right)) - math.log(limit)) > 1e-9:
        assert compare.within(ours, right, {"ratio": limit}) == inside
    assert compare.within(ours, right, "skip") and compare.within(ours, ours, "exact")
    assert not compare.within(-ours, right, {"ratio": limit})
