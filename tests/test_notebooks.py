"""Notebooks stay small, clean and honest: few short cells, no outputs, no functions, known metadata."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

from experiments.compose import ROOT, names
from experiments.notebook import KERNEL, NOTEBOOKS, Notebook, notebooks

PATHS = sorted(NOTEBOOKS.glob("*.ipynb"))
README = (ROOT / "README.md").read_text()


def test_the_notebooks_of_the_first_figures_are_there() -> None:
    expected = {
        "00_index",
        "01_quickstart",
        "fig4_timeline",
        "table4_ttft",
        "table5_handoff",
        "ttft_waterfall",
    }
    assert expected <= {path.stem for path in PATHS}


def test_the_index_is_executed_last() -> None:
    assert notebooks([])[-1].name == "00_index"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_clean(path: Path) -> None:
    content = nbformat.read(path, as_version=4)
    nbformat.validate(content)
    assert content.metadata.kernelspec.name == KERNEL
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert len(code) <= 8
    for cell in code:
        assert cell.outputs == [] and cell.execution_count is None
        assert len(cell.source.splitlines()) <= 15
        body = ast.parse("\n".join(line for line in cell.source.splitlines() if not line.startswith("%")))
        forbidden = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        assert not [node for node in ast.walk(body) if isinstance(node, forbidden)]
    assert any("**What differs from the paper.**" in cell.source for cell in content.cells)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_says_what_it_needs(path: Path) -> None:
    one = Notebook.read(path)
    assert one.experiment is None or one.experiment in names("experiment")
    assert "scale" in one.parameters
    assert (one.experiment is not None) == ("run_dir" in one.parameters)
    if one.experiment:
        assert f"NAME={one.name}`" in README, "the README's table has a row for each figure"
