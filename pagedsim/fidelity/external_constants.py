"""What a data sheet does not say of a server: the constants of its roofline, and its front.

They are of the GPU and of the software, not of a model, so that what is fitted with one model
tells of another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from pagedsim.core import ConfigError
from pagedsim.fidelity.external_server import ExternalServer, Served
from pagedsim.fidelity.step_tables import sheets
from pagedsim.run.backend import Settings
from pagedsim.sim.cost import Roofline

FRONT = "front_ms"
"""From when a request comes until the scheduler has it: HTTP, tokenising, handing over."""
MEANING = {
    "compute_efficiency": "FLOP/s, of the data sheet's",
    "bandwidth_efficiency": "bytes/s of weights",
    "cache_efficiency": "bytes/s of keys and values",
    "bus_efficiency": "bytes/s over the bus",
    "interconnect_efficiency": "bytes/s between GPUs",
    "host_step_ms": "the host, a step",
    "host_request_us": "and a sequence of it",
    "block_tokens": "finding a block, as reading",
    FRONT: "to the scheduler, a request",
}
UNITS = {"_efficiency": "share", "_ms": "ms", "_us": "µs", "_tokens": "tokens"}

TIED = {"attention_efficiency": "compute_efficiency"}
"""Which goes with which, since latencies of requests cannot tell them apart."""

Constants = Mapping[str, float]
"""The roofline's by their keywords, and FRONT."""


class Constant(NamedTuple):
    """One of them."""

    name: str

    @property
    def share(self) -> bool:
        """Whether it is part of what a data sheet says, so that it cannot be above 1."""
        return self.name.endswith("_efficiency")

    @property
    def unit(self) -> str:
        return next((unit for end, unit in UNITS.items() if self.name.endswith(end)), "")

    @property
    def meaning(self) -> str:
        return MEANING.get(self.name, self.name.replace("_", " "))

    def seconds(self, value: float) -> float:
        """What a step's time is proportional to: for a share, what is left of it upside down."""
        return 1.0 / value if self.share else value

    @property
    def likely(self) -> float:
        """How far it may well be from what step tables say, in logarithms."""
        return 0.1 if self.share else 0.7

    @property
    def least(self) -> float:
        """The least that `seconds` can be."""
        return 1.0 if self.share else 0.0

    def held(self, seconds: float) -> float:
        """The value of so many `seconds`, or of the nearest that can be."""
        return self.seconds(max(seconds, self.least))


def constants_of(server: ExternalServer) -> dict[str, float]:
    """Those that `cost=` has; raises ConfigError where it is no roofline."""
    cost = server.cost
    settings = server.config["cost"]
    if not isinstance(cost, Roofline):
        raise ConfigError(
            f"cost._target_={settings.get('_target_')}: must be cost=roofline, whose constants are "
            "what a log of requests is fitted with"
        )
    own = {name: value for name, value in cost.constants.items() if name not in TIED}
    return own | {FRONT: 1e3 * cost.server_seconds}


def with_constants(server: ExternalServer, constants: Constants) -> Settings:
    """The settings of its cost model with these."""
    settings = {name: value for name, value in constants.items() if name != FRONT}
    if isinstance(server.cost, Roofline):
        own = server.cost.constants
        for name, leader in TIED.items():
            if leader in constants:
                settings[name] = min(own[name] * constants[leader] / own[leader], 1.0)
    return {**server.config["cost"], **settings}


def serve(server: ExternalServer, constants: Constants, first: int | None = None) -> Served:
    """Serve the log with these; `first` as for `ExternalServer.serve`."""
    cost = with_constants(server, constants)
    return server.serve(cost, 1e-3 * constants.get(FRONT, 0.0), first)


def at_the_peak(server: ExternalServer) -> ExternalServer:
    """The same at all that the data sheet has, and with software that takes no time."""
    constants_of(server)
    assert isinstance(server.cost, Roofline)
    peak = {name: 1.0 if Constant(name).share else 0.0 for name in server.cost.constants}
    stack = sheets.settings("stack", "ideal")
    cost = {**server.config["cost"], "stack": stack, **peak}
    return ExternalServer({**server.config, "cost": cost}, server.log)


def words(server: ExternalServer, constants: Constants, names: Collection[str]) -> str:
    """Some constants, and those that go with them, as the command line takes them."""
    settings = with_constants(server, constants)
    named = [*names, *(name for name, leader in TIED.items() if leader in names)]
    found = [f"cost.{name}={settings[name]:.4g}" for name in named if name != FRONT]
    if FRONT in named:
        found.append(f"stack.server_ms={constants[FRONT]:.4g}")
    return " ".join(found)
