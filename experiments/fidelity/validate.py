"""Validate: how far the simulator is from the engine on this machine, with requests not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from omegaconf import OmegaConf

from experiments.fidelity.calibrate import fitted, told
from experiments.fidelity.replay import replayed
from pagedsim.core import ConfigError, Scheduler
from pagedsim.core.errors import require_number, require_whole
from pagedsim.fidelity.engine_model import scheduler_of
from pagedsim.fidelity.recorded import Recorded, recorded_runs
from pagedsim.fidelity.steplog import log_of, predicted, samples_of
from pagedsim.metrics.agreement import JUDGED, Regime
from pagedsim.metrics.catalogue import label_of
from pagedsim.metrics.files import write_json
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.study import Run
from pagedsim.metrics.summary import summarise
from pagedsim.report.validation import Validation, show_validation, write_validation
from pagedsim.run.backend import Settings
from pagedsim.run.command import command, typed
from pagedsim.run.errand import Errand
from pagedsim.run.failure import Failure
from pagedsim.run.folder import kept_configuration
from pagedsim.run.job import Job, run_job
from pagedsim.run.parts import backend_of
from pagedsim.run.stoppable import StoppableRecorder
from pagedsim.run.store import Recipe, forget, recipe, store, stored
from pagedsim.sim.cost import Fitted
from pagedsim.sim.simulate import simulate
from pagedsim.user_error import Interruption, UserError, shown

CAPACITY = 200
"""Requests, all at once, whose simulation tells how many can be served in a second."""
FULL = 4
"""Or so many times as many as run at once, so that most of the time the server is full."""
AT_ONCE = 1e6
"""Requests a second."""
FEWEST = 20
"""Requests of a regime, however slow the machine."""
UNEVEN = 0.1
"""A spread of the engine's own runs that takes the meaning from a comparison with them."""
WHOLE = {"limit": None, "hurry": 1}
"""Settings of the backend: it serves what a regime says, when it says so."""
SYNTHETIC = "pagedsim.workload.synthetic"
"""What calibrations take their requests from, whatever is validated."""
POOLS = ("blocks", "cpu_blocks")
"""What every run takes from the first, unless a regime says otherwise."""


@dataclass(frozen=True)
class Validate(Errand):
    """Calibrate on some workloads, then hold another against the simulator, under three loads."""

    calibration: Mapping[str, Settings]
    """Changes of the configuration, each with a synthetic workload to calibrate on."""
    regimes: Mapping[str, Mapping[str, float]]
    """Of each the load, the tolerance, and the share of the engine's blocks that it has (1)."""
    seconds: float
    repeats: int
    seed: int = 0

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

    def perform(self, folder: Path) -> None:
        config = kept_configuration(folder)
        self.check(config)
        bench = _Bench(config, folder / "runs")
        try:
            self._perform(bench, folder)
        except KeyboardInterrupt:
            wanted = self.repeats * (len(self.calibration) + len(self.regimes))
            raise Interruption(
                f"{bench.complete} of {wanted} runs are complete; the same command with "
                f"hydra.run.dir={shown(folder)} goes on from there"
            ) from None

    def _perform(self, bench: _Bench, folder: Path) -> None:
        served: dict[str, list[Recorded]] = {name: [] for name in self.regimes}
        fits: list[Recorded] = []
        plans: dict[str, Settings] = {}
        for again in range(self.repeats):
            for name, change in self.calibration.items():
                seed = self.seed + 100 + again
                fits.append(bench.serve(f"calibration-{name}", bench.of_its_own(change), seed))
            if not plans:
                plans = self._plans(bench, fitted(log_of(fits, "the first calibration")))
            for name, change in plans.items():
                served[name].append(bench.serve(name, change, self.seed, again))
        log = log_of(fits, f"{len(fits)} runs to calibrate on")
        cost = fitted(log)
        cost.save(folder / "cost.json")
        regimes = [
            self._regime(name, bench.configured(plans[name]), runs, cost)
            for name, runs in served.items()
        ]
        done = Validation(
            regimes=regimes,
            machine=fits[0].machine,
            command=command(typed("tracking")),
            steps=sum(run.steps.num_rows for runs in (fits, *served.values()) for run in runs),
            calibration=told(log, cost),
            notes=[*cost.notices, *_doubts(regimes)],
        )
        show_validation(done)
        report = write_validation(done, folder)
        write_json(folder / "validate.json", done.record())
        print(f"results   {shown(folder / 'validate.json')}")
        print(f"report    {shown(report)}")
        print(f"use it    cost=fitted cost.path={shown(folder / 'cost.json')}")

    def check(self, config: Settings) -> None:
        """Raise ConfigError for what cannot be validated."""
        if not backend_of(config).alone:
            raise ConfigError("backend=sim: experiment=validate needs backend=engine")
        workload = config["workload"]
        for key in ("rate", "requests"):
            if key not in workload:
                raise ConfigError(
                    f"workload.{key}: is set by experiment=validate, and this workload has none"
                )
        if workload.get("arrivals") in ("burst", "closed"):
            raise ConfigError(
                f"workload.arrivals={workload['arrivals']}: must be poisson, gamma or fixed, whose "
                "rate experiment=validate sets"
            )

    def _plans(self, bench: _Bench, cost: Fitted) -> dict[str, Settings]:
        """The changes that make each regime: so many requests a second, for so many seconds."""
        count = max(CAPACITY, FULL * bench.machine["max_seqs"])
        burst = {"workload": {"rate": AT_ONCE, "requests": count}}
        summary, _ = simulated(bench.configured(burst), bench.machine, self.seed, cost)
        most = summary["requests_per_s"]
        print(f"it can serve about {most:.3g} requests/s, says the first calibration")
        plans: dict[str, Settings] = {}
        for name, regime in self.regimes.items():
            rate = float(f"{regime['load'] * most:.3g}")
            count = max(round(rate * self.seconds), FEWEST)
            blocks = max(round(regime.get("blocks", 1) * bench.machine["blocks"]), 1)
            plans[name] = {
                "workload": {"rate": rate, "requests": count},
                "memory": {"blocks": blocks},
            }
        return plans

    def _regime(self, name: str, config: Settings, runs: list[Recorded], cost: Fitted) -> Regime:
        machine = runs[0].machine
        summary, requests = simulated(config, machine, self.seed, cost)
        pace = [_pace(run, cost) for run in runs]
        slowed = [simulated(config, machine, self.seed, cost.slowed(1 + one)) for one in pace]
        return Regime(
            name,
            self.regimes[name]["load"],
            config["workload"]["rate"],
            self.regimes[name]["tolerance"],
            [summarised(run.requests, run.steps, run.machine) for run in runs],
            summary,
            pace,
            [paced for paced, _ in slowed],
            [run.requests for run in runs],
            requests,
        )


class _Bench:
    """Where the engine is run; its first run decides how much memory there is."""

    def __init__(self, config: Settings, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self.machine: Settings = {}
        self.complete = 0
        """Runs so far."""

    def of_its_own(self, change: Settings) -> Settings:
        """A change whose workload is another, and none of the settings of the one that is there."""
        if "workload" not in change:
            return change
        own = {"_target_": SYNTHETIC, "max_len": self._config["workload"].get("max_len")}
        return {**change, "workload": {**own, **change["workload"]}}

    def configured(self, change: Settings) -> Settings:
        """The configuration with a change."""
        pinned = {name: self.machine[name] for name in POOLS if self.machine}
        base = dict(self._config)
        if "_target_" in change.get("workload", {}):
            del base["workload"]
        merged = OmegaConf.merge(base, {"backend": WHOLE, "memory": pinned}, change)
        return cast(Settings, OmegaConf.to_container(merged))

    def serve(self, name: str, change: Settings, seed: int, again: int = 0) -> Recorded:
        """A run of the engine that the simulator plans alike; raises what is wrong with it."""
        folder = self._folder / name / f"run-{seed + again}"
        job = Job(name, seed, self.configured(change), folder)
        made_of = recipe(job)
        kept = stored(job, made_of) is not None
        if not kept:
            self._run(job, made_of)
        (run,) = recorded_runs(str(folder))
        self._same_blocks(run)
        if difference := replayed(run):
            so = ", so there is nothing to compare"
            raise UserError([difference.told(name, run.steps.num_rows, so)])
        seconds = float(run.steps["end"][-1].as_py())
        count, steps = run.requests.num_rows, run.steps.num_rows
        there = ", there already" * kept
        print(
            f"{name}: {count} requests, {steps} steps in {seconds:.1f} s, all planned alike{there}"
        )
        self.complete += 1
        return run

    def _run(self, job: Job, made_of: Recipe) -> None:
        forget(job)
        outcome = run_job(job, StoppableRecorder())
        if isinstance(outcome, Failure):
            raise UserError([f"{job.arm}: {outcome}"], expected=outcome.expected)
        if not isinstance(outcome, Run):
            raise KeyboardInterrupt
        if not store(job, made_of):
            raise ConfigError(f"{job.arm}: code or a file of it changed while it ran: begin anew")

    def _same_blocks(self, run: Recorded) -> None:
        self.machine = self.machine or run.machine
        for name in POOLS:
            wanted = run.config["memory"].get(name)
            if wanted is not None and run.machine[name] != wanted:
                raise ConfigError(
                    f"{run.folder}: the engine has {name}={run.machine[name]}, not {wanted} as "
                    "before: runs with other memory cannot be compared"
                )


def simulated(
    config: Settings, machine: Settings, seed: int, cost: Fitted
) -> tuple[dict[str, Any], pa.Table]:
    """Summary and requests of a run of the engine, as the simulator has it."""
    recorder, scheduler = Recorder(), scheduler_of(config, machine, Scheduler)
    workload = backend_of(config).workload(config["workload"], seed)
    # Where there is a bus, the engine lets blocks go out beside the computation.
    simulate(scheduler, workload, cost, recorder, overlap=machine.get("cuda") is not None)
    requests = recorder.requests_table()
    return summarised(requests, recorder.steps_table(), machine), requests


def summarised(requests: pa.Table, steps: pa.Table, machine: Settings) -> dict[str, Any]:
    """The summary of a run, whoever made it."""
    return summarise(
        requests,
        steps,
        total_blocks=machine["blocks"],
        block_size=machine["block_size"],
        max_seqs=machine["max_seqs"],
    )


def _pace(run: Recorded, cost: Fitted) -> float:
    """How much longer than the model says the engine took for its steps."""
    samples = samples_of(run.steps)
    taken = sum(sample.seconds for sample in samples)
    return taken / sum(predicted(cost, sample) for sample in samples) - 1


def _doubts(regimes: Sequence[Regime]) -> list[str]:
    """What a reader must know."""
    doubts = []
    last = max(regimes, key=lambda regime: regime.load)
    if not any(summary["preemptions"] for summary in last.engine):
        doubts.append(f"nobody was preempted under {last.name}: memory.blocks is too large")
    spreads = {
        (regime.name, key): found.spread
        for regime in regimes
        for key, found in regime.agreements().items()
        if key in JUDGED and found.spread > UNEVEN
    }
    if spreads:
        (name, key), most = max(spreads.items(), key=lambda item: item[1])
        doubts.append(
            f"the engine is far from itself: under {name} the {label_of(key)} of its runs differs "
            f"by ± {100 * most:.0f} %, with which little can be shown; let nothing else run here"
        )
    return doubts
