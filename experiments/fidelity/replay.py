"""Replay: check that the simulator plans the same steps as the engine for the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedsim.core import ConfigError
from pagedsim.fidelity.recorded import recorded_runs
from pagedsim.fidelity.replay import replayed
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
        found, wrong, rows = {}, {}, []
        for run in recorded:
            one, steps = replayed(run), run.steps.num_rows
            found[run.name] = one
            rows.append([run.name, f"{steps:,}", f"step {one.step}" if one else "none"])
            runs.say(f"{run.name}: {f'{steps} of {steps} steps the same' if not one else 'no'}")
            if one is not None:
                changed, why = run.changed, ""
                if changed:
                    verb = "has" if len(changed) == 1 else "have"
                    why = f"; {', '.join(changed)} {verb} changed since it was recorded"
                wrong[run.name] = Failure(one.told(steps, why))
        steps = sum(run.steps.num_rows for run in recorded)
        finding = (
            f"{len(wrong)} of {len(recorded)} runs are planned otherwise by the simulator."
            if wrong
            else f"All {steps} steps of {len(recorded)} runs were planned by the simulator as by "
            "the engine."
        )
        head = ["run", "steps", "first difference"]
        return Analysis(
            finding=[finding],
            listings=[Listing("Runs of the engine, planned by the simulator", head, rows)],
            data={
                "run": self.run,
                "runs": {
                    run.name: {
                        "steps": run.steps.num_rows,
                        "difference": (one := found[run.name]) and one._asdict(),
                    }
                    for run in recorded
                },
            },
            table=[
                {
                    "run": run.name,
                    "steps": run.steps.num_rows,
                    "first_difference": (one := found[run.name]) and one.step,
                }
                for run in recorded
            ],
            wrong=wrong,
        )
