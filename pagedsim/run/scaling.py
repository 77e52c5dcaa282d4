"""The setting `fleet.autoscale` as an object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pagedsim.build import AUTOSCALERS, BESIDE, plugins
from pagedsim.cluster.autoscale import Autoscale
from pagedsim.core import ConfigError
from pagedsim.core.contracts import vet
from pagedsim.core.errors import shown, unknown
from pagedsim.policies.autoscaling import CONTRACT, Autoscaler
from pagedsim.run.objects import make, seeded

_TIMING = {
    one.name: one.default for one in fields(Autoscale) if one.name in BESIDE["fleet.autoscale"]
}
"""Its settings that are not the autoscaler's own, and what they are unless they are given."""
_THRESHOLDS = ("up", "down")
"""Settings of the built-in rules, null for others."""
_RENAMED = {"least": "min_replicas", "every": "interval_s", "start": "startup_s"}
_EXAMPLE = "{rule: queue, up: 4, down: 1}"


def autoscale_of(settings: Any, seed: int) -> Autoscale | None:
    """What the setting describes; None if it is off, with neither `rule` nor `_target_`."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"fleet.autoscale={shown(settings)}: must be settings, such as {_EXAMPLE}, or null"
        )
    given = {
        str(key): value
        for key, value in settings.items()
        if key not in _TIMING and not (key in _THRESHOLDS and value is None)
    }
    rule = given.pop("rule", None)
    if rule is None and given.get("_target_") is None:
        timing = {key for key in _TIMING if settings.get(key, _TIMING[key]) != _TIMING[key]}
        if own := given.keys() - {"_target_"} | timing:
            raise ConfigError(
                f"fleet.autoscale.{min(own)}: needs rule or _target_ beside it, as in {_EXAMPLE}; "
                "fleet.autoscale=null is without autoscaling"
            )
        return None
    if rule is not None:
        if given.get("_target_") is not None:
            raise ConfigError(
                f"fleet.autoscale.rule={rule}: must be null beside _target_={given['_target_']}"
            )
        given["_target_"] = _path_of(rule)
        for key in given.keys() & _RENAMED.keys():
            raise ConfigError(
                f"fleet.autoscale.{key}: this setting is now called {_RENAMED[key]!r}"
            )

    def made() -> Autoscaler:
        own = seeded("fleet.autoscale", given, seed)
        return vet(make("fleet.autoscale", own, Autoscaler), CONTRACT)

    made()  # what is wrong with it is said before anything runs
    return Autoscale(made, **{key: settings[key] for key in _TIMING if key in settings})


def _path_of(rule: object) -> str:
    """The path of the class that a rule's name stands for."""
    ours = {name: f"{kind.__module__}.{kind.__qualname__}" for name, kind in AUTOSCALERS.items()}
    paths = {**plugins("autoscaler"), **ours}
    if (name := str(rule)) in paths:
        return paths[name]
    path = "; the path of a class is fleet.autoscale._target_" if "." in name else ""
    raise ConfigError(f"{unknown('fleet.autoscale.rule', name, paths)}{path}")
