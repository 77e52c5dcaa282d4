"""The KV blocks that fit beside weights and activations, and the sizes of a server from them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil

from pagedsim.core import ConfigError, PagedsimError
from pagedsim.core.errors import require_number, require_whole
from pagedsim.server import ServerSpec
from pagedsim.sim.hardware import GIB
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica


@dataclass(frozen=True)
class Capacity:
    """Blocks of each group of a replica, and the memory budget of each of its GPUs."""

    blocks: int
    weight_bytes: float
    activation_bytes: float
    kv_bytes: float
    """Left for the KV cache."""


def capacity(
    replica: Replica,
    *,
    gpu_memory_utilization: float = 0.9,
    reserved_gib: float = 0.5,
    max_batched_tokens: int = 2048,
    max_seqs: int = 256,
) -> Capacity:
    """Blocks = (utilization × memory − weights − peak activations − reserved) / bytes of a block.

    All terms are per GPU, so the blocks are those of one group of GPUs. `reserved_gib` covers the
    CUDA context, workspaces of libraries and graphs. Raises ConfigError if no block fits.
    """
    require_number("gpu_memory_utilization", gpu_memory_utilization, above=0, high=1)
    require_number("reserved_gib", reserved_gib, 0)
    require_whole("max_batched_tokens", max_batched_tokens, 1)
    require_whole("max_seqs", max_seqs, 1)

    def beside(tensor_parallel: int) -> float:
        active = activation_bytes(replica.model, tensor_parallel, max_batched_tokens, max_seqs)
        return active + reserved_gib * GIB

    usable = gpu_memory_utilization * replica.hardware.memory_bytes
    left = usable - replica.weight_bytes - beside(replica.tensor_parallel)
    if 0 < left < replica.block_bytes:
        raise ConfigError(
            f"block_size={replica.block_size}: one block takes {replica.block_bytes / GIB:,.3f} "
            f"GiB, and {left / GIB:,.3f} GiB are left of hardware={replica.hardware.name} "
            f"beside model={replica.model.name}"
        )
    if left <= 0:
        raise _too_large(replica, gpu_memory_utilization, beside)
    return Capacity(
        blocks=int(left // replica.block_bytes),
        weight_bytes=replica.weight_bytes,
        activation_bytes=beside(replica.tensor_parallel) - reserved_gib * GIB,
        kv_bytes=left,
    )


def cpu_blocks(replica: Replica, swap_space_gib: float) -> int:
    """CPU blocks of a group, given the swap space per GPU, as in vLLM."""
    require_number("swap_space_gib", swap_space_gib, 0)
    return int(swap_space_gib * GIB // replica.block_bytes)


def activation_bytes(
    model: ModelShape, tensor_parallel: int, max_batched_tokens: int, max_seqs: int
) -> float:
    """Estimated peak activation memory of a step on one GPU."""
    return sum(activations(model, tensor_parallel, max_batched_tokens, max_seqs).values())


def activations(
    model: ModelShape, tensor_parallel: int, max_batched_tokens: int, max_seqs: int
) -> dict[str, float]:
    """Estimated peak activation memory of a step on one GPU by part, in 16 bits except for the
    sampler.

    A layer peaks at the residual stream, the normalised input, and the intermediate results of the
    MLP (gate, up and their product) or of attention, whichever are larger, per token. The sampler
    holds about four float32 copies of the logits per sequence (logits, probabilities, sorted, their
    order).
    """
    experts = model.moe.experts_per_token + model.moe.shared_experts if model.moe else 1
    inner = experts * model.moe.intermediate if model.moe else model.intermediate
    mlp = (3 if model.gated_mlp else 2) * max(inner, model.intermediate)
    attention = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    widest = "MLP" if mlp >= attention else "attention"
    return {
        "residual stream and norm": max_batched_tokens * 2 * model.hidden * 2,
        widest: max_batched_tokens * max(mlp, attention) / tensor_parallel * 2,
        "logits": max_seqs * model.vocab * 4 * 4,
    }


def _too_large(replica: Replica, utilization: float, beside: Callable[[int], float]) -> ConfigError:
    """`beside(tensor_parallel)`: bytes per GPU other than weights and blocks."""
    model, hardware = replica.model, replica.hardware
    usable = utilization * hardware.memory_bytes

    def need(choice: Replica) -> float:
        return choice.weight_bytes + beside(choice.tensor_parallel) + choice.block_bytes

    choices = _of_any_width(replica)
    fitting = [choice for choice in choices if need(choice) <= usable]
    if fitting:
        hint = f"the smallest tensor_parallel that fits is {fitting[0].tensor_parallel}"
    else:
        largest = choices[-1].tensor_parallel
        memory = need(choices[-1]) / utilization / GIB
        hint = (
            f"no tensor_parallel up to {largest} fits; "
            f"with {largest} it takes GPUs of {ceil(memory)} GiB"
        )
    return ConfigError(
        f"model={model.name} does not fit hardware={hardware.name} with {replica.split}: a GPU "
        "would hold "
        f"{replica.weight_bytes / GIB:.1f} GiB of weights and "
        f"{beside(replica.tensor_parallel) / GIB:.1f} GiB of activations and other, and offers "
        f"{utilization:g} × {hardware.memory_gib:g} = {usable / GIB:.1f} GiB; {hint}"
    )


def _of_any_width(replica: Replica) -> list[Replica]:
    """The replica with each valid `tensor_parallel`."""
    replicas = []
    for size in range(1, replica.hardware.gpus_per_node + 1):
        with suppress(ConfigError):
            replicas.append(replace(replica, tensor_parallel=size))
    return replicas


def sized(server: ServerSpec, replica: Replica, reserved_gib: float = 0.5) -> ServerSpec:
    """The server with GPU blocks, CPU blocks and limits filled in.

    `max_model_len` defaults to the model's, or less if the memory holds less: activations of larger
    steps leave less memory for blocks. `reserved_gib` per GPU are neither weights, activations nor
    blocks.
    """
    most = replica.model.max_model_len
    if (server.max_model_len or 0) > most:
        raise ConfigError(
            f"max_model_len={server.max_model_len}: must be at most {most}, "
            f"that of model={replica.model.name}"
        )

    def of_length(longest: int) -> ServerSpec:
        return _with_blocks(server, replica, reserved_gib, longest)

    return of_length(server.max_model_len or _longest(most, of_length))


def _longest(most: int, of_length: Callable[[int], ServerSpec]) -> int:
    """The largest length up to `most` that fits in memory."""

    def holds(length: int) -> bool:
        return of_length(length).make_memory().longest >= length

    try:
        if holds(most):
            return most
    except PagedsimError:
        holds(1)  # raises if not even this fits
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        try:
            fits = holds(middle)
        except PagedsimError:
            fits = False
        low, high = (middle, high) if fits else (low, middle)
    return low


def _with_blocks(
    server: ServerSpec, replica: Replica, reserved_gib: float, longest: int
) -> ServerSpec:
    """The server with the configured number of blocks, or as many as fit."""
    tokens, blocks, swapped = server.step_tokens(longest), server.blocks, server.cpu_blocks
    if blocks is None:
        blocks = capacity(
            replica,
            gpu_memory_utilization=server.gpu_memory_utilization,
            reserved_gib=reserved_gib,
            max_batched_tokens=tokens,
            max_seqs=server.max_seqs,
        ).blocks
    if swapped is None:
        swapped = cpu_blocks(replica, server.swap_space_gib) if server.may_swap else 0
    return replace(
        server,
        blocks=blocks,
        cpu_blocks=swapped,
        max_batched_tokens=tokens,
        max_model_len=longest,
    )
