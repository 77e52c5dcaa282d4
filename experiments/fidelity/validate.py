"""Validate: errors of the simulator against the engine on this machine, on held-out requests.

`Parity` validates one server under many settings, with a joint report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number, require_whole
from pagedsim.fidelity import regime_report
from pagedsim.fidelity.calibration import Calibration, fitted
from pagedsim.fidelity.recorded import Recorded, StepLog, log_of, recorded_runs
from pagedsim.fidelity.regime_report import JUDGED, measured, summary_of
from pagedsim.fidelity.replay import replayed
from pagedsim.metrics.catalogue import label_of
from pagedsim.metrics.result import Listing
from pagedsim.report.numbers import signed
from pagedsim.run.job import Arm, Failure, error_of, failure_of
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study
from pagedsim.sim.cost import Fitted
from pagedsim.spec.objects import flat, locate
from pagedsim.spec.run import RunSpec, Settings
from pagedsim.user_error import UserError, line, shown

CAPACITY = 200
"""Requests of a simulated burst from which the served requests/s are estimated."""
FULL = 4
"""Or so many times as many as run at once, so that most of the time the server is full."""
AT_ONCE = 1e6
"""Requests a second."""
FEWEST = 20
"""Requests of a regime, however slow the machine."""
SYNTHETIC = "pagedsim.workload.synthetic"
"""What calibrations take their requests from, whatever is validated."""
POOLS = ("blocks", "cpu_blocks")
"""Settings that every run takes from the first, unless a regime states them."""
MODEL = "pagedsim.fidelity.engine_model.EngineModel"
CALIBRATION, ENGINE, SIMULATED = "calibration-{}", "{}, engine", "{}, simulator"


@dataclass(frozen=True)
class Validate(Study):
    """Calibrate on some workloads, then hold another against the simulator, under three loads.

    Rounds of runs: each calibrates once and serves every load once, so that a machine that slows
    down does so for all of them. Then the simulator serves each load.
    """

    backends = ("engine",)
    one_server = True
    why = "the simulator is held against it"

    title: str
    question: str
    calibration: Mapping[str, Settings]
    """Changes of the configuration, each with a synthetic workload to calibrate on."""
    regimes: Mapping[str, Mapping[str, float]]
    """Of each the load, the tolerance, and the share of the engine's blocks that it has (1)."""
    seconds: float
    repeats: int
    _seen: dict[Path, Recorded] = field(default_factory=dict, init=False, repr=False)
    """Runs of the engine that the simulator plans alike."""

    def __post_init__(self) -> None:
        require_number("seconds", self.seconds, 0.1)
        require_whole("repeats", self.repeats, 1)
        for key in ("calibration", "regimes"):
            named = getattr(self, key)
            if not (isinstance(named, Mapping) and named):
                raise ConfigError(f"{key}={named}: must be a mapping of names to settings")
            for name, settings in named.items():
                if not isinstance(settings, Mapping):
                    raise ConfigError(f"{key}.{name}={settings}: must be a mapping of settings")
        for name, regime in self.regimes.items():
            for key in regime.keys() - {"load", "tolerance", "blocks"}:
                raise ConfigError(f"regimes.{name}.{key}: must be load, tolerance or blocks")
            for key in ("load", "tolerance", "blocks"):
                value = regime.get(key, 1 if key == "blocks" else None)
                require_number(f"regimes.{name}.{key}", value, above=0)

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        check_workload(runs.config["workload"])
        return ValidationRounds(self, runs).next_runs()

    def analyse(self, runs: Runs) -> Analysis | None:
        return ValidationRounds(self, runs).analyse()

    def progress(self, runs: Runs) -> str:
        wanted = self.repeats * (len(self.calibration) + len(self.regimes)) + len(self.regimes)
        done = len(runs.finished)
        return f"{done} of {wanted} runs {'is' if done == 1 else 'are'} complete"

    def key_of(self, arm: str) -> str:
        return arm


def check_workload(workload: Settings) -> None:
    """Raise ConfigError for a workload without a configurable load."""
    for key in ("rate", "requests"):
        if key not in workload:
            raise ConfigError(
                f"workload.{key}: is set by the validation, and this workload has none"
            )
    if workload.get("arrivals") in ("burst", "closed"):
        raise ConfigError(
            f"workload.arrivals={workload['arrivals']}: must be poisson, gamma or fixed, whose "
            "rate the validation sets"
        )


class ValidationRounds:
    """The rounds of one validation among `runs`: which come next, and their analysis.

    All runs are under `overrides`; cost.json is written to the folder `place`.
    """

    def __init__(
        self,
        study: Validate,
        runs: Runs,
        overrides: Sequence[str] = (),
        config: Settings | None = None,
        place: Path | None = None,
    ) -> None:
        self.study, self.runs, self.overrides = study, runs, overrides
        self.config = runs.config if config is None else config
        self.seed: int = self.config["seed"]
        self.path = (runs.spec.folder if place is None else place) / "cost.json"

    def next_runs(self) -> list[Arm]:
        """The next runs: a calibration, then each round's loads, and at last the simulator's
        runs."""
        if self.runs.failed:
            ((arm, _), failure) = next(iter(self.runs.failed.items()))
            raise error_of({arm: failure})
        for again in range(self.study.repeats):
            if not self._calibrations(again):
                return [
                    self._arm(
                        CALIBRATION.format(name), self._of_its_own(change), self.seed + 100 + again
                    )
                    for name, change in self.study.calibration.items()
                ]
            if not self._all(map(ENGINE.format, self.study.regimes), self.seed + again):
                return [
                    self._arm(ENGINE.format(name), plan, self.seed, again)
                    for name, plan in self._plans().items()
                ]
        if not self.complete:
            self._save(fitted(self._log()))
            return [self._simulating(name) for name in self.study.regimes]
        return []

    @property
    def complete(self) -> bool:
        return all(self.runs.of(SIMULATED.format(name)) for name in self.study.regimes)

    def _save(self, cost: Fitted) -> None:
        """Write cost.json unless it exists, since existing runs depend on it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        cost.save(new)
        if self.path.exists() and self.path.read_bytes() == new.read_bytes():
            new.unlink()
        else:
            new.replace(self.path)

    def analyse(self) -> Analysis:
        study = self.study
        log = self._log()
        cost = fitted(log)
        served = {name: self._recorded(name) for name in study.regimes}
        regimes = []
        for name, of in study.regimes.items():
            (simulated,) = self.runs.of(SIMULATED.format(name))
            tolerance = of["tolerance"]
            regimes.append(measured(name, of["load"], tolerance, served[name], simulated, cost))
        calibration = Calibration(log, cost)
        steps = sum(run.steps.num_rows for run in chain(self._fitted_to, *served.values()))
        return Analysis(
            finding=regime_report.finding(regimes, log.machine, steps),
            listings=[*regime_report.listings(regimes), *calibration.listings()],
            notes=[*calibration.notes(), *cost.notices, *regime_report.doubts(regimes)],
            data={
                "machine": dict(log.machine),
                "replayed_steps": steps,
                "calibration": calibration.data(),
                "regimes": {regime.name: regime_report.data(regime) for regime in regimes},
            },
            table=regime_report.table(regimes),
            drawings={"validation": regime_report.drawing(regimes)},
            used={"use it": f"cost=fitted cost.path={shown(self.path)}"},
        )

    # -- the engine's runs -------------------------------------------------------------------------

    def _calibrations(self, again: int) -> list[Recorded]:
        """The calibration runs of a round; empty if one is missing."""
        names = map(CALIBRATION.format, self.study.calibration)
        return self._all(names, self.seed + 100 + again)

    def _all(self, names: Iterator[str], number: int) -> list[Recorded]:
        """The runs of these arms; empty if one is missing. Raises an error if the simulator plans
        one differently."""
        keys = [(name, number) for name in names]
        if any(key not in self.runs.finished for key in keys):
            return []
        return [self._checked(name, self.runs.finished[name, n].folder) for name, n in keys]

    def _recorded(self, regime: str) -> list[Recorded]:
        return [self._checked(run.arm, run.folder) for run in self.runs.of(ENGINE.format(regime))]

    def _checked(self, name: str, folder: Path) -> Recorded:
        seen = self.study._seen
        if folder in seen:
            return seen[folder]
        (run,) = recorded_runs(str(folder))
        for pool in POOLS:
            wanted = run.config["memory"].get(pool)
            if wanted is not None and run.machine[pool] != wanted:
                raise ConfigError(
                    f"{run.folder}: the engine has {pool}={run.machine[pool]}, not {wanted} as "
                    "before: runs with other memory cannot be compared"
                )
        if difference := replayed(run):
            so = ", so there is nothing to compare"
            raise UserError([f"{name}: {difference.text(run.steps.num_rows, so)}"])
        seconds = float(run.steps["end"][-1].as_py())
        self.runs.say(
            f"{name}: {run.requests.num_rows} requests, {run.steps.num_rows} steps in "
            f"{seconds:.1f} s, all planned alike"
        )
        return seen.setdefault(folder, run)

    # -- what is asked for -------------------------------------------------------------------------

    @property
    def machine(self) -> Settings:
        """Facts of the first run; empty before it."""
        first = (CALIBRATION.format(next(iter(self.study.calibration))), self.seed + 100)
        run = self.runs.finished.get(first)
        return run.summary["machine"] if run else {}

    def _arm(self, name: str, changes: Settings, seed: int, again: int = 0) -> Arm:
        pinned = {f"memory.{pool}": self.machine[pool] for pool in POOLS if self.machine}
        whole = {"backend.limit": None, "backend.hurry": 1}
        every = {**whole, **pinned, **changes}
        return Arm(name, self.overrides, every, seeds=[seed], repeats=[again])

    def _of_its_own(self, change: Settings) -> Settings:
        """A change with another workload, without the settings of the current one."""
        changes = flat({key: value for key, value in change.items() if key != "workload"})
        if "workload" in change:
            settings = {"_target_": SYNTHETIC, "max_len": self.config["workload"].get("max_len")}
            changes["workload"] = {**settings, **change["workload"]}
        return changes

    def _plans(self) -> dict[str, Settings]:
        """The changes that make each regime: so many requests a second, for so many seconds."""
        machine = self.machine
        cost = fitted(log_of(self._calibrations(0), "the first calibration"))
        count = max(CAPACITY, FULL * machine["max_seqs"])
        # All of them at once.
        burst = {"workload.rate": AT_ONCE, "workload.requests": count}
        (job,) = self.runs.jobs_of([self._arm("burst", burst, self.seed)], str)
        most = summary_of(job.config, machine, job.seed, cost)["requests_per_s"]
        plans: dict[str, Settings] = {}
        for name, regime in self.study.regimes.items():
            rate = float(f"{regime['load'] * most:.3g}")
            blocks = max(round(regime.get("blocks", 1) * machine["blocks"]), 1)
            plans[name] = {
                "workload.rate": rate,
                "workload.requests": max(round(rate * self.study.seconds), FEWEST),
                "memory.blocks": blocks,
            }
        return plans

    def _simulating(self, regime: str) -> Arm:
        (run, *_) = self._recorded(regime)
        workload, memory = run.config["workload"], run.config["memory"]
        changes = {
            "workload.rate": workload["rate"],
            "workload.requests": workload["requests"],
            "memory.blocks": memory["blocks"],
            "backend": {
                "_target_": MODEL,
                "engine": run.config["backend"],
                "machine": run.machine,
                "path": str(self.path),
            },
        }
        return Arm(SIMULATED.format(regime), self.overrides, changes, seeds=[self.seed])

    # -- what is found -----------------------------------------------------------------------------

    @property
    def _fitted_to(self) -> list[Recorded]:
        return [run for again in range(self.study.repeats) for run in self._calibrations(again)]

    def _log(self) -> StepLog:
        fits = self._fitted_to
        return log_of(fits, f"{len(fits)} runs to calibrate on")


# -- a grid of validations -------------------------------------------------------------------------

Changes = tuple[str, ...]
"""The overrides of one validation, as on the command line."""


@dataclass(frozen=True, kw_only=True)
class Parity(Validate):
    """A validation under every combination of what `over` lists, such as `policy=fcfs,priority`.

    Where one fails, the others stand.
    """

    whole = False

    over: Sequence[str]
    _failed: dict[Changes, Failure] = field(default_factory=dict, init=False, repr=False)
    _configured: dict[Changes, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.over, (list, tuple)) or not self.over:
            raise ConfigError(f'over={self.over}: must be a list such as ["policy=fcfs,priority"]')
        for word in self.over:
            key, _, values = str(word).partition("=")
            if not key or not all(values.split(",")):
                raise ConfigError(f"over: {word}: must be of the form key=value,value")

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        self._check(runs)
        for number, changes in enumerate(self._combinations(), 1):
            if changes in self._failed:
                continue
            prefix = _prefix(changes)
            some = self._one(changes, runs)
            if not some.runs.jobs:
                runs.say(f"\n{number} of {len(self._combinations())}: {_said(changes)}")
            try:
                arms = some.next_runs()
            except Exception as error:
                self._fail(changes, error, runs)
                continue
            if arms:
                return [replace(arm, name=prefix + arm.name) for arm in arms]
        return []

    def analyse(self, runs: Runs) -> Analysis | None:
        readings: dict[Changes, Analysis] = {}
        for changes in self._combinations():
            rounds = self._one(changes, runs)
            if changes in self._failed or not rounds.complete:
                continue
            try:
                readings[changes] = rounds.analyse()
            except Exception as error:
                self._fail(changes, error, runs)
        wrong = {_said(changes): failure for changes, failure in self._failed.items()}
        if not readings and wrong:
            raise error_of(wrong)
        if not readings:
            return None
        rows = [row for changes, of in readings.items() for row in _rows(changes, of.data)]
        steps = sum(int(str(reading.data["replayed_steps"])) for reading in readings.values())
        beyond = sum(row[f"{key}_verdict"] == "beyond" for row in rows for key in JUDGED)
        return Analysis(
            finding=[
                f"All {steps:,} steps of {len(readings)} validations were planned alike.",
                f"{beyond} of {len(rows) * len(JUDGED)} errors are beyond the tolerance and twice "
                "the engine's own spread.",
            ],
            listings=[_listing(rows)],
            notes=[f"{_said(c)}: {note}" for c, of in readings.items() for note in of.notes],
            data={
                "steps": steps,
                "validations": {_said(changes): of.data for changes, of in readings.items()},
            },
            table=rows,
            failed={whose: str(failure) for whose, failure in wrong.items()},
            wrong=wrong,
        )

    def _fail(self, changes: Changes, error: Exception, runs: Runs) -> None:
        failure = failure_of(error, self._configured[changes], None)
        self._failed[changes] = failure
        runs.say(f"failed: {failure}")

    def progress(self, runs: Runs) -> str:
        combinations = self._combinations()
        started = sum(bool(runs.only(_prefix(changes)).jobs) for changes in combinations)
        return f"in validation {max(started, 1)} of {len(combinations)}"

    def _combinations(self) -> list[Changes]:
        pairs = (word.partition("=") for word in self.over)
        axes = [[f"{key}={value}" for value in values.split(",")] for key, _, values in pairs]
        return list(product(*axes))

    def _check(self, runs: Runs) -> None:
        for changes in self._combinations() if not self._configured else ():
            try:
                config = runs.spec.configured(_said(changes), changes)
                if not getattr(locate(config["backend"]["_target_"]), "alone", False):
                    raise ConfigError("must be engine, which is validated")
                check_workload(config["workload"])
                RunSpec(config, config["seed"]).prepare()
            except Exception as error:
                text = line(error).removeprefix(f"{_said(changes)}: ")
                raise ConfigError(f"{_said(changes)}: {text}") from error
            self._configured[changes] = config

    def _one(self, changes: Changes, runs: Runs) -> ValidationRounds:
        some = runs.only(_prefix(changes))
        place = runs.spec.folder / quote(",".join(changes), safe=" =,+@")
        return ValidationRounds(self, some, changes, self._configured[changes], place)


def _said(changes: Changes) -> str:
    return " ".join(changes)


def _prefix(changes: Changes) -> str:
    return f"{_said(changes)}: "


def _rows(changes: Changes, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, regime in content["regimes"].items():
        row: dict[str, Any] = dict(change.split("=", 1) for change in changes)
        row |= {"load": name}
        for key in JUDGED:
            metric = regime["metrics"][key]
            row |= {f"{key}_{name}": metric[name] for name in ("error", "spread", "at_pace")}
            row |= {f"{key}_verdict": regime["verdicts"][key]}
        metric = regime["metrics"]["preemptions"]
        row |= {f"preemptions_{side}": metric[side] for side in ("engine", "simulator")}
        rows.append(row)
    return rows


def _listing(rows: Sequence[Mapping[str, Any]]) -> Listing:
    """The errors of judged metrics; a star marks those beyond tolerance and spread."""
    settings = list(rows[0])[: list(rows[0]).index("load") + 1]
    lines = []
    for row in rows:
        line = {key: str(row[key]) for key in settings}
        for key in JUDGED:
            star = "*" * (row[f"{key}_verdict"] == "beyond")
            line[label_of(key)] = signed(row[f"{key}_error"]) + star
        both = row["preemptions_engine"], row["preemptions_simulator"]
        line["preemptions: engine, simulator"] = ", ".join(f"{count:,.0f}" for count in both)
        lines.append(line)
    note = "* beyond the tolerance and twice the spread"
    return Listing.of("Errors of the simulator", lines, note)
