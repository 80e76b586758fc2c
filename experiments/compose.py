"""From conf/ and overrides to one `RunConfig`; Hydra's DictConfig ends here.

Invariant: conf/ is the folder of this source tree (the package is installed editable), wherever the caller
stands, and every way to get the configuration wrong is a `ConfigError` of one line.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pdd.config import RunConfig, from_plain, to_plain
from pdd.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
CONFIG_NAME = "config"
HYDRA_VERSION = "1.3"

# Plain data, not the frozen dataclasses: those would make Hydra's tree read-only.
ConfigStore.instance().store("schema", to_plain(RunConfig()))


def compose(overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration that conf/config.yaml and `overrides` (Hydra's syntax) give.

    Usable from notebooks and tests: `compose(["system=pdd", "wan=regional", "wan.rate_mbps=50"])`.

    Raises:
        ConfigError: an unknown group, file or key, a wrong type or an impossible value, in one line.
    """
    try:
        with initialize_config_dir(str(CONF), version_base=HYDRA_VERSION):
            tree = hydra_compose(CONFIG_NAME, list(overrides))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(one_line(error)) from None
    return resolve(tree)


def resolve(tree: DictConfig) -> RunConfig:
    """The validated dataclass of a composed tree.

    Raises:
        ConfigError: as `compose`.
    """
    try:
        plain = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None
    return cast(RunConfig, from_plain(RunConfig, plain))


def one_line(error: BaseException) -> str:
    """Hydra's several lines as one, with the known keys or files where a name is unknown."""
    text = str(error)
    unknown = re.search(r"Could not override '([^']+)'", text)
    if unknown:
        return _unknown_key(unknown[1])
    missing = re.search(r"Could not find '([^']+)/([^']+)'", text)
    if missing and (CONF / missing[1]).is_dir():
        return f"{missing[1]}: {missing[2]!r} is unknown; give one of {', '.join(names(missing[1]))}"
    dropped = ("full_key", "object_type", "reference_type", "Set the environment", "See https")
    lines = [line.strip().rstrip(".:") for line in text.splitlines()]
    return "; ".join(line for line in lines if line and not line.startswith(dropped))


def _unknown_key(path: str) -> str:
    node: Any = to_plain(RunConfig())
    *parents, _ = path.split(".")
    for part in parents:
        node = node.get(part, {}) if isinstance(node, dict) else {}
    if path.startswith("experiment.options"):
        return f"{path}: not set in conf/experiment; give +{path}=VALUE for an option that it knows"
    return f"{path}: unknown key; known here: {', '.join(sorted(node))}"


def names(group: str) -> list[str]:
    """The files of a config group, such as every system."""
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def with_system(config: RunConfig, name: str) -> RunConfig:
    """The same run with another system of conf/system, for experiments that compare several.

    What any system file sets goes back to its default before `name`'s own deltas are applied; all else
    (thresholds, links, overrides) stays. The run's own system is left as it is, so that its overrides count.

    Raises:
        ConfigError: there is no such system.
    """
    if name == config.system.name:
        return config
    plain, default = to_plain(config), to_plain(RunConfig())
    for section, key in _system_keys():
        plain[section][key] = default[section][key]
    for section, key, value in _deltas(name):
        plain[section][key] = value
    return cast(RunConfig, from_plain(RunConfig, plain))


@cache
def _system_keys() -> frozenset[tuple[str, str]]:
    return frozenset((section, key) for name in names("system") for section, key, _ in _deltas(name))


def _deltas(name: str) -> Iterator[tuple[str, str, Any]]:
    path = CONF / "system" / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"system: {name!r} is unknown; give one of {', '.join(names('system'))}")
    for section, values in yaml.safe_load(path.read_text()).items():
        for key, value in values.items():
            yield section, key, value


def with_model(config: RunConfig, name: str) -> RunConfig:
    """The same run with another of the tiny models."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, name=name, path=None))
