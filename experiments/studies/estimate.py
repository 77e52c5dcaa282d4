"""Estimate: what fits, how long steps take and what binds them, from data sheets and no run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from experiments.papers.reproduction import Reading
from experiments.studies.estimate_data import Case, data_of
from experiments.studies.estimate_words import finding, listings, notes, rows
from pagedsim.core import ConfigError, PagedMemory
from pagedsim.core.errors import require_whole
from pagedsim.metrics.result import Result
from pagedsim.report.pictures import Drawing
from pagedsim.report.result import show_result, write_result
from pagedsim.report.roofline import draw_roofline
from pagedsim.run.command import command, typed
from pagedsim.run.errand import Errand
from pagedsim.run.folder import kept_configuration
from pagedsim.run.parts import backend_of
from pagedsim.run.simulated import Simulated
from pagedsim.sim.cost import Roofline
from pagedsim.user_error import shown

PROMPT = 1024
"""Tokens of a context, where none are given."""
TITLE = "What fits, how long it takes, and what binds it"


@dataclass(frozen=True, kw_only=True)
class Estimate(Errand):
    """Nothing runs: all is arithmetic on the model's shape and the GPU's data sheet."""

    prompt: int | None = None
    batch: int | None = None
    output: int = 256

    def __post_init__(self) -> None:
        for key in ("prompt", "batch", "output"):
            if getattr(self, key) is not None:
                require_whole(key, getattr(self, key), 1)

    def perform(self, folder: Path) -> None:
        config = kept_configuration(folder)
        reading = read(config, self.prompt, self.batch, self.output)
        result = Result(
            name=str(HydraConfig.get().runtime.choices.get("experiment")),
            title=TITLE,
            question="How far does paper and pencil get?",
            command=command(typed("tracking", "jobs", "hydra")),
            finding=reading.finding,
            rows=reading.rows,
            listings=reading.listings,
            notes=reading.notes,
            data=reading.data,
        )
        show_result(result)
        report = write_result(result, reading.drawings if config["report"] else None, folder)
        print(f"results   {shown(folder)}")
        if report is not None:
            print(f"report    {shown(report)}")


def read(config: Mapping[str, Any], prompt: int | None, batch: int | None, output: int) -> Reading:
    """All that can be said of a configuration; raises ConfigError for what cannot be."""
    case = case_of(config, prompt, batch, output)
    data = data_of(case)
    drawing = Drawing(
        "Roofline",
        "Each product of a prefill and of decodes: how much it computes for each byte that it "
        "reads, and the rate that it reaches by that. Dashed: the parts of the data sheet's rates "
        "that kernels are taken to reach.",
        partial(draw_roofline, data),
    )
    return Reading(
        finding=list(finding(data)),
        rows=rows(data),
        listings=listings(data),
        notes=notes(case, data),
        data=data,
        drawings={"roofline": drawing},
    )


def case_of(config: Mapping[str, Any], prompt: int | None, batch: int | None, output: int) -> Case:
    """The server that a configuration describes, and what is asked of it."""
    backend = backend_of(dict(config))
    if not isinstance(backend, Simulated):
        raise ConfigError("backend=engine: must be sim; an estimate runs nothing")
    stage = backend.stage(dict(config), 0)
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
        scheduler=stage.scheduler,
        memory=config["memory"],
        prompt=prompt,
        batch=batch,
        output=max(1, min(output, longest - prompt)),
        wanted=output,
    )
