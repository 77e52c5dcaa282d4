"""The autoscaler interface: how many replicas a fleet needs, and the rules by thresholds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pagedsim.core import ConfigError
from pagedsim.core.contracts import Contract, whole
from pagedsim.core.errors import require_number
from pagedsim.policies.routing.llumnix import freeness
from pagedsim.policies.routing.router import Replica


@dataclass(frozen=True)
class ScalingView:
    """The replicas of one role at a decision."""

    now: float
    """Seconds since the start of the run."""
    role: str
    """"both", or with prefill/decode disaggregation possibly "prefill" or "decode"."""
    replicas: Sequence[Replica]
    """Those that are up or starting, as a router sees them; a starting one is empty."""
    starting: int
    """How many of them are starting."""
    draining: int
    """Replicas that finish their requests and then stop; they return to service first."""
    queued: float
    """Requests queued at the router, as a share where several roles can serve them."""
    min_replicas: int
    """Lower bound of the answer."""
    max_replicas: int
    """Upper bound: all replicas of the role, failed ones included."""
    interval_s: float
    """Seconds until the next decision."""
    startup_s: float
    """Seconds that a replica takes to start."""


class Autoscaler(ABC):
    """Decides how many replicas a role should have; each role has an object of its own.

    It is called at each interval, unless fewer than `min_replicas` are up or starting: then one
    more starts. A class that draws at random takes a `seed`, to which the run's is added.
    """

    @abstractmethod
    def desired(self, view: ScalingView) -> int:
        """The number of replicas wanted, up or starting; the run keeps it within the bounds."""


CONTRACT = Contract(Autoscaler, {"desired": whole(0)})


class Threshold(Autoscaler):
    """One replica more if the mean load is beyond `up`, one fewer if it is beyond `down`."""

    less_is_busier: ClassVar[bool] = False

    def __init__(self, up: float, down: float) -> None:
        self.up, self.down = require_number("up", up), require_number("down", down)
        upside = "below" if self.less_is_busier else "above"
        if not (up < down if self.less_is_busier else up > down):
            raise ConfigError(f"up={up:g}: must be {upside} down={down:g}")

    @abstractmethod
    def load(self, replica: Replica) -> float:
        """The load of a replica."""

    def queue_load(self, queued: float) -> float:
        return 0

    def desired(self, view: ScalingView) -> int:
        count = len(view.replicas)
        total = sum(map(self.load, view.replicas)) + self.queue_load(view.queued)
        sign = -1 if self.less_is_busier else 1
        mean = sign * total / count
        if mean > sign * self.up:
            return count + 1
        return count - 1 if mean < sign * self.down else count


class Queue(Threshold):
    """Waiting requests per replica, including those queued at the router."""

    def load(self, replica: Replica) -> float:
        return replica.waiting

    def queue_load(self, queued: float) -> float:
        return queued


class KVUse(Threshold):
    """The share of KV blocks in use."""

    def load(self, replica: Replica) -> float:
        return 1 - replica.free_blocks / replica.total_blocks


class Freeness(Threshold):
    """Llumnix's load: free blocks less those that the queue needs, per request; low under load."""

    less_is_busier = True

    def load(self, replica: Replica) -> float:
        return freeness(replica)
