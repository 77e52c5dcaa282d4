"""The simulator configured as an engine: limits, blocks, prices, model and hardware."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from pagedsim.backends.base import Backend, BackendRun
from pagedsim.core import ConfigError, Scheduler
from pagedsim.core.offload import LowerTier
from pagedsim.engine.vllm_offload import with_tiers
from pagedsim.fidelity.sheets import option_names, settings
from pagedsim.metrics.recorder import Recorder
from pagedsim.server import ServerSpec
from pagedsim.sim.copies import CopyTimes
from pagedsim.sim.cost import Fitted
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.huggingface import read_shape
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica
from pagedsim.sim.simulate import simulate
from pagedsim.sim.transfers import Transfers
from pagedsim.spec.objects import make
from pagedsim.spec.roots import CARRIED
from pagedsim.spec.run import RunSpec, Settings
from pagedsim.workload import Workload

S = TypeVar("S", bound=Scheduler)


@dataclass(frozen=True)
class EngineModel(Backend):
    """The simulator in the place of an engine: its workload and limits, step times from a fit."""

    engine: Backend
    """The backend of the engine's own settings, which defines how much of a workload is served."""
    machine: Mapping[str, Any]
    """The facts about the machine that the engine's runs record."""
    path: str
    """A cost.json that was fitted to the engine's steps."""

    def traffic(self, settings: Settings, seed: int) -> Workload:
        return self.engine.traffic(settings, seed)

    def prepare(self, config: RunSpec) -> ModelledEngine:
        settings = config.settings
        engines = {**settings, "backend": settings["backend"]["engine"]}
        cost = Fitted.load(self.path, replica_of(engines, dict(self.machine)))
        return ModelledEngine(config, dict(self.machine), cost)


class ModelledEngine(BackendRun):
    """One run of an `EngineModel`."""

    def __init__(self, config: RunSpec, machine: Settings, cost: Fitted) -> None:
        self.scheduler = scheduler_of(config, machine, Scheduler)
        self._cost = cost
        # Where there is a bus, the engine lets blocks go out beside the computation.
        self._overlap = machine.get("cuda") is not None

    def run(self, workload: Workload, recorder: Recorder) -> None:
        settings: Settings = {"overlap": self._overlap}
        if self.scheduler.offloads:
            copies = CopyTimes.of(self._cost.replica, self._cost.bus_efficiency)
            settings["transfers"] = Transfers(copies)
        simulate(self.scheduler, workload, self._cost, recorder, **settings)

    def notices(self) -> list[str]:
        return self._cost.notices


class RecordedPrices:
    """What a preemption cost on the engine's machine."""

    def __init__(self, prices: Mapping[str, Sequence[float]] | None) -> None:
        if prices is None:
            raise ConfigError("machine.prices: must be there for this preemption, and are not")
        self._prefill, self._transfer = prices["prefill"], prices["transfer"]

    def recompute_seconds(self, tokens: int) -> float:
        return self._prefill[0] + self._prefill[1] * tokens

    def swap_seconds(self, blocks: int) -> float:
        return 2 * (self._transfer[0] + self._transfer[1] * blocks)


def scheduler_of(
    config: RunSpec, machine: Settings, kind: type[S], tier: Callable[..., LowerTier] | None = None
) -> S:
    """A scheduler with the engine's limits and sizes, whatever they came from, and such a `tier` in
    the place of each of files."""
    server = config.server.of_sizes(machine)
    offload = server.offloading.sized(server.block_size, machine["block_bytes"])
    server = replace(server, offload=offload)
    if tier is not None:
        server = with_tiers(server, tier)
    if server.weighs_prices:
        server = server.priced(RecordedPrices(machine.get("prices")))
    scheduler = server.scheduler(kind)
    assert isinstance(scheduler, kind)
    return scheduler


def replica_of(config: Settings, machine: Settings) -> Replica:
    """What the engine served, on what, in the simulator's terms."""
    layout = config["memory"].get("kv_layout", "block")
    server = ServerSpec(kv_layout=layout).of_sizes(machine)
    return Replica.of(server, _shape(config), _hardware(config, machine))


def _shape(config: Settings) -> ModelShape:
    name = config["backend"].get("model")
    if name is None:
        return make("model", config.get("model"), ModelShape)
    if name in CARRIED:
        return make("model", settings("model", name), ModelShape)
    if Path(name).expanduser().is_dir():
        return read_shape(name)
    from transformers import AutoConfig

    try:
        return read_shape(AutoConfig.from_pretrained(name).to_dict())
    except (OSError, ValueError) as error:
        raise ConfigError(f"backend.model={name}: its config.json cannot be had here") from error


def _hardware(config: Settings, machine: Settings) -> Hardware:
    """The entry of conf/hardware whose name is in the device's name; else the configured
    hardware."""
    name = data_sheet(machine)
    sheet = settings("hardware", name) if name else config.get("hardware")
    return make("hardware", sheet, Hardware)


def data_sheet(machine: Settings) -> str | None:
    """The entry of conf/hardware for a device name; None without one."""
    if machine.get("cuda") is None:
        return "cpu"
    words = re.findall(r"[a-z0-9]+", machine["device"].lower())
    names = {*words, *(a + b for a, b in pairwise(words))}
    matches = [name for name in sorted(option_names("hardware")) if set(name.split("-")) <= names]
    return max(matches, key=len, default=None)
