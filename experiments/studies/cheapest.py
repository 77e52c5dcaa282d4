"""Search for the cheapest fleet (GPU type, split, router, replicas) that meets an SLO."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf, isinf

from pagedsim.core import ConfigError, PagedsimError
from pagedsim.core.errors import require_number, require_whole, shown
from pagedsim.experiments.studies import cheapest_figures as report
from pagedsim.experiments.studies.capacity import require_rate
from pagedsim.experiments.studies.compare import (
    are_texts,
    notes_of_left_out,
    ordinary,
    refuse_of_an_arm,
)
from pagedsim.experiments.studies.lattice import Counts, Lattice
from pagedsim.experiments.studies.placement import pools_of
from pagedsim.metrics.arms import Run
from pagedsim.metrics.compare import estimate, value_of
from pagedsim.metrics.result import added_up
from pagedsim.metrics.slo import BOUNDED, slo_of
from pagedsim.metrics.stability import Backlog, mean_backlogs, overload_of, unsure_note
from pagedsim.run.job import Arm, Failure, Job
from pagedsim.run.launch import launch_of
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study
from pagedsim.spec.run import RunSpec
from pagedsim.spec.words import group_of

ATTAINED = "slo_attainment"
_LENGTHS = ("workload.requests", "workload.sessions")
"""The setting that shortens a run."""


Split = Sequence[str] | Mapping[str, Sequence[str]]
"""Overrides of replicas: one list for all, or one per role."""
ROLES = ("prefill", "decode")
REPLICAS = "fleet.replicas"
_VARIED = ("hardware", "router", "fleet")
"""Components of an option."""
_TRAFFIC = ("workload", "predictor", "slo", "backend")


@dataclass(frozen=True)
class Cheapest(Study):
    """Every GPU of `gpus` with every split and router, and the fewest replicas that it takes.

    A fleet meets the objective if a share `attainment` of its requests does, and it is not
    overloaded. Short runs look for
    the fewest replicas, long runs under every seed confirm them. Where prefill and decode are
    apart, the fewest for each alone come first: no fleet of both has fewer. What would cost more
    than 1 + `margin` times as much as the cheapest is dropped.
    """

    backends = ("sim",)
    why = "a search takes hundreds of runs of whole fleets"
    whole = False
    keeps_tables = False

    title: str
    question: str
    gpus: Sequence[str]
    splits: Mapping[str, Split]
    routers: Sequence[str]
    attainment: float = 0.95
    most: int = 32
    short: int = 1000
    """Requests of a short run."""
    margin: float = 0.25
    _options: list[Option] = field(default_factory=list, init=False, repr=False)
    _left_out: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    probes: dict[str, Probe] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for key in ("gpus", "routers"):
            names = getattr(self, key)
            if not are_texts(names) or not names or len(set(names)) < len(names):
                example = {"gpus": "[l4, h100]", "routers": "[round_robin]"}[key]
                raise ConfigError(f"{key}={shown(names)}: must be a list such as {example}")
        check_splits(self.splits)
        require_number("attainment", self.attainment, above=0, high=1)
        require_number("margin", self.margin, 0)
        require_whole("most", self.most, 1, 256)
        require_whole("short", self.short, 1)

    def options(self, runs: Runs) -> Sequence[Option]:
        """Every GPU with every split and router, where a model fits and a price is known.

        Raises ConfigError if there are none.
        """
        every = product(self.gpus, self.splits.items(), self.routers)
        for gpu, (split, replicas), router in () if self._options else every:
            changes, keys, alone = _changes(gpu, replicas, router)
            config = runs.spec.configured(f"study.splits.{split}", changes)
            try:
                RunSpec(config, runs.spec.seeds[0]).prepare()
            except PagedsimError as error:
                self._left_out.setdefault(f"{gpu}, {split}", str(error))
                continue
            _, sizes, euros = zip(*pools_of(config), strict=True)
            prices = [price for price in euros if price is not None]
            if len(prices) < len(euros):
                self._left_out[gpu] = "has no price; set hardware.price_per_hour in a sheet of it"
                continue
            self._options.append(Option(gpu, split, router, changes, keys, alone, sizes, prices))
        if not self._options:
            raise ConfigError("; ".join(self.left_out))
        return self._options

    @property
    def left_out(self) -> list[str]:
        return notes_of_left_out(self._left_out, "; ")

    def next_runs(self, runs: Runs) -> list[Arm]:
        probes = Searches(self, runs).next()
        self.probes.update({probe.name: probe for probe in probes})
        return [self.arm(probe, runs) for probe in probes]

    def arm(self, probe: Probe, runs: Runs) -> Arm:
        """The runs of a probe; a short run has at most as many requests as a long one."""
        changes = probe.sizes
        if probe.long:
            return Arm(probe.name, probe.overrides, changes)
        workload = runs.config["workload"]
        for key in _LENGTHS:
            if (name := key.rpartition(".")[2]) in workload:
                changes[key] = min(self.short, workload[name] or self.short)
        return Arm(probe.name, probe.overrides, changes, runs.spec.seeds[:1])

    def check(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if slo_of(job.config["slo"]) is None:
                raise ConfigError("slo: must have a bound: slo.ttft=, slo.tpot= or slo.e2e=")
            require_rate(job, "a fleet is sized for")

    def key_of(self, arm: str) -> str:
        probe = self.probes.get(arm)
        return "study" if probe is None else f"study.splits.{probe.option.split}"

    def analyse(self, runs: Runs) -> Analysis | None:
        return Searches(self, runs).reading() if runs.finished else None

    def progress(self, runs: Runs) -> str:
        return f"{len(runs.finished)} runs of the search are complete"


@dataclass(frozen=True)
class Probe:
    """A fleet to try, by one short run or by long runs."""

    option: Option
    counts: Counts
    long: bool
    role: int | None = None
    """Index of the single role that is simulated, with the others taken as ideal; None: the
    fleet."""

    @property
    def name(self) -> str:
        role = "" if self.role is None else f", {ROLES[self.role]} alone"
        return self.option.fleet(self.counts) + role + ("" if self.long else ", short")

    @property
    def overrides(self) -> Sequence[str]:
        """What makes it, but for how many replicas it has."""
        return self.option.changes if self.role is None else self.option.alone[self.role]

    @property
    def sizes(self) -> dict[str, object]:
        """How many replicas, by the settings that say so."""
        keys = self.option.keys if self.role is None else [REPLICAS]
        return dict(zip(keys, self.counts, strict=True))


class Searches:
    """The state of the searches of all options."""

    def __init__(self, study: Cheapest, runs: Runs) -> None:
        self.study, self.runs = study, runs
        self.options = study.options(runs)
        self.failed: dict[str, Failure] = {}
        """By option."""
        self.lattices: dict[tuple[str, int | None], Lattice] = {}
        """By option and role alone; None: all of them."""
        for option in self.options:
            self.lattices[option.name, None] = Lattice(option.prices, study.most)
            for role in option.roles:
                self.lattices[option.name, role] = Lattice([option.prices[role]], study.most)
        for probe in study.probes.values():
            self._tell(probe)
        for (name, alone), lattice in self.lattices.items():
            if alone is not None:  # no fleet of all roles has fewer of one
                self.lattices[name, None].take(alone, lattice.least)

    def _tell(self, probe: Probe) -> None:
        """The result of a probe, once all of its runs exist."""
        for (arm, _), failure in self.runs.failed.items():
            if arm == probe.name:
                self.failed.setdefault(probe.option.name, failure)
        runs = self.of(probe)
        if len(runs) == (self._seeds if probe.long else 1):
            attained = estimate(_values(runs, ATTAINED)).mean >= self.study.attainment
            met = attained and overload_of(_backlogs(runs)) is None
            self.lattices[probe.option.name, probe.role].tell(probe.counts, met, probe.long)

    def of(self, probe: Probe) -> list[Run]:
        seeds = self.runs.spec.seeds
        every = (self.runs.finished.get((probe.name, seed)) for seed in seeds)
        return [run for run in every if run is not None]

    @property
    def _seeds(self) -> int:
        """So many make different requests."""
        return 1 if self.runs.repeated else len(self.runs.spec.seeds)

    @property
    def limit(self) -> float:
        """Euros an hour; what costs more is dropped."""
        expected = min((lattice.expected for _, lattice in self._open), default=inf)
        return (1 + self.study.margin) * expected

    @property
    def _open(self) -> list[tuple[Option, Lattice]]:
        """Options without a failed run."""
        every = ((option, self.lattices[option.name, None]) for option in self.options)
        return [(option, lattice) for option, lattice in every if option.name not in self.failed]

    def next(self) -> list[Probe]:
        """The next runs: short ones first, then confirming long ones."""
        limit = self.limit
        short = [run for option, grid in self._open for run in self._short(option, grid, limit)]
        return short or [
            Probe(option, counts, long=True)
            for option, lattice in self._open
            for counts in lattice.next_long(limit)
        ]

    def _short(self, option: Option, lattice: Lattice, limit: float) -> list[Probe]:
        """The next short runs of an option: those of single roles first, if it may still be worth
        it."""
        if lattice.long or lattice.bound > limit:
            return []
        alone = [
            Probe(option, counts, long=False, role=role)
            for role in option.roles
            if (counts := self.lattices[option.name, role].next_short(inf)) is not None
        ]
        if alone or (counts := lattice.next_short(limit)) is None:
            return alone
        return [Probe(option, counts, long=False)]

    # -- what came of it ---------------------------------------------------------------------------

    def reading(self) -> Analysis:
        rate, bounds = self.runs.config["workload"].get("rate"), self.runs.config["slo"]
        done = report.Cheapest(
            attainment=self.study.attainment,
            traffic="This traffic takes" if rate is None else f"{rate:g} requests/s take",
            objective=", ".join(
                f"{key.upper()} {bounds[key]:g} s" for key in BOUNDED if bounds[key] is not None
            ),
            fleets=[fleet for fleet in map(self._fleet, self.study.probes.values()) if fleet],
            least={
                option.name: option.fleet(grid.best) for option, grid in self._open if grid.best
            },
            dropped={
                option.name: lattice.bound
                for option, lattice in self._open
                if lattice.best is None and not isinf(lattice.bound)
            },
            nowhere=[option.name for option, lattice in self._open if isinf(lattice.bound)],
            limit=self.limit,
            most=self.study.most,
            interrupted=bool(self.next()),
            prices={
                gpu: self.runs.spec.conf.comment("hardware", gpu, "price_per_hour")
                for gpu in dict.fromkeys(option.gpu for option, _ in self._open)
            },
        )
        failed = {name: str(failure) for name, failure in self.failed.items()}
        again, launch = self._commands(done.winner)
        return Analysis(
            finding=done.lines(),
            listings=done.listings(),
            notes=[*self.study.left_out, *self._notes(done)],
            data=done.data(),
            drawings=done.drawings(),
            table=done.table(),
            again={"The cheapest, first seed": again} if again else {},
            used={"again": again} if again else {},
            launch=launch,
            failed=failed,
            wrong=self.failed,
        )

    def _commands(self, winner: report.Fleet | None) -> tuple[str, str]:
        """What simulates the cheapest again, and what it is as real servers."""
        if winner is None:
            return "", ""
        arm, spec = self.study.arm(self.study.probes[winner.name], self.runs), self.runs.spec
        key = self.study.key_of(arm.name)
        launch = launch_of(spec.configured(key, arm.overrides, arm.changes))
        return ordinary(spec, key, arm, spec.seeds[0]), launch

    def _fleet(self, probe: Probe) -> report.Fleet | None:
        """A fleet that was tried; None if one of its runs is missing."""
        runs, option = self.of(probe), probe.option
        if probe.role is not None or len(runs) < (self._seeds if probe.long else 1):
            return None
        means = {key: estimate(_values(runs, key)) for key in (ATTAINED, *report.COLUMNS)}
        judged = _backlogs(runs)
        return report.Fleet(
            name=option.fleet(probe.counts),
            option=option.name,
            gpu=option.gpu,
            router=option.router,
            long=probe.long,
            counts=probe.counts,
            gpus=sum(n * gpus for n, gpus in zip(probe.counts, option.gpus, strict=True)),
            euros_per_hour=self.lattices[option.name, None].cost(probe.counts),
            attained=means.pop(ATTAINED),
            means={key: estimate.mean for key, estimate in means.items()},
            overloaded=overload_of(judged) is not None,
            unsure=unsure_note(judged) or "",
        )

    def _notes(self, done: report.Cheapest) -> Iterator[str]:
        yield (
            "more replicas of an option are taken never to be worse: what a short run misses with "
            "some, it is not tried with fewer"
        )
        if self.runs.repeated:
            yield "under every seed the workload is the same, so each fleet has one long run"
        if done.winner is not None:
            runs = self.of(self.study.probes[done.winner.name])
            yield from added_up([run.summary for run in runs])


def _values(runs: Sequence[Run], key: str) -> list[float]:
    return [value_of(run.summary, key) for run in runs]


def _backlogs(runs: Sequence[Run]) -> list[Backlog]:
    return mean_backlogs(run.summary for run in runs)


# -- fleet options ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """A fleet option; its number of replicas is searched."""

    gpu: str
    split: str
    router: str
    changes: Sequence[str]
    keys: Sequence[str]
    """Settings for the number of replicas of each kind."""
    alone: Sequence[Sequence[str]]
    """For each role the changes of a fleet with that role alone; empty if all replicas do both."""
    gpus: Sequence[int]
    """Of a replica of each kind."""
    prices: Sequence[float]
    """Euros an hour, likewise."""

    @property
    def name(self) -> str:
        return f"{self.gpu}, {self.split}, {self.router}"

    @property
    def roles(self) -> range:
        return range(len(self.alone))

    def fleet(self, counts: Counts) -> str:
        return f"{' + '.join(map(str, counts))} × {self.name}"


def check_splits(splits: object) -> None:
    """Raise ConfigError unless these are splits by name."""
    if not isinstance(splits, Mapping) or not splits:
        raise ConfigError(f"splits={shown(splits)}: must be a mapping of names to overrides")
    for name, split in splits.items():
        where = f"splits.{name}"
        if isinstance(split, Mapping):
            if set(split) != set(ROLES):
                raise ConfigError(
                    f"{where}={shown(split)}: must have overrides for prefill and for decode"
                )
            for role in ROLES:
                _check_changes(f"{where}.{role}", split[role])
        else:
            _check_changes(where, split)


def _check_changes(where: str, changes: Sequence[str]) -> None:
    if not are_texts(changes):
        raise ConfigError(
            f"{where}={shown(changes)}: must be a list of overrides, such as "
            '["tensor_parallel=2"], or {prefill: [...], decode: [...]}'
        )
    for change in changes:
        refuse_of_an_arm(f"{where}: {change}", change)
        if group_of(change) in _VARIED:
            raise ConfigError(f"{where}: {change}: is what the search varies")
        if group_of(change) in _TRAFFIC:
            raise ConfigError(f"{where}: {change}: must be the same for all options")


def _changes(gpu: str, split: Split, router: str) -> tuple[list[str], list[str], list[list[str]]]:
    """Overrides of the fleet, the keys of replica counts, and the overrides of each single role."""
    changes = [f"hardware={gpu}", f"router={router}"]
    if not isinstance(split, Mapping):
        return [*changes, *split], [REPLICAS], []
    sets = [f"fleet.pools.{role}.set={json.dumps(list(split[role]))}" for role in ROLES]
    keys = [f"fleet.pools.{role}.replicas" for role in ROLES]
    alone = [[*changes, *split[role], f"backend.only={role}"] for role in ROLES]
    return [*changes, "fleet=prefill_decode", *sets], keys, alone
