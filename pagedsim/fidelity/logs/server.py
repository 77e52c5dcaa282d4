"""The simulated counterpart of an external server, and the file of a fit to its log.

The constants are those of the roofline and the time before the scheduler. They belong to the GPU
and the software, not to a model, so that a fit to one model applies to another.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np

from pagedsim.backends.sim import Simulated, Simulation
from pagedsim.core import ConfigError, Request, Scheduler, StepPlan
from pagedsim.core.contracts import vet
from pagedsim.core.errors import require_number
from pagedsim.core.memory import PrefixMemory
from pagedsim.fidelity import sheets
from pagedsim.fidelity.logs.constants import FRONT, KERNELS, TIED, Constant, Constants
from pagedsim.fidelity.logs.log import Latencies, Log
from pagedsim.fidelity.logs.score import Rows, Scores, score
from pagedsim.sim.cost import CostModel, Roofline
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.spec.objects import make
from pagedsim.spec.run import RunSpec, Settings
from pagedsim.workload import Workload
from pagedsim.workload.predictor import CONTRACT, Predictor
from pagedsim.workload.tokens import PrefixedPrompts


class ExternalServer:
    """A simulated server with the settings of the external one."""

    def __init__(self, config: Settings, log: Log, first_step: float = 0.0) -> None:
        """`first_step`: least seconds of its first answer, for a server that was cold."""
        backend = RunSpec(config).backend
        if not isinstance(backend, Simulated):
            raise ConfigError("backend=engine: must be sim: requests= are of a server elsewhere")
        self.config, self.log, self.backend = config, log, backend
        self.first_step = first_step

    @property
    def facts(self) -> Settings:
        """The settings that its speed depends on."""
        replica = self.built.replica
        return replica.more_than_shared | {
            "model": replica.model.name,
            "hardware": replica.hardware.name,
            "family": replica.hardware.family,
            "tensor_parallel": replica.tensor_parallel,
            "kv_cache_dtype": replica.kv_format,
            "quantization": replica.quantization or "none",
            "stack": str(self.config["stack"]["name"]),
            "batching": str(self.config["batching"]["_target_"]).rpartition(".")[2],
            "async_scheduling": bool(self.config["server"]["async_scheduling"]),
        }

    @property
    def family(self) -> str | None:
        """The family of its GPU's kernels, if there is one."""
        return self.built.replica.hardware.family

    @property
    def finds_prefixes(self) -> bool:
        return isinstance(self.built.scheduler.memory, PrefixMemory)

    @cached_property
    def built(self) -> Simulation:
        """Its scheduler, cost model and replica, to be read; every `serve` builds its own."""
        return self.backend.simulation(RunSpec(self.config))

    # -- constants ---------------------------------------------------------------------------------

    @property
    def roofline(self) -> Roofline:
        """Its cost model; raises ConfigError where it is no roofline."""
        if not isinstance(cost := self.built.cost, Roofline):
            raise ConfigError(
                f"cost._target_={self.config['cost'].get('_target_')}: must be cost=roofline, "
                "whose constants are what a log of requests is fitted with"
            )
        return cost

    @property
    def constants(self) -> dict[str, float]:
        """The constants of `cost=`."""
        cost = self.roofline
        fitted = {name: value for name, value in cost.constants.items() if name not in TIED}
        return fitted | {FRONT: 1e3 * cost.server_seconds}

    def _cost_with(self, constants: Constants) -> Settings:
        """The settings of its cost model with these constants instead of its own."""
        cost = self.config["cost"]
        if not constants:
            return cost
        old = self.roofline.constants
        settings = {name: value for name, value in constants.items() if name != FRONT}
        for name, leader in TIED.items():
            if leader in constants:
                settings[name] = min(old[name] * constants[leader] / old[leader], 1.0)
        stack = {**(cost.get("stack") or self.config["stack"])}
        front = {"server_ms": constants[FRONT]} if FRONT in constants else {}
        return {**cost, **settings, "stack": stack | front}

    def words(self, constants: Constants, names: Collection[str]) -> str:
        """Overrides of the command line that set the named constants, with those that depend on
        them."""
        settings = self._cost_with(constants)
        named = [*names, *(name for name, leader in TIED.items() if leader in names)]
        overrides = [f"cost.{name}={settings[name]:.4g}" for name in named if name != FRONT]
        if FRONT in named:
            overrides.append(f"stack.server_ms={constants[FRONT]:.4g}")
        return " ".join(overrides)

    def cost_of(self, model: ModelShape, constants: Constants) -> CostModel:
        """The cost model of another model on this server, whether or not it has room for it."""
        simulation = self.built
        replica = Replica.of(simulation.server, model, simulation.replica.hardware)
        return RunSpec({**self.config, "cost": self._cost_with(constants)}).cost(replica)

    def at_its_peak(self) -> ExternalServer:
        """The same server at the full rates of the data sheet and with software that takes no
        time."""
        constants = Roofline(self.built.replica).constants
        peak = {name: 1.0 if Constant(name).share else 0.0 for name in constants}
        roofline = sheets.settings("cost", "roofline")
        cost = {**roofline, "stack": sheets.settings("stack", "ideal"), **peak}
        return ExternalServer({**self.config, "cost": cost}, self.log)

    # -- requests ----------------------------------------------------------------------------------

    @cached_property
    def _workload(self) -> Workload:
        """The log's requests, with contents for a prefix cache: all different if it has none."""
        log, config = self.log, self.config
        clients = sorted(set(log.client))
        prompts = log.contents
        if prompts is None:
            alone = np.full(len(log), -1, np.int32)
            prompts = PrefixedPrompts(alone, alone, log.prompt.astype(np.int32))
        workload = Workload.of(
            log.arrived,
            log.prompt,
            log.output,
            client=[clients.index(client) for client in log.client],
            clients=clients,
            prompts=prompts if self.finds_prefixes else None,
        )
        if config.get("predictor") is None:
            return workload
        predictor = vet(make("predictor", config["predictor"], Predictor), CONTRACT)
        return predictor.applied(workload, config["seed"])

    def serve_with(self, constants: Constants, first: int | None = None) -> Served:
        """Serve the log with these constants; `first` as for `serve`."""
        return self.serve(self._cost_with(constants), first)

    def serve(self, cost: Settings | None = None, first: int | None = None) -> Served:
        """Serve the log's requests.

        `cost` replaces the configuration's settings. With `first`, stop when the `first` earliest
        requests are answered.
        """
        config = self.config if cost is None else {**self.config, "cost": cost}
        stage = self.backend.simulation(RunSpec(config))
        front = stage.cost.server_seconds
        served = Served(self.log, first or len(self.log), front)
        with suppress(_Enough):
            simulate(
                stage.scheduler,
                self._workload,
                _Cold(stage.cost, self.first_step - front),
                served,
                fast_forward=stage.fast_forward,
                way=front,
                **stage.settings,
            )
        return served


class _Cold:
    """A cost model whose first step takes at least `least` seconds."""

    def __init__(self, cost: CostModel, least: float) -> None:
        self.cost, self.least = cost, least
        self.by_totals = cost.by_totals
        self.decode_seconds, self.swap_seconds = cost.decode_seconds, cost.swap_seconds

    def step_seconds(self, plan: StepPlan) -> float:
        least, self.least = self.least, 0.0
        return max(self.cost.step_seconds(plan), least)


class _Enough(Exception):
    """All requests that are scored have finished."""


class Served:
    """A recorder of what the simulated server did."""

    def __init__(self, log: Log, wanted: int, front: float) -> None:
        self.log = log
        self.steps = self.preemptions = 0
        self.largest = dict.fromkeys(_SIZES, 0)
        """The largest steps, which bound the validity of a fit."""
        self._wanted = self._left = wanted
        self._front = front
        self._plan: StepPlan | None = None
        self._times = np.full((3, len(log)), np.nan)
        """When each request was first in a step, and had its first and its last token."""

    @property
    def latencies(self) -> Latencies:
        """Latencies of all requests; NaN for requests that were not answered."""
        scheduled, first, last = self._times - self.log.arrived
        return Latencies(first, last, self.log.output, np.maximum(scheduled - self._front, 0.0))

    def score(self, rows: Rows | None = None) -> Scores:
        """Errors of some requests; None: of all."""
        return score(self.log, self.latencies, np.arange(len(self.log)) if rows is None else rows)

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        for rejection in plan.rejected:
            place = self.log.places[int(rejection.request.id)]
            raise ConfigError(f"{place} is refused by the simulated server: {rejection.reason}")
        self._plan = plan
        self.steps += 1
        self.preemptions += len(plan.preemptions)
        for name, largest in self.largest.items():
            self.largest[name] = max(largest, getattr(plan, name))

    def again(self, end: float, used_blocks: int) -> None:
        self.steps += 1
        assert self._plan is not None
        context = self._plan.decode_context  # all else is as it was
        if context > self.largest["decode_context"]:
            self.largest["decode_context"] = context

    def left(self, request: Request) -> None:
        row = int(request.id)
        times = request.scheduled_at, request.first_token_at, request.finished_at
        self._times[:, row] = times
        self._left -= row < self._wanted
        if not self._left:
            raise _Enough


_SIZES = (
    *("prefill_tokens", "prefill_attention", "prefill_context"),
    *("decode_count", "decode_context"),
)


# -- the file of a fit -----------------------------------------------------------------------------

NAME = "fit.json"
TRAVELS = ("model",)
"""Facts that may differ from those of the fit, since the roofline accounts for them."""
WHY = {
    "hardware": "another GPU reaches other shares of its data sheet",
    **dict.fromkeys(
        ("tensor_parallel", "pipeline_parallel", "expert_parallel"),
        "what is lost between GPUs was not measured so",
    ),
    "kv_cache_dtype": "attention has other kernels for it",
    "quantization": "products have other kernels for it",
    "stack": "another serving stack has other kernels and another host",
    "batching": "prompts that ride along with decodes have other kernels than those by themselves",
    "async_scheduling": "the host works beside the GPU in one of them alone",
}


ALSO = " and "
"""Between the values of a fact of several servers."""


def merged(facts: Sequence[Settings]) -> Settings:
    """The facts of several servers that were fitted together."""
    names = dict.fromkeys(name for of in facts for name in of)
    values = {name: list(dict.fromkeys(of.get(name) for of in facts)) for name in names}
    return {k: v[0] if len(v) == 1 else ALSO.join(map(str, v)) for k, v in values.items()}


@dataclass(frozen=True)
class Fit:
    """Fitted constants with their origin."""

    constants: Constants
    server: Settings
    """Facts of the server that they were fitted for."""
    largest: Mapping[str, int]
    """The largest steps that were fitted."""
    source: str
    undecided: Sequence[str]
    """Constants that the log did not decide."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Fit:
        """Load from the file or from the folder of the calibration; raises ConfigError."""
        file = Path(path).expanduser()
        if file.is_dir():
            file /= NAME
        try:
            content = json.loads(file.read_text())
        except OSError as error:
            raise ConfigError(
                f"fit={path}: {file} cannot be read ({error.strerror}): must be the folder or the "
                f"{NAME} of an experiment=calibrate requests="
            ) from None
        except ValueError as error:
            raise ConfigError(f"fit={path}: is not JSON: {error}") from None
        needed = [field.name for field in fields(cls)]
        if not isinstance(content, dict) or set(content) != set(needed):
            raise ConfigError(f"fit={path}: must hold an object with {', '.join(needed)}")
        constants = content["constants"]
        if not isinstance(constants, dict) or FRONT not in constants:
            raise ConfigError(f"fit={path}: constants must be an object that has {FRONT}")
        for name, value in constants.items():
            bounds = {"above": 0, "high": 1} if Constant(name).share else {"low": 0}
            require_number(f"fit={path}: constants.{name}", value, **bounds)
        return cls(**content)

    def of(self, server: ExternalServer) -> dict[str, float]:
        """All constants of a server: the fitted ones, and its own for the rest.

        Kernels of another family of GPUs reach what their own tables say.
        """
        known = server.constants
        if strange := [name for name in self.constants if name not in known]:
            raise ConfigError(f"fit: has {', '.join(strange)}: cost= has only {', '.join(known)}")
        kept = KERNELS if self._is_of_another_family(server) else ()
        return known | {k: value for k, value in self.constants.items() if k not in kept}

    def _is_of_another_family(self, server: ExternalServer) -> bool:
        return server.family is not None and server.family != self.server.get("family")

    def doubts(self, server: ExternalServer, served: Served) -> Iterator[str]:
        """Differences between this server and the fitted one, a line each."""
        facts = server.facts
        usual = {name: 1 for name in WHY if name.endswith("_parallel")}  # where it is not named
        for name in dict.fromkeys([*facts, *(name for name in usual if name in self.server)]):
            now, then = (of.get(name, usual.get(name)) for of in (facts, self.server))
            if str(now) in str(then).split(ALSO) or name == "family":
                continue
            if name == "hardware" and self._is_of_another_family(server):
                yield (
                    f"fitted for hardware={then}, and {now} is predicted: what its kernels reach "
                    "is that of its family, and the times of the host are the fit's"
                )
            elif name in TRAVELS:
                yield (
                    f"fitted for {name}={then}, and {now} is predicted: the constants are those "
                    "of the GPU and the stack, and the model's shape says the rest"
                )
            else:
                yield (
                    f"fitted for {name}={then}, but {name}={now} is predicted: {WHY[name]}, so "
                    "that this is no more than a guess"
                )
        beyond = [
            f"{name.replace('_', ' ')} {served.largest[name]:,} (fitted: {most:,})"
            for name, most in self.largest.items()
            if served.largest.get(name, 0) > 1.5 * most
        ]
        if beyond:
            yield f"some steps are far larger than any that was fitted: {', '.join(beyond)}"
        if self.undecided:
            yield f"the fitted log did not decide {', '.join(self.undecided)}"
