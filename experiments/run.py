"""Run one experiment: python -m experiments.run experiment=NAME scale=smoke [overrides]; -m for sweeps.

Invariant: the last line on stdout is one JSON object, or the exit code is not 0 (1 failed, 2 bad
configuration, 130 interrupted) and stderr ends with one line that says why.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from experiments.compose import ROOT, compose
from experiments.folder import RunFolder, shown
from pdd.config import RunConfig
from pdd.errors import ConfigError, PddError

OK, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130


def main(argv: list[str] | None = None) -> int:
    """Entry of the command line; gives the exit code."""
    args = sys.argv[1:] if argv is None else argv
    signal.signal(signal.SIGTERM, _as_interrupt)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        if any(arg.startswith("-") for arg in args):
            from experiments import sweep

            return sweep.main(args)
        config = compose(args)
    except ConfigError as error:
        return _say(str(error), BAD_CONFIG)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    code, _ = run_one(config)
    return code


def run_one(config: RunConfig) -> tuple[int, Path | None]:
    """Run one resolved configuration in a folder of its own; gives exit code and folder."""
    try:
        module = importlib.import_module(f"experiments.{_kind(config)}")
        folder = RunFolder.create(config)
    except ConfigError as error:
        return _say(str(error), BAD_CONFIG), None
    where = shown(folder.path)
    try:
        metrics = _finite(module.run(config, folder))
        folder.finish(metrics)
    except KeyboardInterrupt as stop:
        folder.fail(stop, "interrupted")
        return _say(f"interrupted; see {where}", INTERRUPTED), folder.path
    except Exception as error:
        folder.fail(error)
        name = "" if isinstance(error, PddError) else f"{type(error).__name__}: "
        code = BAD_CONFIG if isinstance(error, ConfigError) else FAILED
        return _say(f"{name}{error}; see {where}/traceback.txt", code), folder.path
    print(
        json.dumps({"experiment": config.experiment.name, "run_dir": where, "metrics": metrics}), flush=True
    )
    return OK, folder.path


def _kind(config: RunConfig) -> str:
    """The module that runs this experiment; only modules that some conf/experiment names can be run."""
    kind = config.experiment.kind
    if not kind.isidentifier() or not (ROOT / "experiments" / f"{kind}.py").is_file():
        raise ConfigError(f"experiment.kind: {kind!r} is unknown; give a module of experiments/")
    return kind


def _finite(value: Any) -> Any:
    """Metrics as plain JSON values; a number that could not be taken (NaN) becomes null."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _say(line: str, code: int) -> int:
    print(f"experiments.run: {' '.join(line.split())}", file=sys.stderr, flush=True)
    return code


def _as_interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.exit(code)
