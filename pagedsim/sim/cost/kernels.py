"""The kernels of a step, by the shape of the model, from tables of measured ones.

Three kernels are in no table. Norms, rotary embeddings and activations pass once over their values,
as the measured quantisation does (it reads 16 bits and writes 8), and take its time for as many
bytes. Writing to the KV cache is part of the measured attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

from pagedsim.core import ConfigError
from pagedsim.sim.cost.base import Bound, UnmeasuredError
from pagedsim.sim.cost.grids import Curve, Surface
from pagedsim.sim.cost.roofline import ALL_REDUCES, all_to_all, hops
from pagedsim.sim.cost.tables import SIXTEEN_BITS, KernelTables
from pagedsim.sim.cost.terms import CostTerm
from pagedsim.sim.hardware import FP16
from pagedsim.sim.model import MLA
from pagedsim.sim.replica import Replica
from pagedsim.sim.stack import Stack

Seconds = Callable[[float], float]

DEEPSEEK = MLA(kv_lora_rank=512, rope_dim=64, nope_dim=128, v_dim=128, q_lora_rank=1536)
"""The latent attention that was measured."""
EIGHT_BITS = ("fp8_block", "fp8")
PASS_BYTES = 3.0
"""Bytes a value of a quantisation."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that runs `calls` times in a step, `seconds` each by tokens or by sequences."""

    name: str
    bound: Bound
    calls: float
    seconds: Seconds
    compute_from: float = inf
    """The number from which it is bound by compute instead."""

    def bound_at(self, size: float) -> Bound:
        return "compute" if size >= self.compute_from else self.bound

    def of(self, size: float) -> float:
        """Seconds in a step."""
        return self.calls * self.seconds(size)


class StepKernels(NamedTuple):
    """The kernels of a replica on one GPU."""

    by_tokens: Sequence[Kernel]
    by_sequences: Sequence[Kernel]
    experts: Sequence[Kernel]
    """By the tokens of all groups."""
    chunks: Callable[[float, float, float], float]
    """Attention of a layer by chunks, the tokens of each, and those before them."""
    decodes: Surface
    """The same by sequences and their context."""
    notices: Sequence[str]


def kernels_of(replica: Replica, tables: KernelTables, stack: Stack, load: str) -> StepKernels:
    """The kernels of a replica, from tables in the layout of aiconfigurator-core."""
    model = replica.model
    if model.params is not None:
        raise ConfigError(
            f"model.params={model.params:g}: must be null, since cost=measured goes by the shapes "
            "of a model's layers"
        )
    prompts, decodes = _attention(replica, tables)
    layers = _Layers(replica, tables)
    moves = [*all_to_all(replica, stack.all_to_all_share), *hops(replica, stack.all_to_all_share)]
    by_tokens = [
        *(*layers.dense(), *layers.passes()),
        *(*all_reduces(replica, tables), *map(_moving, moves)),
    ]
    experts = list(layers.experts(load))
    tile = None if model.mla else tables.tile(model.head_dim)
    chunks = partial(_chunks, prompts, decodes, tile)
    return StepKernels(by_tokens, [layers.head()], experts, chunks, decodes, [sources(tables)])


def _attention(replica: Replica, tables: KernelTables) -> list[Surface]:
    """Attention of whole prompts and of decodes."""
    model, gpus = replica.model, replica.tensor_parallel
    eight = replica.kv_format != "auto" or model.kv_dtype_bytes < 2
    kv_format = "fp8" if eight else "bfloat16"
    heads, kv_heads = model.heads / gpus, max(model.kv_heads / gpus, 1.0)
    if model.mla is None:
        return [
            tables.attention(table, heads, kv_heads, model.head_dim, kv_format)
            for table in ("context_attention_perf", "generation_attention_perf")
        ]
    if model.mla != DEEPSEEK:
        raise UnmeasuredError(f"model.mla={model.mla}: must be {DEEPSEEK}, which was measured")
    dtype = "bfloat16" if model.products == FP16 else "fp8_block"
    return [
        tables.latent_attention(table, heads, dtype, kv_format)
        for table in ("mla_context_module_perf", "mla_generation_module_perf")
    ]


def _chunks(
    whole: Surface,
    decodes: Surface,
    tile: Curve | None,
    *chunks: float,
) -> float:
    """A part of the attention of whole prompts up to the chunks' ends, as many as their pairs are
    of all, but at least what decodes at the same place take to read their context, or a tile of
    queries to pass over it."""
    prompts, tokens, before = chunks
    length = tokens + before
    seconds = whole(prompts, length)
    if not before:
        return seconds
    share = 1.0 - before * (before + 1.0) / (length * (length + 1.0))
    return max(seconds * share, decodes(prompts, length), tile(length) if tile else 0.0)


def all_reduces(replica: Replica, tables: KernelTables) -> Iterator[Kernel]:
    """All-reduces under tensor parallelism."""
    model, gpus = replica.model, replica.tensor_parallel
    if gpus > 1:
        curve, calls = tables.all_reduce(gpus), ALL_REDUCES * model.layers
        seconds = lambda tokens: curve(tokens * model.hidden)  # noqa: E731
        yield Kernel("all-reduce", "interconnect", calls, seconds)


def _moving(term: CostTerm) -> Kernel:
    """Transfers that no table has, as the roofline takes them."""
    fixed, rate = term.seconds.step, term.seconds.token
    return Kernel(term.name, term.bound, 1, lambda tokens: fixed + tokens * rate)


def sources(tables: KernelTables) -> str:
    """Where times come from, in one line."""
    labels: dict[str, list[str]] = {}
    for kernel, label in tables.taken.items():
        labels.setdefault(label, []).append(kernel)
    parts = [f"{', '.join(kernels)} by {label}" for label, kernels in labels.items()]
    told = "; ".join([*parts, *tables.replaced])
    return f"step times are sums of kernels measured on {tables.system}: {told}"


class _Layers:
    """The kernels of the layers, summed over them, but for attention."""

    def __init__(self, replica: Replica, tables: KernelTables) -> None:
        self.replica, self.model, self.tables = replica, replica.model, tables
        self.gpus = replica.tensor_parallel

    def dense(self) -> Iterator[Kernel]:
        """Products with weights that all tokens read."""
        model, gpus, hidden = self.model, self.gpus, self.model.hidden
        moe, gates = model.moe, 2 if model.gated_mlp else 1
        if model.mla is None:
            wide = (model.heads + 2 * max(model.kv_heads, gpus)) * model.head_dim // gpus
            yield self.product("qkv", wide, hidden, model.layers)
            yield self.product("o", hidden, model.heads * model.head_dim // gpus, model.layers)
        mlps = [("", model.intermediate, model.layers - model.moe_layers)]
        if moe:
            yield self.product("router", moe.experts, hidden, model.moe_layers, whole=True)
            mlps.append(("shared ", moe.shared_experts * moe.intermediate, model.moe_layers))
        for prefix, inner, calls in mlps:
            if inner and calls:
                yield self.product(f"{prefix}gate_up", gates * inner // gpus, hidden, calls)
                yield self.product(f"{prefix}down", hidden, inner // gpus, calls)

    def head(self) -> Kernel:
        """The LM head, by sequences."""
        return self.product("LM head", self.model.vocab // self.gpus, self.model.hidden, 1, True)

    def product(
        self, name: str, outputs: int, inputs: int, calls: int, whole: bool = False
    ) -> Kernel:
        """A product with a matrix in the model's formats, or in 16 bits as a `whole`."""
        hardware, products = self.replica.hardware, FP16 if whole else self.model.products
        dtype_bytes = 2.0 if whole else self.model.dtype_bytes
        eight = products != FP16 and products in hardware.rates
        rate = hardware.rates[products if eight else FP16]
        compute_from = dtype_bytes * rate / (2 * hardware.bandwidth)
        if eight:
            seconds = self._eight_bits(outputs, inputs, compute_from)
        else:
            seconds = self._sixteen_bits(outputs, inputs, dtype_bytes)
        return Kernel(name, "bandwidth", calls, seconds, compute_from)

    def _sixteen_bits(self, outputs: int, inputs: int, dtype_bytes: float) -> Seconds:
        """Where weights are smaller, reading them is a product of smaller depth, and computing
        takes what the fastest of 16 bits take a FLOP."""
        whole = self._curve(outputs, inputs)
        if dtype_bytes >= 2:
            return whole
        self.tables.lacks("weights below 16 bits", "products of 16 bits that read as many bytes")
        least = min(each / rows for rows, each in zip(whole.sizes, whole.seconds, strict=True))
        reading = self._curve(outputs, inputs * dtype_bytes / 2)
        return lambda rows: max(reading(rows), rows * least)

    def _eight_bits(self, outputs: int, inputs: int, compute_from: float) -> Seconds:
        """The tables' products in 8 bits contain quantising their inputs, which servers do in the
        norm or activation before. Where reading the weights binds, the product alone is as one in
        16 bits of half the depth; where computing does, the measured quantisation is taken off."""
        tables, halved = self.tables, self._curve(outputs, inputs / 2)
        both = [tables.product(kind, outputs, inputs) for kind in EIGHT_BITS]
        passes = [tables.one_pass(inputs, "computescale_perf"), tables.one_pass(inputs)]
        whole, contained = ([curve for curve in curves if curve] for curves in (both, passes))

        def seconds(rows: float) -> float:
            if rows < compute_from or not whole:
                return min(curve(rows) for curve in (halved, *whole))
            longer = min(curve(rows) for curve in whole)
            return max(longer - sum(curve(rows) for curve in contained), halved(rows))

        return seconds

    def _curve(self, outputs: float, inputs: float) -> Curve:
        curve = self.tables.product("bfloat16", outputs, inputs)
        if curve is None:
            raise UnmeasuredError(f"cost.tables: no products in 16 bits of {self.tables.system}")
        return curve

    def experts(self, load: str) -> Iterator[Kernel]:
        """Experts by the tokens of all groups."""
        model, replica = self.model, self.replica
        if (moe := model.moe) is None:
            return
        small = model.expert_dtype_bytes
        four = ("w4a16_mxfp4", "int4_wo")
        dtypes = SIXTEEN_BITS if small > 1 else EIGHT_BITS if small == 1 else four
        shape = {
            "hidden_size": model.hidden,
            "inter_size": moe.intermediate,
            "topk": moe.experts_per_token,
            "num_experts": moe.experts,
            "moe_tp_size": 1 if replica.expert_parallel > 1 else self.gpus,
            "moe_ep_size": replica.expert_parallel,
        }
        curve = self.tables.experts(shape, dtypes, load)
        yield Kernel("experts", "bandwidth", model.moe_layers, curve)

    def passes(self) -> Iterator[Kernel]:
        """Kernels that pass once over their values, by the bytes of a token."""
        model, gpus = self.model, self.gpus
        # Adding the residual is part of a norm: both are read and written, in 16 bits.
        passes = [("norms", 2 * model.layers + 1, 8.0 * model.hidden)]
        if model.mla is None:
            heads = (model.heads + max(model.kv_heads, gpus)) / gpus
            passes.append(("rotary", model.layers, 4.0 * heads * model.head_dim))
        if dense := model.layers - model.moe_layers:
            moved = 6.0 if model.gated_mlp else 4.0
            passes.append(("activation", dense, moved * model.intermediate / gpus))
        for name, calls, moved in passes:
            yield Kernel(name, "bandwidth", calls, self.one_pass(moved))

    def one_pass(self, token_bytes: float) -> Seconds:
        """Seconds of a kernel that passes over so many bytes a token."""
        if curve := self.tables.one_pass(token_bytes / PASS_BYTES):
            return curve
        # As on the GPUs that have it in the tables: four fifths of the memory's rate, and a launch.
        rate = 0.8 * self.replica.hardware.bandwidth
        return lambda tokens: 1.9e-6 + tokens * token_bytes / rate
