"""Probes: ordinary runs of an arm at a rate, and how to type them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from experiments.arm import Job
from experiments.backend import Settings
from experiments.command import command
from experiments.compare import Compare
from experiments.study import jobs_of
from pagedsim.core import ConfigError

RATE = "workload.rate"
_OWN = ("study", "experiment", "seed", "seeds", "jobs", "report", "tracking")
"""Keys that belong to the search as a whole."""
_WITHOUT_RATE = ("closed", "burst")
"""Arrivals that nobody sets the pace of."""


class Probes:
    """The jobs of a search, made from the arms of `plan` and what was typed."""

    def __init__(self, plan: Compare, overrides: Sequence[str], folder: Path) -> None:
        for arm, changes in plan.arms.items():
            for change in changes:
                if _key(change) == RATE:
                    raise ConfigError(f"study.arms.{arm}: {change}: is what the search varies")
        self.plan = plan
        self._overrides = list(overrides)
        self._folder = folder
        self._arms: dict[str, DictConfig] = {}

    def first(self, rate: float) -> list[Job]:
        """Every arm under every seed at one rate; raises ConfigError for what cannot be made."""
        arms = {arm: [*changes, f"{RATE}={rate:g}"] for arm, changes in self.plan.arms.items()}
        jobs = jobs_of(replace(self.plan, arms=arms), self._overrides, self._folder)
        for job in jobs:
            if (arrivals := job.config["workload"].get("arrivals")) in _WITHOUT_RATE:
                raise ConfigError(
                    f"workload.arrivals={arrivals}: has no rate; a search needs one of "
                    "poisson, gamma, fixed, or a trace's own"
                )
        self._arms = {
            arm: compose("config", overrides=[*self._overrides, *changes])
            for arm, changes in arms.items()
        }
        return [self.at(job, rate) for job in jobs]

    def at(self, job: Job, rate: float) -> Job:
        """The same arm and seed at another rate: what typing that rate would make of it."""
        config = self._arms[job.arm]
        OmegaConf.update(config, RATE, rate)
        plain = cast(Settings, OmegaConf.to_container(config, resolve=True))
        place = self._folder / "probes" / job.folder.parent.name
        return replace(job, config=plain, folder=place / f"rate-{rate:g}-seed-{job.seed}")

    def typed(self, job: Job) -> str:
        """The command of an ordinary run that does the same as a probe."""
        own = (*_OWN, RATE)
        words = [word for word in self._overrides if not {_group(word), _key(word)} & set(own)]
        rate = job.config["workload"]["rate"]
        words = ["experiment=single", *words, *self.plan.arms[job.arm]]
        words += [f"{RATE}={rate:g}", f"seed={job.seed}", "seeds=1"]
        plain = OmegaConf.to_container(compose("config", overrides=words), resolve=True)
        return command([*words, *_changes(_flat(plain), _flat(job.config))])


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _group(override: str) -> str:
    return re.split(r"[.@]", _key(override))[0]


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """The overrides that make one configuration the other, as far as a run is concerned."""
    for key in sorted(before.keys() | after.keys()):
        if key.partition(".")[0] in _OWN or before.get(key) == after.get(key):
            continue
        if key not in after:
            yield f"~{key}"
        else:
            yield f"{'' if key in before else '+'}{key}={json.dumps(after[key])}"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and their values."""
    if not isinstance(value, Mapping) or not value:
        return {prefix[:-1]: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= _flat(inner, f"{prefix}{key}.")
    return found
