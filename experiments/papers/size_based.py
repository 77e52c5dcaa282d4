"""Orders by size: what they buy against first come, first served, and who pays for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from experiments.papers import size_bursts, size_curve
from experiments.papers.reproduction import Reproduction
from experiments.papers.size_answers import answers_of
from experiments.papers.size_bursts import Burst, read_bursts
from experiments.papers.size_curve import Curve
from experiments.papers.size_curves import read_curves
from experiments.papers.size_payers import Payers, read_payers
from pagedsim.core import ConfigError
from pagedsim.core.errors import unknown
from pagedsim.metrics.arms import Run
from pagedsim.run.job import Arm
from pagedsim.run.runs import Runs
from pagedsim.run.study import Reading
from pagedsim.workload.predictor import PREDICTED

Kind = TypeVar("Kind", Curve, Burst, Payers)


@dataclass(frozen=True, kw_only=True)
class SizeBased(Reproduction):
    """Latency of several orders against `base`: under rising load, in bursts, and by class.

    Each curve and each burst is a server with its requests, as its publication has them.
    """

    orders: Mapping[str, Sequence[str]]
    """Names, and the overrides that make them."""
    base: str
    """The one that the others are held against."""
    servers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names, and the overrides that make them, for curves and bursts that name one."""
    curves: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of `Curve`."""
    bursts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of `Burst`."""
    payers: Mapping[str, Any] | None = None
    """Settings of `Payers`; None: nobody is told apart by size."""
    only: Sequence[str] | None = None
    """The curves and bursts that are wanted; None: all. Who pays is told if its curve is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base not in self.orders:
            raise unknown("base", self.base, self.orders)
        for name in self.only or ():
            if name not in self.curves and name not in self.bursts:
                there = (*self.curves, *self.bursts)
                raise ConfigError(f"only: {unknown('curve or burst', name, there)}")
        for name, settings in (*self.curves.items(), *self.bursts.items()):
            server = settings.get("server")
            if server is not None and server not in self.servers:
                raise unknown(f"server of {name}", server, self.servers)
        for name, curve in self.every_curve.items():
            for order in curve.rates:
                if order not in self.orders:
                    raise unknown(f"order of {name}", order, self.orders)
            if self.base not in curve.rates:
                raise ConfigError(f"curves.{name}.rates: lack {self.base}, the base")
        if (payers := self.who_pays) is not None:
            payers.check(self.every_curve, self.base)
        if not {**self.every_curve, **self.every_burst}:
            raise ConfigError("curves and bursts: at least one must be asked for")

    @property
    def every_curve(self) -> dict[str, Curve]:
        """The curves, made of their settings."""
        return self._wanted(Curve, "curves", self.curves)

    @property
    def every_burst(self) -> dict[str, Burst]:
        """The bursts, made of theirs."""
        return self._wanted(Burst, "bursts", self.bursts)

    @property
    def who_pays(self) -> Payers | None:
        """The classes, if they are asked for."""
        payers = None if self.payers is None else _made(Payers, "payers", self.payers)
        left_out = payers and payers.of in self.curves and payers.of not in self.every_curve
        return None if left_out else payers

    def _wanted(
        self, kind: type[Kind], where: str, every: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Kind]:
        return {
            name: _made(kind, f"{where}.{name}", settings)
            for name, settings in every.items()
            if self.only is None or name in self.only
        }

    @property
    def every_arm(self) -> list[Arm]:
        """All that is to run."""
        base = self.orders[self.base]
        return [
            *size_curve.arms_of(self.every_curve, self.orders, self.servers),
            *size_bursts.arms_of(self.every_burst, self.base, base, self.servers),
        ]

    def arms(self) -> dict[str, Sequence[str]]:
        return {arm.name: arm.overrides for arm in self.every_arm}

    def ask(self, runs: Runs) -> list[Arm]:
        return self.every_arm

    def key_of(self, arm: str) -> str:
        for part, names in (("curves", self.curves), ("bursts", self.bursts)):
            if whose := [name for name in names if arm.startswith(f"{name}, ")]:
                return f"study.{part}.{max(whose, key=len)}"
        return f"study.{arm}"

    def read(self, runs: Runs) -> Reading:
        reading = super().read(runs)
        # The tables have how good predictions are, arm by arm.
        notes = [note for note in reading.notes if PREDICTED not in note]
        return replace(reading, notes=notes)

    def read_arms(self, runs: Mapping[str, Sequence[Run]]) -> Reading:
        answers = {arm: [answers_of(run) for run in own] for arm, own in runs.items()}
        parts = [
            read_bursts(self.every_burst, self.base, answers, runs),
            read_curves(self.every_curve, self.base, answers),
        ]
        if (payers := self.who_pays) is not None:
            parts.insert(0, read_payers(payers, self.every_curve, self.base, answers))
        return Reading(
            finding=[sentence for part in parts for sentence in part.finding],
            rows=[row for part in parts for row in part.rows],
            listings=[listing for part in parts for listing in part.listings],
            data={name: value for part in parts for name, value in part.data.items()},
            drawings={name: one for part in parts for name, one in part.drawings.items()},
        )


def _made(kind: type[Kind], where: str, settings: Mapping[str, Any]) -> Kind:
    """One part of the study; raises ConfigError that names the setting."""
    known = [one.name for one in fields(kind)]
    for setting in settings:
        if setting not in known:
            raise unknown(f"setting of {where}", setting, known)
    try:
        return kind(**settings)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except TypeError as error:
        raise ConfigError(f"{where}: lacks {str(error).rpartition(': ')[2]}") from error
