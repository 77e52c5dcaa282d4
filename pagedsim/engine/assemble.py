"""Assemble an engine from its arguments."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from pagedsim.core import ConfigError, Scheduler
from pagedsim.core.errors import unknown
from pagedsim.engine.attention import TRITON, attention_of, require
from pagedsim.engine.cache import Cache, CacheShape
from pagedsim.engine.engine_args import DEVICES, Arguments
from pagedsim.engine.file_tier import FileTier, bind_tiers
from pagedsim.engine.models import LoadedModel, load_model
from pagedsim.engine.models.load import check_shards
from pagedsim.engine.models.shard import Shard
from pagedsim.engine.output import Tokenizer
from pagedsim.engine.parallel.ranks import Ranks
from pagedsim.engine.prices import MeasuredPrices
from pagedsim.engine.profile import fitting_blocks
from pagedsim.engine.runner import Leader, Runner
from pagedsim.engine.runtime import GIB, in_memory, require_host
from pagedsim.engine.sampler import warm_up_sampling
from pagedsim.engine.tokenizer import load_tokenizer
from pagedsim.engine.vllm_offload import with_tiers
from pagedsim.kernels.batch import Attention
from pagedsim.kernels.float8 import is_float8, name_of
from pagedsim.server import ServerSpec
from pagedsim.sglang import HiCache


@dataclass(frozen=True)
class Parts:
    """The components of an engine."""

    model: LoadedModel
    server: ServerSpec
    """With all sizes resolved."""
    tokenizer: Tokenizer | None
    scheduler: Scheduler
    runner: Runner
    prices: MeasuredPrices
    """Measured costs of preemption, for `preemption=cheapest`."""


def assemble(arguments: Arguments) -> Parts:
    """Load the model, determine the number of KV blocks that fit, and build the scheduler."""
    model = loaded(arguments)
    try:
        return _assembled(arguments, model)
    except BaseException:
        if not isinstance(arguments.model, LoadedModel):
            model.close()
        raise


def _assembled(arguments: Arguments, model: LoadedModel) -> Parts:
    server, prices, graphs = arguments.server, MeasuredPrices(), arguments.graph_tokens
    shape = model.cache_shape(server.block_size, server.kv_cache_dtype)
    if shape.planes == 1 and is_float8(shape.dtype):
        raise ConfigError(
            f"kv_cache_dtype={server.kv_cache_dtype}: model={model.name} has compressed keys and "
            "values, which are kept in its own dtype alone; choose auto"
        )
    model = replace(model, attention=_attention(arguments.attention, model, shape))
    measure = server.weighs_prices
    server = with_tiers(_sized(server.priced(prices), model, shape, graphs=graphs), FileTier)
    scheduler = server.scheduler()
    assert server.blocks is not None and server.cpu_blocks is not None
    if scheduler.memory.begins_transfers and not isinstance(scheduler.memory, HiCache):
        raise ConfigError(
            f"offload: the engine has no {type(scheduler.memory).__name__}; "
            "choose offload=none, or backend=sim"
        )
    if scheduler.memory.lower_tiers:
        raise ConfigError(
            "offload: has tiers below the host tier, which the engine has not; choose backend=sim"
        )
    hosted = scheduler.host_blocks
    if hosted:  # told after what does not go together
        _require_room(server, shape, server.blocks, hosted, model.device, tier=True)
    cache = new_cache(shape, server.blocks, server.cpu_blocks + hosted, model.device)
    bind_tiers(scheduler, cache, model)
    tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
    settings: dict[str, Any] = {
        "seqs": scheduler.max_seqs,
        "longest": scheduler.max_model_len,
        "layout": server.kv_layout,
    }
    if model.ranks is None:
        runner = Runner(model, cache, **settings)
    else:
        runner = Leader(model.ranks, model, cache, **settings)
    runner.warm_up(scheduler.max_batched_tokens, graphs=graphs)
    warm_up_sampling(model.vocab_size, model.device)
    if measure:
        prices.measure(runner, scheduler.max_batched_tokens)
    return Parts(model, server, tokenizer, scheduler, runner, prices)


def loaded(arguments: Arguments) -> LoadedModel:
    """Load only the model, to be shared by engines; a loaded model is returned as it is."""
    server = arguments.server
    if isinstance(model := arguments.model, LoadedModel):
        length = server.max_model_len or model.max_model_len
        if length > model.max_model_len:
            raise ConfigError(f"max_model_len={length}: was loaded for {model.max_model_len}")
        if (size := server.tensor_parallel) != model.ranks_count:
            raise ConfigError(f"tensor_parallel={size}: was loaded for {model.ranks_count}")
        return replace(model, max_model_len=length)
    device = device_of(arguments.device)
    require(arguments.attention, device)
    if server.tensor_parallel > 1:
        return _split(arguments, device)
    return load_on(arguments.model, device, arguments.loading)


def _attention(name: str, model: LoadedModel, shape: CacheShape) -> Attention:
    """The setting `attention`; raises ConfigError if it does not go with the model or its cache."""
    if name != TRITON and shape.planes == 1:
        raise ConfigError(
            f"attention={name}: must be {TRITON} for model={model.name}, which has compressed keys "
            "and values"
        )
    sizes: dict[str, Any] = {"head_dim": shape.head_dim, "block_size": shape.block_size}
    return attention_of(name, model.device, dtype=model.dtype, held=shape.dtype, **sizes)


def check_split(arguments: Arguments) -> None:
    """Raise ConfigError if the model cannot be split over the ranks; reads no weights."""
    size, model = arguments.server.tensor_parallel, arguments.model
    if size == 1 or isinstance(model, LoadedModel):
        return
    if device_of(arguments.device).type == "cuda" and size > (gpus := torch.cuda.device_count()):
        raise ConfigError(f"tensor_parallel={size}: torch finds {gpus} of the GPUs that it needs")
    if not hasattr(socket, "AF_UNIX") or not torch.distributed.is_available():
        raise ConfigError(f"tensor_parallel={size}: needs Unix sockets and torch.distributed")
    check_shards(model, size, arguments.model_impl)


def _split(arguments: Arguments, device: torch.device) -> LoadedModel:
    """Start the other ranks and load rank 0's shard."""
    check_split(arguments)
    size = arguments.server.tensor_parallel
    if device.type == "cuda":
        device = torch.device(device.type, 0)
    settings = arguments.loading
    ranks = Ranks(size, device)
    with ranks.together("load", arguments.model, settings):
        model = load_on(arguments.model, device, {**settings, "shard": Shard(0, size)})
    ranks.replies()
    assert model.native is not None
    model.native.group = ranks.group
    return replace(model, ranks=ranks)


def load_on(model: Any, device: torch.device, settings: dict[str, Any]) -> LoadedModel:
    """Load a model; raises ConfigError if there is no room for its weights."""
    with in_memory("no room for the weights", device, "take a smaller model or dtype"):
        return load_model(model, device=device, **settings)


def new_cache(shape: CacheShape, blocks: int, cpu_blocks: int, device: torch.device) -> Cache:
    """Allocate a cache; raises ConfigError if there is no room for it."""
    knobs = f"lower blocks={blocks} or gpu_memory_utilization"
    with in_memory(f"no room for {blocks} blocks", device, knobs):
        return Cache(shape, blocks, cpu_blocks, device)


def _sized(server: ServerSpec, model: LoadedModel, shape: CacheShape, graphs: int) -> ServerSpec:
    """The server with its blocks and limits resolved from the memory left beside the model."""
    longest = model.max_model_len
    seqs, tokens = server.max_seqs, server.step_tokens(longest)
    knobs = f"lower max_batched_tokens={tokens} or max_seqs={seqs}"
    settings: dict[str, Any] = {
        "max_model_len": longest,
        "max_seqs": seqs,
        "max_batched_tokens": tokens,
        "utilization": server.gpu_memory_utilization or 0.9,
        "graphs": graphs,
    }
    with in_memory("no room for the activations of the largest step", model.device, knobs):
        if server.blocks:
            blocks = server.blocks
        elif model.ranks is None:
            blocks = fitting_blocks(model, shape, **settings)
        else:
            with model.ranks.together("fit", shape, **settings):
                mine = fitting_blocks(model, shape, **settings)
            blocks = min(mine, *model.ranks.replies())
    if server.max_model_len is None:  # limited by the memory
        longest = min(longest, blocks * shape.block_size)
    swapped = server.cpu_blocks
    if swapped is None:
        swapped = int(server.swap_space_gib * GIB // shape.block_bytes)
    swapped = swapped if server.may_swap else 0
    offloading = server.offloading
    try:
        offload = offloading.sized(shape.block_size, shape.block_bytes)
    except ConfigError as error:
        raise ConfigError(f"offload.{error}") from error
    _require_room(server, shape, blocks, swapped, model.device)
    return replace(
        server,
        blocks=blocks,
        offload=offload,
        cpu_blocks=swapped,
        max_model_len=longest,
        max_batched_tokens=server.step_tokens(longest),
        kv_cache_dtype=name_of(shape.dtype),
    )


def _require_room(
    server: ServerSpec,
    shape: CacheShape,
    blocks: int,
    on_host: int,
    device: torch.device,
    tier: bool = False,
) -> None:
    """Raise ConfigError for block pools beyond the memory, before they are allocated; what is on
    the host is for swapping, or a `tier`."""
    size, ranks = f"of {shape.block_bytes / 2**20:.3g} MiB", server.tensor_parallel
    if ranks > 1:
        size += f" on each of {ranks} ranks"
    purpose, knobs = "for swapping", f"lower cpu_blocks={on_host}"
    if tier:
        purpose, knobs = "in the host tier", "set a lower offload.gib"
    elif server.cpu_blocks is None:
        knobs = f"lower swap_space_gib={server.swap_space_gib:g}"
    host = on_host * shape.block_bytes * ranks
    if device.type != "cuda":
        what = f"{blocks} blocks, and {on_host} {purpose}, {size}"
        host += blocks * shape.block_bytes * ranks
        require_host(what, host, f"lower blocks={blocks}" + f", or {knobs}" * (on_host > 0))
        return
    require_host(f"{on_host} blocks {purpose}, {size},", host, knobs)
    total = torch.cuda.get_device_properties(device).total_memory
    if blocks * shape.block_bytes > total:
        raise ConfigError(
            f"blocks={blocks}: blocks {size} take {blocks * shape.block_bytes / GIB:.1f} "
            f"GiB, and the GPU has {total / GIB:.1f} GiB"
        )


def device_of(name: str) -> torch.device:
    """Resolve the setting `device`; raises ConfigError if it is not available."""
    if name not in DEVICES:
        raise unknown("device", name, DEVICES)
    cuda = torch.cuda.is_available()
    if name == "cuda" and not cuda:
        raise ConfigError(
            "device=cuda: torch finds no GPU here; choose device=cpu, or device=auto for "
            "whatever there is"
        )
    if name == "auto":
        name = "cuda" if cuda else "cpu"
    if name == "cuda" and find_spec("triton") is None:
        raise ConfigError(
            "device=cuda: needs Triton, which is not installed: pip install triton; where there is "
            "none (macOS, Windows), choose device=cpu"
        )
    return torch.device(name)
