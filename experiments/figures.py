"""Make figures: python -m experiments.figures [NAME ...] [--scale smoke|reduced|paper].

Invariant: a figure in out/ is what the last run of its notebook made: old files are removed before a notebook
is executed, and a failed one is named and counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import papermill

from experiments import scorecard
from experiments.compose import ROOT, compose
from experiments.folder import fresh_result, read_run, shown
from experiments.notebook import Notebook, notebooks
from experiments.provenance import git_state, versions
from experiments.publish import outputs
from pdd.errors import ConfigError, PddError

OUT = "paper_figures/out"
RUN = (sys.executable, "-m", "experiments.run")
EXPERIMENT_LIMIT_S = 3600.0
STOP_S = 20.0


@dataclass(frozen=True)
class Outcome:
    """How one notebook ended: `ok`, or `failed` with one line."""

    name: str
    method: str
    status: str
    wall_s: float
    note: str = ""


def main(argv: list[str] | None = None) -> int:
    """Entry of the command line; 0 only if every figure was made."""
    args = _parse(argv)
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        chosen = notebooks(args.names)
        given = _given(args.parameter)
        for one in chosen:
            one.check(given)
        outcomes = [_make(one, args, given, f"{at + 1}/{len(chosen)}") for at, one in enumerate(chosen)]
    except ConfigError as error:
        print(f"experiments.figures: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("experiments.figures: interrupted", file=sys.stderr)
        return 130
    _report(outcomes)
    return 1 if any(one.status != "ok" for one in outcomes) else 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m experiments.figures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks; default: all")
    parser.add_argument("--scale", default="reduced", choices=("smoke", "reduced", "paper"))
    parser.add_argument("--out", default=OUT, help=f"folder in the source tree (default: {OUT})")
    parser.add_argument("--rerun", action="store_true", help="run experiments again in any case")
    parser.add_argument(
        "-o", "--override", action="append", default=[], help="Hydra override for experiments"
    )
    parser.add_argument("-p", "--parameter", action="append", default=[], help="NAME=VALUE for notebooks")
    return parser.parse_args(argv)


def _given(pairs: list[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"--parameter: {pair!r} has no '='; give NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def _make(one: Notebook, args: argparse.Namespace, given: dict[str, str], place: str) -> Outcome:
    began_s = time.monotonic()
    print(f"[{place}] {one.name}", flush=True)
    out = ROOT / args.out
    for path in outputs(one.name, out):
        path.unlink()
    entry: dict[str, Any] = {
        "notebook": f"notebooks/{one.name}.ipynb",
        "method": one.method,
        "scale": args.scale,
    }
    try:
        run_dir = _result(one, args) if one.experiment else ""
        parameters = {"run_dir": run_dir, "out_dir": args.out, "scale": args.scale, **given}
        wanted = {name: value for name, value in parameters.items() if name in one.parameters}
        one.execute(wanted, out / "notebooks" / f"{one.name}.ipynb")
        status, note = "ok", ""
    except (PddError, papermill.PapermillExecutionError, subprocess.SubprocessError, OSError) as error:
        run_dir, status, note = "", "failed", _last_line(error)
        print(f"[{place}] {one.name} failed: {note}", file=sys.stderr, flush=True)
    wall_s = time.monotonic() - began_s
    _note(
        out, one, {**entry, **_origin(run_dir), "status": status, "error": note, "wall_s": round(wall_s, 1)}
    )
    scorecard.collect(out)
    return Outcome(one.name, one.method, status, wall_s, note)


def _result(one: Notebook, args: argparse.Namespace) -> str:
    """Folder of a fresh result of the notebook's experiment, run now if there is none.

    Raises:
        ConfigError: the experiment does not compose.
        PddError: the experiment failed.
    """
    overrides = [f"experiment={one.experiment}", f"scale={args.scale}", *args.override]
    fresh = None if args.rerun else fresh_result(compose(overrides))
    if fresh is not None:
        print(f"    reuses {shown(fresh)}", flush=True)
        return shown(fresh)
    command = [*RUN, *overrides]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        stdout, _ = process.communicate(timeout=EXPERIMENT_LIMIT_S)
    finally:
        _end(process)
    if process.returncode != 0:
        raise PddError(f"experiment {one.experiment} ended with code {process.returncode}; its line is above")
    run_dir: str = json.loads(stdout.splitlines()[-1])["run_dir"]
    return run_dir


def _end(process: subprocess.Popen[str]) -> None:
    """Let an experiment that is still running clean up, and end it if it does not."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _origin(run_dir: str) -> dict[str, Any]:
    """What the manifest says of where the data came from."""
    if not run_dir:
        return {"run_dir": None, "git": git_state(), "versions": versions()}
    record = read_run(ROOT / run_dir)
    kept = ("experiment", "config_hash", "seeds", "git", "versions", "host")
    return {"run_dir": run_dir, **{key: record[key] for key in kept}, "experiment_wall_s": record["wall_s"]}


def _note(out: Path, one: Notebook, entry: dict[str, Any]) -> None:
    """Put the figure's entry into manifest.json, which is replaced as a whole."""
    path = out / "manifest.json"
    manifest = json.loads(path.read_text()) if path.is_file() else {}
    made = [file for file in outputs(one.name, out) if file.parent == out]
    entry["sha256"] = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in made}
    entry["made"] = datetime.now(UTC).isoformat(timespec="seconds")
    manifest[one.name] = entry
    partial = path.with_suffix(".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps(dict(sorted(manifest.items())), indent=1) + "\n")
    os.replace(partial, path)


def _report(outcomes: list[Outcome]) -> None:
    print(f"\n{'figure':<20} {'method':<10} {'minutes':>7}  status")
    for one in outcomes:
        print(f"{one.name:<20} {one.method:<10} {one.wall_s / 60:>7.1f}  {one.status} {one.note}".rstrip())


def _last_line(error: BaseException) -> str:
    if isinstance(error, papermill.PapermillExecutionError):
        return f"{error.ename}: {' '.join(str(error.evalue).split())[:200]}; see its executed notebook"
    return " ".join(str(error).split())[:300]


def _as_interrupt(_signum: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
