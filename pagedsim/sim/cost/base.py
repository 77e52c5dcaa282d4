"""The interface of cost models: step times and their breakdown."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pagedsim.core import ConfigError, Request, SamplingParams, StepPlan, policy_validation
from pagedsim.core.compiled import mypyc_attr
from pagedsim.core.errors import printed, require_flag, require_number
from pagedsim.core.plan import Chunk
from pagedsim.sim.cost.work import Work, step_work
from pagedsim.sim.hardware import Hardware
from pagedsim.sim.replica import Replica

Bound = Literal[
    "compute",
    "bandwidth",
    "interconnect",
    "network",
    "pipeline",
    "launch",
    "host",
    "fitted",
]
"""The resource that bounds a part of a step: network, transfers between nodes; pipeline, idle
stages; launch, fixed time of kernels; fitted, where the model does not distinguish resources."""


class UnmeasuredError(ConfigError):
    """A cost model has no measurements of a replica."""


class Term(NamedTuple):
    """A part of a step's time."""

    name: str
    seconds: float
    bound: Bound


@dataclass(frozen=True)
class Breakdown:
    """The breakdown of a step's time. `work` is that of one GPU.

    >>> terms = Term("weights", 0.023, "bandwidth"), Term("host", 0.002, "host")
    >>> print(Breakdown("decode", terms, Work(flop=14e9, bytes=14e9)))
    decode: 25.0 ms, bandwidth-bound (weights 92 %, host 8 %)
    """

    kind: str
    """prefill, decode, mixed or idle."""
    terms: tuple[Term, ...]
    work: Work

    @property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def bound(self) -> Bound:
        """The resource that bounds most of the time."""
        waits: dict[Bound, float] = {}
        for term in self.terms:
            waits[term.bound] = waits.get(term.bound, 0.0) + term.seconds
        return max(waits, key=lambda bound: waits[bound])

    def mfu(self, hardware: Hardware) -> float:
        """Model FLOP utilisation: the achieved fraction of the peak rate."""
        return self.work.mfu(self.seconds, hardware)

    def mbu(self, hardware: Hardware) -> float:
        """Model bandwidth utilisation, likewise."""
        return self.work.mbu(self.seconds, hardware)

    def __str__(self) -> str:
        total = self.seconds
        if not total:
            return f"{self.kind}: 0 ms"
        shares = [(term.name, round(100 * term.seconds / total)) for term in self.terms]
        parts = ", ".join(f"{name} {share} %" for name, share in shares if share)
        bound = "fitted" if self.bound == "fitted" else f"{self.bound}-bound"
        return f"{self.kind}: {milliseconds(total)}, {bound} ({parts})"


def milliseconds(seconds: float) -> str:
    """Format a time in ms, with three digits.

    >>> milliseconds(0.0233333)
    '23.3 ms'
    """
    value = seconds * 1e3
    for digits, limit in ((3, 1.0), (2, 10.0), (1, 100.0)):
        if value < limit:
            return f"{value:.{digits}f} ms"
    return f"{value:,.0f} ms"


_REQUEST = Request(0, 1, SamplingParams(max_tokens=1))


def step(
    prompt: int = 0, decodes: int = 0, context: int = 0, ahead: bool = False, cached: int = 0
) -> StepPlan:
    """A synthetic plan for querying a cost model: one prefill chunk of `prompt` tokens after
    `cached` ones, and decodes with a total context."""
    plan = StepPlan(number=0, now=0.0, ahead=ahead)
    if prompt:
        plan.add_chunk(Chunk(_REQUEST, cached, prompt, samples=True))
    plan._decode_count, plan._decode_context = decodes, context
    return plan


def kind_of(plan: StepPlan) -> str:
    """The kind of a step: prefill, decode, mixed or idle."""
    if plan.prefill_tokens:
        return "mixed" if plan.decode_count else "prefill"
    return "decode" if plan.decode_count else "idle"


BUS_EFFICIENCY = 0.8
"""The achieved share of the bus's bandwidth, unless it is given."""


def move_seconds(replica: Replica, bus_efficiency: float) -> float:
    """Seconds to move one block over the bus: its bytes, and a latency per copy.

    Every GPU moves its own part over its own bus, concurrently.
    """
    hardware = replica.hardware
    transfer = replica.block_bytes / (hardware.pcie * bus_efficiency)
    return transfer + replica.copies_per_block * hardware.pcie_copy_us * 1e-6


@mypyc_attr(allow_interpreted_subclasses=True)
class CostModel(ABC):
    """Predicts the duration of steps; all times in seconds. One method is required.

    Answers are deterministic. Transfers over the bus are not part of a step's time, since they may
    overlap with it.
    """

    by_totals = True
    """Whether times depend on the totals of a plan only: its tokens, sequences and contexts. If
    not, as where single requests or the number of the step count, every step is planned, and
    `decode_seconds` is not supported."""

    server_seconds = 0.0
    """Time of HTTP and tokenisation, before a request reaches the scheduler."""

    bus_efficiency = BUS_EFFICIENCY
    """The share of the bus's bandwidth that copies of KV blocks reach."""

    def __init__(self, replica: Replica | None = None) -> None:
        """`replica` has model and GPU; a run sets it after this where a class does not take it."""
        if replica is not None:
            self.replica = replica

    @property
    def notices(self) -> list[str]:
        """Caveats for readers of a run's times, one line each."""
        return []

    @abstractmethod
    def step_seconds(self, plan: StepPlan) -> float:
        """Duration of a step: forward pass and host work."""

    def decode_seconds(self, sequences: int, context: int) -> float:
        """`step_seconds` of a step of decodes alone, bit for bit; `context` is their total context.

        The most frequent call of a simulation: keep it to a handful of float operations. Default:
        `step_seconds` of a plan with these totals and without requests.
        """
        return self.step_seconds(step(decodes=sequences, context=context))

    def swap_seconds(self, blocks: int) -> float:
        """Seconds to move `blocks` blocks over the bus, one way.

        Default: their bytes at `bus_efficiency` of the bandwidth of the GPU's bus, and its latency
        per copy.
        """
        return blocks * move_seconds(self._known_replica(), self.bus_efficiency)

    def recompute_seconds(self, tokens: int) -> float:
        """Seconds to prefill `tokens` tokens of one request in a separate step.

        Default: `step_seconds` of one chunk of so many tokens.
        """
        return self.step_seconds(step(tokens))

    def explain(self, plan: StepPlan) -> Breakdown:
        """The breakdown of `step_seconds(plan)`. Default: one part, whose bound is not known."""
        term = Term("step", self.step_seconds(plan), "fitted")
        return Breakdown(kind_of(plan), (term,), self.work(plan))

    def work(self, plan: StepPlan) -> Work:
        """FLOP and bytes of a step on one GPU, for `mfu` and `mbu`.

        Default: those of the model's shape, in which each weight is read once.
        """
        return step_work(self._known_replica(), plan)

    def _known_replica(self) -> Replica:
        try:
            return self.replica
        except AttributeError:
            raise ConfigError(
                f"{type(self).__name__}.replica: is not set; __init__ must call "
                "super().__init__(replica)"
            ) from None

    def prices(self) -> ModelledPrices:
        """The prices that `preemption=cheapest` compares."""
        return ModelledPrices(self)


@mypyc_attr(allow_interpreted_subclasses=True)
class ModelledPrices:
    """Preemption prices from a cost model: swapping costs both directions."""

    def __init__(self, cost: Any) -> None:  # a CostModel, whose answers are validated
        self._cost = cost

    def recompute_seconds(self, tokens: int) -> float:
        """Seconds to prefill `tokens` tokens."""
        answer = self._cost.recompute_seconds(tokens)
        return policy_validation.seconds(self._cost, "recompute_seconds", answer)

    def swap_seconds(self, blocks: int) -> float:
        """Seconds to move `blocks` blocks out and in again."""
        answer = self._cost.swap_seconds(blocks)
        return 2.0 * policy_validation.seconds(self._cost, "swap_seconds", answer)


def refuse_attributes(cost: Any) -> None:
    """Raise ConfigError for invalid attributes of a cost model."""
    name = type(cost).__name__
    require_flag(f"{name}.by_totals", cost.by_totals)
    require_number(f"{name}.server_seconds", cost.server_seconds, 0.0, policy_validation.LONGEST)
    require_number(f"{name}.bus_efficiency", cost.bus_efficiency, above=0, high=1)
    prices = cost.prices()
    for hook in ("swap_seconds", "recompute_seconds"):
        if not callable(getattr(prices, hook, None)):
            raise ConfigError(
                f"{name}.prices gave {printed(prices)}: must have the methods swap_seconds and "
                "recompute_seconds"
            )
