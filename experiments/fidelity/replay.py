"""Replay: check that the simulator plans the same steps as the engine for the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagedsim.core import ConfigError
from pagedsim.fidelity.recorded import recorded_runs
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
        steps = {run.name: run.steps.num_rows for run in recorded}
        differences: dict[str, Difference | None] = {}
        wrong = {}
        for run in recorded:
            name = run.name
            differences[name] = difference = replayed(run)
            alike = "no" if difference else f"{steps[name]} of {steps[name]} steps the same"
            runs.say(f"{name}: {alike}")
            if difference is not None:
                changed, why = run.changed, ""
                if changed:
                    verb = "has" if len(changed) == 1 else "have"
                    why = f"; {', '.join(changed)} {verb} changed since it was recorded"
                wrong[name] = Failure(difference.text(steps[name], why))
        finding = (
            f"{len(wrong)} of {len(recorded)} runs are planned otherwise by the simulator."
            if wrong
            else f"All {sum(steps.values())} steps of {len(recorded)} runs were planned by the "
            "simulator as by the engine."
        )
        rows = [
            {
                "run": name,
                "steps": f"{steps[name]:,}",
                "first difference": f"step {difference.step}" if difference else "none",
            }
            for name, difference in differences.items()
        ]
        return Analysis(
            finding=[finding],
            listings=[Listing.of("Runs of the engine, planned by the simulator", rows)],
            data={
                "run": self.run,
                "runs": {
                    name: {"steps": steps[name], "difference": difference and difference._asdict()}
                    for name, difference in differences.items()
                },
            },
            table=[
                {"run": name, "steps": steps[name], "first_difference": d and d.step}
                for name, d in differences.items()
            ],
            wrong=wrong,
        )
