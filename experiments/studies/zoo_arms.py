"""Arms of a zoo: all named policies, and whether their required inputs exist."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pagedsim.build import memory_class, policies
from pagedsim.core import ConfigError, Memory, Policy, PrefixMemory
from pagedsim.run.backend import RunConfig, Settings, policy_of
from pagedsim.run.parts import build, unmet
from pagedsim.workload import Workload
from policies.admission import Refusal


def every_policy(predictors: Sequence[str]) -> dict[str, list[str]]:
    """Overrides by arm: one per policy, and one per predictor if it uses predicted lengths."""
    arms: dict[str, list[str]] = {}
    for name, kind in policies().items():
        if "predictor" in kind.needs:
            for one in predictors:
                arms[guessed(name, one)] = [f"policy={name}", f"predictor={one}"]
        else:
            arms[name] = [f"policy={name}"]
    return arms


def guessed(name: str, predictor: str) -> str:
    """The name of the arm of a policy with a predictor."""
    return f"{name} by {predictor}"


def by_client(workload: Mapping[str, Any], objectives: Mapping[str, Any]) -> dict[str, Any]:
    """The bounds of each client, from those of the workload's classes.

    Raises ConfigError for a client of several classes.
    """
    found: dict[str, Any] = {}
    for name, bounds in objectives.items():
        settings = (workload.get("classes") or {}).get(name)
        for client in [] if settings is None else _clients(name, settings):
            if found.setdefault(client, bounds) is not bounds:
                raise ConfigError(
                    f"objectives.{name}: client {client} is of other classes, too; "
                    f"set slo.clients.{client}="
                )
    return found


def _clients(name: str, settings: Mapping[str, Any]) -> list[str]:
    """The clients of a class; default is its name."""
    client = settings.get("client", name)
    return [*map(str, client)] if isinstance(client, Mapping) else [str(client)]


class Feed:
    """Checks of policies' inputs; arms with equal workload settings share a workload."""

    def __init__(self, base: Settings, seed: int) -> None:
        """Raises ConfigError if `base`, without overrides of arms, cannot be built."""
        self.seed = seed
        self._workloads: dict[str, Workload] = {}
        build(base, seed, self._workload(base))

    def lacking(self, config: Settings) -> str:
        policy, workload = policy_of(config["policy"]), self._workload(config)
        for _, reason in unmet(policy, workload):
            return reason
        if "prompts" in _needs(policy) and not issubclass(_memory(config), PrefixMemory):
            kind = config["memory"]["kind"]
            return f"goes by what is cached, and memory={kind} caches nothing; set memory=prefix"
        return ""

    def misfit(self, config: Settings) -> str:
        try:
            build(config, self.seed, self._workload(config))
        except ConfigError as error:
            return str(error)
        return ""

    def counts_apart(self, config: Settings) -> bool:
        """Whether an arm's policy counts a shared prefix once per request."""
        rules = _around(policy_of(config["policy"]))
        return (
            issubclass(_memory(config), PrefixMemory)
            and self._workload(config).prompts is not None
            and any(isinstance(one, Refusal) for one in rules)
        )

    def _workload(self, config: Settings) -> Workload:
        whose: Mapping[str, Any] = {
            key: config.get(key) for key in ("workload", "backend", "predictor")
        }
        settings = json.dumps(whose, sort_keys=True, default=str)
        if settings not in self._workloads:
            self._workloads[settings] = RunConfig(config, self.seed).workload()
        return self._workloads[settings]


def _needs(policy: Policy) -> set[str]:
    return {need for one in _around(policy) for need in one.needs}


def _around(policy: Policy) -> Iterator[Policy]:
    """A policy, and those that it stands around."""
    yield policy
    if isinstance(inner := getattr(policy, "of", None), Policy):
        yield from _around(inner)


def _memory(config: Settings) -> type[Memory]:
    return memory_class(config["memory"].get("kind", "paged"))
