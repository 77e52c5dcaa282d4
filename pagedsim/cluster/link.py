"""The network between replicas: links shared by concurrent transfers, in simulated time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from heapq import heapreplace
from math import inf
from random import Random

import simpy

from pagedsim.core.errors import ConfigError, require_flag, require_number, require_whole, unknown
from pagedsim.sim.environment import NORMAL, Environment
from pagedsim.sim.hardware import Hardware


class Link:
    """A unidirectional link of one or more channels; `bandwidth` is of a channel, in bytes/s."""

    def __init__(self, environment: Environment, bandwidth: float, channels: int = 1) -> None:
        self.environment = environment
        self.bandwidth = bandwidth
        self.channels = channels
        self.turn = simpy.Resource(environment, capacity=channels)
        self.bytes = 0.0  # transferred in all
        self.free_at = [-inf] * channels  # a heap: when each has sent all that waits for it
        self._users = 0  # transfers that use it or wait for it
        self._idle = deque([-inf] * channels)  # idle channels, and since when each is
        self._filled = -inf  # when the last idle channel was taken
        self._spent = -inf  # idle time up to here was used by layer-wise transfers, after the fact

    @property
    def busy_s(self) -> float:
        """Seconds that one channel takes for all bytes transferred."""
        return self.bytes / self.bandwidth

    @property
    def idle_since(self) -> float | None:
        """Since when a channel has been idle until now; None if all are busy."""
        if self._idle:
            return max(self._idle[0], self._spent)
        return self._spent if self._filled == self.environment.now else None

    def spend(self, nbytes: float, until: float) -> None:
        """Account for bytes sent in idle time, which is used up to `until`."""
        self.bytes += nbytes
        self._spent = until

    def take(self) -> None:
        """Register a transfer."""
        self._users += 1
        if self._idle:
            self._spent = max(self._spent, self._idle.popleft())
            self._filled = self.environment.now if not self._idle else -inf

    def give(self) -> None:
        """Unregister a transfer."""
        self._users -= 1
        if self._users < self.channels:
            self._idle.append(self.environment.now)


Route = Sequence[Link]
"""The links that a transfer occupies at the same time."""


class Fifo:
    """First come, first served, at full bandwidth; a transfer that waits for its second link keeps
    the first one."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def carry(self, route: Route, nbytes: float) -> Generator[simpy.Event, None, None]:
        """Wait for a channel of each link in turn. All transfers take outgoing links before
        incoming ones, so there is no deadlock."""
        end = self._environment.now + self.seconds(route, nbytes)
        for link in route:
            heapreplace(link.free_at, end)
        with ExitStack() as turns:
            for link in route:
                yield turns.enter_context(link.turn.request())
            seconds = nbytes / min(link.bandwidth for link in route)
            yield self._environment.at(self._environment.now + seconds, NORMAL)

    def seconds(self, route: Route, nbytes: float) -> float:
        """How long a transfer would take that began now, as if no other were cancelled."""
        now = self._environment.now
        begin = max(now, *(link.free_at[0] for link in route))
        return begin - now + nbytes / min(link.bandwidth for link in route)


@dataclass(eq=False)
class Flow:
    """A transfer that shares its links."""

    route: Route
    left: float
    """Bytes still to be sent."""
    sent: simpy.Event
    rate: float = 0.0
    """Current rate, in bytes/s."""
    end: float = field(default=0.0)
    """Its end at this rate."""

    @property
    def most(self) -> float:
        """Its rate on idle links."""
        return min(link.bandwidth for link in self.route)


class Fair:
    """All transfers at once, at max-min fair rates, recomputed whenever one starts or ends."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._flows: list[Flow] = []
        self._at = 0.0  # time of the last update of `left`
        self._round = 0  # version of the rates

    def carry(self, route: Route, nbytes: float) -> Generator[simpy.Event, None, None]:
        """Send bytes along with all other transfers."""
        flow = Flow(route, nbytes, self._environment.event())
        self._advance()
        self._flows.append(flow)
        self._divide()
        try:
            yield flow.sent
        finally:
            if flow in self._flows:  # interrupted
                self._advance()
                self._flows.remove(flow)
                self._divide()

    def seconds(self, route: Route, nbytes: float) -> float:
        """How long a transfer would take that began now, at the rate that it would get now."""
        flow = Flow(route, nbytes, self._environment.event())
        divide([*map(replace, self._flows), flow])
        return nbytes / flow.rate

    def _advance(self) -> None:
        now = self._environment.now
        for flow in self._flows:
            flow.left = max(flow.left - flow.rate * (now - self._at), 0.0)
        self._at = now

    def _divide(self) -> None:
        """Recompute the rates, and schedule the first end at these rates."""
        self._round += 1
        if not self._flows:
            return
        divide(self._flows)
        for flow in self._flows:
            flow.end = self._at + flow.left / flow.rate
        first, this = min(flow.end for flow in self._flows), self._round
        event = self._environment.at(first, NORMAL)
        event.callbacks.append(lambda _: self._end(this))

    def _end(self, version: int) -> None:
        if version != self._round:  # rates have changed since
            return
        now = self._environment.now
        over = [flow for flow in self._flows if flow.end <= now]
        self._advance()
        self._flows = [flow for flow in self._flows if flow.end > now]
        self._divide()
        for flow in over:
            flow.sent.succeed()


def divide(flows: Sequence[Flow]) -> None:
    """Set max-min fair rates: all rates rise together; a flow stops when one of its links is full,
    or at the bandwidth of one channel."""
    room = {link: link.channels * link.bandwidth for flow in flows for link in flow.route}
    rising = list(flows)
    while rising:
        users = Counter(link for flow in rising for link in flow.route)
        share = {link: room[link] / count for link, count in users.items()}
        level = min(*share.values(), *(flow.most for flow in rising))
        full = {link for link, rate in share.items() if rate <= level}
        stops = [f for f in rising if f.most <= level or not full.isdisjoint(f.route)]
        for flow in stops:
            flow.rate = level
            for link in flow.route:
                room[link] -= level
        rising = [flow for flow in rising if flow not in stops]


SHARING: dict[str, type[Fifo] | type[Fair]] = {"fifo": Fifo, "fair": Fair}
"""By the value of the setting `sharing`."""
TOPOLOGIES = ("nic", "shared")


@dataclass(frozen=True)
class Network:
    """The network between replicas, in the units of data sheets: 1 GB is 1e9 bytes."""

    bandwidth_gb_s: float | None = None
    """Bandwidth of a channel, in one direction; None: `network_gb_s` of each replica's hardware."""
    latency_us: float = 0.0
    """From sending the last byte to its arrival."""
    topology: str = "nic"
    """`nic`: each replica has an outgoing and an incoming link, and a transfer occupies one of
    each; `shared`: one link carries all transfers."""
    channels: int = 1
    """Of a link: concurrent transfers, each at the full bandwidth."""
    sharing: str = "fifo"
    """Among more transfers than channels: `fifo`, one after the other; `fair`, all at once at
    max-min fair rates."""
    layerwise: bool = False
    """Whether layers are sent as they are computed, the last one after the step."""
    node_replicas: int = 1
    """Consecutive replicas in one node, which are connected by links of their own."""
    node_gb_s: float | None = None
    """Bandwidth of these; None: `interconnect_gb_s` of each replica's hardware."""
    failure_rate: float = 0.0
    """Probability that an attempt fails."""
    timeout_s: float = 1.0
    """Time after the last byte until a failure is detected."""
    retries: int = 3
    """Maximum number of attempts after the first."""

    def __post_init__(self) -> None:
        for key in ("bandwidth_gb_s", "node_gb_s"):
            if getattr(self, key) is not None:
                require_number(f"link.{key}", getattr(self, key), above=0)
        for key in ("latency_us", "timeout_s"):
            require_number(f"link.{key}", getattr(self, key), 0)
        require_number("link.failure_rate", self.failure_rate, 0, 1)
        for key, least in (("channels", 1), ("node_replicas", 1), ("retries", 0)):
            require_whole(f"link.{key}", getattr(self, key), least)
        require_flag("link.layerwise", self.layerwise)
        for key, known in (("topology", TOPOLOGIES), ("sharing", tuple(SHARING))):
            if (value := str(getattr(self, key))) not in known:
                raise unknown(f"link.{key}", value, known)

    def refuse_unknown(self, replicas: Sequence[Hardware]) -> None:
        """Raise UnknownLink unless a bandwidth is known between any two replicas of this
        hardware."""
        if self.bandwidth_gb_s is not None or len(replicas) <= self.node_replicas:
            return
        wanted = "fleet.link.bandwidth_gb_s=null: must be given, in GB/s"
        if self.topology == "shared":
            raise UnknownLink(f"{wanted}, with topology=shared: that of the one link")
        for hardware in replicas:
            if hardware.network_gb_s is None:
                raise UnknownLink(
                    f"{wanted} for each GPU: requests go from replica to replica, and "
                    f"hardware={hardware.name} has network_gb_s=null"
                )

    @property
    def drawn(self) -> bool:
        """Whether what arrives depends on the seed."""
        return self.failure_rate > 0


class UnknownLink(ConfigError):
    """No bandwidth is known between replicas that exchange requests."""


@dataclass
class Usage:
    """Statistics of all transfers."""

    transfers: int = 0
    bytes: float = 0.0
    """Of transfers that arrived, over the links of all GPUs of a replica."""
    seconds: float = 0.0
    """Total time of transfers, from the start until they arrived or were given up."""
    waiting_s: float = 0.0
    """The part of `seconds` spent waiting for other transfers."""
    retries: int = 0
    lost: int = 0
    """Transfers given up, or cancelled when a replica failed or the request ended."""


class Fabric:
    """The links between the replicas of a simulation."""

    def __init__(
        self,
        environment: Environment,
        network: Network,
        seed: int = 0,
        hardware: Sequence[Hardware | None] = (),
    ) -> None:
        """`hardware` is that of each replica, where the network has no bandwidth of its own."""
        self.environment = environment
        self.network = network
        self.usage = Usage()
        self.links: dict[tuple[str, int], Link] = {}
        """By kind and replica; links are created on first use."""
        self._hardware = hardware
        self._sharing = SHARING[network.sharing](environment)
        self._dice = Random(f"link/{seed}")

    def send(
        self,
        source: int,
        target: int,
        nbytes: float,
        *,
        since: float | None = None,
        layers: int = 1,
        links: float = 1.0,
    ) -> Generator[simpy.Event, None, bool]:
        """Send bytes from one replica to another; returns whether they arrive.

        `nbytes` go over the link of one GPU, and `links` times as many over those of all.

        With layer-wise transfer, what was computed since `since` has been sent meanwhile as far as
        the links were idle, up to all but the last of `layers`. So on idle links a transfer ends
        when `nbytes` could have been sent since then, or one layer since now, whichever is later.
        Interrupting the process frees the links.
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
            usage.bytes += links * nbytes if arrives else 0.0
        return arrives

    def seconds(self, source: int, target: int, nbytes: float) -> float:
        """About how long it would take to send bytes from now on, behind or beside all others."""
        seconds = self._sharing.seconds(self.route(source, target), nbytes)
        return seconds + 1e-6 * self.network.latency_us

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
        """Statistics for a summary; `busy_s` is that of the busiest link."""
        busy = max((link.busy_s for link in self.links.values()), default=0.0)
        return {**vars(self.usage), "busy_s": busy}

    def _link(self, what: str, replica: int) -> Link:
        if (what, replica) not in self.links:
            rate = self._rate(replica, inside=what.startswith("node"))
            self.links[what, replica] = Link(self.environment, rate, self.network.channels)
        return self.links[what, replica]

    def _rate(self, replica: int, inside: bool) -> float:
        """Bytes/s of a link, inside a node or between nodes."""
        given = self.network.node_gb_s if inside else self.network.bandwidth_gb_s
        if given is not None:
            return 1e9 * given
        hardware = self._hardware[replica]
        assert hardware is not None, "its replicas must say their hardware"
        return hardware.interconnect if inside else hardware.network

    def _sent_before(self, route: Route, nbytes: float, since: float | None, layers: int) -> float:
        """Bytes that were sent while they were computed."""
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
        """One attempt, up to its last byte."""
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
