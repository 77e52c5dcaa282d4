"""What replicas send each other: bytes over links that others use, too, in simulated time."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from random import Random

import simpy

from pagedsim.core.errors import require_flag, require_number, require_whole, unknown
from pagedsim.fleet.lanes import SHARING, Link, Route, Sharing
from pagedsim.sim.environment import Environment

TOPOLOGIES = ("nic", "shared")


@dataclass(frozen=True)
class Network:
    """How replicas are joined, in the units of data sheets: 1 GB is 1e9 bytes."""

    bandwidth_gb_s: float
    """Of a lane, one way."""
    latency_us: float = 0.0
    """From the last byte sent until it is there."""
    topology: str = "nic"
    """`nic`: every replica has a link out and a link in, and a transfer takes one of each;
    `shared`: one link carries everything."""
    lanes: int = 1
    """Transfers that a link carries at once, each at the full bandwidth."""
    sharing: str = "fifo"
    """What happens where more come: `fifo`, they go one after the other; `fair`, all go at once,
    and none could have more but at the cost of one that has no more than it (max-min)."""
    layerwise: bool = False
    """Whether layers are sent as they are computed, the last of them when the step is over."""
    node_replicas: int = 1
    """Replicas in one node, by their numbers; among themselves they have links of their own."""
    node_gb_s: float = 450.0
    """Of these, as of an H100's NVLink."""
    failure_rate: float = 0.0
    """The part of attempts of which nothing arrives."""
    timeout_s: float = 1.0
    """So long after the last byte was sent, that is known."""
    retries: int = 3
    """Attempts after the first."""

    def __post_init__(self) -> None:
        for key in ("bandwidth_gb_s", "node_gb_s"):
            require_number(f"link.{key}", getattr(self, key), above=0)
        for key in ("latency_us", "timeout_s"):
            require_number(f"link.{key}", getattr(self, key), 0)
        require_number("link.failure_rate", self.failure_rate, 0, 1)
        for key, least in (("lanes", 1), ("node_replicas", 1), ("retries", 0)):
            require_whole(f"link.{key}", getattr(self, key), least)
        require_flag("link.layerwise", self.layerwise)
        for key, known in (("topology", TOPOLOGIES), ("sharing", tuple(SHARING))):
            if (value := str(getattr(self, key))) not in known:
                raise unknown(f"link.{key}", value, known)


@dataclass
class Usage:
    """What all transfers came to."""

    transfers: int = 0
    bytes: float = 0.0
    """Of those that arrived."""
    seconds: float = 0.0
    """From when they were asked for until they were there, or given up."""
    waiting_s: float = 0.0
    """What of that was for other transfers."""
    retries: int = 0
    lost: int = 0
    """Given up, or cut off when a replica died or the request ended."""


class Fabric:
    """The links of some replicas, in one environment."""

    def __init__(self, environment: Environment, network: Network, seed: int = 0) -> None:
        self.environment = environment
        self.network = network
        self.usage = Usage()
        self.links: dict[tuple[str, int], Link] = {}
        """By what they are and whose: those that were used."""
        self._sharing: Sharing = SHARING[network.sharing](environment)
        self._dice = Random(f"link/{seed}")

    def send(
        self,
        source: int,
        target: int,
        nbytes: float,
        *,
        since: float | None = None,
        layers: int = 1,
    ) -> Generator[simpy.Event, None, bool]:
        """Send bytes from a replica to another; whether they arrive.

        Layer by layer, what was computed since `since` has been sent while it was, as far as the
        links were idle: all but the last of `layers` at most. So alone on its links a transfer is
        over when `nbytes` could have been sent since then, or a layer since now, whichever is
        later. Whoever interrupts the process gives the links to others.
        """
        network, usage, began = self.network, self.usage, self.environment.now
        route = self.route(source, target)
        left = nbytes - self._sent_before(route, nbytes, since, layers)
        usage.transfers += 1
        arrives = False
        try:
            for attempt in range(1 + network.retries):
                usage.retries += attempt > 0
                yield from self._carry(route, left)
                if not self._dice.random() < network.failure_rate:
                    yield self.environment.timeout(1e-6 * network.latency_us)
                    arrives = True
                    break
                yield self.environment.timeout(network.timeout_s)
                left = nbytes
        finally:
            usage.seconds += self.environment.now - began
            usage.lost += not arrives
            usage.bytes += nbytes if arrives else 0.0
        return arrives

    def route(self, source: int, target: int) -> Route:
        """The links between two replicas."""
        network = self.network
        if source == target:
            return ()
        if source // network.node_replicas == target // network.node_replicas:
            return self._link("node out", source), self._link("node in", target)
        if network.topology == "shared":
            return (self._link("network", 0),)
        return self._link("out", source), self._link("in", target)

    def facts(self) -> dict[str, float]:
        """What all transfers came to, for a summary; `busy_s` is that of the busiest link."""
        busy = max((link.busy_s for link in self.links.values()), default=0.0)
        return {**vars(self.usage), "busy_s": busy}

    def _link(self, what: str, whose: int) -> Link:
        network = self.network
        if (what, whose) not in self.links:
            rate = network.node_gb_s if what.startswith("node") else network.bandwidth_gb_s
            self.links[what, whose] = Link(self.environment, 1e9 * rate, network.lanes)
        return self.links[what, whose]

    def _sent_before(self, route: Route, nbytes: float, since: float | None, layers: int) -> float:
        """Bytes that went while they were computed."""
        if since is None or not self.network.layerwise or not route:
            return 0.0
        begin, rate = since, min(link.bandwidth for link in route)
        for link in route:
            if (idle := link.idle_since) is None:
                return 0.0
            begin = max(begin, idle)
        sent = min(nbytes * (1 - 1 / layers), (self.environment.now - begin) * rate)
        for link in route:
            link.spend(sent, begin + sent / rate)
        return sent

    def _carry(self, route: Route, nbytes: float) -> Generator[simpy.Event, None, None]:
        """One attempt, until its last byte is sent."""
        if not route or not nbytes:
            return
        began, alone = self.environment.now, nbytes / min(link.bandwidth for link in route)
        for link in route:
            link.take()
        try:
            yield from self._sharing.carry(route, nbytes)
        finally:
            for link in route:
                link.give()
        for link in route:
            link.bytes += nbytes
        self.usage.waiting_s += max(self.environment.now - began - alone, 0.0)
