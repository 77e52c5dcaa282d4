"""Derive the unset sizes of a server from its model and hardware."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pagedsim.core import ConfigError, PagedsimError
from pagedsim.server import ServerSpec
from pagedsim.sim.capacity import capacity, cpu_blocks
from pagedsim.sim.replica import Replica


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
