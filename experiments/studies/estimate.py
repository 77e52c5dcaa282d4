"""Estimate of capacity, step times and bottlenecks from data sheets, without a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.studies.estimate_data import Case, data_of
from experiments.studies.estimate_words import finding, listings, notes, rows
from pagedsim.core import ConfigError, PagedMemory
from pagedsim.core.errors import require_whole
from pagedsim.report.figures import FigureSpec
from pagedsim.report.roofline import draw_roofline
from pagedsim.run.backend import RunConfig
from pagedsim.run.job import Arm
from pagedsim.run.parts import refuse_fleet
from pagedsim.run.runs import Runs
from pagedsim.run.simulated import Simulated
from pagedsim.run.study import Analysis, Study
from pagedsim.sim.cost import Roofline

PROMPT = 1024
"""Default context length in tokens."""


@dataclass(frozen=True, kw_only=True)
class Estimate(Study):
    """Arithmetic on the model's shape and the GPU's data sheet, without a run."""

    asks = False
    backends = ("sim",)
    why = "an estimate runs nothing"

    title: str
    question: str
    prompt: int | None = None
    batch: int | None = None
    output: int = 256

    def __post_init__(self) -> None:
        for key in ("prompt", "batch", "output"):
            if getattr(self, key) is not None:
                require_whole(key, getattr(self, key), 1)

    def next_runs(self, runs: Runs) -> Sequence[Arm]:
        case_of(runs.config, self.prompt, self.batch, self.output)  # raises ConfigError early
        return ()

    def analyse(self, runs: Runs) -> Analysis:
        return estimated(runs.config, self.prompt, self.batch, self.output)


def estimated(
    config: Mapping[str, Any], prompt: int | None, batch: int | None, output: int
) -> Analysis:
    """The estimate of a configuration; raises ConfigError if it is invalid."""
    case = case_of(config, prompt, batch, output)
    data = data_of(case)
    drawing = FigureSpec(
        "Roofline",
        "Each product of a prefill and of decodes: how much it computes for each byte that it "
        "reads, and the rate that it reaches by that. Dashed: the parts of the data sheet's rates "
        "that kernels are taken to reach.",
        partial(draw_roofline, data),
    )
    return Analysis(
        finding=list(finding(data)),
        rows=rows(data),
        listings=listings(data),
        notes=notes(case, data),
        data=data,
        table=[
            {"step": step, **product}
            for step, products in data["products"].items()
            for product in products
        ],
        drawings={"roofline": drawing},
    )


def case_of(config: Mapping[str, Any], prompt: int | None, batch: int | None, output: int) -> Case:
    """The server and the request sizes of a configuration."""
    run_config = RunConfig(dict(config))
    refuse_fleet(run_config, "an estimate is of one server")
    backend = run_config.backend
    assert isinstance(backend, Simulated)
    stage = backend.simulation(run_config)
    if not isinstance(stage.cost, Roofline):
        raise ConfigError(
            f"cost._target_={config['cost']['_target_']}: does not know what binds a step; "
            "an estimate takes cost=roofline"
        )
    if not isinstance(stage.scheduler.memory, PagedMemory):
        raise ConfigError(
            f"memory.kind={config['memory']['kind']}: must be paged or prefix; how many contexts "
            "reservations hold depends on what they are reserved for"
        )
    longest = stage.scheduler.max_model_len
    if prompt is not None and prompt > longest:
        raise ConfigError(
            f"prompt={prompt}: must be at most {longest:,}, the longest context that "
            f"model={stage.replica.model.name} and the memory of hardware="
            f"{stage.replica.hardware.name} hold"
        )
    prompt = prompt or min(PROMPT, longest)
    return Case(
        cost=stage.cost,
        power=backend.power,
        scheduler=stage.scheduler,
        server=stage.server,
        memory=config["memory"],
        prompt=prompt,
        batch=batch,
        output=max(1, min(output, longest - prompt)),
        wanted=output,
    )
