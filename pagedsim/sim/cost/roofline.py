"""Roofline cost model: each part of a step is bound by compute or by memory bandwidth."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from pagedsim.core import ConfigError
from pagedsim.core.errors import require_number
from pagedsim.server import FP8
from pagedsim.sim.cost.base import BUS_EFFICIENCY, Bound, move_seconds
from pagedsim.sim.cost.terms import ByTerms, CostTerm, Split, Totals
from pagedsim.sim.hardware import FP16, Family, family_of
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica
from pagedsim.sim.stack import Stack

PRODUCTS = "matrix products"
"""The term of compute-bound products with weights."""
ALL_REDUCES = 2
"""Per layer, under tensor parallelism: after attention and after the MLP."""


class Roofline(ByTerms):
    """A step is a sequence of kernels and the host work around them:

    - matrix products of all tokens together: FLOP, or reading the weights once per step;
    - attention of prefill chunks: max(FLOP, reading the keys and values before them);
    - attention of decodes: max(FLOP, reading all their keys and values);
    - norms, rotary embeddings and activations, which read and write their values;
    - the latency of each kernel.

    So prefill is compute-bound, decode bandwidth-bound, and chunks batched with decodes share the
    reading of the weights. Tensor parallelism divides products and attention and adds two ring
    all-reduces per layer. Efficiencies of kernels default to those of the GPU's `Family`, software
    overheads to those of the `Stack`; arguments override them. `bandwidth_efficiency` applies to
    weights, and to the KV cache unless `cache_efficiency` is given; `compute_efficiency` to
    products, and to prefill attention unless `attention_efficiency` is. `block_tokens` makes
    decodes read slower from small blocks (see `slowdown`). With async scheduling host work overlaps
    with the GPU, and only the excess counts. Pipelines and groups are those of `Split`;
    `expert_skew` is the long-run frequency with which the experts of the busiest GPU are chosen,
    relative to the average.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        stack: Stack | None = None,
        family: Family | None = None,
        compute_efficiency: float | None = None,
        attention_efficiency: float | None = None,
        bandwidth_efficiency: float | None = None,
        cache_efficiency: float | None = None,
        bus_efficiency: float = BUS_EFFICIENCY,
        interconnect_efficiency: float | None = None,
        host_step_ms: float | None = None,
        host_request_us: float | None = None,
        block_tokens: float = 0.0,
        expert_skew: float = 1.0,
    ) -> None:
        for name, part in (
            ("compute_efficiency", compute_efficiency),
            ("attention_efficiency", attention_efficiency),
            ("bandwidth_efficiency", bandwidth_efficiency),
            ("cache_efficiency", cache_efficiency),
            ("bus_efficiency", bus_efficiency),
            ("interconnect_efficiency", interconnect_efficiency),
        ):
            if part is not None:
                require_number(f"cost.{name}", part, above=0, high=1)
        for name, least in (("host_step_ms", host_step_ms), ("host_request_us", host_request_us)):
            if least is not None:
                require_number(f"cost.{name}", least, 0)
        require_number("cost.block_tokens", block_tokens, 0)
        require_number("cost.expert_skew", expert_skew, 1)
        if not isinstance(stack := Stack() if stack is None else stack, Stack):
            raise ConfigError(f"cost.stack={stack}: must be settings with a _target_")
        hardware, model = replica.hardware, replica.model
        self.guessed = hardware.family is None and None in (
            compute_efficiency,
            bandwidth_efficiency,
        )
        """Whether no efficiencies are fitted to such a GPU."""
        if not isinstance(family := family or family_of(hardware.family), Family):
            raise ConfigError(f"cost.family={family}: must be a Family; see hardware.family")
        products = family.products_in(model.products)
        rate = hardware.rates.get(model.products, hardware.flop_rate)
        if rate == hardware.flop_rate:
            products = family.products_in(FP16)
        self.flop_rate = rate * _first(compute_efficiency, products.compute)
        """Achieved FLOP/s of products with weights."""
        head = family.products_in(FP16).compute
        self.head_rate = hardware.flop_rate * _first(compute_efficiency, head)
        """Achieved FLOP/s of the LM head, which stays in 16 bits."""
        self.attention_rate = hardware.flop_rate * _first(
            attention_efficiency, compute_efficiency, family.attention
        )
        """Achieved FLOP/s of attention."""
        self.bandwidth = hardware.bandwidth * _first(bandwidth_efficiency, products.bandwidth)
        """Achieved bytes/s of reading weights."""
        self.cache_bandwidth = hardware.bandwidth * _first(
            cache_efficiency, bandwidth_efficiency, family.cache
        )
        if cache_efficiency is None and replica.kv_format in FP8:
            self.cache_bandwidth *= stack.fp8_cache
        """Achieved bytes/s of reading the KV cache."""
        self.paged = slowdown(replica.block_size, block_tokens)
        """Slowdown of reading the KV cache from blocks."""
        link = hardware.interconnect * _first(interconnect_efficiency, stack.all_reduce_share)
        moved = _first(interconnect_efficiency, stack.all_to_all_share)
        host_step = _first(host_step_ms, stack.host_step_ms)
        host_request = _first(host_request_us, stack.host_request_us)
        kernels_us = layer_us(model, products.us, family.products_in(FP16).us) + family.attention_us
        terms = [
            *_products(
                *(replica, self.flop_rate, self.head_rate, self.bandwidth),
                inf if stack.ideal_kernels else products.sharpness,
            ),
            *_attention(replica, self.attention_rate, self.cache_bandwidth, self.paged),
            *(() if stack.ideal_kernels else _passes(replica)),
            *_latencies(replica, 0.0 if stack.ideal_kernels else stack.latencies * kernels_us),
            *_all_reduces(replica, link),
            *all_to_all(replica, moved),
            *hops(replica, moved),
            *_host(host_step * 1e-3, host_request * 1e-6),
        ]
        moe = model.moe
        super().__init__(
            replica,
            terms,
            unchosen=1.0 - moe.experts_per_token / moe.experts if moe else 0.0,
            launching=launches(model, stack, family.launch),
            split=Split.of(replica, expert_skew),
        )
        self.bus_efficiency = bus_efficiency
        self._move = move_seconds(replica, bus_efficiency)
        self.server_seconds = stack.server_ms * 1e-3
        self.constants = {
            "compute_efficiency": self.flop_rate / rate,
            "attention_efficiency": self.attention_rate / hardware.flop_rate,
            "bandwidth_efficiency": self.bandwidth / hardware.bandwidth,
            "cache_efficiency": self.cache_bandwidth / hardware.bandwidth,
            "bus_efficiency": bus_efficiency,
            "interconnect_efficiency": link / hardware.interconnect,
            "host_step_ms": host_step,
            "host_request_us": host_request,
            "block_tokens": block_tokens,
        }
        """The effective constants, by argument name."""

    @property
    def notices(self) -> list[str]:
        if not self.guessed:
            return []
        return [
            f"no constants are fitted to the family of hardware={self.replica.hardware.name}: what "
            "its kernels reach of the data sheet is taken from other GPUs"
        ]

    def swap_seconds(self, blocks: int) -> float:
        return blocks * self._move


def _first(*given: float | None) -> float:
    """The first argument that is not None."""
    return next(value for value in given if value is not None)


class _Link(NamedTuple):
    name: str
    bound: Bound
    many: int
    """GPUs or stages reached over it."""
    rate: float
    """Bytes/s."""
    fixed: float
    """Latency of a transfer in seconds."""


# The table of terms, in seconds on one GPU for its share of the work.


def _products(
    replica: Replica, flop_rate: float, head_rate: float, bandwidth: float, sharpness: float
) -> list[CostTerm]:
    """Matrix products of all tokens read the weights once, of experts only those chosen.

    The rounded corner of the roofline is the longest of its tangents.
    """
    model, gpus = replica.model, replica.tensor_parallel
    flop, read, held = model.flop_per_token, model.read_bytes(float("inf")), 0.0
    routed = 0.0
    if replica.expert_parallel > 1 and model.moe:  # whole experts per GPU
        routed = 2 * model.moe_layers * model.expert_params
        flop -= routed * model.moe.experts_per_token
        read -= model.expert_bytes
        held = model.expert_bytes / replica.expert_parallel
    computing = Totals(
        token=flop / gpus / flop_rate,
        sequence=model.flop_per_sample / gpus / head_rate,
        routed=routed / flop_rate,
    )
    reading = Totals(
        step=(read / gpus + held) / bandwidth,
        unchosen=-(held or model.expert_bytes / gpus) / bandwidth,
    )
    terms = []
    for way, (part, other) in enumerate(tangents(sharpness)):
        if part:
            scaled = computing.scaled(part)
            terms.append(CostTerm("products", PRODUCTS, "compute", scaled, way))
        if other:
            terms.append(CostTerm("products", "weights", "bandwidth", reading.scaled(other), way))
    return terms


RATIOS = (0.0, 0.35, 0.6, 0.8, 1.0, 1.25, 1.7, 2.9, inf)
"""Ratios of compute to reading at which tangents touch the rounded corner: at most 1 % below it."""


def tangents(sharpness: float) -> list[tuple[float, float]]:
    """Shares of compute and of reading, whose largest sum is (compute^s + reading^s)^(1/s).

    >>> tangents(1.0), tangents(inf)
    ([(1.0, 1.0)], [(0.0, 1.0), (1.0, 0.0)])
    >>> max(3.0 * part + 4.0 * other for part, other in tangents(2.0)) > 0.99 * 5.0
    True
    """
    shares = []
    if sharpness == inf:
        return [(0.0, 1.0), (1.0, 0.0)]
    for ratio in RATIOS:
        longest = max(ratio, 1.0)
        compute, reading = (1.0, 0.0) if ratio == inf else (ratio / longest, 1.0 / longest)
        whole = (compute**sharpness + reading**sharpness) ** (1 / sharpness)
        power = sharpness - 1.0
        shares.append(((compute / whole) ** power, (reading / whole) ** power))
    return list(dict.fromkeys(shares))


def _attention(
    replica: Replica, flop_rate: float, bandwidth: float, paged: float
) -> list[CostTerm]:
    """Attention of chunks and of decodes, whose reads are slower by `paged`."""
    model, gpus = replica.model, replica.tensor_parallel
    read = replica.kv_path_bytes / bandwidth
    pair = model.prefill_pair_flop / gpus / flop_rate
    decode_pair = model.decode_pair_flop / gpus / flop_rate
    return [
        CostTerm("chunks", "attention", "compute", Totals(pair=pair)),
        CostTerm("chunks", "KV of chunks", "bandwidth", Totals(chunk_context=read)),
        CostTerm("decodes", "KV", "bandwidth", Totals(decode_context=read * paged)),
        CostTerm("decodes", "decode attention", "compute", Totals(decode_context=decode_pair)),
    ]


PASS_US = 1.9
"""Latency of a pass over values, as of the tables' quantising kernel."""
PASS_EFFICIENCY = 0.8
"""The share of the memory's bandwidth that it reaches."""


def _passes(replica: Replica) -> list[CostTerm]:
    """Kernels that read and write the activations of all tokens, in 16 bits: of norms with their
    residuals, queries, keys and values around attention, and the MLP's activation."""
    model, gpus = replica.model, replica.tensor_parallel
    experts = model.moe.experts_per_token + model.moe.shared_experts if model.moe else 0
    inner = experts * model.moe.intermediate if model.moe else model.intermediate
    mlp = (3 if model.gated_mlp else 2) * inner / gpus
    heads = (4 * model.heads + 4 * model.kv_heads) * model.head_dim / gpus
    values = model.layers * (8 * model.hidden + heads + mlp)
    if model.moe:  # sorting writes a state for each expert of a token here, summing reads it
        ways = gpus if replica.expert_parallel > 1 else 1
        values += model.moe_layers * 2 * (model.moe.experts_per_token / ways + 1) * model.hidden
    rate = PASS_EFFICIENCY * replica.hardware.bandwidth
    totals = Totals(token=2 * values / rate)
    return [CostTerm("passes", "norms and activations", "bandwidth", totals)]


def layer_us(model: ModelShape, product_us: float, whole_us: float) -> float:
    """Latencies of a layer's kernels but attention, on average: of products in the model's format,
    of those in 16 bits, and of passes, as servers fuse them.

    Products of queries, keys and values; output; gate and up; down. Passes of two norms, rotary
    embeddings, activation. Latent attention makes queries in two products, with a norm between,
    and takes them to the latents and back in 16 bits. Experts are chosen by a product in 16 bits
    and a pass, and sorted and summed in two more. Shared ones are among them (SGLang) or beside
    them (vLLM, TensorRT-LLM).
    """
    products, whole, passes = 4.0, 0.0, 4.0
    if mla := model.mla:
        products, whole, passes = 4.0 + (mla.q_lora_rank is not None), 2.0, 5.0
    routed = model.moe_layers / model.layers
    passes, whole = passes + 3 * routed, whole + routed
    return products * product_us + whole * whole_us + passes * PASS_US


def launches(model: ModelShape, stack: Stack, host: float) -> tuple[float, float]:
    """Seconds of launching a step's kernels, without and with prompts, by a host that takes `host`
    times as long as a typical one."""
    decodes = model.layers * stack.launch_us
    latent = model.moe_layers if model.mla else 0
    prompts = (model.layers - latent) * stack.prompt_launch_us + latent * stack.latent_launch_us
    return decodes * host * 1e-6, max(decodes, prompts) * host * 1e-6


def _latencies(replica: Replica, layer_us: float) -> list[CostTerm]:
    """The latencies of a layer's kernels, on every GPU."""
    totals = Totals(step=replica.model.layers * layer_us * 1e-6)
    return [CostTerm("layers", "latencies", "launch", totals)] if layer_us else []


def _all_reduces(replica: Replica, link: float) -> list[CostTerm]:
    """Ring all-reduces under tensor parallelism."""
    model, gpus = replica.model, replica.tensor_parallel
    if gpus == 1:
        return []
    vector = model.hidden * 2.0  # bytes; activations have 16 bits for all formats of weights
    reduces = ALL_REDUCES * model.layers
    totals = Totals(
        token=reduces * 2 * (gpus - 1) / gpus * vector / link,
        step=reduces * replica.hardware.interconnect_us * 1e-6,
    )
    return [CostTerm("all-reduce", "all-reduce", "interconnect", totals)]


ALL_TO_ALL_US = 14.0
"""Latency of a dispatch or a combine of experts inside a node, with which DeepEP's times are near
those measured (`python -m tests.experiments.fidelity.all_to_all`)."""
ALL_TO_ALL_INSIDE = 0.85
"""The share of a link inside a node over that of the network, likewise."""


def all_to_all(replica: Replica, share: float) -> list[CostTerm]:
    """All-to-all dispatch of tokens to the GPUs of their experts, and back, between groups.

    Tokens are sent in the format of the products, results in 16 bits, each GPU of a group sending
    part of its tokens. `share` is the achieved fraction of the link rates. Transfers inside and
    between nodes overlap.
    """
    model, gpus, hardware = replica.model, replica.expert_parallel, replica.hardware
    if replica.groups == 1 or model.moe is None:
        return []
    dispatched = 2.0 if model.products == FP16 else 1.0
    sent = model.hidden * (dispatched + 2.0) * model.moe.experts_per_token / replica.tensor_parallel
    node = min(gpus, hardware.gpus_per_node)
    terms = []
    inside_us = ALL_TO_ALL_US
    for name, bound, others, rate, fixed in _links(replica, node - 1, gpus - node, inside_us):
        reached = share * (ALL_TO_ALL_INSIDE if bound == "interconnect" else 1.0)
        totals = Totals(
            token=model.moe_layers * sent * others / gpus / (rate * reached),
            step=model.moe_layers * 2 * fixed,
        )
        terms.append(CostTerm("all-to-all", f"all-to-all{name}", bound, totals))
    return terms


def hops(replica: Replica, share: float) -> list[CostTerm]:
    """Transfers of a micro-batch between stages, each GPU sending its part."""
    vector = replica.model.hidden * 2.0 / replica.tensor_parallel
    terms = []
    inside_us = replica.hardware.interconnect_us
    for name, bound, hops, rate, fixed in _links(replica, *replica.hops, inside_us):
        totals = Totals(token=hops * vector / (rate * share), step=hops * fixed)
        terms.append(CostTerm(f"stages{name}", f"to the next stage{name}", bound, totals))
    return terms


def _links(replica: Replica, inside: int, outside: int, inside_us: float) -> Iterator[_Link]:
    """The links inside a node, with this latency, and between nodes that are used."""
    hardware = replica.hardware
    if inside:
        yield _Link("", "interconnect", inside, hardware.interconnect, inside_us * 1e-6)
    if outside:
        fixed = hardware.network_us * 1e-6
        yield _Link(" between nodes", "network", outside, hardware.network, fixed)


def _host(step: float, sequence: float) -> list[CostTerm]:
    """Host time: scheduling, preparing the batch, launching, sampling."""
    return [CostTerm("host", "host", "host", Totals(sequence=sequence, step=step))]


def slowdown(block_size: int, block_tokens: float) -> float:
    """Slowdown of decode attention by paging, relative to contiguous keys and values.

    Each block costs as much as reading `block_tokens` tokens, independent of its size: a lookup in
    the block table, a branch, and a new read.

    >>> slowdown(16, 4.0)
    1.25
    """
    return 1.0 + block_tokens / block_size
