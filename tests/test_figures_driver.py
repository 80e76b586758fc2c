"""The papermill driver: strict parameters, caching, and going on after a failure."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from experiments import figures, notebook, publish, scorecard
from experiments.compose import ROOT
from experiments.notebook import Notebook
from pdd.errors import ConfigError

GOOD = """
import pandas as pd
from experiments.publish import publish
from pdd.figures.style import figure
fig = figure(2, 1)
fig.subplots().plot([0, size])
publish("good", fig, pd.DataFrame({"size": [size]}), out_dir)
"""


def write(folder: Path, name: str, code: str, **about: Any) -> Path:
    content = nbformat.v4.new_notebook()
    content.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "pdd": {"experiment": None, "method": "computed", **about},
    }
    cell = nbformat.v4.new_code_cell('out_dir = "a=b"\nsize: int = 3\nscale = "reduced"')
    cell.metadata["tags"] = ["parameters"]
    content.cells = [cell, nbformat.v4.new_code_cell(code)]
    path = folder / f"{name}.ipynb"
    nbformat.write(content, path)
    return path


@pytest.fixture
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "notebooks"
    folder.mkdir()
    for module in (figures, notebook, publish):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(notebook, "NOTEBOOKS", folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def test_figures_are_made_and_a_failed_one_does_not_stop_the_others(
    books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(books, "bad", "1 / 0")
    write(books, "good", GOOD)
    out = tmp_path / "out"
    (out / "scores").mkdir(parents=True)
    stale = out / "bad.csv"
    stale.write_text("old\n")
    assert figures.main(["--scale", "smoke", "--out", str(out)]) == 1
    said = capsys.readouterr()
    assert "bad failed: ZeroDivisionError: division by zero" in said.err
    assert "good" in said.out.splitlines()[-1] and said.out.splitlines()[-1].endswith("ok")
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["bad"]["status"] == "failed" and manifest["bad"]["sha256"] == {}
    assert set(manifest["good"]["sha256"]) == {"good.csv", "good.pdf", "good.png"}
    assert manifest["good"]["scale"] == "smoke" and manifest["good"]["versions"]["papermill"]
    assert not stale.exists() and (out / "good.csv").read_text() == "size\n3\n"
    before = (out / "good.pdf").read_bytes()
    assert figures.main(["good", "--out", str(out)]) == 0
    assert (out / "good.pdf").read_bytes() == before


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["good", "-p", "sise=4"], "good: unknown parameter 'sise'; it has out_dir, size, scale"),
        (["good", "-p", "size"], "'size' has no '='"),
        (["goood"], "'goood' is unknown; give one of good"),
    ],
)
def test_mistakes_are_one_line_before_anything_runs(
    books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    write(books, "good", GOOD)
    assert figures.main([*argv, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not (tmp_path / "out").exists()


def test_an_experiment_that_fails_fails_its_figure(
    books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(books, "good", GOOD, experiment="ttft")
    out = tmp_path / "out"
    assert figures.main(["good", "--out", str(out), "-o", "wan.rate_mbps=-1"]) == 1
    assert "wan.rate_mbps: -1.0 is not possible" in capsys.readouterr().err
    monkeypatch.setattr(figures, "RUN", (sys.executable, "-c", "raise SystemExit(1)"))
    assert figures.main(["good", "--out", str(out), "-o", f"runs_dir={tmp_path}"]) == 1
    assert "experiment ttft ended with code 1" in capsys.readouterr().err
    assert not (out / "good.png").exists()


def test_metadata_and_parameters_cell_are_required(books: Path) -> None:
    path = write(books, "odd", "", method="guessed")
    with pytest.raises(ConfigError, match="odd.ipynb: metadata.pdd.method"):
        Notebook.read(path)
    path = write(books, "two", "")
    content = nbformat.read(path, as_version=4)
    content.cells[1].metadata["tags"] = ["parameters"]
    nbformat.write(content, path)
    with pytest.raises(ConfigError, match="2 cells are tagged parameters"):
        Notebook.read(path)


def test_files_of_a_notebook_are_not_those_of_another(books: Path, tmp_path: Path) -> None:
    for name in ("ttft", "ttft_ecdf"):
        write(books, name, "")
    for name in ("ttft.png", "ttft_relayed.csv", "ttft_ecdf.png", "other.png"):
        (tmp_path / name).write_text("")
    assert [path.name for path in publish.outputs("ttft", tmp_path)] == ["ttft.png", "ttft_relayed.csv"]


@pytest.mark.parametrize(
    ("paper", "ours", "word"),
    [
        (2.0, 2.1, "reproduced"),
        (2.0, 2.4, "close"),
        (2.0, 9.0, "shape"),
        (2.0, 0.9, "contradicted"),
        (2.0, float("nan"), "not identifiable"),
    ],
)
def test_a_verdict_follows_from_the_numbers(paper: float, ours: float, word: str) -> None:
    assert scorecard.verdict(paper, ours) == word
    table = scorecard.scores("t", "measured", [("a over b", "x", paper, ours), ("a", "s", paper, ours)])
    assert table["verdict"].tolist() == [word, "other scale"]
