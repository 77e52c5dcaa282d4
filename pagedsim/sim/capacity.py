"""How many blocks of keys and values fit beside the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from pagedsim.core import ConfigError
from pagedsim.core.errors import require
from pagedsim.sim.hardware import GIB
from pagedsim.sim.model import ModelShape
from pagedsim.sim.replica import Replica, can_split


@dataclass(frozen=True)
class Capacity:
    """Blocks of a replica, and the bytes of each of its GPUs that led to them."""

    blocks: int
    cpu_blocks: int
    weight_bytes: float
    activation_bytes: float
    kv_bytes: float
    """What is left for keys and values."""


def capacity(
    replica: Replica,
    *,
    gpu_memory_utilization: float = 0.9,
    max_batched_tokens: int = 2048,
    max_seqs: int = 256,
    activation_gib: float | None = None,
    swap_space_gib: float = 4.0,
) -> Capacity:
    """Blocks = (utilization × memory − weights − peak activations) / bytes of a block, on each GPU.

    Activations are estimated unless given. `swap_space_gib` is the CPU memory for each GPU, as
    in vLLM. Raises ConfigError where not one block is left.
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise ConfigError(
            f"gpu_memory_utilization={gpu_memory_utilization}: must be above 0 and at most 1"
        )
    require("max_batched_tokens", max_batched_tokens, 1)
    require("max_seqs", max_seqs, 1)
    require("swap_space_gib", swap_space_gib, 0)
    if activation_gib is not None:
        require("activation_gib", activation_gib, 0)

    def activations(tensor_parallel: int) -> float:
        if activation_gib is not None:
            return activation_gib * GIB
        return activation_bytes(replica.model, tensor_parallel, max_batched_tokens, max_seqs)

    usable = gpu_memory_utilization * replica.hardware.memory_bytes
    active = activations(replica.tensor_parallel)
    left = usable - replica.weight_bytes - active
    if left < replica.block_bytes:
        raise _too_large(replica, gpu_memory_utilization, activations)
    return Capacity(
        blocks=int(left // replica.block_bytes),
        cpu_blocks=int(swap_space_gib * GIB // replica.block_bytes),
        weight_bytes=replica.weight_bytes,
        activation_bytes=active,
        kv_bytes=left,
    )


def activation_bytes(
    model: ModelShape, tensor_parallel: int, max_batched_tokens: int, max_seqs: int
) -> float:
    """Peak memory of a step's intermediate results on one GPU, in 16 bits; an estimate.

    At its widest a layer holds, for each token, the residual stream, the normalised input and
    what the MLP makes of it (gate, up and their product); the sampler, for each sequence, about
    four float32 copies of the logits (logits, probabilities, sorted, their order).
    """
    experts = model.moe.experts_per_token + model.moe.shared_experts if model.moe else 1
    inner = experts * model.moe.intermediate if model.moe else model.intermediate
    mlp = (3 if model.gated_mlp else 2) * max(inner, model.intermediate)
    attention = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    token = 2 * model.hidden + max(mlp, attention) / tensor_parallel
    return max_batched_tokens * token * 2 + max_seqs * model.vocab * 4 * 4


def _too_large(
    replica: Replica, utilization: float, activations: Callable[[int], float]
) -> ConfigError:
    model, hardware = replica.model, replica.hardware
    usable = utilization * hardware.memory_bytes

    def need(tensor_parallel: int) -> float:
        each = replace(replica, tensor_parallel=tensor_parallel)
        return each.weight_bytes + activations(tensor_parallel) + each.block_bytes

    choices = [n for n in range(1, hardware.gpus_per_node + 1) if can_split(model, n)]
    fitting = [n for n in choices if need(n) <= usable]
    if fitting:
        hint = f"the smallest tensor_parallel that fits is {fitting[0]}"
    else:
        largest = choices[-1]
        memory = need(largest) / utilization / GIB
        hint = (
            f"no tensor_parallel up to {largest} fits; "
            f"with {largest} it takes GPUs of {ceil(memory)} GiB"
        )
    return ConfigError(
        f"model={model.name} does not fit hardware={hardware.name} with "
        f"tensor_parallel={replica.tensor_parallel}: a GPU would hold "
        f"{replica.weight_bytes / GIB:.1f} GiB of weights and "
        f"{activations(replica.tensor_parallel) / GIB:.1f} GiB of activations, and offers "
        f"{utilization:g} × {hardware.memory_gib:g} = {usable / GIB:.1f} GiB; {hint}"
    )
