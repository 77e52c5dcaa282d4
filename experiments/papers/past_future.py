"""Goodput of admission by memory's future peak, beside cautious and greedy admission (LightLLM)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

from experiments.papers.goodput import Served, over_seeds, served
from experiments.papers.past_future_drawing import draw
from experiments.papers.past_future_words import Words
from experiments.papers.reproduction import Reproduction
from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole, unknown
from pagedsim.metrics.arms import Run
from pagedsim.report.pictures import Drawing
from pagedsim.run.command import group_of, key_of
from pagedsim.run.job import Arm
from pagedsim.run.objects import each_of, require_kinds
from pagedsim.run.runs import Runs
from pagedsim.run.study import Reading

_ALIKE = ("experiment", "seed", "seeds", "jobs", "report", "tracking")
"""What may be typed without a change of what is compared."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """A kind of requests, from more and more users who wait for their answers."""

    overrides: Sequence[str]
    users: Sequence[int]
    warm_up: float
    """Seconds in which who finishes does not count."""


@dataclass(frozen=True, kw_only=True)
class Goodput(Reproduction):
    """Every system under every load.

    The objective of a request is a time to its first token of at most `ttft` seconds, and then no
    wait for a token longer than `gap`.
    """

    idle: ClassVar[Mapping[str, str]] = {
        "workload.rate": "users ask once they are answered",
    }

    systems: Mapping[str, Sequence[str]]
    """Names, and the overrides that make them."""
    ours: str
    """The one that was published, held against `others`."""
    others: Sequence[str]
    exact: str | None
    """The one that knows lengths, by which nobody is to be preempted."""
    loads: Mapping[str, Mapping[str, Any]]
    """Settings of `Load`."""
    ttft: float
    gap: float
    bounds: Sequence[float]
    """Other times to the first token that could have been asked for, in seconds."""
    published: Sequence[float]
    """How many times the goodput of others: from, to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("study.ttft", self.ttft, 0)
        require_number("study.gap", self.gap, 0)
        for bound in self.bounds:
            require_number("study.bounds", bound, 0)
        if not self.others or not self.loads:
            empty = "loads" if self.others else "others"
            raise ConfigError(f"study.{empty}: must name at least one")
        if len(self.published) != 2:
            raise ConfigError(f"study.published={list(self.published)}: must be [from, to]")
        for name in filter(None, (self.ours, *self.others, self.exact)):
            if name not in self.systems:
                raise unknown("system", name, self.systems)
        for name, load in self._loads.items():
            require_kinds(load, f"study.loads.{name}")
            require_number(f"study.loads.{name}.warm_up", load.warm_up, 0)
            if not load.users:
                raise ConfigError(f"study.loads.{name}.users: must name at least one number")
            for users in load.users:
                require_whole(f"study.loads.{name}.users", users, 1)

    @property
    def _loads(self) -> dict[str, Load]:
        return each_of(Load, self.loads, "study.loads")

    def ask(self, runs: Runs) -> list[Arm]:
        for name, load in self._loads.items():
            sets = any("workload.lengths" in change for change in load.overrides)
            if sets and "lengths" not in runs.config["workload"]:
                raise ConfigError(
                    f"workload={runs.command.choices.get('workload')}: must be one that draws "
                    f"lengths, such as sharegpt: study.loads.{name} sets them"
                )
        return super().ask(runs)

    def read(self, runs: Runs) -> Reading:
        reading = super().read(runs)
        words = [word for word in runs.command.words if key_of(word) not in self.idle]
        typed = [word for word in words if _matters(word)]
        if not typed:
            return reading
        low, high = self.published
        note = (
            f"{', '.join(typed)}: what was published, {low:g} to {high:g} times, is of the model, "
            f"hardware, loads and objective that experiment={runs.command.experiment} has by itself"
        )
        return replace(reading, notes=[note, *reading.notes])

    def arms(self) -> dict[str, list[str]]:
        return {
            _arm(name, system, users): [
                *load.overrides,
                "workload.arrivals=closed",
                f"workload.users={users}",
                *changes,
            ]
            for name, load in self._loads.items()
            for users in load.users
            for system, changes in self.systems.items()
        }

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        found = {
            name: {
                system: {
                    users: self._served(runs[_arm(name, system, users)], load.warm_up)
                    for users in load.users
                }
                for system in self.systems
            }
            for name, load in self._loads.items()
        }
        data = {
            name: {
                system: {
                    "users": list(by_users),
                    "goodput": [one.goodput for one in by_users.values()],
                    "gaps alone": [one.smooth for one in by_users.values()],
                }
                for system, by_users in each.items()
            }
            for name, each in found.items()
        }
        words = self._words
        caption = (
            f"Tokens a second of requests that met the objective: above, a first token within "
            f"{self.ttft:g} s and no gap above {self.gap:g} s; below, the gaps alone."
        )
        return Reading(
            finding=[line for name, each in found.items() for line in words.told(name, each)],
            rows=[row for name, each in found.items() for row in words.rows(name, each)],
            listings=[words.by_bound(found), *(words.listing(*each) for each in found.items())],
            data=data,
            drawings={"goodput": Drawing("Goodput over load", caption, partial(draw, data))},
            headline=["goodput"],
        )

    @property
    def _words(self) -> Words:
        return Words(**{one.name: getattr(self, one.name) for one in fields(Words)})

    def _served(self, runs: Sequence[Run], warm_up: float) -> Served:
        return over_seeds([served(run, warm_up, self._words.asked, self.gap) for run in runs])


def _arm(load: str, system: str, users: int) -> str:
    return f"{load}, {system}, {users} users"


def _matters(word: str) -> bool:
    """Whether a typed word makes it another experiment than the published one."""
    return not word.startswith("~study") and group_of(word) not in _ALIKE
