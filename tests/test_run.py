"""experiments.run: folders, run.json, exit codes and the last line, with experiments made up for the test."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from experiments import run as runner
from experiments.compose import ROOT, compose
from experiments.folder import RunFolder, fresh_result, read_run, read_table
from experiments.options import read_options
from experiments.sweep import job_count
from pdd.config import RunConfig
from pdd.errors import ConfigError, DeadlineError


def config_in(folder: Path, *overrides: str) -> RunConfig:
    return compose([f"runs_dir={folder}", *overrides])


def pretend(monkeypatch: pytest.MonkeyPatch, function: Any) -> None:
    module = ModuleType("experiments.timeline")
    module.run = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "experiments.timeline", module)


def test_a_good_run_ends_with_one_json_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
        folder.write_table("rows", pd.DataFrame({"a": [1, 2]}))
        return {"systems": {"pdd": {"ttft_p50_s": 0.5, "takeover_gap_p50_ms": float("nan")}}}

    pretend(monkeypatch, work)
    code, path = runner.run_one(config_in(tmp_path))
    assert code == 0 and path is not None
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(line) == {"experiment", "run_dir", "metrics"}
    assert line["metrics"]["systems"]["pdd"] == {"ttft_p50_s": 0.5, "takeover_gap_p50_ms": None}
    record = read_run(path)
    assert record["status"] == "ok" and record["metrics"] == line["metrics"] and record["wall_s"] >= 0
    assert record["config"]["workload"]["rate_rps"] == compose().workload.rate_rps
    assert {"versions", "git", "host", "seeds", "config_hash", "result_key"} <= set(record)
    assert read_table(path, "rows")["a"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("error", "code", "status", "said"),
    [
        (DeadlineError("r1: too late"), 1, "failed", "experiments.run: r1: too late; see"),
        (ConfigError("x: 1 is not possible"), 2, "failed", "experiments.run: x: 1 is not possible; see"),
        (ZeroDivisionError("by zero\nreally"), 1, "failed", "ZeroDivisionError: by zero really; see"),
        (KeyboardInterrupt(), 130, "interrupted", "experiments.run: interrupted; see"),
    ],
)
def test_a_failed_run_says_so(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    status: str,
    said: str,
) -> None:
    def work(config: RunConfig, folder: RunFolder) -> dict[str, Any]:
        raise error

    pretend(monkeypatch, work)
    got, path = runner.run_one(config_in(tmp_path))
    out, err = capsys.readouterr()
    assert (got, out) == (code, "") and said in err and err.count("\n") == 1
    assert path is not None and read_run(path)["status"] == status
    assert type(error).__name__ in (path / "traceback.txt").read_text()


def test_folders_of_the_same_second_differ(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    assert len({RunFolder.create(config).path for _ in range(20)}) == 20


def test_only_a_finished_run_of_the_same_configuration_is_fresh(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    folder = RunFolder.create(config)
    assert fresh_result(config) is None
    folder.fail(ValueError("no"))
    assert fresh_result(config) is None
    done = RunFolder.create(config)
    done.finish({})
    assert fresh_result(config) == done.path
    assert fresh_result(config_in(tmp_path, "wan.rtt_ms=3")) is None
    (done.path / "run.json").write_text("{broken")
    assert fresh_result(config) is None


def test_options_are_checked() -> None:
    config = compose(["+experiment.options.tokens=5", "scale=smoke"])
    assert read_options(config, {"tokens": 1, "many": {"smoke": 2, "reduced": 3}}) == {"tokens": 5, "many": 2}
    with pytest.raises(ConfigError, match="experiment.options.tokens: unknown option of timeline; known: other"):
        read_options(config, {"other": 1})
    with pytest.raises(ConfigError, match="'a' is not possible; give a int"):
        read_options(compose(["+experiment.options.tokens=a"]), {"tokens": 1})


def test_jobs_of_a_sweep_are_counted_and_experiments_are_not_mixed() -> None:
    assert job_count(["experiment=ttft", "wan.rate_mbps=1,2,3", "system=pdd,cdc_pd"]) == 6
    assert job_count(["scale=smoke"]) == 1
    with pytest.raises(ConfigError, match="give one experiment a sweep"):
        job_count(["experiment=ttft,handoff"])


def test_a_sweep_reports_each_job(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.run", "-m", "experiment=exactness", f"runs_dir={tmp_path}"]
    command += ["wan.rate_mbps=1,-1", "experiment.models=[]", "experiment.systems=[]", "model.max_tokens=128"]
    command += ["experiment.kind=nope"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    line = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1 and line["metrics"] == {"jobs": 2, "expected": 2, "failed": 2}
    assert "wan.rate_mbps: -1.0 is not possible" in done.stderr and "job 1 failed" in done.stderr


def test_ctrl_c_in_the_middle_ends_everything(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "experiments.run",
        "experiment=ttft",
        "scale=smoke",
        f"runs_dir={tmp_path}",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children: set[int] = set()
    until_s = time.monotonic() + 60
    while len(children) < 3 and time.monotonic() < until_s and process.poll() is None:
        children |= _children(process.pid)
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert len(children) >= 3 and (process.returncode, out) == (130, "")
    assert "experiments.run: interrupted" in err.splitlines()[-1]
    record = read_run(next(tmp_path.glob("ttft/*")))
    assert record["status"] == "interrupted"
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]


def _children(pid: int) -> set[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return {int(child) for child in path.read_text().split()} if path.exists() else set()
