"""An engine's parts, from its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagedsim.build import make_batching, make_memory, make_policy, make_preemption
from pagedsim.core import ConfigError, Preemption, Scheduler
from pagedsim.engine.arguments import Arguments
from pagedsim.engine.cache import Cache, CacheShape
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.prices import Measured
from pagedsim.engine.profile import GIB, fitting_blocks
from pagedsim.engine.runner import Runner
from pagedsim.engine.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Parts:
    """What an engine is made of."""

    model: LoadedModel
    tokenizer: Tokenizer | None
    scheduler: Scheduler
    runner: Runner
    prices: Measured
    """What the preemption may have been made with."""


def assemble(arguments: Arguments) -> Parts:
    """Load the model, find out how much fits beside it, and build the scheduler over that."""
    device = device_of(arguments.device)
    model = load_model(
        arguments.model,
        dtype=arguments.dtype,
        device=device,
        load_format=arguments.load_format,
        seed=arguments.seed,
    )
    longest = arguments.max_model_len or model.max_model_len
    if longest > model.max_model_len:
        raise ConfigError(
            f"max_model_len={longest}: must be at most {model.max_model_len}, that of {model.name}"
        )
    shape = CacheShape(
        model.num_layers, arguments.block_size, model.num_kv_heads, model.head_dim, model.dtype
    )
    prices = Measured()
    preemption = _preemption(arguments.preemption, prices)
    scheduler, cache = _with_memory(arguments, model, shape, longest, preemption)
    tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
    runner = Runner(model, cache)
    runner.warm_up(scheduler.max_batched_tokens)
    if arguments.preemption == "cheapest" or callable(arguments.preemption):
        prices.measure(runner, scheduler.max_batched_tokens)
    return Parts(model, tokenizer, scheduler, runner, prices)


def _preemption(
    given: str | Preemption | Callable[[Measured], Preemption], prices: Measured
) -> Preemption:
    if callable(given):
        return given(prices)
    return make_preemption(given, **({"prices": prices} if given == "cheapest" else {}))


def _with_memory(
    arguments: Arguments,
    model: LoadedModel,
    shape: CacheShape,
    longest: int,
    preemption: Preemption,
) -> tuple[Scheduler, Cache]:
    batching = make_batching(arguments.batching)
    seqs = arguments.max_num_seqs
    tokens = arguments.max_num_batched_tokens or batching.default_tokens(longest, seqs)
    blocks = arguments.num_gpu_blocks or fitting_blocks(
        model,
        shape,
        max_model_len=longest,
        max_seqs=seqs,
        max_batched_tokens=tokens,
        utilization=arguments.gpu_memory_utilization,
    )
    if arguments.max_model_len is None:  # then as long as the memory holds
        longest = min(longest, blocks * shape.block_size)
    cpu_blocks = arguments.num_cpu_blocks
    if cpu_blocks is None:
        cpu_blocks = int(arguments.swap_space * GIB // shape.block_bytes)
    cpu_blocks = cpu_blocks if preemption.swaps else 0
    scheduler = Scheduler(
        memory=make_memory(
            arguments.memory,
            blocks=blocks,
            block_size=shape.block_size,
            cpu_blocks=cpu_blocks,
        ),
        batching=batching,
        policy=make_policy(arguments.policy),
        preemption=preemption,
        max_seqs=seqs,
        max_batched_tokens=arguments.max_num_batched_tokens,
        max_model_len=longest,
    )
    return scheduler, _allocated(shape, blocks, cpu_blocks, model.device)


def _allocated(shape: CacheShape, blocks: int, cpu_blocks: int, device: torch.device) -> Cache:
    try:
        return Cache(shape, blocks, cpu_blocks, device)
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        needs = f"{blocks} blocks on the GPU and {cpu_blocks} on the host"
        raise ConfigError(
            f"out of memory: {needs} of {shape.block_bytes / 2**20:.2f} MiB each do not fit; lower "
            "num_gpu_blocks, gpu_memory_utilization, num_cpu_blocks or swap_space"
        ) from error


def device_of(name: str) -> torch.device:
    """The device that a setting means; raises ConfigError where it is not there."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise ConfigError(
            "device=cuda: torch finds no GPU here; choose device=cpu, or device=auto for "
            "whatever there is"
        )
    if name == "auto":
        name = "cuda" if there else "cpu"
    return torch.device(name)
