"""Two logs of one server under two policies: one is fitted, and both are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.fidelity.fairness_fit import Found, Weights, fitted
from pagedsim.core import ConfigError
from pagedsim.fidelity.external_log import Log
from pagedsim.fidelity.external_server import ExternalServer
from pagedsim.fidelity.external_service import ClientService
from pagedsim.run.backend import RunConfig, Settings

FIT = (0.5, 0.2, 0.07)
"""Sizes of the simplex that looks for step times: the first tries them 65 % longer."""


@dataclass(frozen=True)
class Rules:
    """What the logs leave out, of a server such as S-LoRA."""

    known: float
    """Seconds of the first log: requests whose answers began by then are fitted."""
    least: int
    """So many at least, where few come by then."""
    moves: int
    """Of each simplex of the search."""
    more_prompt: int
    """Tokens that the server adds to each prompt, and clients do not count."""
    adapter: int
    """Tokens of the pool that a client's adapter takes."""
    prompts: int
    """A step computes prompts up to the pool over this, unless `server.max_batched_tokens` says."""
    cold: bool
    """Whether the first step takes as long as each log's first answer did."""


@dataclass(frozen=True)
class Side:
    """One of the logs, and what the simulated server did with its requests."""

    policy: str
    measured: ClientService
    simulated: ClientService
    elsewise: Mapping[str, ClientService] = field(default_factory=dict)
    """The same where something else is assumed."""
    policies: Mapping[str, ClientService] = field(default_factory=dict)
    """The same under policies that nobody measured."""


@dataclass(frozen=True)
class Paired:
    """What one pair of logs came to."""

    name: str
    facts: Settings
    found: Found
    first: Side
    other: Side
    pace: float
    """Time between tokens in the other log, over that of the simulated server."""

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both."""
        return self.first, self.other


@dataclass(frozen=True)
class Pair:
    """A pair of logs and the server that they are of."""

    name: str
    config: Settings
    first: Log
    other: Log
    policy: str
    """That of the other log; the first is of fcfs."""
    more: Sequence[str]
    """Policies to try on the other log's requests besides."""
    rules: Rules

    def studied(self) -> Paired:
        """Fit the first log, then serve the requests of both."""
        first = self._server(self.first, "fcfs")
        found = fitted(first, self._known, FIT, self.rules.moves)
        weights = found.weights
        other = self._served(self.other, self.policy, weights)
        pace = self._measured(self.other).tpot / other.tpot
        return Paired(
            self.name,
            first.facts,
            found,
            Side("fcfs", self._measured(self.first), self._served(self.first, "fcfs", weights)),
            Side(
                self.policy,
                self._measured(self.other),
                other,
                self._elsewise(weights, pace),
                {name: self._served(self.other, name, weights) for name in self.more},
            ),
            pace,
        )

    @property
    def _known(self) -> int:
        """How many requests are fitted."""
        begun = self.first.arrived + self.first.latencies.ttft
        known = max(int((begun <= self.rules.known).sum()), self.rules.least)
        return min(known, len(self.first))

    def _elsewise(self, weights: Weights, pace: float) -> dict[str, ClientService]:
        """The other log's requests, served with one thing changed."""
        rules, serve = self.rules, self._served
        log, policy = self.other, self.policy
        asked = {"batching": {"max_wait_tokens": 0}}
        roomy = {"server": {"max_batched_tokens": 1 << 20}}
        slower = Weights(*(weight * pace for weight in weights))
        found = {"steps as long as in this log": serve(log, policy, slower)}
        if self.config["batching"].get("max_wait_tokens"):
            found["admission at every step"] = serve(log, policy, weights, asked)
        if self.config["server"]["max_batched_tokens"] is None:
            found["prompts of a step without bound"] = serve(log, policy, weights, roomy)
        plain: dict[str, Mapping[str, Any]] = {
            "prompts as long as clients say": {"more_prompt": 0},
            "no memory for adapters": {"adapter": 0},
            "warm from the first step": {"cold": False},
        }
        for name, change in plain.items():
            other = replace(self, rules=replace(rules, **change))
            if other.rules != rules:
                found[name] = other._served(log, policy, weights)
        return found

    def _served(
        self, log: Log, policy: str, weights: Weights, changes: Settings | None = None
    ) -> ClientService:
        server = self._server(log, policy, changes or {})
        return ClientService(log, server.serve(weights.settings).latencies)

    def _measured(self, log: Log) -> ClientService:
        return ClientService(log, log.latencies)

    def _server(
        self, log: Log, policy: str, changes: Mapping[str, Mapping[str, Any]] | None = None
    ) -> ExternalServer:
        config, rules = deepcopy(self.config), self.rules
        server, memory = config["server"], config["memory"]
        config["policy"]["of"] = policy
        pool = memory["blocks"] * memory["block_size"]
        if server["max_batched_tokens"] is None:
            longest = server["max_model_len"] or 0
            server["max_batched_tokens"] = max(pool // rules.prompts, longest)
        clients = len(set(log.client))
        adapters = rules.adapter * clients
        memory["blocks"] = (pool - adapters) // memory["block_size"]
        if memory["blocks"] < 1:
            raise ConfigError(
                f"memory.blocks: a pool of {pool:,} tokens holds no more than the adapters of "
                f"{clients} clients, {adapters:,} (study.adapter={rules.adapter})"
            )
        for group, values in (changes or {}).items():
            config[group] |= values
        longer = replace(log, prompt=log.prompt + rules.more_prompt)
        first = float(log.latencies.ttft[0]) if rules.cold else 0.0
        made = ExternalServer(config, longer, first)
        try:
            RunConfig(config).prepare()
        except ConfigError as error:
            if not adapters or f"memory of {memory['blocks']} blocks" not in str(error):
                raise
            raise ConfigError(
                f"{error}; of the pool's {pool:,} tokens the adapters of {clients} clients take "
                f"{adapters:,} (study.adapter={rules.adapter})"
            ) from error
        return made
