"""The simulator's twin of an engine: its limits and blocks, its prices, its model and machine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf

from pagedsim.core import ConfigError, Scheduler
from pagedsim.run.backend import Settings
from pagedsim.run.objects import make
from pagedsim.run.server import server_of
from pagedsim.server import ServerSpec
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.huggingface import read_shape
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica

S = TypeVar("S", bound=Scheduler)


class Prices:
    """What a preemption cost on the engine's machine."""

    def __init__(self, prices: Mapping[str, Sequence[float]] | None) -> None:
        if prices is None:
            raise ConfigError("machine.prices: must be there for this preemption, and are not")
        self._prefill, self._transfer = prices["prefill"], prices["transfer"]

    def recompute_seconds(self, tokens: int) -> float:
        """Time to prefill `tokens` tokens."""
        return self._prefill[0] + self._prefill[1] * tokens

    def swap_seconds(self, blocks: int) -> float:
        """Time to move `blocks` blocks out and in again."""
        return 2 * (self._transfer[0] + self._transfer[1] * blocks)


def scheduler_of(config: Settings, machine: Settings, kind: type[S]) -> S:
    """A scheduler with the engine's limits and sizes, whatever they came from."""
    server = server_of(config).of_sizes(machine)
    if server.weighs_prices:
        server = server.priced(Prices(machine.get("prices")))
    scheduler = server.scheduler(kind)
    assert isinstance(scheduler, kind)
    return scheduler


def replica_of(config: Settings, machine: Settings) -> Replica:
    """What the engine served, on what, in the simulator's terms."""
    layout = config["memory"].get("kv_layout", "block")
    server = ServerSpec(kv_layout=layout).of_sizes(machine)
    return Replica.of(server, _shape(config), _hardware(config, machine))


def _shape(config: Settings) -> ModelShape:
    """The shape of the model that a backend has loaded."""
    name = config["backend"].get("model")
    if name is None:
        return make("model", config.get("model"), ModelShape)
    if name == "tiny":
        return make("model", _option("model", name), ModelShape)
    if Path(name).expanduser().is_dir():
        return read_shape(name)
    from transformers import AutoConfig

    try:
        return read_shape(AutoConfig.from_pretrained(name).to_dict())
    except (OSError, ValueError) as error:
        raise ConfigError(f"backend.model={name}: its config.json cannot be had here") from error


def _hardware(config: Settings, machine: Settings) -> Hardware:
    """That of conf/hardware which the machine's device is called like; else the configured one."""
    name = data_sheet(machine)
    settings = _option("hardware", name) if name else config.get("hardware")
    return make("hardware", settings, Hardware)


def data_sheet(machine: Settings) -> str | None:
    """The name in conf/hardware of the machine's device; None where there is none of it."""
    if machine.get("cuda") is None:
        return "cpu"
    words = re.findall(r"[a-z0-9]+", machine["device"].lower())
    names = {*words, *(a + b for a, b in pairwise(words))}
    known = sorted(path.name.removesuffix(".yaml") for path in _folder("hardware").iterdir())
    found = [name for name in known if set(name.split("-")) <= names]
    return max(found, key=len, default=None)


def _option(group: str, name: str) -> Any:
    text = _folder(group).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return OmegaConf.to_container(OmegaConf.create(text))


def _folder(group: str) -> Any:
    return files("conf").joinpath(group)
