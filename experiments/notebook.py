"""A figure's notebook: what it needs, and its strict execution by papermill.

Invariant: the parameters given are exactly names that the cell tagged `parameters` assigns; papermill alone
would only warn about a mistyped one.
"""

from __future__ import annotations

import ast
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill
from traitlets.config import Config

from experiments.compose import ROOT
from pdd.errors import ConfigError

NOTEBOOKS = ROOT / "notebooks"
KERNEL = "python3"
CELL_TIMEOUT_S = 600
METHODS = ("measured", "simulated", "computed", "data", "none")
SOURCE_DATE_EPOCH = "1751328000"
"""The date inside PDFs, so that equal figures are equal bytes."""


@dataclass(frozen=True)
class Notebook:
    """One notebook; its own metadata (`pdd`) says which experiment it shows and by which method.

    experiment: None for one that runs no experiment. last: executed after all others, as the index is.
    """

    name: str
    path: Path
    experiment: str | None
    method: str
    last: bool
    parameters: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Notebook:
        """Raises: ConfigError: no metadata `pdd`, no or several parameters cells, an unknown method."""
        content = nbformat.read(path, as_version=4)
        about = content.metadata.get("pdd")
        if about is None or about.get("method") not in METHODS:
            raise ConfigError(
                f"{path.name}: metadata.pdd.method is missing; give one of {', '.join(METHODS)}"
            )
        tagged = [cell.source for cell in content.cells if "parameters" in cell.metadata.get("tags", [])]
        if len(tagged) != 1:
            raise ConfigError(f"{path.name}: {len(tagged)} cells are tagged parameters; give one")
        names = _assigned(tagged[0])
        return cls(path.stem, path, about.get("experiment"), about["method"], bool(about.get("last")), names)

    def check(self, given: dict[str, Any]) -> None:
        """Raises: ConfigError: a parameter that the notebook does not have."""
        for name in given:
            if name not in self.parameters:
                known = ", ".join(self.parameters) or "none"
                raise ConfigError(f"{self.name}: unknown parameter {name!r}; it has {known}")

    def execute(self, given: dict[str, Any], output: Path) -> None:
        """Run every cell in a fresh kernel; the executed copy goes to `output`.

        Raises:
            ConfigError: as `check`.
            papermill.PapermillExecutionError: a cell failed; `output` shows which.
        """
        self.check(given)
        logging.getLogger("papermill").setLevel(logging.ERROR)
        os.environ["SOURCE_DATE_EPOCH"] = SOURCE_DATE_EPOCH
        output.parent.mkdir(parents=True, exist_ok=True)
        papermill.execute_notebook(
            str(self.path),
            str(output),
            parameters=given,
            kernel_name=KERNEL,
            cwd=str(ROOT),
            progress_bar=False,
            execution_timeout=CELL_TIMEOUT_S,
            # No TCP port is opened for the kernel.
            config=Config({"KernelManager": {"transport": "ipc"}}),
        )


def _assigned(source: str) -> tuple[str, ...]:
    """Names that a cell assigns, in order."""
    names: list[str] = []
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    return tuple(names)


def notebooks(names: list[str]) -> list[Notebook]:
    """The notebooks of these names, all of them for none, in the order in which they are to be run.

    Raises:
        ConfigError: an unknown name, or a notebook that `read` refuses.
    """
    found = {path.stem: path for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    for name in names:
        if name not in found:
            raise ConfigError(f"figures: {name!r} is unknown; give one of {', '.join(found)}")
    chosen = [Notebook.read(found[name]) for name in (names or found)]
    return sorted(chosen, key=lambda one: (one.last, one.name))
