"""Placement of prefill and decode on GPUs, disaggregated and colocated."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pagedsim.cluster.link import UnknownLink
from pagedsim.cluster.placement import Option, Placement, limit, pair, placed
from pagedsim.core import ConfigError, PagedsimError
from pagedsim.experiments.studies.capacity import Capacity
from pagedsim.experiments.studies.compare import notes_of_left_out
from pagedsim.metrics.compare import average
from pagedsim.metrics.result import Listing, Row
from pagedsim.report.numbers import signed
from pagedsim.run.job import Arm, Job
from pagedsim.run.launch import launch_of
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis
from pagedsim.spec.check import Positive, Whole
from pagedsim.spec.run import RunSpec, Settings

PHASES = {"prefill": "prefill", "decode": "decode", "both": "null"}
"""Phases that a server serves, each with its `backend.only`."""
APART = "apart"
"""What a fleet of both does."""


@dataclass(frozen=True)
class Place(Capacity):
    """A search for capacity of every option that does prefill alone, decode alone, or both.

    `arms` are the options, such as tensor_parallel=2, and `target` is the rate for which servers
    are counted.
    """

    source: str = ""
    target: Positive = 10.0
    node: Annotated[int | None, Whole(2)] = None
    """GPUs of one server for each phase together, at most; None: any number."""
    wholes: Mapping[str, Sequence[str]] | None = None
    """Fleets of servers for each phase that are searched as a whole, by name."""
    published: Mapping[str, Any] | None = None
    """Published values for the pair: requests/s per GPU (`per_gpu`), GPUs of each phase (`prefill`,
    `decode`), and its `name` among `wholes`."""
    example: Mapping[str, Any] = field(default_factory=dict)
    """Values of `baseline`, `node`, `wholes` and `published` with the `usual` options."""
    _unlinked: dict[str, str] = field(default_factory=dict, init=False, repr=False)
    """Why an arm is left out: no bandwidth is known for its transfers. Empty: it is known."""

    def __post_init__(self) -> None:
        for key, value in self.example.items() if self.arms is None else ():
            if getattr(self, key) is None:
                object.__setattr__(self, key, value)
        super().__post_init__()

    @property
    def options(self) -> Mapping[str, Sequence[str]]:
        return super().searched

    @property
    def searched(self) -> Mapping[str, Sequence[str]]:
        alone = {
            f"{phase}, {name}": [*changes, f"backend.only={only}"]
            for phase, only in PHASES.items()
            for name, changes in self.options.items()
        }
        every = alone | {f"{APART}, {name}": changes for name, changes in self.fleets.items()}
        return {arm: changes for arm, changes in every.items() if not self._unlinked.get(arm)}

    def next_runs(self, runs: Runs) -> list[Arm]:
        for name, changes in self.options.items():
            arms = [f"{phase}, {name}" for phase in ("prefill", "decode")]
            self._ask_for_link(arms, [*changes, "fleet=prefill_decode"], runs)
        for name, changes in self.fleets.items():
            self._ask_for_link([f"{APART}, {name}"], changes, runs)
        return super().next_runs(runs)

    def _ask_for_link(self, arms: Sequence[str], changes: Sequence[str], runs: Runs) -> None:
        """Leave arms out if no bandwidth is known between the replicas of a fleet."""
        if arms[0] in self._unlinked:
            return
        why = ""
        try:
            config = runs.spec.configured("study.arms", changes)
            RunSpec(config, runs.spec.seeds[0]).prepare()
        except UnknownLink as error:
            why = str(error)
        except PagedsimError:  # refused where the arm itself is prepared
            pass
        self._unlinked.update(dict.fromkeys(arms, why))

    @property
    def left_out(self) -> list[str]:
        """Notes on the arms that are left out."""
        return notes_of_left_out({arm: why for arm, why in self._unlinked.items() if why}, "; ")

    @property
    def fleets(self) -> Mapping[str, Sequence[str]]:
        return self.wholes or {}

    def check(self, jobs: Sequence[Job]) -> None:
        super().check(jobs)
        for job in jobs if self.arms is None else ():
            fitted, model = job.config["cost"].get("fitted_for", {}), job.config["model"]["name"]
            if (measured_model := fitted.get("model", model)) != model:
                raise ConfigError(
                    f"study.arms: must be given for model={model}, e.g. "
                    f"'study.arms={{TP 2: [\"tensor_parallel=2\"]}}': those of the experiment "
                    f"have the step times of {measured_model}"
                )

    def key_of(self, arm: str) -> str:
        phase, _, name = arm.rpartition(" at ")[0].partition(", ")
        return f"study.{'wholes' if phase == APART else 'arms'}.{name}"

    def analyse(self, runs: Runs) -> Analysis | None:
        reading = super().analyse(runs)
        if reading is None:
            return None
        placed = PlacementResult(self, runs, reading.data)
        return replace(
            reading,
            finding=placed.finding(),
            rows=placed.rows(),
            listings=[*placed.listings(), *reading.listings],
            notes=[*self.left_out, *placed.notes(), *reading.notes],
            data={**reading.data, "placement": placed.data()},
            launch=self._launch(runs, placed),
        )

    def _launch(self, runs: Runs, placed: PlacementResult) -> str:
        """The servers of the placement of fewest GPUs; empty where there is none."""
        if placed.apart is None or placed.together is None:
            best = placed.apart or placed.together
        else:
            best = min(placed.apart, placed.together, key=lambda placement: placement.gpus)
        if best is None:
            return ""
        shares, split = best.shares, best is placed.apart
        if split:
            pools = dict(zip(("prefill", "decode"), shares, strict=True))
            sets = {name: list(self.options[share.option.name]) for name, share in pools.items()}
            words = [f"fleet.pools.{name}.set={json.dumps(of)}" for name, of in sets.items()]
            words = ["fleet=prefill_decode", *words]
            many = {f"fleet.pools.{name}.replicas": of.servers for name, of in pools.items()}
        else:
            words = list(self.options[shares[0].option.name])
            many = {"fleet.replicas": shares[0].servers}
        return launch_of(runs.spec.configured("study.arms", words, many))


class PlacementResult:
    """Options with the rates that they sustain, and the placement that follows."""

    def __init__(self, study: Place, runs: Runs, capacity: Mapping[str, Any]) -> None:
        self.study = study
        arms = capacity["arms"]
        self.unbound = [name for name, arm in arms.items() if arm["nowhere"] and _rate(arm)]
        by_phase: dict[str, list[Option]] = {phase: [] for phase in (*PHASES, APART)}
        for phase, options in by_phase.items():
            fleets = phase == APART
            of = study.fleets if fleets else study.options
            for name, (gpus, euros) in servers(runs, "wholes" if fleets else "arms", of).items():
                if (arm := arms.get(f"{phase}, {name}")) is not None:
                    options.append(Option(name, gpus, _rate(arm), euros))
        self.wholes, self.options = by_phase.pop(APART), by_phase
        apart = self.options["prefill"], self.options["decode"]
        self.together = placed(study.target, self.options["both"])
        self.apart = placed(study.target, *apart)
        self.pair = pair(*apart, study.node)
        self.limits = {"apart": limit(*apart), "together": limit(self.options["both"])}

    def finding(self) -> list[str]:
        lines = []
        if self.apart is not None:
            lines.append(f"Apart, {self._placed(self.apart, ('prefill', 'decode'))}.")
        if self.together is not None:
            lines.append(f"Together, {self._placed(self.together, ('both phases',))}.")
        apart, together = self.limits["apart"], self.limits["together"]
        if apart and together:
            lines.append(
                f"In the best proportion servers apart sustain {apart:.3g} requests/s a GPU, "
                f"{signed(apart / together - 1)} against {together:.3g} together."
            )
        missing = [
            phase
            for phase, options in self.options.items()
            if options and not any(option.goodput for option in options)
        ]
        return lines + [f"Nothing does {phase} within the objective." for phase in missing]

    def _placed(self, placement: Placement, phases: Sequence[str]) -> str:
        parts = " and ".join(
            f"{share.servers} × {share.option.name} for {phase}"
            for share, phase in zip(placement.shares, phases, strict=True)
        )
        euros = placement.euros_per_hour
        cost = "" if euros is None else f" for {euros:,.2f} € an hour"
        return f"{placement.rate:g} requests/s take {placement.gpus} GPUs{cost}: {parts}"

    def rows(self) -> list[Row]:
        """Comparison with published numbers for one server of each phase."""
        published = self.study.published or {}
        rows = []
        if self.pair is not None:
            most = "" if self.study.node is None else f", {self.study.node} GPUs at most"
            what = f"one server for each phase{most}: requests/s a GPU"
            rows.append(Row(what, self.pair.per_gpu, published.get("per_gpu")))
            for share, phase in zip(self.pair.shares, ("prefill", "decode"), strict=True):
                rows.append(Row(f"of these, GPUs for {phase}", share.gpus, published.get(phase)))
        for whole in self.wholes:
            what = f"{whole.name}, simulated together: requests/s a GPU"
            known = published.get("per_gpu") if published.get("name") == whole.name else None
            rows.append(Row(what, whole.per_gpu, known))
        return rows

    def listings(self) -> list[Listing]:
        table = [
            [
                phase,
                option.name,
                str(option.gpus),
                f"{option.goodput:.3g}" if option.goodput else "–",
                f"{option.per_gpu:.3g}" if option.goodput else "–",
            ]
            for phase, options in {**self.options, APART: self.wholes}.items()
            for option in options
        ]
        head = ["server of", "option", "GPUs", "requests/s", "a GPU"]
        return [Listing("What one server sustains", head, table)]

    def notes(self) -> list[str]:
        notes = [
            "each phase is simulated alone: requests come to decodes as they arrive, without a "
            "transfer, and prefills never wait for memory that others decode in"
        ]
        if self.unbound:
            notes.append(
                f"no rate misses the objective of {', '.join(self.unbound)}: the highest that was "
                "tried stands for what it sustains; more requests would overload it"
            )
        return notes

    def data(self) -> dict[str, Any]:
        return {
            "options": {
                phase: {
                    option.name: {"gpus": option.gpus, "requests_per_s": option.goodput}
                    for option in options
                }
                for phase, options in self.options.items()
            },
            "wholes": {w.name: {"gpus": w.gpus, "a_gpu": w.per_gpu} for w in self.wholes},
            "apart": _data(self.apart),
            "together": _data(self.together),
            "pair": _data(self.pair),
            "requests_per_s_a_gpu": self.limits,
        }


def servers(
    runs: Runs, key: str, arms: Mapping[str, Sequence[str]]
) -> dict[str, tuple[int, float | None]]:
    """GPUs of each arm and their price per hour."""
    servers = {}
    for name, changes in arms.items():
        config = runs.spec.configured(f"study.{key}.{name}", changes, {})
        gpus, euros = 0, 0.0
        for pool, many, price in pools_of(config):
            replicas = pool.get("replicas", 1)
            gpus += replicas * many
            euros += replicas * (math.nan if price is None else price)
        servers[name] = gpus, None if math.isnan(euros) else euros
    return servers


def pools_of(config: Settings) -> Iterator[tuple[Settings, int, float | None]]:
    """The pools of a fleet, with the GPUs of one server of each and their price per hour."""
    for name, pool in (config["fleet"].get("pools") or {"": {}}).items():
        of = RunSpec(config).pool(name).settings
        gpus = max(of["tensor_parallel"], of["expert_parallel"]) * of["pipeline_parallel"]
        price = of["hardware"].get("price_per_hour")
        yield pool, gpus, price and gpus * price


def _rate(arm: Mapping[str, Any]) -> float:
    """Geometric mean rate over the seeds; 0 if under one of them no rate meets the objective."""
    met = [seed["met_up_to"] or 0.0 for seed in arm["seeds"].values()]
    return average(met).mean if all(met) else 0.0


def _data(placement: Placement | None) -> dict[str, Any] | None:
    if placement is None:
        return None
    shares = [{"option": share.option.name, "servers": share.servers} for share in placement.shares]
    return {
        "requests_per_s": placement.rate,
        "gpus": placement.gpus,
        "a_gpu": placement.per_gpu,
        "euros_per_hour": placement.euros_per_hour,
        "shares": shares,
    }
