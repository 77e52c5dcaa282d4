"""Compare named arms: lists of overrides on one base, fed with the same requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagedsim.core import ConfigError
from pagedsim.metrics.catalogue import keys_of

METRICS = ("ttft", "tpot", "e2e", "output_tokens_per_s")
_NOT_OF_AN_ARM = ("seed", "seeds", "jobs", "report", "tracking", "study", "experiment", "hydra")
"""What there is once in a study, whatever its arms."""


@dataclass(frozen=True)
class Compare:
    """What to compare, and how to say it.

    `arms` maps a name to overrides, as one would type them; `baseline` is the arm that the others
    are held against (the first, if not given); `metrics` are the columns of the table; `swept` is
    the setting that the arms vary, where they are points of a sweep.
    """

    title: str
    question: str
    arms: Mapping[str, Sequence[str]]
    baseline: str | None = None
    metrics: Sequence[str] = METRICS
    swept: str | None = None

    def __post_init__(self) -> None:
        if not _names(self.arms):
            raise ConfigError(f"arms={self.arms}: must be a mapping of names to overrides")
        for arm, changes in self.arms.items():
            if not _texts(changes):
                raise ConfigError(
                    f'arms.{arm}={changes}: must be a list of overrides, such as ["policy=fcfs"]'
                )
            for change in changes:
                refuse_of_an_arm(f"arms.{arm}: {change}", change)
        if self.baseline is not None and self.baseline not in self.arms:
            raise ConfigError(
                f"baseline={self.baseline}: must be one of the arms {', '.join(self.arms)}"
            )
        if not _texts(self.metrics) or not self.metrics:
            raise ConfigError(f"metrics={self.metrics}: must be a list such as [ttft, tpot]")
        try:
            keys_of(self.metrics)
        except ConfigError as error:
            raise ConfigError(f"metrics: {error}") from error

    def key_of(self, arm: str) -> str:
        """The setting that an arm comes from, for an error about it."""
        return f"study.arms.{arm}" if self.swept is None else f"study.over={self.swept}"


def refuse_of_an_arm(where: str, change: str) -> None:
    """Raise ConfigError for an override of what belongs to the study as a whole."""
    if re.split(r"[.=@]", change.lstrip("+~"))[0] in _NOT_OF_AN_ARM:
        raise ConfigError(f"{where}: is the study's own, and the same for all arms")


def _names(value: object) -> bool:
    return isinstance(value, Mapping) and len(value) > 0


def _texts(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value)
