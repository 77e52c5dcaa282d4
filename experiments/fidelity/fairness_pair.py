"""Two logs of one server under two policies: step times are fitted to one, both are predicted.

Fitted are the milliseconds of a server such as S-LoRA. Its kernels of 2023 are too far from a data
sheet for efficiencies: with those the fitted requests of the A100's log are 15 % off, with these
3 %. They hold for the measured model only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
from rich.console import Console

from pagedsim.core import ConfigError
from pagedsim.fidelity.logs.fit import search
from pagedsim.fidelity.logs.log import Log
from pagedsim.fidelity.logs.score import ClientService, distance
from pagedsim.fidelity.logs.server import ExternalServer
from pagedsim.fidelity.logs.trials import Point
from pagedsim.sim.cost import CostModel
from pagedsim.spec.check import Positive, Whole
from pagedsim.spec.run import RunSpec, Settings

FEWEST = 20
"""Minimum number of requests to fit four coefficients to."""
FREE = ("decode_step", "mixed_step", "prompt_token", "context_token")
"""Fitted weights; initial values are those of `cost=`. Request latencies do not identify the
others: prompt pairs scale with prompt tokens, since the GPU computes both, and the cost of a
sequence is kept."""
PULL = 0.0005
"""Regularisation towards the initial weights, per ln² of their factor: too weak to affect weights
that the log determines, strong enough for those it does not."""
LEAST = 1e-12
"""Minimum weight in seconds, so that weights that a cost model omits can be fitted."""


class Weights(NamedTuple):
    """Components of a step's time in seconds."""

    decode_step: float
    """A decode-only step: reading the model's weights, and host overhead."""
    mixed_step: float
    """A step with prefill: reading the model's weights, and host overhead."""
    prompt_token: float
    prompt_pair: float
    """A pair of a prompt token and a token it attends to."""
    decode: float
    context_token: float

    @classmethod
    def of(cls, cost: CostModel) -> Weights:
        """The closest weights to another cost model."""
        single, two = cost.decode_seconds(1, 0), cost.decode_seconds(2, 0)
        read = (cost.decode_seconds(1, 4096) - single) / 4096
        short, long, longer = (cost.recompute_seconds(size) for size in (1024, 2048, 4096))
        # A prompt's time is a + b·n + c·n², through three points.
        pair = ((longer - long) / 2048 - (long - short) / 1024) / (4096 - 1024)
        token = (long - short) / 1024 - pair * (1024 + 2048)
        fixed = 2 * single - two
        weights = (fixed, fixed, token, pair, two - single, read)
        return cls(*(max(value, LEAST) for value in weights))

    @property
    def settings(self) -> Settings:
        prompt = {
            "constant": 1e3 * self.mixed_step,
            "prefill_tokens": 1e3 * self.prompt_token,
            "prefill_attention": 1e3 * self.prompt_pair,
        }
        count, context = 1e3 * self.decode, {"decode_context": 1e3 * self.context_token}
        return {
            "_target_": "pagedsim.sim.cost.Fitted",
            "unit": "ms",
            "prefill": prompt,
            "decode": {"constant": 1e3 * self.decode_step, "decode_count": count, **context},
            # In a mixed step, a decode is one more token of the same matrix products.
            "mixed": {
                **prompt,
                "decode_count": max(prompt["prefill_tokens"], count),
                **context,
            },
        }


class WeightsFit(NamedTuple):
    """The result of a search."""

    weights: Weights
    simulations: int
    distance: float
    """Mean |ln(predicted / measured)| of the fitted requests."""


def fitted(server: ExternalServer, known: int, sizes: Sequence[float], moves: int) -> WeightsFit:
    """Fit to the first `known` requests; the same log gives the same weights.

    `sizes` and `moves` are those of `search`.
    """
    begin = Weights.of(server.built.cost)
    tries, nearest = 0, np.inf
    with Console(stderr=True).status("fitting") as status:

        def value(point: Point) -> float:
            nonlocal tries, nearest
            tries += 1
            apart = _apart(server, begin, point, known)
            nearest = min(nearest, apart)
            status.update(f"simulation {tries}: requests are {100 * nearest:.2f} % off at best")
            return apart + PULL * float((point**2).sum())

        point = search(value, np.zeros(len(FREE)), sizes, moves)
    return WeightsFit(_weights(begin, point), tries, _apart(server, begin, point, known))


def _apart(server: ExternalServer, begin: Weights, point: Point, known: int) -> float:
    served = server.serve(_weights(begin, point).settings, first=known)
    return distance(server.log, served.latencies, np.arange(known))


def _weights(begin: Weights, point: Point) -> Weights:
    """Scale the free weights by the exponentials of the point."""
    factors = dict(zip(FREE, np.exp(point).tolist(), strict=True))
    factors["prompt_pair"] = factors["prompt_token"]
    return begin._replace(
        **{name: factor * getattr(begin, name) for name, factor in factors.items()}
    )


FIT = (0.5, 0.2, 0.07)
"""Sizes of the search simplex, as logarithms: the first tries 65 % longer step times."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Properties of a server such as S-LoRA that its logs omit."""

    known: Positive
    """Seconds of the first log; requests with a first token by then are fitted."""
    least: Annotated[int, Whole(FEWEST)]
    moves: Annotated[int, Whole()]
    more_prompt: Annotated[int, Whole(0)]
    """Tokens that the server adds to each prompt, not counted by clients."""
    adapter: Annotated[int, Whole(0)]
    """Tokens of the pool that a client's adapter occupies."""
    prompts: Annotated[int, Whole()]
    """Prompt tokens per step are bounded by the pool over this, by default."""
    cold: bool
    """Whether the first step takes as long as the log's first answer."""


@dataclass(frozen=True)
class Side:
    """One of the logs, and the simulation of its requests."""

    policy: str
    measured: ClientService
    simulated: ClientService
    elsewise: Mapping[str, ClientService] = field(default_factory=dict)
    policies: Mapping[str, ClientService] = field(default_factory=dict)

    @property
    def every(self) -> dict[str, ClientService]:
        named = {"measured": self.measured, "simulated": self.simulated}
        return {**named, **self.elsewise, **self.policies}


@dataclass(frozen=True)
class Paired:
    """The results of a pair of logs."""

    name: str
    facts: Settings
    fit: WeightsFit
    first: Side
    other: Side
    pace: float
    """Measured over simulated TPOT in the other log."""

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.first, self.other


@dataclass(frozen=True)
class Pair:
    """A pair of logs and their server."""

    name: str
    config: Settings
    first: Log
    other: Log
    policy: str
    """The policy of the other log; that of the first is fcfs."""
    more: Sequence[str]
    """Further policies to simulate on the other log's requests."""
    rules: Rules

    def studied(self) -> Paired:
        first = self._server(self.first, "fcfs")
        first_token = self.first.arrived + self.first.latencies.ttft
        known = max(int((first_token <= self.rules.known).sum()), self.rules.least)
        fit = fitted(first, min(known, len(self.first)), FIT, self.rules.moves)
        weights = fit.weights
        measured = [ClientService(log, log.latencies) for log in (self.first, self.other)]
        ours = self._served(self.first, "fcfs", weights)
        other = self._served(self.other, self.policy, weights)
        pace = measured[1].tpot / other.tpot
        more = {name: self._served(self.other, name, weights) for name in self.more}
        return Paired(
            self.name,
            first.facts,
            fit,
            Side("fcfs", measured[0], ours),
            Side(self.policy, measured[1], other, self._elsewise(weights, pace), more),
            pace,
        )

    def _elsewise(self, weights: Weights, pace: float) -> dict[str, ClientService]:
        """The other log, simulated with one assumption changed."""
        rules, serve = self.rules, partial(self._served, self.other, self.policy)
        slower = Weights(*(weight * pace for weight in weights))
        variants = {"steps as long as in this log": serve(slower)}
        if self.config["batching"].get("max_wait_tokens"):
            variants["admission at every step"] = serve(weights, batching={"max_wait_tokens": 0})
        if self.config["server"]["max_batched_tokens"] is None:
            most = {"max_batched_tokens": 1 << 20}
            variants["prompts of a step without bound"] = serve(weights, server=most)
        plain: dict[str, Mapping[str, Any]] = {
            "prompts as long as clients say": {"more_prompt": 0},
            "no memory for adapters": {"adapter": 0},
            "warm from the first step": {"cold": False},
        }
        for name, change in plain.items():
            other = replace(self, rules=replace(rules, **change))
            if other.rules != rules:
                variants[name] = other._served(self.other, self.policy, weights)
        return variants

    def _served(
        self, log: Log, policy: str, weights: Weights, **changes: Settings
    ) -> ClientService:
        server = self._server(log, policy, **changes)
        return ClientService(log, server.serve(weights.settings).latencies)

    def _server(self, log: Log, policy: str, **changes: Settings) -> ExternalServer:
        """The server of a log, with other settings in these groups."""
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
        for group, values in changes.items():
            config[group] |= values
        longer = replace(log, prompt=log.prompt + rules.more_prompt)
        first = float(log.latencies.ttft[0]) if rules.cold else 0.0
        external = ExternalServer(config, longer, first)
        try:
            RunSpec(config).prepare()
        except ConfigError as error:
            if not adapters or f"memory of {memory['blocks']} blocks" not in str(error):
                raise
            raise ConfigError(
                f"{error}; of the pool's {pool:,} tokens the adapters of {clients} clients take "
                f"{adapters:,} (study.adapter={rules.adapter})"
            ) from error
        return external
