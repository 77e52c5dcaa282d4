"""The backend `sim`: simulated time, by a SimPy process and a cost model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pagedsim.build import make_memory
from pagedsim.core import (
    Batching,
    ConfigError,
    Memory,
    PagedsimError,
    Policy,
    Preemption,
    Scheduler,
)
from pagedsim.core.errors import require, require_number
from pagedsim.run.backend import Backend, Settings, Stage
from pagedsim.run.objects import make, said_of, takes
from pagedsim.run.stoppable import StoppableRecorder
from pagedsim.sim.beams import TURNOVER, Beams
from pagedsim.sim.capacity import capacity, cpu_blocks
from pagedsim.sim.cost import CostModel
from pagedsim.sim.cost.work import total_work
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.model import ModelShape
from pagedsim.sim.number import share
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.workload import Workload

_NOT_MEMORYS = (
    "kind",
    "kv_layout",
    "swap_space_gib",
    "gpu_memory_utilization",
    "reserved_gib",
)
"""Settings of the group `memory` that say how large it is, or how its blocks lie."""


@dataclass(frozen=True)
class Simulated(Backend):
    """Where steps are simulated."""

    overlap: bool = False
    """Whether swaps out go on beside the computation."""
    fast_forward: bool = True
    """Whether quiet decode steps are planned in one go."""
    beam_turnover: float = TURNOVER
    """How often a beam is replaced by another's child; see `Beams`."""
    copy_efficiency: float | None = 0.9
    """The part of the GPU's bandwidth that copies of its blocks reach; None: they take no time."""

    def __post_init__(self) -> None:
        for key in ("overlap", "fast_forward"):
            if not isinstance(getattr(self, key), bool):
                raise ConfigError(f"{key}={getattr(self, key)}: must be true or false")
        require_number("beam_turnover", self.beam_turnover, 0, 1)
        if self.copy_efficiency is not None:
            share("copy_efficiency", self.copy_efficiency)

    def stage(self, config: Settings, seed: int) -> Simulation:
        replica = _replica(config)
        cost = make("cost", config["cost"], CostModel, replica=replica)
        preemption = _preemption(config, cost)
        batching = make("batching", config["batching"], Batching)
        policy = make("policy", config["policy"], Policy)
        memory, limits = _memory(config, replica, batching, swaps=preemption.swaps)
        with said_of("server", config["server"]):
            scheduler = Scheduler(
                memory=memory,
                batching=batching,
                policy=policy,
                preemption=preemption,
                async_scheduling=config["server"]["async_scheduling"],
                **limits,
            )
        return Simulation(self, replica, cost, scheduler, Beams(self.beam_turnover, seed))


class Simulation(Stage):
    """One replica in simulated time."""

    def __init__(
        self,
        backend: Simulated,
        replica: Replica,
        cost: CostModel,
        scheduler: Scheduler,
        beams: Beams,
    ) -> None:
        self.backend = backend
        self.replica = replica
        self.cost = cost
        self.scheduler = scheduler
        self.beams = beams

    def run(self, workload: Workload, recorder: StoppableRecorder) -> None:
        simulate(
            self.scheduler,
            workload,
            self.cost,
            recorder,
            overlap=self.backend.overlap,
            copy_seconds=self._copy_seconds,
            beams=self.beams,
            fast_forward=self.backend.fast_forward,
        )

    @property
    def _copy_seconds(self) -> float:
        """Reading a block and writing it elsewhere on the GPU."""
        if self.backend.copy_efficiency is None:
            return 0.0
        bandwidth = self.replica.hardware.bandwidth * self.backend.copy_efficiency
        return 2 * self.replica.block_bytes / bandwidth

    def work(self, steps: pa.Table) -> Mapping[str, float]:
        done, hardware = total_work(self.replica, steps), self.replica.hardware
        return {
            "flops": done.flop,
            "bytes": done.bytes,
            "peak_flops": hardware.flop_rate,
            "peak_bandwidth": hardware.bandwidth,
        }

    def notices(self) -> list[str]:
        return self.cost.notices


def _replica(config: Settings) -> Replica:
    memory = config["memory"]
    if not isinstance(memory, dict):
        raise ConfigError(f"memory={memory}: must be a mapping of settings")
    model = make("model", config["model"], ModelShape)
    hardware = make("hardware", config["hardware"], Hardware)
    with said_of("memory", memory):
        return Replica(
            model=model,
            hardware=hardware,
            tensor_parallel=config["tensor_parallel"],
            block_size=_whole(memory.get("block_size", 1)),
            kv_layout=memory.get("kv_layout", "block"),
            kv_cache_dtype=config["kv_cache_dtype"],
        )


def _preemption(config: Settings, cost: CostModel) -> Preemption:
    settings = config["preemption"]
    wants_prices = isinstance(settings, dict) and "_target_" in settings
    with said_of("preemption", {"_target_": None}):
        wants_prices = wants_prices and takes(settings["_target_"], "prices")
    prices = {"prices": cost.prices()} if wants_prices else {}
    return make("preemption", settings, Preemption, **prices)


def _memory(
    config: Settings, replica: Replica, batching: Batching, swaps: bool
) -> tuple[Memory, dict[str, int]]:
    """The memory, and the scheduler's limits, which depend on it and it on them.

    `max_model_len` is the model's, unless the memory holds less: the more tokens one step may
    compute, the more room their activations take from the blocks.
    """
    server, settings = config["server"], config["memory"]
    with said_of("server", server):
        for key in ("max_seqs", "max_batched_tokens", "max_model_len"):
            if server[key] is not None:
                require(key, server[key], 1)
        if (server["max_model_len"] or 0) > replica.model.max_model_len:
            raise ConfigError(
                f"max_model_len={server['max_model_len']}: must be at most "
                f"{replica.model.max_model_len}, that of model={replica.model.name}"
            )
    tokens = server["max_batched_tokens"]

    def limits(longest: int) -> dict[str, int]:
        return {
            "max_seqs": server["max_seqs"],
            "max_batched_tokens": tokens or batching.default_tokens(longest, server["max_seqs"]),
            "max_model_len": longest,
        }

    def memory(longest: int) -> Memory:
        return _of_size(settings, replica, limits(longest), swaps)

    with said_of("memory", settings):
        if given := server["max_model_len"]:
            return memory(given), limits(given)
        longest = _longest(replica.model.max_model_len, memory)
        return memory(longest), limits(longest)


def _longest(most: int, memory: Callable[[int], Memory]) -> int:
    """The greatest length up to `most` that the memory beside its activations holds."""

    def holds(length: int) -> bool:
        return memory(length).longest >= length

    try:
        if holds(most):
            return most
    except PagedsimError:
        memory(1)  # if this does not fit either, nothing does
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        try:
            fits = holds(middle)
        except PagedsimError:
            fits = False
        low, high = (middle, high) if fits else (low, middle)
    return low


def _of_size(settings: Settings, replica: Replica, limits: dict[str, int], swaps: bool) -> Memory:
    """The memory with as many blocks as given, or as the hardware has left."""
    own = {key: value for key, value in settings.items() if key not in _NOT_MEMORYS}
    if own.get("blocks") is None:
        own["blocks"] = capacity(
            replica,
            gpu_memory_utilization=settings.get("gpu_memory_utilization", 0.9),
            reserved_gib=settings.get("reserved_gib", 0.5),
            max_batched_tokens=limits["max_batched_tokens"],
            max_seqs=limits["max_seqs"],
        ).blocks
    if own.get("cpu_blocks", 0) is None:
        fitting = cpu_blocks(replica, settings.get("swap_space_gib", 0.0))
        own["cpu_blocks"] = fitting if swaps else 0
    if str(settings.get("kind", "paged")).startswith("reserved"):
        own["max_model_len"] = limits["max_model_len"]
    return make_memory(settings.get("kind", "paged"), **own)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"block_size={value}: must be a whole number")
    return value
