"""Back-of-the-envelope estimates: step times and their bottlenecks, products, memory footprint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, pairwise
from math import fsum
from typing import Any, NamedTuple, TypeVar

from pagedsim.core import Scheduler, StepPlan
from pagedsim.server import ServerSpec
from pagedsim.sim.cost import Breakdown, CostModel, Measured, Roofline
from pagedsim.sim.cost.base import Bound, step
from pagedsim.sim.cost.roofline import PRODUCTS
from pagedsim.sim.model import HEAD, Matrix, attention_matrices, mlp_matrices
from pagedsim.sim.pools import room
from pagedsim.sim.power import EnergyRoofline
from pagedsim.sim.replica import Replica

T = TypeVar("T")


class Product(NamedTuple):
    """`times` products of `rows` × `inputs` by `inputs` × `outputs`, over the whole model.

    In a pipeline, rows are those of a micro-batch. FLOP and bytes are per GPU; bytes are of weights
    and KV cache, without activations, which the cost model does not count either. Numbers may be
    means over experts, GPUs, chunks or contexts.
    """

    name: str
    rows: float
    inputs: float | None
    """None if only the number of weights is known."""
    outputs: float | None
    times: float
    flop: float
    bytes: float
    attention: bool = False
    """Whether it multiplies keys or values rather than weights."""
    from_blocks: bool = False
    """Whether it reads paged blocks (decode attention)."""


def products(replica: Replica, plan: StepPlan) -> list[Product]:
    """The products of a step; their FLOP and bytes add up to the step's work."""
    rows = [*_with_weights(replica, plan)] if plan.prefill_tokens + plan.decode_count else []
    if plan.chunks:
        rows += _of_chunks(replica, plan)
    if plan.decode_count:
        rows += _of_decodes(replica, plan)
    return rows


def _with_weights(replica: Replica, plan: StepPlan) -> Iterator[Product]:
    model, whole = replica.model, plan.prefill_tokens + plan.decode_count
    passes = replica.passes(whole)  # each reads the weights again
    tokens = whole if passes == 1 else whole / passes

    def product(matrix: Matrix, rows: float, times: float, nbytes: float, of: str = "") -> Product:
        times *= passes
        holders = replica.gpus if of == "expert" else replica.gpus // replica.groups
        flop = 2 * rows * matrix.params * times / replica.gpus
        return Product(
            *(f"{of} {matrix.name}".strip(), rows, matrix.inputs, matrix.outputs, times),
            *(flop, matrix.params * times * nbytes / holders),
        )

    if model.params is not None:
        share = model.params * passes / replica.gpus
        read = share * model.dtype_bytes
        yield Product("all weights", tokens, None, None, passes, 2 * tokens * share, read)
        return
    for matrix in attention_matrices(model):
        yield product(matrix, tokens, model.layers, model.dtype_bytes)
    if dense := model.layers - model.moe_layers:
        for matrix in mlp_matrices(model, model.intermediate):
            yield product(matrix, tokens, dense, model.dtype_bytes)
    if moe := model.moe:
        router = Matrix("router", model.hidden, moe.experts)
        yield product(router, tokens, model.moe_layers, model.dtype_bytes)
        chosen = moe.expected_experts(tokens)
        expert_rows = tokens * moe.experts_per_token / chosen
        for matrix in mlp_matrices(model, moe.intermediate):
            times = model.moe_layers * chosen
            yield product(matrix, expert_rows, times, model.expert_dtype_bytes, "expert")
        if shared := model.moe_layers * moe.shared_experts:
            for matrix in mlp_matrices(model, moe.intermediate):
                yield product(matrix, tokens, shared, model.dtype_bytes, "shared")
    samples: float = sum(chunk.samples for chunk in plan.chunks) + plan.decode_count
    samples = samples if passes == 1 else samples / passes
    head = Matrix(HEAD, model.hidden, model.vocab)
    yield product(head, samples, 1, model.head_dtype_bytes)


def _of_chunks(replica: Replica, plan: StepPlan) -> list[Product]:
    """Prefill attention; masked pairs do not count as FLOP."""
    model, count = replica.model, len(plan.chunks)
    key, value = model.prefill_dims
    rows, context = plan.prefill_tokens / count, plan.prefill_context / count
    times = model.layers * model.heads * count
    flop = 2 * model.layers * model.heads * plan.prefill_pairs / replica.gpus
    # The chunk's own keys and values are still in the GPU's caches.
    before = plan.prefill_context - plan.prefill_tokens
    keys, values = _read(replica, before)
    return [
        Product("scores", rows, key, context, times, flop * key, keys, True),
        Product("values", rows, context, value, times, flop * value, values, True),
    ]


def _of_decodes(replica: Replica, plan: StepPlan) -> list[Product]:
    """Decode attention: the query heads that share a KV head are one product."""
    model, count = replica.model, plan.decode_count
    key, value = model.decode_dims
    groups = 1 if model.mla else model.kv_heads
    rows, context = model.heads / groups, plan.decode_context / count
    times = model.layers * groups * count
    flop = 2 * model.layers * model.heads * plan.decode_context / replica.gpus
    keys, values = _read(replica, plan.decode_context)
    return [
        Product("scores", rows, key, context, times, flop * key, keys, True, True),
        Product("values", rows, context, value, times, flop * value, values, True, True),
    ]


def _read(replica: Replica, tokens: int) -> tuple[float, float]:
    """Bytes of keys and of values; compressed vectors of MLA serve as both and are read once."""
    read = tokens * replica.kv_read_bytes
    return (read, 0.0) if replica.model.mla else (read / 2, read / 2)


def timed(cost: Roofline, plan: StepPlan) -> list[dict[str, Any]]:
    """The products of a step with the time that each takes alone, as for result.json."""
    return [_timed(cost, product) for product in products(cost.replica, plan)]


def _timed(cost: Roofline, product: Product) -> dict[str, Any]:
    fields = product._asdict()
    if product.attention:
        computing = product.flop / cost.attention_rate
        longer = cost.paged if fields.pop("from_blocks") else 1.0
        reading = product.bytes / cost.cache_bandwidth * longer
    else:
        del fields["from_blocks"]
        computing = product.flop / (cost.head_rate if product.name == HEAD else cost.flop_rate)
        reading = product.bytes / cost.bandwidth
    bound: Bound = "compute" if computing >= reading else "bandwidth"
    return {**fields, "computing_s": computing, "reading_s": reading, "bound": bound}


def bound_of(breakdown: Breakdown) -> tuple[Bound, str]:
    """The bottleneck of a step, and the longest term of it."""
    waits = [term for term in breakdown.terms if term.bound == breakdown.bound]
    return breakdown.bound, max(waits, key=lambda term: term.seconds).name


def changes(of: Callable[[int], T], most: int) -> list[tuple[int, T]]:
    """The sizes from 1 to `most` at which `of` changes, with its values.

    Intervals between powers of two are bisected if their ends differ, so a change that reverts
    within one is missed.

    >>> changes(lambda size: "large" if size > 20 else "small", 100)
    [(1, 'small'), (21, 'large')]
    """
    known = cache(of)
    sizes = [*(2**i for i in range(most.bit_length())), most]
    later = [_changes(known, low, high) for low, high in pairwise(sizes)]
    return [(size, known(size)) for size in chain([1], *later)]


def _changes(of: Callable[[int], object], low: int, high: int) -> Iterator[int]:
    """The sizes above `low` at which it changes."""
    if of(low) == of(high):
        return
    if high - low == 1:
        yield high
        return
    middle = (low + high) // 2
    yield from _changes(of, low, middle)
    yield from _changes(of, middle, high)


def generations(
    cost: CostModel, prompt: int, output: int, ahead: bool = False
) -> dict[str, dict[str, float]]:
    """Time and FLOP of one GPU for one answer on an idle server.

    With a KV cache: one prefill, then one token per step. Without: each step recomputes all tokens.
    """
    decodes = [step(decodes=1, context=prompt + i, ahead=ahead) for i in range(1, output)]
    ways = {
        "with": [step(prompt, ahead=ahead), *decodes],
        "without": [step(prompt + i, ahead=ahead) for i in range(output)],
    }
    return {
        way: {
            "seconds": fsum(map(cost.step_seconds, steps)),
            "flop": fsum(cost.work(plan).flop for plan in steps),
        }
        for way, steps in ways.items()
    }


# -- numbers for result.json -----------------------------------------------------------------------

MOST = 4096
"""Maximum number of sequences or prompt tokens in the search for bottleneck changes."""


@dataclass(frozen=True)
class Case:
    """A server and the request sizes."""

    cost: Roofline | Measured
    power: EnergyRoofline | None
    scheduler: Scheduler
    server: ServerSpec
    memory: Mapping[str, Any]
    """The settings of the group."""
    prompt: int
    batch: int | None
    output: int
    wanted: int
    """Output tokens before clipping to the maximum context."""

    @property
    def replica(self) -> Replica:
        return self.cost.replica

    @cached_property
    def roofline(self) -> Roofline:
        """What tells products one by one."""
        return self.cost if isinstance(self.cost, Roofline) else Roofline(self.replica)

    @cached_property
    def fitting(self) -> int:
        """Contexts of `prompt` tokens that memory holds."""
        return self.contexts(self.prompt)

    @property
    def step_tokens(self) -> int:
        """Maximum number of tokens of a step."""
        return self.server.step_tokens(self.scheduler.max_model_len)

    @property
    def full(self) -> int:
        return min(self.fitting, self.scheduler.max_seqs)

    def contexts(self, tokens: int) -> int:
        """Number of contexts of this length that memory holds, without sharing."""
        memory = self.scheduler.memory
        return memory.total // memory.blocks_for(tokens)

    def prefill(self, tokens: int) -> StepPlan:
        return step(tokens, ahead=self.scheduler.async_scheduling)

    def decode(self, sequences: int) -> StepPlan:
        """A step of decodes, each with a context as long as the prompt."""
        ahead = self.scheduler.async_scheduling
        return step(decodes=sequences, context=sequences * self.prompt, ahead=ahead)

    @property
    def batches(self) -> dict[str, int]:
        """Decode batch sizes: one sequence, the configured batch, the full batch."""
        asked = {} if self.batch is None else {"batch": self.batch}
        return {"one": 1, **asked, "full": self.full}


def data_of(case: Case) -> dict[str, Any]:
    """All numbers, in bytes, seconds and FLOP of one GPU."""
    replica, roofline = case.replica, case.roofline
    hardware = replica.hardware
    decodes = {f"decode_{name}": case.decode(count) for name, count in case.batches.items()}
    plans = {"prefill": case.prefill(case.prompt), **decodes}
    ahead = case.scheduler.async_scheduling
    return {
        "model": replica.model.name,
        "hardware": hardware.name,
        "tensor_parallel": replica.tensor_parallel,
        **replica.more_than_shared,
        "gpus": replica.gpus,
        "euros_per_hour": replica.euros_per_hour,
        "kv_cache_dtype": replica.kv_format,
        "prompt": case.prompt,
        "batches": case.batches,
        "output": case.output,
        "memory": _memory(case),
        "steps": {name: _step(case, plan) for name, plan in plans.items()},
        "products": {name: timed(roofline, plan) for name, plan in plans.items()},
        "bounds": _bounds(case),
        "kv_cache": generations(case.cost, case.prompt, case.output, ahead),
        "peak": {"bandwidth": hardware.bandwidth, "flop_rates": hardware.rates},
        "reached": {"bandwidth": roofline.bandwidth, "flop_rate": roofline.flop_rate},
    }


def _memory(case: Case) -> dict[str, Any]:
    replica, server, scheduler = case.replica, case.server, case.scheduler
    memory, longest = scheduler.memory, scheduler.max_model_len
    held, steps = replica.weights, (case.step_tokens, server.max_seqs)
    keys = ("pool", "gpu_memory_utilization", "reserved_gib")
    rule = {key: case.memory[key] for key in keys if key in case.memory}
    found = room(replica, **rule, max_batched_tokens=steps[0], max_seqs=steps[1])
    return {
        "memory_bytes": round(replica.hardware.memory_bytes),
        "gpu_memory_utilization": found.share,
        "usable_bytes": round(found.usable),
        "weights": {part: round(nbytes) for part, nbytes in held.items()},
        "activations": {part: round(nbytes) for part, nbytes in found.activations.items()},
        "max_batched_tokens": case.step_tokens,
        "max_seqs": server.max_seqs,
        "reserved_bytes": round(found.reserved),
        "left_bytes": round(found.kv_bytes),
        "kv_bytes_per_token": round(replica.kv_bytes_per_token),
        "block_size": memory.block_size,
        "block_bytes": round(replica.block_bytes),
        "blocks": memory.total,
        "tokens": memory.total * memory.block_size,
        "max_model_len": longest,
        "contexts_of_prompt": case.fitting,
        "contexts_of_max_model_len": case.contexts(longest),
    }


def _step(case: Case, plan: StepPlan) -> dict[str, Any]:
    breakdown, replica = case.cost.explain(plan), case.replica
    bound, term = bound_of(breakdown)
    tokens = plan.prefill_tokens + plan.decode_count
    rate, euros = tokens / breakdown.seconds, replica.euros_per_hour
    watts = case.power and case.power.watts(replica, breakdown.work, breakdown.seconds)
    return {
        "tokens": tokens,
        "seconds": breakdown.seconds,
        "bound": bound,
        "term": term,
        "terms": [part._asdict() for part in breakdown.terms],
        "flop": breakdown.work.flop,
        "bytes": breakdown.work.bytes,
        "mfu": breakdown.mfu(replica.hardware),
        "mbu": breakdown.mbu(replica.hardware),
        "tokens_per_s": rate,
        "watts": watts,
        "tokens_per_joule": watts and rate / watts,
        "tokens_per_euro": euros and 3600 * rate / euros,
    }


def _bounds(case: Case) -> dict[str, Any]:
    """The bottleneck of steps by size, and the batch from which products are compute bound."""
    explain = case.cost.explain

    def computes(sequences: int) -> bool:
        terms = case.roofline.explain(case.decode(sequences)).terms
        return any(term.name == PRODUCTS for term in terms)

    def of(plan: Callable[[int], StepPlan]) -> list[dict[str, Any]]:
        bounds = changes(lambda size: bound_of(explain(plan(size))), MOST)
        return [{"from": size, "bound": bound, "term": term} for size, (bound, term) in bounds]

    return {
        "prefill": of(case.prefill),
        "decode": of(case.decode),
        "products_compute_from": next((n for n, does in changes(computes, MOST) if does), None),
    }
