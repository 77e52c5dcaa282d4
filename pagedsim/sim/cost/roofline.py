"""Step times from data sheets: each part of a step computes or reads, whichever takes longer."""

from __future__ import annotations

from pagedsim.core import StepPlan
from pagedsim.sim.cost.base import Breakdown, CostModel, Term, kind_of
from pagedsim.sim.cost.kernel import slowdown
from pagedsim.sim.cost.work import Work, step_work
from pagedsim.sim.number import not_negative, share
from pagedsim.sim.replica import Replica

ALL_REDUCES = 2
"""A layer, under tensor parallelism: after attention and after the MLP."""


class Roofline(CostModel):
    """A step is three kinds of kernels, one after the other, and the host's work around them:

    - matrix products of all tokens together: max(FLOP, reading the weights, once a step);
    - attention of prefill chunks: max(FLOP, reading the keys and values before them);
    - attention of decodes: max(FLOP, reading all their keys and values).

    So a prefill is bound by compute, a decode by bandwidth, and chunks that ride along with
    decodes share the reading of the weights. Tensor parallelism divides each of these and adds
    two all-reduces a layer, by the formula of a ring. The efficiencies say what part of the data
    sheet's rate kernels reach; `conf/cost/roofline.yaml` says where the defaults come from.
    `block_tokens` makes decodes read slower from small blocks (see `kernel.py`). For a step that
    is planned ahead the host works while the GPU does, and counts only where it takes longer.
    """

    __slots__ = (
        "_alone",
        "_context",
        "_experts",
        "_head",
        "_host",
        "_move",
        "_others",
        "_paged",
        "_pair",
        "_reading",
        "_reduce",
        "_request",
        "_step",
        "_token",
        "_token_and_head",
        "_weights",
        "replica",
    )

    def __init__(
        self,
        replica: Replica,
        *,
        compute_efficiency: float = 0.6,
        bandwidth_efficiency: float = 0.8,
        bus_efficiency: float = 0.8,
        interconnect_efficiency: float = 0.8,
        host_step_ms: float = 1.0,
        host_request_us: float = 10.0,
        block_tokens: float = 0.0,
    ) -> None:
        for name, part in (
            ("compute_efficiency", compute_efficiency),
            ("bandwidth_efficiency", bandwidth_efficiency),
            ("bus_efficiency", bus_efficiency),
            ("interconnect_efficiency", interconnect_efficiency),
        ):
            share(f"cost.{name}", part)
        not_negative("cost.host_step_ms", host_step_ms)
        not_negative("cost.host_request_us", host_request_us)
        not_negative("cost.block_tokens", block_tokens)
        self.replica = replica
        model, gpus = replica.model, replica.tensor_parallel
        flop_rate = replica.hardware.flop_rate * compute_efficiency
        bandwidth = replica.hardware.bandwidth * bandwidth_efficiency

        # Everything below is in seconds on one GPU: for each token, sequence, pair, ...
        self._token = model.flop_per_token / gpus / flop_rate
        self._head = model.flop_per_sample / gpus / flop_rate
        self._token_and_head = self._token + self._head
        # Reading the weights for n tokens takes _weights − _experts · _others ** n: more tokens
        # choose more experts. Without experts the second part is nothing.
        self._weights = model.read_bytes(float("inf")) / gpus / bandwidth
        self._experts, self._others = 0.0, 0.0
        if moe := model.moe:
            experts = model.moe_layers * moe.experts * model.expert_params
            self._experts = experts * model.expert_dtype_bytes / gpus / bandwidth
            self._others = 1.0 - moe.experts_per_token / moe.experts
        self._reading = replica.kv_bytes_per_token / bandwidth
        self._pair = model.prefill_pair_flop / gpus / flop_rate
        self._paged = self._reading * slowdown(replica.block_size, block_tokens)
        self._context = max(self._paged, model.decode_pair_flop / gpus / flop_rate)
        self._request = host_request_us * 1e-6
        self._host = host_step_ms * 1e-3
        self._reduce, self._step = 0.0, self._host
        if gpus > 1:
            link = replica.hardware.interconnect * interconnect_efficiency
            vector = model.hidden * 2.0  # bytes; activations have 16 bits, whatever the weights
            reduces = ALL_REDUCES * model.layers
            self._reduce = reduces * 2 * (gpus - 1) / gpus * vector / link
            self._step += reduces * replica.hardware.interconnect_us * 1e-6
        self._alone = self._request + self._reduce  # what a decode adds besides computing
        self._move = move_seconds(replica, bus_efficiency)

    def step_seconds(self, plan: StepPlan) -> float:
        if not plan.ahead:
            return self._in_turn(plan)
        host = (len(plan.chunks) + plan.decode_count) * self._request + self._host
        return max(self._in_turn(plan) - host, host)

    def _in_turn(self, plan: StepPlan) -> float:
        """A step that the host begins when the one before has ended."""
        if not plan.prefill_tokens:
            return self.decode_seconds(plan.decode_count, plan.decode_context)
        return self._mixed(
            plan.prefill_tokens,
            plan.prefill_context,
            plan.prefill_pairs,
            len(plan.chunks),
            plan.decode_count,
            plan.decode_context,
        )

    def decode_seconds(self, sequences: int, context: int) -> float:
        if not sequences:
            return self._host
        linear = sequences * self._token_and_head
        weights = self._weights
        if self._experts:
            weights -= self._experts * self._others**sequences
        if linear < weights:
            linear = weights
        return linear + context * self._context + sequences * self._alone + self._step

    def _mixed(
        self,
        tokens: int,
        context: int,
        pairs: int,
        chunks: int,
        decodes: int,
        decode_context: int,
    ) -> float:
        every, sequences = tokens + decodes, chunks + decodes
        linear = every * self._token + sequences * self._head
        weights = self._weights
        if self._experts:
            weights -= self._experts * self._others**every
        if linear < weights:
            linear = weights
        prefill = self._pair * pairs
        reading = self._reading * (context - tokens)  # its own are still in the caches
        if prefill < reading:
            prefill = reading
        around = every * self._reduce + sequences * self._request + self._step
        return linear + prefill + decode_context * self._context + around

    def swap_seconds(self, blocks: int) -> float:
        return blocks * self._move

    def recompute_seconds(self, tokens: int) -> float:
        if not tokens:
            return 0.0
        return self._mixed(tokens, tokens, tokens * (tokens + 1) // 2, 1, 0, 0)

    def work(self, plan: StepPlan) -> Work:
        return step_work(self.replica, plan)

    def explain(self, plan: StepPlan) -> Breakdown:
        tokens, decodes = plan.prefill_tokens, plan.decode_count
        every, sequences = tokens + decodes, len(plan.chunks) + decodes
        terms = []
        if every:
            products = every * self._token + sequences * self._head
            weights = self._weights
            if self._experts:
                weights -= self._experts * self._others**every
            terms.append(_longer("matrix products", products, "weights", weights))
        if tokens:
            attention = self._pair * plan.prefill_pairs
            reading = self._reading * (plan.prefill_context - tokens)
            terms.append(_longer("attention", attention, "KV of chunks", reading))
        if decodes:
            read = self._context == self._paged
            term = Term("KV", plan.decode_context * self._context, "bandwidth")
            terms.append(term if read else term._replace(name="decode attention", bound="compute"))
        if every and self.replica.tensor_parallel > 1:
            reduces = every * self._reduce + self._step - self._host
            terms.append(Term("all-reduce", reduces, "interconnect"))
        host = sequences * self._request + self._host
        if plan.ahead:
            host = max(host - sum(term.seconds for term in terms), 0.0)
        terms.append(Term("host", host, "host"))
        return Breakdown(kind_of(plan), tuple(terms), self.work(plan))


def _longer(compute: str, flop_seconds: float, read: str, read_seconds: float) -> Term:
    if flop_seconds < read_seconds:
        return Term(read, read_seconds, "bandwidth")
    return Term(compute, flop_seconds, "compute")


def move_seconds(replica: Replica, bus_efficiency: float) -> float:
    """Moving one block over the bus: its bytes, and a fixed time for each copy.

    Every GPU moves its own part over its own bus, all at the same time.
    """
    hardware = replica.hardware
    transfer = replica.block_bytes / (hardware.pcie * bus_efficiency)
    return transfer + replica.copies_per_block * hardware.pcie_copy_us * 1e-6
