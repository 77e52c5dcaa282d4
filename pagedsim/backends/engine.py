"""The backend `engine`: real time, real tokens, on a GPU or, with a small model, a CPU."""

from __future__ import annotations

import gc
import os
import platform
import re
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pagedsim.backends.base import Backend, BackendRun, StoppableRecorder, Stopped, refuse_sessions
from pagedsim.core import (
    ConfigError,
    Policy,
    Request,
    RequestId,
    SamplingParams,
    Scheduler,
    StepPlan,
)
from pagedsim.core.errors import not_installed, require_number, require_whole, unknown
from pagedsim.core.transfers import EndedCopy
from pagedsim.metrics.plans import described
from pagedsim.requirements import refuse_older
from pagedsim.server import ENGINE_MEMORIES, MOST_THREADS, ServerSpec
from pagedsim.spec.objects import said_of, takes
from pagedsim.spec.roots import CARRIED
from pagedsim.spec.run import RunSpec, Settings
from pagedsim.workload import Workload
from pagedsim.workload.tokens import Prompts

if TYPE_CHECKING:
    from pagedsim.engine.engine import LLMEngine
    from pagedsim.engine.engine_args import Arguments
    from pagedsim.engine.models import LoadedModel
    from pagedsim.engine.output import Observer


TIMES = ("feed", "plan", "launch", "sample", "commit")
"""Parts of a step, as `StepTimes` has them; the columns are called <part>_seconds."""


@dataclass(frozen=True)
class Engine(Backend):
    """Where steps are carried out. Its settings are explained in conf/backend/engine.yaml."""

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    model_impl: str = "auto"
    attention: str = "triton"
    enforce_eager: bool = False
    max_cudagraph_capture_size: int = 1024
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
        try:
            whole = super().traffic(self._limited(settings, seed), seed)
        except ConfigError:  # formats of sessions take no `requests`, which may be our limit
            if settings.get("requests") is None:
                refuse_sessions(super().traffic(settings, seed), "engine")
            raise
        refuse_sessions(whole, "engine")
        changes = [f"prompts and answers are {self.shrink} times shorter"] * (self.shrink > 1)
        changes += [f"arrivals come {self.hurry:g} times sooner"] * (self.hurry > 1)
        if not changes:
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
            asked=tuple(map(self._shorter, whole.asked)),
            notices=(*whole.notices, f"{' and '.join(changes)} than the workload says"),
        )

    def _shorter(self, params: SamplingParams) -> SamplingParams:
        if params.max_tokens is None:
            return params
        return replace(params, max_tokens=max(params.max_tokens // self.shrink, 1))

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

    def prepare(self, config: RunSpec) -> Serving:
        try:
            from pagedsim.engine.assemble import check_split, device_of
            from pagedsim.engine.attention import require
            from pagedsim.engine.engine_args import Arguments
        except ModuleNotFoundError as error:
            raise not_installed("backend=engine", "engine", error.name) from error
        refuse_older("engine")
        with said_of("backend", {"device": self.device}):
            device = device_of(self.device)
        if self.clock == "cpu" and device.type != "cpu":
            raise ConfigError(f"backend.clock=cpu: must be wall on {device.type}")
        if self.clock == "cpu" and (ranks := config.settings["tensor_parallel"]) > 1:
            raise ConfigError(
                f"backend.clock=cpu: must be wall with tensor_parallel={ranks}, since it does not "
                "see what other processes compute"
            )
        model, name = self._model(config)
        server = self._server(config)
        with said_of(
            "backend",
            dict.fromkeys(("load_format", "model_impl", "attention", "generation_config")),
        ):
            arguments = Arguments(
                model=model,
                dtype=self.dtype,
                device=self.device,
                load_format=self.load_format,
                model_impl=self.model_impl,
                attention=self.attention,
                enforce_eager=self.enforce_eager,
                max_cudagraph_capture_size=self.max_cudagraph_capture_size,
                generation_config=self.generation_config,
                num_threads=self.threads,
                server=server,
            )
            require(self.attention, device)
        check_split(arguments)
        return Serving(arguments, name, config.seed, CLOCKS[self.clock]())

    def _server(self, config: RunSpec) -> ServerSpec:
        server = config.server
        if (kind := server.memory) not in ENGINE_MEMORIES:
            name = kind if isinstance(kind, str) else type(kind).__name__
            raise ConfigError(f"memory={name}: backend=engine has {', '.join(ENGINE_MEMORIES)}")
        if server.blocks is not None or self.cache_tokens is None:
            return server
        return replace(server, blocks=max(self.cache_tokens // server.block_size, 1))

    def _model(self, config: RunSpec) -> tuple[Any, str]:
        """What to load, and its name: one given to this backend, or what the group `model` says.

        A shape alone gets random weights, but for those that the engine has weights of.
        """
        if self.model is not None:
            return self.model, self.model
        settings = config.settings["model"]
        if isinstance(settings, dict) and "config" in settings:  # a config.json, or its folder
            path = Path(str(settings["config"])).expanduser()
            folder = str(path.parent if path.suffix == ".json" else path)
            return folder, folder
        shape = config.model
        if shape.name in CARRIED:
            return shape.name, shape.name
        from pagedsim.engine.models.shaped import shaped_config

        return shaped_config(shape), f"{shape.name}, random weights"


class Serving(BackendRun):
    """One engine in real time; it is made when the run begins, and gone when it ends."""

    def __init__(self, arguments: Arguments, name: str, seed: int, clock: WallClock) -> None:
        self.arguments = arguments
        self.name = name
        self.seed = seed
        self.clock = clock
        self._times = {part: array("d") for part in TIMES}
        self._plans: list[str] = []
        self._copies = RecordedCopies()
        self._outputs: dict[RequestId, list[int]] = {}
        self._facts: Settings = {}
        self._launched: Settings = {}
        self._failures: list[str] = []

    @property
    def policies(self) -> Sequence[Policy]:
        policy = self.arguments.server.policy
        assert isinstance(policy, Policy)
        return (policy,)

    def draws_for(self, workload: Workload) -> bool:
        # The seed chooses the prompts' tokens, and these which beams survive.
        beams = any(asked.beam_search for asked in workload.asked)
        return beams or super().draws_for(workload)

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

        log = _Log(recorder, self._plans, self._outputs, self._copies)
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
        from pagedsim.engine.file_tier import empty_folders

        given = self.arguments
        with (
            the_machine(stopping),
            threads(given.num_threads),
            empty_folders(given.server) as server,
        ):
            arguments = replace(given, model=_loaded(given), server=server)
            engine = LLMEngine(arguments, observer=observer, clock=self.clock)
            self.scheduler = engine.scheduler
            self._facts = facts_of(engine, self.name) | {"attention": given.attention}
            try:
                work(engine)
            finally:
                launched = engine.runner.launched.items()
                self._launched = {f"{kind}_steps": steps for kind, steps in launched}
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
        columns = {**times, "plan": pa.array(self._plans, pa.string())}
        if self.scheduler.offloads:
            columns |= self._copies.columns()
        return columns

    def request_columns(self, ids: Sequence[RequestId]) -> Mapping[str, pa.Array]:
        outputs = [self._outputs.get(request_id, []) for request_id in ids]
        return {"output_ids": pa.array(outputs, pa.list_(pa.int32()))}

    def facts(self) -> Settings:
        facts = {**self._facts, "clock": self.clock.name, "failed_steps": len(self._failures)}
        facts |= self._launched
        return facts | {"failed_copies": failed} if (failed := self._copies.failed) else facts

    def notices(self) -> list[str]:
        notices = [f"the engine served {self.name} on {self._facts['device']}{self.clock.notice}"]
        if not self._failures:
            return notices
        what = f"{len(self._failures)} steps failed and ended their requests"
        return [*notices, f"{what}; the first: {self._failures[0]}"]


def _loaded(arguments: Arguments) -> LoadedModel:
    """The model, or an error that names a setting as the command line does."""
    try:
        return CACHE.model(arguments)
    except ConfigError as error:
        text = re.sub(r"(?<![\w.])load_format=", "backend.load_format=", str(error))
        raise ConfigError(text) from error


ENDS: Mapping[tuple[bool, bool], str] = {
    (False, False): "transferred",
    (False, True): "awaited",
    (True, False): "below_transferred",
    (True, True): "below_awaited",
}
"""Columns of jobs that ended: whether those are below the host tier, and whether the engine waited
in the pause after the step, or saw it at the step's end."""


class RecordedCopies:
    """For each step the copies from and to the host tier that ended, as far as was seen."""

    def __init__(self) -> None:
        self.failed = 0
        self._ended: dict[str, list[list[int]]] = {name: [] for name in ENDS.values()}

    def step(self) -> None:
        """Another step has ended."""
        for ended in self._ended.values():
            ended.append([])

    def transferred(self, ended: Sequence[EndedCopy], waited: bool) -> None:
        for copy in ended:
            self._ended[ENDS[copy.below, waited]][-1].append(copy.job)
            self.failed += copy.error is not None

    def columns(self) -> dict[str, pa.Array]:
        jobs = pa.list_(pa.int64())
        return {name: pa.array(ended, jobs) for name, ended in self._ended.items()}


class _Log:
    """Passes on to a recorder what an engine tells, and keeps plans, tokens and ends of copies."""

    def __init__(
        self,
        recorder: StoppableRecorder,
        plans: list[str],
        outputs: dict[RequestId, list[int]],
        copies: RecordedCopies,
    ) -> None:
        self._recorder, self._plans, self._outputs = recorder, plans, outputs
        self._copies = copies
        self.transferred = copies.transferred

    def step(self, plan: StepPlan, start: float, end: float, scheduler: Scheduler) -> None:
        self._recorder.step(plan, start, end, scheduler)
        self._plans.append(described(plan, scheduler))
        self._copies.step()

    def left(self, request: Request) -> None:
        self._recorder.left(request)
        self._outputs[request.id] = list(request.outputs[0]) if request.outputs else []


class WallClock:
    """Real time."""

    name = "wall"
    notice = ""

    def __call__(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)


class CpuClock(WallClock):
    """The time that this process computes, whatever else the machine does; pauses take none."""

    name = "cpu"
    notice = "; times are of the processor, not of a wall clock"

    def __init__(self) -> None:
        self._slept = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._slept

    def sleep(self, seconds: float) -> None:
        self._slept += seconds


CLOCKS: Mapping[str, type[WallClock]] = {clock.name: clock for clock in (WallClock, CpuClock)}


class ModelCache:
    """Loads models, and keeps one; of one that cannot be loaded it keeps why."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] | None = None
        self._kept: LoadedModel | ConfigError | None = None

    def model(self, arguments: Arguments) -> LoadedModel:
        """What these arguments load; raises ConfigError where they cannot."""
        from pagedsim.engine.assemble import loaded

        where = arguments.device, arguments.server.tensor_parallel
        key = (_named(arguments.model), *where, *arguments.loading.values())
        if key != self._key or self._gone():
            self._drop()  # first, since there may be no room for two
            try:
                self._kept = loaded(arguments)
            except ConfigError as error:
                self._kept = error
            self._key = key
        if isinstance(self._kept, ConfigError):
            raise self._kept
        assert self._kept is not None
        return self._kept

    def _gone(self) -> bool:
        """Whether it was shared by several processes, of which one has failed."""
        ranks = getattr(self._kept, "ranks", None)
        return ranks is not None and ranks.gone

    def _drop(self) -> None:
        if (ranks := getattr(self._kept, "ranks", None)) is not None:
            ranks.close()
        self._key = self._kept = None
        give_back()


CACHE = ModelCache()
"""The model of this process's last run."""


def _named(model: Any) -> str:
    """A model's name; of a configuration all that is in it."""
    return model.to_json_string() if hasattr(model, "to_json_string") else str(model)


def facts_of(engine: LLMEngine, name: str) -> Settings:
    """What a run's results do not show: device, versions, sizes, and limits that were chosen."""
    import torch
    import transformers

    device = engine.model.device
    cuda = device.type == "cuda"
    return {
        "backend": "engine",
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or "CPU",
        "threads": torch.get_num_threads(),
        "model": name,
        "model_impl": "transformers" if engine.model.native is None else "native",
        "dtype": str(engine.model.dtype).removeprefix("torch."),
        "vocab_size": engine.model.vocab_size,
        **engine.server.sizes(),
        "block_bytes": engine.runner.cache.shape.block_bytes,
        "prices": {"prefill": engine.prices.prefill, "transfer": engine.prices.transfer},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "python": platform.python_version(),
    }


def give_back() -> None:
    """What an engine held on the GPU; a model refers to itself in circles."""
    import torch

    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for what a CPU computes."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


NAP = 0.1
"""Seconds between two looks at whether another engine is done."""


@contextmanager
def the_machine(stopping: Callable[[], bool]) -> Iterator[None]:
    """Wait until no other run of an engine is under way here: each would slow the other down.

    It waits no longer once `stopping` returns true.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    path = Path(tempfile.gettempdir()) / f"pagedsim-engine-{os.getuid()}.lock"
    with path.open("a") as file:
        told = False
        while not stopping():
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    print("waiting for another engine on this machine", file=sys.stderr)
                told = True
                time.sleep(NAP)
        yield
