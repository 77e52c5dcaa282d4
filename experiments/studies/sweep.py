"""A sweep of one setting, of one configuration or of several arms: curves over a load."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product, takewhile

from pagedsim.core import ConfigError
from pagedsim.experiments.studies.bisection import Bound, bounds_of, missed, validate_clients
from pagedsim.experiments.studies.compare import (
    Compare,
    are_texts,
    check_baseline,
    check_overrides,
    refuse_of_an_arm,
)
from pagedsim.metrics.arms import DEFAULT_METRICS, Arms, Run
from pagedsim.metrics.compare import (
    NO_ESTIMATE,
    Estimate,
    average,
    paired_ratio,
)
from pagedsim.metrics.finding import join
from pagedsim.metrics.result import Listing
from pagedsim.metrics.stability import keep_up
from pagedsim.metrics.variation import Cell, are_numbers
from pagedsim.report.numbers import signed
from pagedsim.run.job import Arm, Job
from pagedsim.run.publish import arms_of
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis
from pagedsim.spec.run import RunSpec
from pagedsim.spec.words import text_of


def sweep(
    title: str,
    question: str,
    over: str,
    values: Sequence[object],
    baseline: object = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    arms: Mapping[str, Sequence[str]] | None = None,
    facets: Mapping[str, Sequence[object]] | None = None,
    bounds: Mapping[str, object] | None = None,
    usual: Mapping[str, Sequence[str]] | None = None,
) -> Compare:
    """The comparison of `over=value` for each of `values`; with `arms` (None: `usual`) or `facets`
    that of the arms at each value."""
    arms = arms or usual
    _check_values("values", values)
    if not isinstance(over, str):
        raise ConfigError(
            f"over={over}: must be the name of one setting, such as memory.block_size, with values="
        )
    refuse_of_an_arm(f"over={over}", over)
    if arms or facets:
        named = arms or {"run": []}
        check_overrides(named)
        first = next(iter(named)) if baseline is None else typed(baseline)
        return Curves(
            title, question, named, first, metrics, over, values=values, facets=facets or {},
            bounds=bounds or {},
        )  # fmt: skip
    if bounds:
        raise ConfigError("bounds: are those of arms: study.arms={name: [overrides], ...}")
    points = {typed(value): [f"{over}={typed(value)}"] for value in values}
    held = None if baseline is None else typed(baseline)
    check_baseline(held, points, "values")
    return Compare(title, question, points, held, metrics, swept=over)


def _check_values(key: str, values: object) -> None:
    if not isinstance(values, (list, tuple)) or not values:
        raise ConfigError(f"{key}={values}: must be a list such as [8, 16]")
    if len({typed(value) for value in values}) < len(values):
        raise ConfigError(f"{key}={list(values)}: must differ from each other")


def _check_facets(facets: object) -> None:
    if not isinstance(facets, Mapping) or not are_texts([*facets]):
        raise ConfigError(f"facets={facets}: must be a mapping of settings to lists")
    for key, values in facets.items():
        refuse_of_an_arm(f"facets: {key}", key)
        _check_values(f"facets.{key}", values)


def typed(value: object) -> str:
    """A value as on the command line; a text without quotes."""
    return value if isinstance(value, str) else text_of(value)


def _setting(key: str) -> str:
    """What a key sets, by the name that it has among the settings that arms vary."""
    return key.lstrip("+").removesuffix("._target_")


@dataclass(frozen=True)
class Curves(Compare):
    """Arms at each value of a setting, mostly the load, and of further ones.

    `swept` has `values`, `facets` maps further settings to theirs; arms are compared within each
    combination, under the same seeds. `bounds` are latencies in seconds, for the load up to which
    an arm meets them all.
    """

    values: Sequence[object] = ()
    facets: Mapping[str, Sequence[object]] = field(default_factory=dict)
    bounds: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_facets(self.facets)
        if self.swept in self.facets:
            raise ConfigError(f"facets: {self.swept}: is what the study is over")
        for name, changes in self.arms.items():
            for word in changes:
                if _setting(word.partition("=")[0]) in self.conditions:
                    raise ConfigError(f"arms.{name}: {word}: is what arms are compared along")
        if self.bounds:
            bounds_of(self.bounds)
            if not are_numbers(self.values):
                raise ConfigError(
                    f"bounds: need numbers along over={self.swept}, not "
                    f"{', '.join(map(typed, self.values))}; bounds=null leaves them out"
                )

    @property
    def conditions(self) -> Sequence[str]:
        return tuple(map(_setting, (self._over, *self.facets)))

    @property
    def _over(self) -> str:
        assert self.swept is not None
        return self.swept

    def next_runs(self, runs: Runs) -> list[Arm]:
        facets = product(*([(key, value) for value in of] for key, of in self.facets.items()))
        return [
            self._arm(name, [(self._over, value), *facet])
            for facet in facets
            for value in self.values
            for name in self.arms
        ]

    def key_of(self, arm: str) -> str:
        names = [name for name in self.arms if arm.startswith(f"{name}, ")]
        return f"study.arms.{max(names, key=len, default=arm)}"

    def _arm(self, name: str, condition: Sequence[tuple[str, object]]) -> Arm:
        words = [f"{key}={typed(value)}" for key, value in condition]
        at = [f"{_setting(key).rpartition('.')[2]}={typed(value)}" for key, value in condition]
        return Arm(", ".join([name, *at]), [*self.arms[name], *words], series=name)

    def check(self, jobs: Sequence[Job]) -> None:
        super().check(jobs)
        bounds = bounds_of(self.bounds) if self.bounds else []
        if any(bound.client is not None for bound in bounds):
            for job in jobs:
                validate_clients(bounds, RunSpec(job.config, job.seed).workload().clients)

    def analyse(self, runs: Runs) -> Analysis | None:
        reading = super().analyse(runs)
        if reading is None:
            return None
        arms = arms_of(self, runs)
        loads = sustained_loads(arms, bounds_of(self.bounds)) if self.bounds else []
        return replace(
            reading,
            finding=[*_on_loads(loads, arms, self.bounds), *reading.finding],
            listings=[listing_of(loads, arms)] if loads else [],
            headline=["curves"],
        )


# -- the load up to which an objective is met ------------------------------------------------------


@dataclass(frozen=True)
class SustainedLoad:
    """The load up to which an arm meets an objective, in one cell of the facets."""

    arm: str
    facet: str
    by_seed: Mapping[int, float]
    """Between the last value at which the objective is met and the first at which it is missed, on
    lines in the logarithm of the latency; infinite if it is met at every value, 0 if at none."""
    binds: Sequence[str]
    """The bounds that are missed first."""
    tried: tuple[float, float]
    """The least and the largest value that ran."""
    knee: float
    """The largest value up to which the server keeps up; 0 if at none."""

    @property
    def load(self) -> Estimate:
        """The mean over seeds, geometric where what was tried is positive; infinite or 0 if it is
        so under each. If it is so under some, the ends of what ran stand for it, and there is no
        interval."""
        loads = list(self.by_seed.values())
        if len(set(loads)) == 1:
            return NO_ESTIMATE._replace(mean=loads[0])
        least, most = self.tried
        inside = [min(max(load, least), most) for load in loads]
        value = average(inside)
        if inside != loads:
            return NO_ESTIMATE._replace(mean=value.mean)
        return value._replace(low=max(value.low, 0.0))

    @property
    def text(self) -> str:
        """The mean in words, such as "4.2" or "above 6"."""
        least, most = self.tried
        loads, mean = self.by_seed.values(), self.load.mean
        if math.isinf(mean) or not mean:
            return f"above {most:g}" if mean else f"below {least:g}"
        bound = "at least " if math.inf in loads else "at most " if 0.0 in loads else ""
        return f"{bound}{mean:.3g}"


def sustained_loads(study: Arms, bounds: Sequence[Bound]) -> list[SustainedLoad]:
    """Of every arm in every cell of the facets; none where values of the sweep are no numbers."""
    curves: dict[tuple[str, Cell], dict[float, list[Run]]] = {}
    variation = study.variation
    for arm in study.arms:
        load, *_ = cell = variation.cell_of(arm)
        if not isinstance(load, int | float):
            return []
        curves.setdefault((variation.series[arm], cell[1:]), {})[float(load)] = study.of(arm)
    return [
        _sustained(name, variation.at(facet), runs, bounds)
        for (name, facet), runs in curves.items()
    ]


def _sustained(
    name: str, facet: str, curve: Mapping[float, Sequence[Run]], bounds: Sequence[Bound]
) -> SustainedLoad:
    by_seed: dict[int, float] = {}
    binds: dict[str, None] = {}
    for seed in dict.fromkeys(run.seed for runs in curve.values() for run in runs):
        runs = {x: run for x, of in curve.items() for run in of if run.seed == seed}
        by_seed[seed], names = _edge(runs, bounds)
        binds |= dict.fromkeys(names)
    loads = sorted(curve)
    kept = list(takewhile(lambda load: keep_up(run.summary for run in curve[load]), loads))
    knee = kept[-1] if kept else 0.0
    return SustainedLoad(name, facet, by_seed, list(binds), (loads[0], loads[-1]), knee)


def _edge(runs: Mapping[float, Run], bounds: Sequence[Bound]) -> tuple[float, list[str]]:
    """The load up to which one seed meets the bounds, and what is missed beyond."""
    last = 0.0
    for load in sorted(runs):
        summary = runs[load].summary
        over = missed(bounds, summary) if summary["finished"] else bounds
        if not over and keep_up([summary]):
            last = load
            continue
        if not last or not over:
            return last, [bound.name for bound in over] or ["an overload"]
        curves = ({x: bound.of(runs[x].summary) for x in (last, load)} for bound in over)
        passed = [
            sustained(curve, bound.seconds) for curve, bound in zip(curves, over, strict=True)
        ]
        return min((x for x in passed if not math.isnan(x)), default=last), [
            bound.name for bound in over
        ]
    return math.inf, []


def passes(curve: Mapping[float, float], level: float) -> float:
    """The first x at which y rises past `level`, on lines between points; NaN for none.

    >>> passes({1: 0, 2: 4}, 1)
    1.25
    """
    for low, high in pairwise(sorted(curve)):
        below, above = curve[low], curve[high]
        if below <= level <= above:
            return low + (high - low) * (level - below) / ((above - below) or 1)
    return math.nan


def sustained(curve: Mapping[float, float], bound: float) -> float:
    """The rate at which the latency first passes `bound`, on lines in its logarithm.

    NaN where the rates that were run do not bracket it.

    >>> sustained({1: 0.1, 2: 1.0, 3: 10.0}, 1.0)
    2.0
    >>> round(sustained({1: 0.1, 2: 10.0}, 1.0), 3)
    1.5
    """
    return passes({rate: math.log(value) for rate, value in curve.items()}, math.log(bound))


# -- in words --------------------------------------------------------------------------------------


def _on_loads(
    loads: Sequence[SustainedLoad], study: Arms, bounds: Mapping[str, object]
) -> Iterator[str]:
    """The load within the objective, best first, in each cell of the facets."""
    objective = join([bound.text for bound in bounds_of(bounds)]) if loads else ""
    name = study.variation.conditions[0].rpartition(".")[2]
    baseline = study.within(study.cells[0]).baseline
    for facet in dict.fromkeys(load.facet for load in loads):
        arms = [load for load in loads if load.facet == facet]
        if len({tuple(load.by_seed.values()) for load in arms}) == 1 and len(arms) > 1:
            continue  # nothing differs
        ranked = sorted(arms, key=lambda load: -load.load.mean)
        theirs = next((load for load in arms if load.arm == baseline), None)
        texts = [f"{load.arm} {load.text}{_gain_text(load, theirs)}" for load in ranked]
        at = f", {facet}" if facet else ""
        yield f"Within {objective}{at}, the {name} may be: {', '.join(texts)}."


def _gain_text(load: SustainedLoad, theirs: SustainedLoad | None) -> str:
    """The change of the sustained load against the baseline's, if it is sure."""
    if theirs is None or load is theirs:
        return ""
    seeds = [seed for seed in load.by_seed if seed in theirs.by_seed]
    ours, others = ([edge.by_seed[seed] for seed in seeds] for edge in (load, theirs))
    if math.inf in (*ours, *others) or math.isnan((ratio := paired_ratio(ours, others)).mean):
        return ""
    if ratio.known and ratio.low <= 1 <= ratio.high:
        return " (not surely another)"
    return f" ({signed(ratio.mean - 1)})"


def listing_of(loads: Sequence[SustainedLoad], study: Arms) -> Listing:
    """The load of every arm within the objective."""
    name = study.variation.conditions[0]
    rows = []
    for load in loads:
        edge = load.load
        interval = f"{edge.low:.3g} to {edge.high:.3g}" if edge.known else ""
        cells = {"": load.arm, **({"at": load.facet} if load.facet else {})}
        rows.append(
            cells
            | {name: load.text, "95 % CI": interval, "missed first": ", ".join(load.binds)}
            | {"knee": f"{load.knee:g}" if load.knee else f"below {load.tried[0]:g}"}
        )
    note = (
        "Between the last value that meets the objective and the first that misses it, on lines in "
        "the logarithm of the latency; geometric mean over seeds. Knee: the last value at which "
        "the server keeps up."
    )
    return Listing.of("Load within the objective", rows, note)
