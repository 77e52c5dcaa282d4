"""The scheduler: plain Python, no clock, no torch, no I/O. Start reading at `scheduler.py`."""

from pagedsim.core.batch_state import ServerState
from pagedsim.core.batching import Batching, OneByOne, PrefillFirst, Static, Unified
from pagedsim.core.errors import (
    ConfigError,
    IntegrityError,
    PagedsimError,
    PlanError,
    RequestError,
)
from pagedsim.core.memory import (
    CacheEntry,
    EvictionPolicy,
    Fit,
    Memory,
    PagedMemory,
    PrefixMemory,
    ReservedMax,
    ReservedOracle,
    ReservedPow2,
    Usage,
)
from pagedsim.core.plan import Chunk, Continuation, Rejection, StepPlan
from pagedsim.core.policy import (
    Admitted,
    Arrived,
    Event,
    Left,
    Policy,
    PolicyWrapper,
    Preempted,
    Preemption,
    PreemptionMode,
)
from pagedsim.core.request import Request, RequestId, State
from pagedsim.core.sampling import SamplingParams
from pagedsim.core.scheduler import Scheduler

__all__ = [
    "Admitted",
    "Arrived",
    "Batching",
    "CacheEntry",
    "Chunk",
    "ConfigError",
    "Continuation",
    "Event",
    "EvictionPolicy",
    "Fit",
    "IntegrityError",
    "Left",
    "Memory",
    "OneByOne",
    "PagedMemory",
    "PagedsimError",
    "PlanError",
    "Policy",
    "PolicyWrapper",
    "Preempted",
    "Preemption",
    "PreemptionMode",
    "PrefillFirst",
    "PrefixMemory",
    "Rejection",
    "Request",
    "RequestError",
    "RequestId",
    "ReservedMax",
    "ReservedOracle",
    "ReservedPow2",
    "SamplingParams",
    "Scheduler",
    "ServerState",
    "State",
    "Static",
    "StepPlan",
    "Unified",
    "Usage",
]
