"""Replay: check that the simulator plans the same steps as the engine for the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedsim.core import ConfigError
from pagedsim.fidelity.recorded import Recorded, recorded_runs
from pagedsim.fidelity.replay import Difference, replayed
from pagedsim.metrics.result import Listing
from pagedsim.run.job import Arm, Failure
from pagedsim.run.runs import Runs
from pagedsim.run.study import Analysis, Study


@dataclass(frozen=True)
class Replay(Study):
    """Replays all engine runs in the folder `run` in the simulator."""

    title: str
    question: str
    run: str | None

    asks = False
    reads = ("run", "study")

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        if self.run is None:
            raise ConfigError("run: must be given: run=<folder of an earlier study on the engine>")
        return ()

    def analyse(self, runs: Runs) -> Analysis:
        assert self.run is not None
        recorded = recorded_runs(self.run)
        differences = {}
        for run in recorded:
            differences[run.name] = found = replayed(run)
            steps = run.steps.num_rows
            runs.say(f"{run.name}: {f'{steps} of {steps} steps the same' if not found else 'no'}")
        return Analysis(
            finding=[self._finding(recorded, differences)],
            listings=[
                Listing(
                    "Runs of the engine, planned by the simulator",
                    ["run", "steps", "first difference"],
                    [
                        [run.name, f"{run.steps.num_rows:,}", _step(differences[run.name])]
                        for run in recorded
                    ],
                )
            ],
            data={
                "run": self.run,
                "runs": {
                    run.name: {
                        "steps": run.steps.num_rows,
                        "difference": (one := differences[run.name]) and one._asdict(),
                    }
                    for run in recorded
                },
            },
            table=[
                {
                    "run": run.name,
                    "steps": run.steps.num_rows,
                    "first_difference": (one := differences[run.name]) and one.step,
                }
                for run in recorded
            ],
            wrong={
                run.name: Failure(one.told(run.steps.num_rows, _since(run)))
                for run in recorded
                if (one := differences[run.name])
            },
        )

    def _finding(self, recorded: list[Recorded], found: dict[str, Difference | None]) -> str:
        steps = sum(run.steps.num_rows for run in recorded)
        if other := sum(one is not None for one in found.values()):
            return f"{other} of {len(recorded)} runs are planned otherwise by the simulator."
        return (
            f"All {steps} steps of {len(recorded)} runs were planned by the simulator as by the "
            "engine."
        )


def _step(difference: Difference | None) -> str:
    return "none" if difference is None else f"step {difference.step}"


def _since(run: Recorded) -> str:
    """Possible reasons for differences other than the simulator."""
    if changed := run.changed:
        verb = "has" if len(changed) == 1 else "have"
        return f"; {', '.join(changed)} {verb} changed since it was recorded"
    return ""
