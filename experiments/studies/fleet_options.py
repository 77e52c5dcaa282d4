"""Fleet options of a search: GPU, split and router, without the number of replicas."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.studies.compare import refuse_of_an_arm
from experiments.studies.lattice import Counts
from experiments.studies.placement import server
from pagedsim.core import ConfigError, PagedsimError
from pagedsim.core.errors import shown
from pagedsim.run.backend import RunConfig, Settings
from pagedsim.run.compose import Command, group_of

Split = Sequence[str] | Mapping[str, Sequence[str]]
"""Overrides of replicas: one list for all, or one per role."""
ROLES = ("prefill", "decode")
REPLICAS = "fleet.replicas"
_VARIED = ("hardware", "router", "fleet")
"""Components of an option."""
_TRAFFIC = ("workload", "predictor", "slo", "backend")
"""Settings common to all options."""


@dataclass(frozen=True)
class Option:
    """A fleet option; its number of replicas is searched."""

    gpu: str
    split: str
    router: str
    changes: Sequence[str]
    keys: Sequence[str]
    """Settings for the number of replicas of each kind."""
    alone: Sequence[Sequence[str]]
    """For each role the changes of a fleet that does nothing else; none where all do both."""
    gpus: Sequence[int]
    """Of a replica of each kind."""
    prices: Sequence[float]
    """Euros an hour, likewise."""

    @property
    def name(self) -> str:
        """For a reader."""
        return f"{self.gpu}, {self.split}, {self.router}"

    def fleet(self, counts: Counts) -> str:
        """So many of it."""
        return f"{together(counts)} × {self.name}"

    def gpus_of(self, counts: Counts) -> int:
        """Of so many."""
        return sum(count * each for count, each in zip(counts, self.gpus, strict=True))


@dataclass(frozen=True)
class Options:
    """All valid options in order, and the reasons for omitting others."""

    there: Sequence[Option]
    left_out: Mapping[str, str]
    """Reasons, by what is left out."""


def together(counts: Counts) -> str:
    """Such as "2 + 3"."""
    return " + ".join(map(str, counts))


def check_splits(splits: object) -> None:
    """Raise ConfigError unless these are splits by name."""
    if not isinstance(splits, Mapping) or not splits:
        raise ConfigError(f"splits={shown(splits)}: must be a mapping of names to overrides")
    for name, split in splits.items():
        where = f"splits.{name}"
        if isinstance(split, Mapping):
            if set(split) != set(ROLES):
                raise ConfigError(
                    f"{where}={shown(split)}: must have overrides for prefill and for decode"
                )
            for role in ROLES:
                _check_changes(f"{where}.{role}", split[role])
        else:
            _check_changes(where, split)


def _check_changes(where: str, changes: object) -> None:
    if not isinstance(changes, (list, tuple)) or not all(isinstance(one, str) for one in changes):
        raise ConfigError(
            f"{where}={shown(changes)}: must be a list of overrides, such as "
            '["tensor_parallel=2"], '
            "or {prefill: [...], decode: [...]}"
        )
    for change in changes:
        refuse_of_an_arm(f"{where}: {change}", change)
        if group_of(change) in _VARIED:
            raise ConfigError(f"{where}: {change}: is what the search varies")
        if group_of(change) in _TRAFFIC:
            raise ConfigError(f"{where}: {change}: must be the same for all options")


def options_of(
    command: Command, gpus: Sequence[str], splits: Mapping[str, Split], routers: Sequence[str]
) -> Options:
    """Every GPU with every split and router, where a model fits and a price is known."""
    there: list[Option] = []
    left_out: dict[str, str] = {}
    for gpu in gpus:
        for split, set_to in splits.items():
            for router in routers:
                changes, keys, alone = _changes(gpu, set_to, router)
                config = command.configured(f"study.splits.{split}", changes)
                if reason := _misfit(config, command.seeds[0]):
                    left_out.setdefault(f"{gpu}, {split}", reason)
                    continue
                servers = list(_servers(config))
                prices = [euros for _, euros in servers if euros is not None]
                if len(prices) < len(servers):
                    left_out[gpu] = "has no price; set hardware.price_per_hour in a sheet of it"
                    continue
                sizes = [many for many, _ in servers]
                there.append(Option(gpu, split, router, changes, keys, alone, sizes, prices))
    return Options(there, left_out)


def _changes(gpu: str, split: Split, router: str) -> tuple[list[str], list[str], list[list[str]]]:
    """Overrides, the keys of how many replicas there are, and overrides of each role alone."""
    changes = [f"hardware={gpu}", f"router={router}"]
    if not isinstance(split, Mapping):
        return [*changes, *split], [REPLICAS], []
    sets = [f"fleet.pools.{role}.set={json.dumps(list(split[role]))}" for role in ROLES]
    keys = [f"fleet.pools.{role}.replicas" for role in ROLES]
    alone = [[*changes, *split[role], f"backend.only={role}"] for role in ROLES]
    return [*changes, "fleet=prefill_decode", *sets], keys, alone


def _misfit(config: Settings, seed: int) -> str:
    """Why it cannot be built; empty if it can."""
    try:
        RunConfig(config, seed).prepare()
    except PagedsimError as error:
        return str(error)
    return ""


def _servers(config: Settings) -> Iterator[tuple[int, float | None]]:
    """GPUs and euros an hour of a replica of each kind."""
    pools: Mapping[str, Any] = config["fleet"].get("pools") or {"": {}}
    for pool in pools:
        yield server(RunConfig(config).pool(pool).settings)
