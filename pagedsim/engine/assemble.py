"""An engine's parts, from its arguments."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from pagedsim.build import make_batching, make_memory, make_policy, make_preemption
from pagedsim.core import ConfigError, Preemption, Scheduler
from pagedsim.engine.arguments import Arguments
from pagedsim.engine.cache import Cache, CacheShape, cache_dtype
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.models.load import check_shares
from pagedsim.engine.models.share import Share
from pagedsim.engine.parallel.leader import Leader
from pagedsim.engine.parallel.ranks import Ranks
from pagedsim.engine.prices import Measured
from pagedsim.engine.profile import fitting_blocks
from pagedsim.engine.room import GIB, in_memory, require_host
from pagedsim.engine.runner import Runner
from pagedsim.engine.sampler import rehearse_sampling
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
    model = loaded(arguments)
    try:
        return _assembled(arguments, model)
    except BaseException:
        if not isinstance(arguments.model, LoadedModel):
            model.close()
        raise


def _assembled(arguments: Arguments, model: LoadedModel) -> Parts:
    longest = model.max_model_len
    shape = CacheShape(
        model.num_layers,
        arguments.block_size,
        model.num_kv_heads,
        model.head_dim,
        cache_dtype(arguments.kv_cache_dtype, model.dtype),
    )
    prices = Measured()
    preemption = _preemption(arguments.preemption, prices)
    scheduler, cache = _with_memory(arguments, model, shape, longest, preemption)
    tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
    seqs, most, layout = scheduler.max_seqs, scheduler.max_model_len, arguments.kv_layout
    if model.ranks is None:
        runner = Runner(model, cache, seqs=seqs, longest=most, layout=layout)
    else:
        runner = Leader(model.ranks, model, cache, seqs=seqs, longest=most, layout=layout)
    runner.warm_up(scheduler.max_batched_tokens, graphs=not arguments.enforce_eager)
    rehearse_sampling(model.vocab_size, model.device)
    if arguments.preemption == "cheapest" or callable(arguments.preemption):
        prices.measure(runner, scheduler.max_batched_tokens)
    return Parts(model, tokenizer, scheduler, runner, prices)


def loaded(arguments: Arguments) -> LoadedModel:
    """The model alone, for engines that are to share it; one that is loaded already is taken."""
    if isinstance(there := arguments.model, LoadedModel):
        length = arguments.max_model_len or there.max_model_len
        if length > there.max_model_len:
            raise ConfigError(f"max_model_len={length}: was loaded for {there.max_model_len}")
        if (size := arguments.tensor_parallel_size) != there.ranks_count:
            raise ConfigError(f"tensor_parallel_size={size}: was loaded for {there.ranks_count}")
        return replace(there, max_model_len=length)
    device = device_of(arguments.device)
    if arguments.tensor_parallel_size > 1:
        return _split(arguments, device)
    return _load(arguments.model, device, _loading(arguments))


def check_split(arguments: Arguments) -> None:
    """Raise ConfigError where the model cannot be split as it is asked to; reads no weights."""
    size, model = arguments.tensor_parallel_size, arguments.model
    if size == 1 or isinstance(model, LoadedModel):
        return
    if device_of(arguments.device).type == "cuda" and size > (there := torch.cuda.device_count()):
        raise ConfigError(
            f"tensor_parallel_size={size}: torch finds {there} of the GPUs that it needs"
        )
    if not hasattr(socket, "AF_UNIX") or not torch.distributed.is_available():
        raise ConfigError(f"tensor_parallel_size={size}: needs Unix sockets and torch.distributed")
    check_shares(model, size, arguments.model_impl)


def _split(arguments: Arguments, device: torch.device) -> LoadedModel:
    """The share of rank 0; it has the other ranks, each with its own share."""
    check_split(arguments)
    size = arguments.tensor_parallel_size
    if device.type == "cuda":
        device = torch.device(device.type, 0)
    settings = _loading(arguments)
    ranks = Ranks(size, device)
    with ranks.together("load", arguments.model, settings):
        model = _load(arguments.model, device, {**settings, "share": Share(0, size)})
    ranks.replies()
    assert model.native is not None
    model.native.group = ranks.group
    return replace(model, ranks=ranks)


def _loading(arguments: Arguments) -> dict[str, Any]:
    """What decides what is loaded, beside the model and where it goes."""
    names = ("dtype", "load_format", "model_impl", "seed", "max_model_len")
    return {name: getattr(arguments, name) for name in names}


def _load(model: Any, device: torch.device, settings: dict[str, Any]) -> LoadedModel:
    with in_memory("no room for the weights", device, "take a smaller model or dtype"):
        return load_model(model, device=device, **settings)


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
    knobs = f"lower max_num_batched_tokens={tokens} or max_num_seqs={seqs}"
    with in_memory("no room for the activations of the largest step", model.device, knobs):
        blocks = arguments.num_gpu_blocks or _fitting_blocks(
            model,
            shape,
            max_model_len=longest,
            max_seqs=seqs,
            max_batched_tokens=tokens,
            utilization=arguments.gpu_memory_utilization,
            graphs=not arguments.enforce_eager,
        )
    if arguments.max_model_len is None:  # then as long as the memory holds
        longest = min(longest, blocks * shape.block_size)
    cpu_blocks = arguments.num_cpu_blocks
    if cpu_blocks is None:
        cpu_blocks = int(arguments.swap_space * GIB // shape.block_bytes)
    cpu_blocks = cpu_blocks if preemption.swaps else 0
    _require_room(shape, blocks, cpu_blocks, model.device, arguments.tensor_parallel_size)
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
        async_scheduling=arguments.async_scheduling,
    )
    return scheduler, _allocated(shape, blocks, cpu_blocks, model.device)


def _fitting_blocks(model: LoadedModel, shape: CacheShape, **settings: Any) -> int:
    """As many as fit on every rank."""
    if (ranks := model.ranks) is None:
        return fitting_blocks(model, shape, **settings)
    with ranks.together("fit", shape, **settings):
        mine = fitting_blocks(model, shape, **settings)
    return min(mine, *ranks.replies())


def _require_room(
    shape: CacheShape, blocks: int, cpu_blocks: int, device: torch.device, ranks: int
) -> None:
    """Raise ConfigError for pools that cannot be, before anything as large is made for them."""
    size, knobs = f"of {shape.block_bytes / 2**20:.3g} MiB", "lower num_cpu_blocks or swap_space"
    if ranks > 1:
        size += f" on each of {ranks} ranks"
    host = cpu_blocks * shape.block_bytes * ranks
    if device.type != "cuda":
        what = f"{blocks} blocks, and {cpu_blocks} for who is swapped out, {size}"
        host += blocks * shape.block_bytes * ranks
        require_host(what, host, f"lower num_gpu_blocks, or {knobs}")
        return
    require_host(f"{cpu_blocks} blocks for who is swapped out, {size},", host, knobs)
    total = torch.cuda.get_device_properties(device).total_memory
    if blocks * shape.block_bytes > total:
        raise ConfigError(
            f"num_gpu_blocks={blocks}: blocks {size} take {blocks * shape.block_bytes / GIB:.1f} "
            f"GiB, and the GPU has {total / GIB:.1f} GiB"
        )


def _allocated(shape: CacheShape, blocks: int, cpu_blocks: int, device: torch.device) -> Cache:
    knobs = "lower num_gpu_blocks or gpu_memory_utilization"
    with in_memory(f"no room for {blocks} blocks", device, knobs):
        return Cache(shape, blocks, cpu_blocks, device)


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
