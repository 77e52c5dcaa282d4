"""Step times from data sheets: each part of a step computes or reads, whichever takes longer."""

from __future__ import annotations

from pagedsim.core.errors import require_number
from pagedsim.sim.cost.kernel import slowdown
from pagedsim.sim.cost.terms import ByTerms, CostTerm, Totals
from pagedsim.sim.replica import Replica

PRODUCTS = "matrix products"
"""The term of products with weights, where they compute longer than they read."""
ALL_REDUCES = 2
"""A layer, under tensor parallelism: after attention and after the MLP."""


class Roofline(ByTerms):
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

    __slots__ = ("_move", "bandwidth", "flop_rate", "paged")

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
            require_number(f"cost.{name}", part, above=0, high=1)
        require_number("cost.host_step_ms", host_step_ms, 0)
        require_number("cost.host_request_us", host_request_us, 0)
        require_number("cost.block_tokens", block_tokens, 0)
        self.flop_rate = replica.hardware.flop_rate * compute_efficiency
        """FLOP a second that kernels reach."""
        self.bandwidth = replica.hardware.bandwidth * bandwidth_efficiency
        """Bytes a second, likewise."""
        self.paged = slowdown(replica.block_size, block_tokens)
        """How many times longer decodes read, since what they read lies in blocks."""
        link = replica.hardware.interconnect * interconnect_efficiency
        terms = [
            *_products(replica, self.flop_rate, self.bandwidth),
            *_attention(replica, self.flop_rate, self.bandwidth, self.paged),
            *_all_reduces(replica, link),
            *_host(host_step_ms * 1e-3, host_request_us * 1e-6),
        ]
        moe = replica.model.moe
        super().__init__(replica, terms, 1.0 - moe.experts_per_token / moe.experts if moe else 0.0)
        self._move = move_seconds(replica, bus_efficiency)

    def swap_seconds(self, blocks: int) -> float:
        return blocks * self._move


# The table. Seconds on one GPU, of which each has its part of the work.


def _products(replica: Replica, flop_rate: float, bandwidth: float) -> list[CostTerm]:
    """Matrix products of all tokens together read the weights once, of experts those chosen."""
    model, gpus = replica.model, replica.tensor_parallel
    experts = 0.0
    if moe := model.moe:
        experts = model.moe_layers * moe.experts * model.expert_params
    computing = Totals(
        token=model.flop_per_token / gpus / flop_rate,
        sequence=model.flop_per_sample / gpus / flop_rate,
    )
    reading = Totals(
        step=model.read_bytes(float("inf")) / gpus / bandwidth,
        unchosen=-experts * model.expert_dtype_bytes / gpus / bandwidth,
    )
    return [
        CostTerm("products", PRODUCTS, "compute", computing),
        CostTerm("products", "weights", "bandwidth", reading),
    ]


def _attention(
    replica: Replica, flop_rate: float, bandwidth: float, paged: float
) -> list[CostTerm]:
    """Of chunks, and of decodes, whose reading takes `paged` times as long from blocks."""
    model, gpus = replica.model, replica.tensor_parallel
    read = replica.kv_bytes_per_token / bandwidth
    pair = model.prefill_pair_flop / gpus / flop_rate
    decode_pair = model.decode_pair_flop / gpus / flop_rate
    return [
        CostTerm("chunks", "attention", "compute", Totals(pair=pair)),
        CostTerm("chunks", "KV of chunks", "bandwidth", Totals(chunk_context=read)),
        CostTerm("decodes", "KV", "bandwidth", Totals(decode_context=read * paged)),
        CostTerm("decodes", "decode attention", "compute", Totals(decode_context=decode_pair)),
    ]


def _all_reduces(replica: Replica, link: float) -> list[CostTerm]:
    """By the formula of a ring, where the model is split."""
    model, gpus = replica.model, replica.tensor_parallel
    if gpus == 1:
        return []
    vector = model.hidden * 2.0  # bytes; activations have 16 bits, whatever the weights
    reduces = ALL_REDUCES * model.layers
    each = Totals(
        token=reduces * 2 * (gpus - 1) / gpus * vector / link,
        step=reduces * replica.hardware.interconnect_us * 1e-6,
    )
    return [CostTerm("all-reduce", "all-reduce", "interconnect", each)]


def _host(step: float, sequence: float) -> list[CostTerm]:
    """Scheduling, preparing the batch, launching, sampling."""
    return [CostTerm("host", "host", "host", Totals(sequence=sequence, step=step))]


def move_seconds(replica: Replica, bus_efficiency: float) -> float:
    """Moving one block over the bus: its bytes, and a fixed time for each copy.

    Every GPU moves its own part over its own bus, all at the same time.
    """
    hardware = replica.hardware
    transfer = replica.block_bytes / (hardware.pcie * bus_efficiency)
    return transfer + replica.copies_per_block * hardware.pcie_copy_us * 1e-6
