"""Probes: ordinary runs of an arm at a rate, and how to type them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from experiments.studies.compare import Compare
from pagedsim.core import ConfigError
from pagedsim.run.backend import Settings
from pagedsim.run.job import Job
from pagedsim.run.runs import jobs_of
from pagedsim.run.typed import key_of, single

RATE = "workload.rate"
_WITHOUT_RATE = ("closed", "burst")
"""Arrivals that nobody sets the pace of."""


class Probes:
    """The jobs of a search, made from the arms of `plan` and what was typed."""

    def __init__(self, plan: Compare, overrides: Sequence[str], folder: Path) -> None:
        for arm, changes in plan.arms.items():
            for change in changes:
                if key_of(change) == RATE:
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
        rate = f"{RATE}={job.config['workload']['rate']:g}"
        words = [word for word in self._overrides if key_of(word) != RATE]
        return single([*words, *self.plan.arms[job.arm], rate], job)
