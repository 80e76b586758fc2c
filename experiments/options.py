"""`experiment.options`: each experiment's own settings, checked against its defaults.

Invariant: an option has the type of its default, and one that the experiment does not know is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdd.config import RunConfig
from pdd.errors import ConfigError


def read_options(config: RunConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options of this run. A default that is a mapping holds one value for each scale.

    Raises:
        ConfigError: an unknown option or one of another type, in one line.
    """
    scale = config.scale.name
    options = {key: item[scale] if isinstance(item, dict) else item for key, item in defaults.items()}
    for key, value in config.experiment.options.items():
        where = f"experiment.options.{key}"
        if key not in options:
            known = ", ".join(sorted(options)) or "none"
            raise ConfigError(f"{where}: unknown option of {config.experiment.name}; known: {known}")
        kind = type(options[key])
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(f"{where}: {value!r} is not possible; give a {kind.__name__}")
        if kind in (int, float) and value < 0:
            raise ConfigError(f"{where}: {value!r} is not possible; give 0 or more")
        options[key] = value
    return options
