"""The requests of a server elsewhere, as our own is to serve them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np

from pagedsim.core import Request
from pagedsim.core.contracts import vet
from pagedsim.core.source import Job, Mode
from pagedsim.fidelity.external_log import Log
from pagedsim.run.backend import Settings
from pagedsim.run.objects import make
from pagedsim.workload.draws import stream
from pagedsim.workload.predictor import CONTRACT, NoPredictor, Predictor


@dataclass(frozen=True)
class LogRequests:
    """The log as a workload."""

    log: Log
    named: bool
    """Whether prompts have token contents for a prefix cache; otherwise all differ."""
    guesses: Sequence[float | None]
    """How long each answer is taken to be."""
    front: float = 0.0
    """Seconds from when a request comes until the scheduler has it."""
    mode: Mode = "open"
    users: int | None = None
    think_time: float = 0.0
    turns: None = None

    def requests(self) -> Iterator[Job]:
        log, token = self.log, 0
        for row in range(len(log)):
            length = int(log.prompt[row])
            prompt: Sequence[int] | int = length
            if self.named and log.contents is not None:
                prompt = log.contents[row]
            elif self.named:
                prompt = range(token, token + length)
            token += length
            known: dict[str, Any] = {"client": log.client[row], "predicted_len": self.guesses[row]}
            arrival = float(log.arrived[row]) + self.front
            request = Request(row, prompt, arrival=arrival, **known)
            yield request, int(log.output[row])


def guesses(config: Settings, log: Log) -> list[float | None]:
    """What `predictor=` says of each answer's length; None where it says nothing."""
    settings = config.get("predictor")
    made = NoPredictor() if settings is None else make("predictor", settings, Predictor)
    predictor = vet(made, CONTRACT)
    said = predictor.guesses(log.output.astype(np.int32), stream(config["seed"], "predictions"))
    return [None if isnan(guess) else guess for guess in said.tolist()]
