"""The router interface: which replica gets a request, and which requests migrate later.

A router sees of a replica what a real one could tell it (`Replica`), and of a request what its
client sent: never the length that its output will have. Override `route`; the other hooks have
defaults.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from pagedsim.core import Request


class Replica(Protocol):
    """One replica, as a router sees it; with `fleet.staleness`, as it was some time ago.

    Properties are computed when they are read, so a router pays for what it reads.
    """

    @property
    def index(self) -> int:
        """Its number in the fleet, from 0; for good."""

    @property
    def name(self) -> str:
        """As reports call it."""

    @property
    def role(self) -> str:
        """What it does: "both", or "prefill" or "decode" alone."""

    @property
    def waiting(self) -> int:
        """Requests that wait for their admission, those on their way to it included."""

    @property
    def running(self) -> int:
        """Requests in its batch."""

    @property
    def swapped(self) -> int:
        """Requests whose memory is on the CPU."""

    @property
    def requests(self) -> int:
        """All of these together."""

    @property
    def max_seqs(self) -> int:
        """Sequences that may run at once."""

    @property
    def max_batched_tokens(self) -> int:
        """Tokens that one step may compute."""

    @property
    def block_size(self) -> int:
        """Token slots a block."""

    @property
    def total_blocks(self) -> int:
        """GPU blocks, free and used."""

    @property
    def free_blocks(self) -> int:
        """GPU blocks that can be handed out; what only the prefix cache holds is among them."""

    @property
    def wanted_blocks(self) -> int:
        """Blocks that waiting requests would take."""

    @property
    def owed_tokens(self) -> int:
        """Prompt tokens that are still to be computed, of all who wait or are being prefilled; who
        waits counts whole, for what a prefix cache has of it is found when it is let in."""

    @property
    def stored_tokens(self) -> int:
        """Tokens of decoding requests in memory."""

    @property
    def predicted_tokens(self) -> float:
        """Tokens that all who are here will still generate, by what a predictor said, or by
        their `max_tokens`; who has neither counts nothing."""

    @property
    def batch(self) -> Collection[Request]:
        """The requests that run, in the order of the batch."""

    def cached_tokens(self, request: Request) -> int:
        """Leading tokens of a request that its prefix cache has; 0 without one."""

    def host_tokens(self, request: Request, cached: int) -> int:
        """Tokens behind its `cached` ones that its tier of host memory has; 0 without one."""

    def prefill_seconds(self, tokens: int, cached: int = 0) -> float:
        """How long a step takes it that computes `tokens` of a prompt after `cached` ones."""

    def decode_seconds(self, sequences: int, context: int) -> float:
        """Seconds of a decode step whose sequences have `context` tokens in sum."""


class Replicas(Sequence[Replica], ABC):
    """Those that may take a request, in the order of their indices."""

    @property
    @abstractmethod
    def all_replicas(self) -> Sequence[Replica]:
        """All that are alive, whatever their role."""

    @property
    def role(self) -> str:
        """What is to be done there: "both", or where these are apart one of them."""
        return "both"

    @property
    def seen_at(self) -> float | None:
        """The time as of which they are seen; None: they are seen as they are now."""
        return None

    def cached_tokens(self, request: Request) -> Sequence[int]:
        """Leading tokens of a request that the prefix cache of each has, in their order."""
        return [replica.cached_tokens(request) for replica in self]

    def prefill_seconds(self, request: Request) -> Sequence[float]:
        """How long each would take for a prompt if it were idle, behind what its prefix cache has
        or what it would fetch from another's (`fleet.fetch`), in their order."""
        cached, tokens = self.cached_tokens(request), request.num_tokens
        return [
            replica.prefill_seconds(tokens - known, known)
            for replica, known in zip(self, cached, strict=True)
        ]


@dataclass(frozen=True)
class Refusal:
    """The fleet does not serve a request."""

    reason: str


Answer = Replica | Refusal | None
"""The result of a router: a replica, a refusal, or None to keep the request in the queue."""


@dataclass(frozen=True)
class Placed:
    """A request goes to a replica."""

    request: Request
    replica: Replica
    now: float


@dataclass(frozen=True)
class Left:
    """A request is served to its end at a replica, or gave up, or was lost with it."""

    request: Request
    replica: Replica
    now: float


Event = Placed | Left


@dataclass(frozen=True)
class Move:
    """A running request is to go on at another replica, its keys and values with it."""

    request: Request
    source: Replica
    target: Replica


class Router(ABC):
    """Chooses the replica for each request."""

    paper: ClassVar[str] = ""
    """The source of its rule."""

    blind: ClassVar[bool] = False
    """Whether it reads no state of replicas, so that a simulation need not bring them to the
    present at each arrival."""

    holds: ClassVar[bool] = False
    """Whether `route` may return None, so that requests queue at the router."""

    migrates_every: float | None = None
    """Seconds between two calls of `migrate`; None: it is never called."""

    @abstractmethod
    def route(self, request: Request, replicas: Replicas, now: float) -> Answer:
        """The replica that gets the request; None keeps it in the queue at the router.

        It is called again for queued requests, in order of arrival, when a request has left a
        replica. With disaggregation it is called a second time, with the replicas that
        decode (`replicas.role`), when the first token is out.
        """

    def observe(self, event: Event) -> None:
        """Something happened; in the order of time."""

    def migrate(self, replicas: Replicas, now: float) -> Sequence[Move]:
        """Running requests to migrate."""
        return ()
