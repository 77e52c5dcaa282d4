"""The KV blocks that fit beside weights and activations, and the sizes of a server from them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from pagedsim.core import ConfigError, PagedsimError
from pagedsim.core.errors import require_number
from pagedsim.server import ServerSpec
from pagedsim.sim.hardware import GIB
from pagedsim.sim.pools import Room, room
from pagedsim.sim.replica import Replica


def capacity(replica: Replica, **settings: Any) -> Room:
    """The room for blocks of each group of a replica, by the settings of `room`.

    Raises ConfigError if no block fits.
    """
    found, hardware = room(replica, **settings), replica.hardware
    if 0 < found.kv_bytes < replica.block_bytes:
        raise ConfigError(
            f"block_size={replica.block_size}: one block takes {replica.block_bytes / GIB:,.3f} "
            f"GiB, and {found.kv_bytes / GIB:,.3f} GiB are left of hardware={hardware.name} "
            f"beside model={replica.model.name}"
        )
    if found.kv_bytes <= 0:
        raise _too_large(replica, found, partial(room, **settings))
    return found


def cpu_blocks(replica: Replica, swap_space_gib: float) -> int:
    """CPU blocks of a group, given the swap space per GPU, as in vLLM."""
    require_number("swap_space_gib", swap_space_gib, 0)
    return int(swap_space_gib * GIB // replica.block_bytes)


def _too_large(replica: Replica, found: Room, room_of: Callable[[Replica], Room]) -> ConfigError:
    model, hardware = replica.model, replica.hardware
    choices = _of_any_width(replica)
    fitting = [choice for choice in choices if room_of(choice).blocks > 0]
    if fitting:
        hint = f"the smallest tensor_parallel that fits is {fitting[0].tensor_parallel}"
    else:
        widest = choices[-1]
        sizes = (replace(hardware, memory_gib=gib) for gib in count(int(hardware.memory_gib) + 1))
        enough = next(gpu for gpu in sizes if room_of(replace(widest, hardware=gpu)).blocks > 0)
        hint = (
            f"no tensor_parallel up to {widest.tensor_parallel} fits; "
            f"with {widest.tensor_parallel} it takes GPUs of {enough.memory_gib} GiB"
        )
    held = found.reserved + sum(found.activations.values())
    return ConfigError(
        f"model={model.name} does not fit hardware={hardware.name} with {replica.split}: a GPU "
        f"would hold {replica.weight_bytes / GIB:.1f} GiB of weights and {held / GIB:.1f} GiB of "
        f"activations and other, and offers {found.usable / GIB:.1f} of {hardware.memory_gib:g} "
        f"GiB with gpu_memory_utilization={found.share:g}; {hint}"
    )


def _of_any_width(replica: Replica) -> list[Replica]:
    """The replica with each valid `tensor_parallel`."""
    replicas = []
    for size in range(1, replica.hardware.gpus_per_node + 1):
        with suppress(ConfigError):
            replicas.append(replace(replica, tensor_parallel=size))
    return replicas


def sized(server: ServerSpec, replica: Replica, **rule: Any) -> ServerSpec:
    """The server with GPU blocks, CPU blocks and limits filled in.

    `max_model_len` defaults to the model's, or less if the memory holds less: activations of larger
    steps leave less memory for blocks. `rule` are `pool` and `reserved_gib` of `room`.
    """
    most = replica.model.max_model_len
    if (server.max_model_len or 0) > most:
        raise ConfigError(
            f"max_model_len={server.max_model_len}: must be at most {most}, "
            f"that of model={replica.model.name}"
        )

    def of_length(longest: int) -> ServerSpec:
        return _with_blocks(server, replica, longest, **rule)

    return of_length(server.max_model_len or _longest(most, of_length))


def _longest(most: int, of_length: Callable[[int], ServerSpec]) -> int:
    """The largest length up to `most` that fits in memory."""

    def holds(length: int) -> bool:
        try:
            return of_length(length).make_memory().longest >= length
        except PagedsimError:
            return False

    if holds(most):
        return most
    of_length(1).make_memory()  # raises if not even this fits
    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _with_blocks(server: ServerSpec, replica: Replica, longest: int, **rule: Any) -> ServerSpec:
    """The server with the configured number of blocks, or as many as fit."""
    tokens, blocks, swapped = server.step_tokens(longest), server.blocks, server.cpu_blocks
    if blocks is None:
        blocks = capacity(
            replica,
            gpu_memory_utilization=server.gpu_memory_utilization,
            max_batched_tokens=tokens,
            max_seqs=server.max_seqs,
            **rule,
        ).blocks
    if swapped is None:
        swapped = cpu_blocks(replica, server.swap_space_gib) if server.may_swap else 0
    return replace(
        server,
        blocks=blocks,
        cpu_blocks=swapped,
        offload=server.offloading.sized(replica.block_size, replica.block_bytes),
        max_batched_tokens=tokens,
        max_model_len=longest,
    )
