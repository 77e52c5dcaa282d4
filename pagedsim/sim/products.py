"""The matrix products of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pagedsim.core import StepPlan
from pagedsim.sim.model import Matrix, attention_matrices, mlp_matrices
from pagedsim.sim.replica import Replica

HEAD = "LM head"


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
    found = [*_with_weights(replica, plan)] if plan.prefill_tokens + plan.decode_count else []
    if plan.chunks:
        found += _of_chunks(replica, plan)
    if plan.decode_count:
        found += _of_decodes(replica, plan)
    return found


def _with_weights(replica: Replica, plan: StepPlan) -> Iterator[Product]:
    model, whole = replica.model, plan.prefill_tokens + plan.decode_count
    passes = replica.passes(whole)  # each reads the weights again
    tokens = whole if passes == 1 else whole / passes

    def product(matrix: Matrix, rows: float, times: float, each: float, of: str = "") -> Product:
        times *= passes
        holders = replica.gpus if of == "expert" else replica.gpus // replica.groups
        flop = 2 * rows * matrix.params * times / replica.gpus
        return Product(
            *(f"{of} {matrix.name}".strip(), rows, matrix.inputs, matrix.outputs, times),
            *(flop, matrix.params * times * each / holders),
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
        each = tokens * moe.experts_per_token / chosen
        for matrix in mlp_matrices(model, moe.intermediate):
            times = model.moe_layers * chosen
            yield product(matrix, each, times, model.expert_dtype_bytes, "expert")
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
    """Decode attention, the query heads of one KV head in one product."""
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
