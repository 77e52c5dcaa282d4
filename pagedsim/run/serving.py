"""The backend `engine`: real time, real tokens, on a GPU or, with a small model, a CPU."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pagedsim.config import CARRIED
from pagedsim.core import ConfigError, Request, RequestId, Scheduler, StepPlan
from pagedsim.core.errors import not_installed, require_number, require_whole, unknown
from pagedsim.metrics.plans import described
from pagedsim.run.backend import Backend, Settings, Stage, refuse_sessions
from pagedsim.run.clocks import CLOCKS, WallClock
from pagedsim.run.machine import facts_of, give_back, the_machine, threads
from pagedsim.run.model_cache import ModelCache
from pagedsim.run.objects import draws, make, said_of, takes
from pagedsim.run.server import server_of
from pagedsim.run.stoppable import StoppableRecorder, Stopped
from pagedsim.server import MOST_THREADS, ServerSpec
from pagedsim.sim.model import ModelShape
from pagedsim.workload import Workload
from pagedsim.workload.tokens import Prompts

if TYPE_CHECKING:
    from pagedsim.engine.arguments import Arguments
    from pagedsim.engine.engine import LLMEngine
    from pagedsim.engine.models import LoadedModel
    from pagedsim.engine.observer import Observer

TIMES = ("feed", "plan", "launch", "sample", "commit")
"""Parts of a step, as `StepTimes` has them; the columns are called <part>_seconds."""


CACHE = ModelCache()
"""The model of this process's last run."""


@dataclass(frozen=True)
class Engine(Backend):
    """Where steps are carried out. Its settings are explained in conf/backend/engine.yaml."""

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    model_impl: str = "auto"
    enforce_eager: bool = False
    generation_config: str = "auto"
    threads: int = 1
    cache_tokens: int | None = None
    limit: int | None = None
    shrink: int = 1
    hurry: float = 1.0
    clock: str = "wall"

    alone = True
    unread = ("hardware", "cost")

    def __post_init__(self) -> None:
        for name in ("cache_tokens", "limit", "shrink"):
            if (value := getattr(self, name)) is not None:
                require_whole(name, value, 1)
        require_number("hurry", self.hurry, 1)
        require_whole("threads", self.threads, 1, MOST_THREADS)
        if self.clock not in CLOCKS:
            raise unknown("clock", self.clock, CLOCKS)

    def traffic(self, settings: Settings, seed: int) -> Workload:
        whole = super().traffic(self._limited(settings, seed), seed)
        refuse_sessions(whole, "engine")
        told = [f"prompts and answers are {self.shrink} times shorter"] * (self.shrink > 1)
        told += [f"arrivals come {self.hurry:g} times sooner"] * (self.hurry > 1)
        if not told:
            return whole
        waits = whole.deadline - whole.arrival
        prompt_len = np.maximum(whole.prompt_len // self.shrink, 1)
        return replace(
            whole,
            arrival=whole.arrival / self.hurry,
            deadline=whole.arrival / self.hurry + waits,
            prompt_len=prompt_len,
            prompts=self._shrunk(whole, prompt_len),
            output_len=np.maximum(whole.output_len // self.shrink, 1),
            notices=(*whole.notices, f"{' and '.join(told)} than the workload says"),
        )

    def _shrunk(self, whole: Workload, prompt_len: NDArray[np.int32]) -> Prompts | None:
        """What is in prompts that are shorter now, shared beginnings as much so."""
        if self.shrink == 1 or whole.prompts is None:
            return whole.prompts
        shrunk = whole.prompts.shrunk(self.shrink, prompt_len)
        if shrunk is None:
            raise ConfigError(
                f"backend.shrink={self.shrink}: must be 1 where prompts are blocks of a trace"
            )
        return shrunk

    def _limited(self, settings: Settings, seed: int) -> Settings:
        """The workload's settings with no more than `limit` requests."""
        if self.limit is None or "_target_" not in settings:
            return settings
        if not takes(settings["_target_"], "requests"):
            refuse_sessions(super().traffic(settings, seed), "engine")
            raise ConfigError(
                f"backend.limit={self.limit}: must be null for a workload without requests="
            )
        wanted = settings.get("requests") or self.limit
        return {**settings, "requests": min(wanted, self.limit)}

    def stage(self, config: Settings, seed: int) -> Serving:
        try:
            from pagedsim.engine.arguments import Arguments
            from pagedsim.engine.assemble import check_split, device_of
        except ModuleNotFoundError as error:
            raise not_installed("backend=engine", "engine", error.name) from error
        with said_of("backend", {"device": self.device}):
            device = device_of(self.device)
        if self.clock == "cpu" and device.type != "cpu":
            raise ConfigError(f"backend.clock=cpu: must be wall on {device.type}")
        if self.clock == "cpu" and (ranks := config["tensor_parallel"]) > 1:
            raise ConfigError(
                f"backend.clock=cpu: must be wall with tensor_parallel={ranks}, since it does not "
                "see what other processes compute"
            )
        model, name = self._model(config)
        server = self._server(config, seed)
        with said_of(
            "backend", {"load_format": None, "model_impl": None, "generation_config": None}
        ):
            arguments = Arguments(
                model=model,
                dtype=self.dtype,
                device=self.device,
                load_format=self.load_format,
                model_impl=self.model_impl,
                enforce_eager=self.enforce_eager,
                generation_config=self.generation_config,
                num_threads=self.threads,
                server=server,
            )
        check_split(arguments)
        return Serving(arguments, name, seed, CLOCKS[self.clock]())

    def _server(self, config: Settings, seed: int) -> ServerSpec:
        server = server_of(config, seed)
        if (kind := server.memory) not in ("paged", "prefix"):
            raise ConfigError(f"memory.kind={kind}: backend=engine has paged and prefix")
        if server.blocks is not None or self.cache_tokens is None:
            return server
        return replace(server, blocks=max(self.cache_tokens // server.block_size, 1))

    def _model(self, config: Settings) -> tuple[Any, str]:
        """What to load, and its name: one given to this backend, or what the group `model` says.

        A shape alone gets random weights, but for those that the engine has weights of.
        """
        if self.model is not None:
            return self.model, self.model
        settings = config["model"]
        if isinstance(settings, dict) and "config" in settings:  # a config.json, or its folder
            path = Path(str(settings["config"])).expanduser()
            folder = str(path.parent if path.suffix == ".json" else path)
            return folder, folder
        shape = make("model", settings, ModelShape)
        if shape.name in CARRIED:
            return shape.name, shape.name
        from pagedsim.engine.models.shaped import shaped_config

        return shaped_config(shape), f"{shape.name}, random weights"


class Serving(Stage):
    """One engine in real time; it is made when the run begins, and gone when it ends."""

    def __init__(self, arguments: Arguments, name: str, seed: int, clock: WallClock) -> None:
        self.arguments = arguments
        self.name = name
        self.seed = seed
        self.clock = clock
        self._times = {part: array("d") for part in TIMES}
        self._plans: list[str] = []
        self._outputs: dict[RequestId, list[int]] = {}
        self._facts: Settings = {}
        self._failures: list[str] = []

    @property
    def drawn(self) -> bool:
        return draws(self.arguments.server.policy)

    def run(self, workload: Workload, recorder: StoppableRecorder) -> None:
        from pagedsim.engine.drive import drive

        def serve(engine: LLMEngine) -> None:
            drive(
                engine,
                workload,
                seed=self.seed,
                stopping=lambda: recorder.stopping,
                stepped=self._stepped,
                sleep=self.clock.sleep,
            )

        log = _Log(recorder, self._plans, self._outputs)
        self.use(log, serve, stopping=lambda: recorder.stopping)
        if recorder.stopping:
            raise Stopped

    def use(
        self,
        observer: Observer,
        work: Callable[[LLMEngine], None],
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make the engine, have `work` done with it, and take it away; no other runs meanwhile."""
        from pagedsim.engine.engine import LLMEngine

        with the_machine(stopping), threads(self.arguments.num_threads):
            arguments = replace(self.arguments, model=_loaded(self.arguments))
            engine = LLMEngine(arguments, observer=observer, clock=self.clock)
            self.scheduler = engine.scheduler
            self._facts = facts_of(engine, self.name)
            try:
                work(engine)
            finally:
                engine.close()
                del engine
                give_back()

    def _stepped(self, engine: LLMEngine) -> None:
        if engine.times is None:
            self._failures.append(engine.failure)
            return
        for part, seconds in zip(TIMES, engine.times, strict=True):
            self._times[part].append(seconds)

    def step_columns(self) -> Mapping[str, pa.Array]:
        times = {f"{part}_seconds": pa.array(times) for part, times in self._times.items()}
        return {**times, "plan": pa.array(self._plans, pa.string())}

    def request_columns(self, ids: Sequence[RequestId]) -> Mapping[str, pa.Array]:
        outputs = [self._outputs.get(one, []) for one in ids]
        return {"output_ids": pa.array(outputs, pa.list_(pa.int32()))}

    def facts(self) -> Settings:
        return {**self._facts, "clock": self.clock.name, "failed_steps": len(self._failures)}

    def notices(self) -> list[str]:
        told = [f"the engine served {self.name}{self.clock.notice}"]
        if not self._failures:
            return told
        what = f"{len(self._failures)} steps failed and ended their requests"
        return [*told, f"{what}; the first: {self._failures[0]}"]


def _loaded(arguments: Arguments) -> LoadedModel:
    """The model, or an error that names a setting as the command line does."""
    try:
        return CACHE.model(arguments)
    except ConfigError as error:
        text = re.sub(r"(?<![\w.])load_format=", "backend.load_format=", str(error))
        raise ConfigError(text) from error


class _Log:
    """Passes on to a recorder what an engine tells, and keeps plans and tokens."""

    def __init__(
        self, recorder: StoppableRecorder, plans: list[str], outputs: dict[RequestId, list[int]]
    ) -> None:
        self._recorder, self._plans, self._outputs = recorder, plans, outputs

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self._recorder.step(plan, start, end, scheduler)
        self._plans.append(described(plan, scheduler))

    def left(self, request: Request) -> None:
        self._recorder.left(request)
        self._outputs[request.id] = list(request.outputs[0]) if request.outputs else []
