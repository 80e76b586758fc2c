"""conf/ composes in every combination, holds deltas only, and says in one line what is wrong."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import yaml

from experiments.compose import CONF, ROOT, compose, names, with_model, with_system
from pdd.config import RunConfig, to_plain
from pdd.errors import ConfigError

GROUPS = ("model", "cluster", "wan", "workload", "router", "handoff", "scale")


def test_defaults_are_those_of_the_dataclasses_but_for_the_experiment() -> None:
    config = compose(["scale=paper", "scale.seeds=[0,1]", "scale.requests=40", "scale.repetitions=30"])
    ours, theirs = to_plain(config), to_plain(RunConfig())
    for section in ("model", "engine", "system", "router", "handoff", "cluster", "wan", "kv_stream"):
        assert ours[section] == theirs[section], section


@pytest.mark.parametrize("experiment", names("experiment"))
def test_every_experiment_composes_with_every_system(experiment: str) -> None:
    alone = compose([f"experiment={experiment}"])
    for system in names("system"):
        config = compose([f"experiment={experiment}", f"system={system}"])
        assert config.system.name == system
        assert with_system(alone, system) == config
    assert (ROOT / "experiments" / f"{alone.experiment.kind}.py").is_file()
    assert set(alone.experiment.systems) <= set(names("system"))


@pytest.mark.parametrize("group", GROUPS)
def test_every_file_of_a_group_composes(group: str) -> None:
    for name in names(group):
        extra = ["model.path=some/folder"] if name == "hf" else []
        compose([f"{group}={name}", *extra])


def test_files_hold_only_keys_of_the_schema() -> None:
    schema = to_plain(RunConfig())
    for path in CONF.glob("*/*.yaml"):
        data = yaml.safe_load(path.read_text()) or {}
        tree = data if "@package _global_" in path.read_text() else {path.parent.name: data}
        for section, values in tree.items():
            assert set(values) <= set(schema[section]), path


def test_an_override_beats_the_system_file() -> None:
    assert compose(["system=cdc_pd", "router.kind=hit_rate"]).router.kind == "hit_rate"
    assert compose(["system=pdd_oneshot", "handoff=catchup"]).handoff.mode == "catchup"


def test_with_system_keeps_overrides_and_resets_what_systems_set() -> None:
    config = compose(["system=pdd_oneshot", "router.threshold=0.5", "wan.rtt_ms=7"])
    other = with_system(config, "cdc_pd_nocache")
    assert (other.system.drc, other.router.kind) == (False, "direct")
    assert (other.router.threshold, other.wan.rtt_ms) == (0.5, 7.0)
    assert other.handoff.mode == RunConfig().handoff.mode
    assert with_model(config, "tiny_llama").model.name == "tiny_llama"
    with pytest.raises(ConfigError, match="'nope' is unknown; give one of cdc_pd"):
        with_system(config, "nope")


BAD = {
    "wan.nope=1": "wan.nope: unknown key; known here: backend",
    "+wan.nope=1": "wan.nope: unknown key; known here: backend",
    "nope=1": "nope: unknown key; known here: cluster",
    "experiment.options.nope=1": "experiment.options.nope",
    "wan=nope": "wan: 'nope' is unknown; give one of continental",
    "experiment=nope": "experiment: 'nope' is unknown; give one of",
    "wan.rate_mbps=fast": "wan.rate_mbps: 'fast' is not possible; give a number",
    "wan.rate_mbps=-1": "wan.rate_mbps: -1.0 is not possible; give a number above 0",
    "wan.rate_mbps=inf": "wan.rate_mbps: inf is not possible",
    "wan.rate_mbps": "missing EQUAL",
    "wan.loss=[1": "no viable alternative",
    "wan.loss=${nope}": "Interpolation key 'nope' not found",
    "cluster.prefill=a": "cluster.prefill: 'a' is not possible; give a list",
    "scale.seeds=[]": "scale.seeds: () is not possible; give at least one seed",
    "wan=null": "must be a string or a list",
}


@pytest.mark.parametrize("override", BAD)
def test_a_bad_override_is_one_line(override: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(BAD[override])) as caught:
        compose([override])
    assert "\n" not in str(caught.value)


def test_the_command_line_says_it_in_one_line_too() -> None:
    command = [sys.executable, "-m", "experiments.run", "experiment=ttft", "wan.nope=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "wan.nope: unknown key" in done.stderr


def test_direct_dependencies_are_those_of_the_lock() -> None:
    lock = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    )
    pins = re.findall(r'^    "([\w.-]+)==([\w.]+)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(pins) > 20
    for name, version in pins:
        assert lock[name] == version, name
