"""One arm under one seed: configuration → objects → a run → tables on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from pagedsim.build import make_memory
from pagedsim.core import ConfigError, Memory, PagedsimError, Scheduler
from pagedsim.core.errors import unknown
from pagedsim.metrics.files import write_run
from pagedsim.metrics.recorder import Recorder
from pagedsim.metrics.study import Run
from pagedsim.metrics.summary import Slo, summarise
from pagedsim.sim.capacity import capacity
from pagedsim.sim.cost import CostModel
from pagedsim.sim.cost.work import total_work
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.workload import Workload

Settings = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What a process needs to know to run one arm under one seed."""

    arm: str
    seed: int
    config: Settings
    folder: Path


@dataclass(frozen=True)
class Parts:
    """The objects of one run."""

    workload: Workload
    replica: Replica
    cost: CostModel
    memory: Memory
    scheduler: Scheduler


def run_job(job: Job) -> Run | str:
    """The run, or what went wrong in one line."""
    try:
        return run_arm(job)
    except PagedsimError as error:
        return str(error)


def run_arm(job: Job) -> Run:
    """Simulate, summarise, write. Interrupted, it writes what there is, and raises again."""
    parts = build(job.config, job.seed)
    recorder = Recorder()
    backend = job.config["backend"]
    try:
        simulate(
            parts.scheduler,
            parts.workload,
            parts.cost,
            recorder,
            overlap=backend["overlap"],
            fast_forward=backend["fast_forward"],
        )
    except KeyboardInterrupt:
        _write(job, parts, recorder)
        raise
    return _write(job, parts, recorder)


def _write(job: Job, parts: Parts, recorder: Recorder) -> Run:
    for request in parts.scheduler.requests.values():
        recorder.left(request)
    requests, steps = recorder.requests_table(), recorder.steps_table()
    summary = _summary(job.config, parts, requests, steps)
    write_run(job.folder, requests, steps, summary)
    return Run(job.arm, job.seed, job.folder, job.config, requests, steps, summary)


def _summary(config: Settings, parts: Parts, requests: pa.Table, steps: pa.Table) -> Settings:
    hardware = parts.replica.hardware
    work = total_work(parts.replica, steps.to_pydict())
    slo = {name: bound for name, bound in config["slo"].items() if bound is not None}
    return summarise(
        requests,
        steps,
        total_blocks=parts.memory.total,
        block_size=parts.memory.block_size,
        max_seqs=parts.scheduler.max_seqs,
        slo=Slo(**slo) if slo else None,
        flops=work.flop,
        bytes=work.bytes,
        peak_flops=hardware.flop_rate,
        peak_bandwidth=hardware.bandwidth,
    )


# -- objects from a configuration ----------------------------------------------------------------


def build(config: Settings, seed: int) -> Parts:
    """The objects that a configuration describes."""
    workload = _make("workload", config, seed=seed)
    replica = Replica(
        model=_make("model", config),
        hardware=_make("hardware", config),
        tensor_parallel=config["tensor_parallel"],
        block_size=config["memory"].get("block_size", 1),
        kv_layout=config["memory"].get("kv_layout", "block"),
    )
    cost: CostModel = _make("cost", config, replica=replica)
    needs_prices = config["preemption"].get("_target_", "").endswith(".Cheapest")
    preemption = _make("preemption", config, **({"prices": cost.prices()} if needs_prices else {}))
    batching = _make("batching", config)
    server = config["server"]
    longest = server["max_model_len"] or replica.model.max_model_len
    tokens = server["max_batched_tokens"] or batching.default_tokens(longest, server["max_seqs"])
    memory = _memory(config, replica, longest, tokens, swaps=preemption.swaps)
    scheduler = Scheduler(
        memory=memory,
        batching=batching,
        policy=_make("policy", config),
        preemption=preemption,
        max_seqs=server["max_seqs"],
        max_batched_tokens=tokens,
        max_model_len=longest if server["max_model_len"] else min(longest, memory.longest),
    )
    return Parts(workload, replica, cost, memory, scheduler)


def _memory(config: Settings, replica: Replica, longest: int, tokens: int, swaps: bool) -> Memory:
    settings = dict(config["memory"])
    kind = settings.pop("kind", "paged")
    settings.pop("kv_layout", None)
    swap_space = settings.pop("swap_space_gib", 0.0)
    utilization = settings.pop("gpu_memory_utilization", 0.9)
    wants_blocks = settings.get("blocks") is None
    wants_cpu = "cpu_blocks" in settings and settings["cpu_blocks"] is None
    if wants_blocks or (wants_cpu and swaps):
        room = capacity(
            replica,
            gpu_memory_utilization=utilization,
            max_batched_tokens=tokens,
            max_seqs=config["server"]["max_seqs"],
            swap_space_gib=swap_space,
        )
        if wants_blocks:
            settings["blocks"] = room.blocks
    if wants_cpu:
        settings["cpu_blocks"] = room.cpu_blocks if swaps else 0
    if kind.startswith("reserved"):
        settings["max_model_len"] = longest
    return make_memory(kind, **settings)


def _make(group: str, config: Settings, **more: Any) -> Any:
    """What `config[group]` describes; errors name the group."""
    settings: Mapping[str, Any] = config[group]
    if "_target_" not in settings:
        raise ConfigError(f"{group}._target_: missing; it names the class to build")
    try:
        # In two steps, since Hydra would turn dataclasses among the arguments into configurations.
        return instantiate(settings, _partial_=True, _convert_="all")(**more)
    except (InstantiationException, TypeError) as error:
        raise _clear(group, settings, error) from error


def _clear(group: str, settings: Mapping[str, Any], error: Exception) -> ConfigError:
    """What was wrong with a group's settings, in one line."""
    cause = error.__cause__ or error
    if isinstance(cause, PagedsimError):
        return ConfigError(str(cause))
    text = " ".join(str(cause).split())
    if "unexpected keyword argument" in text:
        name = text.rsplit("'", 2)[-2]
        return unknown(f"key of {group}", name, [k for k in settings if not k.startswith("_")])
    return ConfigError(f"{group}={settings['_target_']}: {text}")
