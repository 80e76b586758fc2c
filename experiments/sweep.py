"""Hydra multirun: python -m experiments.run -m experiment=NAME key=a,b [hydra/launcher=joblib].

Invariant: as many jobs are reported as the comma lists multiply to; a job that fails keeps its traceback in
its own folder and the others go on.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from experiments.compose import CONF, CONFIG_NAME, HYDRA_VERSION, ROOT, one_line, resolve
from experiments.folder import shown
from pdd.config import RunConfig
from pdd.errors import ConfigError

SWEEP_ENV = "PDD_SWEEP_DIR"


def main(args: list[str]) -> int:
    """Run Hydra's own command line (multirun, --cfg, --help); gives the exit code.

    Raises:
        ConfigError: overrides that Hydra refuses, in one line.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sweeping = bool({"-m", "--multirun"} & set(args))
    expected = job_count([arg for arg in args if not arg.startswith("-")]) if sweeping else 0
    runs_dir = next(
        (arg.split("=", 1)[1] for arg in args if arg.startswith("runs_dir=")), RunConfig().runs_dir
    )
    folder = ROOT / runs_dir / "multirun" / secrets.token_hex(4)
    if sweeping:
        folder.mkdir(parents=True)
        os.environ[SWEEP_ENV] = str(folder)
        args = [*args, f"hydra.sweep.dir={folder}"]
    _hydra(args)
    return _report(folder, expected) if sweeping else 0


def _hydra(args: list[str]) -> None:
    command, sys.argv = sys.argv, [sys.argv[0], *args]
    try:
        hydra.main(version_base=HYDRA_VERSION, config_path=str(CONF), config_name=CONFIG_NAME)(_job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error)) from None
    finally:
        sys.argv = command


def job_count(overrides: list[str]) -> int:
    """How many jobs the comma lists among `overrides` multiply to.

    Raises:
        ConfigError: an override that Hydra's grammar refuses, or several experiments in one sweep: Hydra
            would drop each one's own settings in silence.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(one_line(error)) from None
    sweeps = {
        item.key_or_group: len(list(item.sweep_iterator())) for item in parsed if item.is_sweep_override()
    }
    if "experiment" in sweeps:
        raise ConfigError("experiment: several in one sweep are not possible; give one experiment a sweep")
    return math.prod(sweeps.values())


def _job(tree: DictConfig) -> None:
    from experiments.run import BAD_CONFIG, run_one

    job = HydraConfig.get().job
    outcome: dict[str, Any] = {"number": job.num, "overrides": list(HydraConfig.get().overrides.task)}
    try:
        code, path = run_one(resolve(tree))
    except ConfigError as error:
        code, path = BAD_CONFIG, None
        print(f"experiments.run: {error}", file=sys.stderr)
    outcome |= {"code": code, "run_dir": shown(path) if path else None}
    folder = os.environ.get(SWEEP_ENV)
    if folder:
        (Path(folder) / f"job_{job.num:04d}.json").write_text(json.dumps(outcome) + "\n")
    if code == 130:
        raise KeyboardInterrupt


def _report(folder: Path, expected: int) -> int:
    jobs = [json.loads(path.read_text()) for path in sorted(folder.glob("job_*.json"))]
    failed = [job for job in jobs if job["code"] != 0]
    for job in failed:
        where = job["run_dir"] or "no folder"
        print(
            f"experiments.run: job {job['number']} failed: {' '.join(job['overrides'])} ({where})",
            file=sys.stderr,
        )
    if len(jobs) != expected:
        print(f"experiments.run: {len(jobs)} of {expected} jobs reported an end", file=sys.stderr)
    metrics = {"jobs": len(jobs), "expected": expected, "failed": len(failed)}
    print(json.dumps({"experiment": "multirun", "run_dir": shown(folder), "metrics": metrics}))
    return 0 if len(jobs) == expected and not failed else 1
