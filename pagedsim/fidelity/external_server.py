"""The simulated server that stands for an outside one, and the coefficients of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pagedsim.core import ConfigError, Request, Scheduler, StepPlan
from pagedsim.fidelity.external_log import Latencies, Log
from pagedsim.fidelity.external_requests import LogRequests, guesses
from pagedsim.run.backend import Settings
from pagedsim.run.parts import backend_of
from pagedsim.run.simulated import Simulated
from pagedsim.sim.cost import CostModel, Fitted
from pagedsim.sim.simulate import simulate


class Weights(NamedTuple):
    """What a step's time is made of, in seconds."""

    decode_step: float
    """A step of nothing but decodes: reading the model's weights, and the host's work."""
    mixed_step: float
    """The same of a step with prompts."""
    prompt_token: float
    prompt_pair: float
    """A token of a prompt and one that it may attend to."""
    decode: float
    """A sequence that decodes."""
    context_token: float
    """One that a decode attends to."""

    @classmethod
    def of(cls, cost: CostModel) -> Weights:
        """Those that come nearest to a cost model that counts otherwise."""
        one, two = cost.decode_seconds(1, 0), cost.decode_seconds(2, 0)
        read = (cost.decode_seconds(1, 4096) - one) / 4096
        short, long, longer = (cost.recompute_seconds(size) for size in (1024, 2048, 4096))
        # A prompt's time is a + b·n + c·n², through three points.
        pair = ((longer - long) / 2048 - (long - short) / 1024) / (4096 - 1024)
        token = (long - short) / 1024 - pair * (1024 + 2048)
        fixed = 2 * one - two
        found = (fixed, fixed, token, pair, two - one, read)
        return cls(*(max(value, LEAST) for value in found))

    def settings(self) -> dict[str, Mapping[str, float]]:
        """As `cost=fitted` takes them, in ms."""
        prompt = {
            "constant": self.mixed_step,
            "prefill_tokens": self.prompt_token,
            "prefill_attention": self.prompt_pair,
        }
        decode = {"decode_context": self.context_token}
        sets = {
            "prefill": prompt,
            "decode": {"constant": self.decode_step, "decode_count": self.decode, **decode},
            # Beside prompts a decode is a token more of the same matrix products.
            "mixed": {**prompt, "decode_count": max(self.prompt_token, self.decode), **decode},
        }
        return {
            kind: {name: 1e3 * value for name, value in of.items()} for kind, of in sets.items()
        }


LEAST = 1e-12
"""Seconds: what a cost model leaves out altogether may still turn out to take time."""


class ExternalServer:
    """A server with the outside one's settings."""

    def __init__(self, config: Settings, log: Log, first_step: float = 0.0) -> None:
        """`first_step`: seconds that the first step takes at least, where the server was cold."""
        backend = backend_of(config)
        if not isinstance(backend, Simulated):
            raise ConfigError("backend=engine: must be sim: requests= are of a server elsewhere")
        self.config, self.log, self.backend = config, log, backend
        self.first_step = first_step

    @property
    def facts(self) -> Settings:
        """What was fitted."""
        replica = self.backend.stage(self.config, 0).replica
        return {
            "model": replica.model.name,
            "hardware": replica.hardware.name,
            "tensor_parallel": replica.tensor_parallel,
            "kv_cache_dtype": replica.kv_format,
        }

    @property
    def guessed_blocks(self) -> int | None:
        """How many blocks it is taken to have, where the configuration does not say."""
        if self.config["memory"].get("blocks") is not None:
            return None
        return self.backend.stage(self.config, 0).scheduler.memory.total

    def begin(self) -> Weights:
        """What `cost=` says before any fit."""
        return Weights.of(self.backend.stage(self.config, 0).cost)

    def cost(self, weights: Weights, **known: object) -> Fitted:
        """The cost model of these weights."""
        cost = self.backend.stage(self._with(weights, known), 0).cost
        assert isinstance(cost, Fitted)
        return cost

    def serve(self, weights: Weights, first: int | None = None) -> Served:
        """Serve the log's requests; with `first` until so many of the earliest are answered."""
        return self._serve(self._with(weights, {}), first)

    def serve_unfitted(self) -> Served:
        """Serve them all with step times as `cost=` says."""
        return self._serve(self.config, None)

    def _with(self, weights: Weights, known: Mapping[str, object]) -> Settings:
        cost = {"_target_": "pagedsim.sim.cost.Fitted", "unit": "ms", **weights.settings(), **known}
        return {**self.config, "cost": cost}

    def _serve(self, config: Settings, first: int | None) -> Served:
        backend = self.backend
        stage = backend.stage(config, 0)
        named = config["memory"].get("kind") == "prefix"
        served = Served(self.log, first or len(self.log))
        with suppress(_Enough):
            simulate(
                stage.scheduler,
                LogRequests(self.log, named, guesses(config, self.log)),
                _Cold(stage.cost, self.first_step),
                served,
                overlap=backend.overlap,
                fast_forward=backend.fast_forward,
            )
        return served


class _Cold:
    """A cost model whose first step takes `least` seconds at least."""

    def __init__(self, cost: CostModel, least: float) -> None:
        self.cost, self.least = cost, least
        self.by_totals = cost.by_totals
        self.decode_seconds, self.swap_seconds = cost.decode_seconds, cost.swap_seconds

    def step_seconds(self, plan: StepPlan) -> float:
        least, self.least = self.least, 0.0
        return max(self.cost.step_seconds(plan), least)


class _Enough(Exception):
    """Everybody who counts has been answered."""


@dataclass
class Served:
    """A recorder of what the simulated server did."""

    log: Log
    wanted: int
    steps: int = 0
    preemptions: int = 0
    largest: dict[str, int] = field(default_factory=dict)
    """The largest steps: what one may know from this log."""

    def __post_init__(self) -> None:
        self._first = np.full(len(self.log), np.nan)
        self._last = self._first.copy()
        self._left = self.wanted
        self._plan: StepPlan | None = None

    @property
    def latencies(self) -> Latencies:
        """Of all requests; NaN for those that were not answered."""
        arrived, output = self.log.arrived, self.log.output
        return Latencies(self._first - arrived, self._last - arrived, output)

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        for rejection in plan.rejected:
            place = self.log.places[int(rejection.request.id)]
            raise ConfigError(f"{place} is refused by the simulated server: {rejection.reason}")
        self._plan = plan
        self.preemptions += len(plan.preempted) + len(plan.displaced)
        self._count(plan)

    def again(self, end: float, used_blocks: int) -> None:
        assert self._plan is not None
        self._count(self._plan)

    def left(self, request: Request) -> None:
        row = int(request.id)
        assert request.first_token_at is not None and request.finished_at is not None
        self._first[row], self._last[row] = request.first_token_at, request.finished_at
        self._left -= row < self.wanted
        if not self._left:
            raise _Enough

    def _count(self, plan: StepPlan) -> None:
        self.steps += 1
        for name in _SIZES:
            if (size := getattr(plan, name)) > self.largest.get(name, 0):
                self.largest[name] = size


_SIZES = (
    "prefill_tokens",
    "prefill_attention",
    "prefill_context",
    "decode_count",
    "decode_context",
)
