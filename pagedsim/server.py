"""One server, described once, for the simulator and the engine alike.

The words are those of the front door (`server.max_seqs`, `memory.blocks`, `tensor_parallel`), in
what one writes, in errors, and in what a run tells of itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

from pagedsim import build
from pagedsim.build import (
    accepts,
    make_batching,
    make_memory,
    make_preemption,
    make_scheduler,
    memory_class,
    preemption_class,
)
from pagedsim.core import (
    Batching,
    ConfigError,
    Memory,
    PagedsimError,
    Policy,
    Preemption,
    Scheduler,
    Unified,
)
from pagedsim.core.contracts import class_of
from pagedsim.core.errors import (
    raised,
    refuse_settings,
    require_flag,
    require_number,
    require_whole,
    shown,
    unknown,
)
from pagedsim.core.offload import Offload, VLLMOffload
from pagedsim.policies.preemption import Prices

ENGINE_MEMORIES = ("paged", "prefix", "radix")
"""Memories that an engine has."""
LAYOUTS = ("block", "layer")
"""What one copy to the host moves."""
FP8 = ("fp8_e4m3", "fp8_e5m2")
CACHE_DTYPES = ("auto", "fp8", *FP8)
"""What `kv_cache_dtype` may be: fp8 is fp8_e4m3."""
MOST_THREADS = 1024
QUANTIZATIONS = ("int8", "fp8")
"""What `quantization` may be, beside None."""

_SIZES = (
    *("max_seqs", "max_batched_tokens", "max_model_len", "async_scheduling"),
    *("blocks", "block_size", "cpu_blocks", "kv_cache_dtype", "quantization", "tensor_parallel"),
)


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """The policies of a server, its limits, and its memory.

    What is None is chosen from the model and the machine by the driver of the server; after that
    `scheduler` makes its scheduler.

    >>> spec = ServerSpec(policy="priority", max_seqs=8, blocks=64, cpu_blocks=64)
    >>> spec.scheduler()
    Scheduler(Priority, PrefillFirst: 0 waiting, 0 running, 0 swapped)
    """

    policy: str | Policy = "fcfs"
    preemption: str | Preemption | Callable[[Prices], Preemption] = "recompute"
    """Where it weighs prices, as cheapest does, its name or a function of them."""
    batching: str | Batching = "prefill_first"

    max_seqs: int = 256
    max_batched_tokens: int | None = None
    max_model_len: int | None = None
    async_scheduling: bool = False
    """Plan a step while the one before runs; what tokens decide is then known one step late."""

    memory: str | Memory = "paged"
    """prefix: with a prefix cache. Or the path of a class, or an object, which is copied."""
    memory_settings: Mapping[str, Any] = field(default_factory=dict)
    """What such a class takes besides."""
    offload: Offload | Mapping[str, Any] = field(default_factory=Offload)
    """What is copied to host memory beside the GPU's work; or the settings of a `VLLMOffload`."""
    block_size: int = 16
    blocks: int | None = None
    """Blocks of the cache; None: as many as fit."""
    cpu_blocks: int | None = None
    """Blocks for what is swapped out; None: as many as `swap_space_gib` holds."""
    swap_space_gib: float = 4.0
    gpu_memory_utilization: float | None = None
    """The share of a GPU's memory for weights, activations and cache together; None: 0.9, and in
    the simulator as the server that sizes the cache."""
    kv_layout: str = "block"
    """What one copy to the host moves: a block of all layers, or (layer) keys or values of one."""
    kv_cache_dtype: str = "auto"
    """What the cache holds: keys and values as computed, or in 8 bits, half as many bytes: fp8_e4m3
    (or fp8) or fp8_e5m2, with a scale of 1."""
    quantization: str | None = None
    """What the layers hold their weights in: 8 bits, each output with a scale of its own; products
    are in the model's dtype all the same. None: as the model has them."""
    tensor_parallel: int = 1
    """GPUs that share the model, or one of its stages; sizes of memory are for each of them."""
    pipeline_parallel: int = 1
    """Stages to which the layers are dealt; in the simulator alone."""
    expert_parallel: int = 1
    """GPUs of a stage to which experts are dealt; in the simulator alone."""

    def __post_init__(self) -> None:
        parallel = ("tensor_parallel", "pipeline_parallel", "expert_parallel")
        for name in ("max_seqs", "block_size", *parallel):
            require_whole(name, getattr(self, name), 1)
        for name, least in (
            *(("max_batched_tokens", 1), ("max_model_len", 1)),
            *(("blocks", 1), ("cpu_blocks", 0)),
        ):
            if (value := getattr(self, name)) is not None:
                require_whole(name, value, least)
        self._require_a_token_for_each()
        require_number("swap_space_gib", self.swap_space_gib, 0)
        if (share := self.gpu_memory_utilization) is not None:
            require_number("gpu_memory_utilization", share, above=0, high=1)
        require_flag("async_scheduling", self.async_scheduling)
        for name, known in (("kv_layout", LAYOUTS), ("kv_cache_dtype", CACHE_DTYPES)):
            if (value := getattr(self, name)) not in known:
                raise unknown(name, str(value), known)
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise unknown("quantization", str(self.quantization), QUANTIZATIONS)

    def _require_a_token_for_each(self) -> None:
        """Raise ConfigError where decodes alone may take more than a step's tokens.

        Schedulers can do it, and hold some back; a server of vLLM 0.33 does not start so.
        """
        tokens = self.max_batched_tokens
        if tokens is None or tokens >= self.max_seqs:
            return
        if isinstance(make_batching(self.batching), Unified):
            raise ConfigError(
                f"max_batched_tokens={tokens}: must be at least max_seqs={self.max_seqs}, so that "
                "a step has a token for every sequence"
            )

    # -- what is left open, filled in --------------------------------------------------------------

    @property
    def weighs_prices(self) -> bool:
        """Whether its preemption needs prices, from `priced`, before anything is made."""
        if isinstance(self.preemption, str):
            return accepts(preemption_class(self.preemption), "prices")
        return not isinstance(self.preemption, Preemption)

    def priced(self, prices: Prices) -> ServerSpec:
        """This server with a preemption that knows the prices, if it uses any."""
        if not self.weighs_prices:
            return self
        if isinstance(self.preemption, str):
            return replace(self, preemption=make_preemption(self.preemption, prices=prices))
        assert not isinstance(self.preemption, Preemption)
        return replace(self, preemption=self.preemption(prices))

    @property
    def may_swap(self) -> bool:
        """Whether its preemption may swap, and its memory can."""
        return self._preemption().swaps and self.memory_class.can_swap

    @property
    def memory_class(self) -> type[Memory]:
        """The class of its memory."""
        return (
            class_of(self.memory) if isinstance(self.memory, Memory) else memory_class(self.memory)
        )

    def step_tokens(self, longest: int) -> int:
        """The tokens that one step may compute, where requests have up to `longest`."""
        given = self.max_batched_tokens
        return given or make_batching(self.batching).default_tokens(longest, self.max_seqs)

    # -- what is made of it ------------------------------------------------------------------------

    @property
    def offloading(self) -> Offload:
        """What is copied to host memory, as an object."""
        if isinstance(self.offload, Offload):
            return self.offload
        if not isinstance(self.offload, Mapping):
            raise ConfigError(
                f"offload={shown(self.offload)}: must be settings of vLLM's connector, such as "
                "{'gib': 4}, or an Offload"
            )
        settings = dict(self.offload)
        refuse_settings("offload", settings, VLLMOffload, "offload")
        try:
            return VLLMOffload(**settings)
        except ConfigError as error:
            raise ConfigError(re.sub("^(unknown )?", r"\1offload.", str(error))) from error

    @property
    def groups(self) -> int:
        """Data-parallel groups of GPUs: each has requests, keys and values of its own, and all
        limits and sizes are those of one group, as in vLLM."""
        return max(1, self.expert_parallel // self.tensor_parallel)

    def make_memory(self, groups: int = 1) -> Memory:
        """The empty memory of so many groups; `blocks` are known by now."""
        settings = {"block_size": self.block_size, **self.memory_settings}
        settings["blocks"] = None if self.blocks is None else self.blocks * groups
        if self.cpu_blocks:
            settings["cpu_blocks"] = self.cpu_blocks * groups
        if isinstance(self.memory, Memory):
            return _copied(self.memory, settings)
        self._refuse_without(settings.keys() - self.memory_settings.keys())
        if accepts(self.memory_class, "max_model_len"):
            settings["max_model_len"] = self.max_model_len
        if settings.get("eviction") is not None:
            settings["eviction"] = build.make_eviction(settings["eviction"])
        batching = make_batching(self.batching)
        memory = self.offloading.memory(self.memory_class, batching, settings, groups)
        if memory is not None:
            return memory
        try:
            return make_memory(self.memory, **settings)
        except PagedsimError:
            raise
        except Exception as error:  # of a user's __init__
            text = raised(error, build.__file__)
            raise ConfigError(f"memory._target_={self.memory}: {text}") from error

    def _refuse_without(self, sizes: Iterable[str]) -> None:
        """Raise ConfigError for a class of memory that does not take what the server gives it."""
        kind = self.memory_class
        takes = signature(kind).parameters.values()
        if any(one.kind is one.VAR_KEYWORD for one in takes):
            return
        for name in sorted({*sizes} - {one.name for one in takes}):
            raise ConfigError(
                f"memory._target_={self.memory}: {kind.__name__}.__init__ must take {name}, which "
                "the server gives"
            )

    def scheduler(self, kind: type[Scheduler] = Scheduler) -> Scheduler:
        """Its scheduler; `kind` may be a class that does more.

        One scheduler stands for all groups, with the sequences and blocks of all of them, and the
        tokens of all their micro-batches; vLLM bounds the tokens of each micro-batch.
        """
        if (batches := self.groups * self.pipeline_parallel) > 1:
            self._scheduler(Scheduler, 1, 1)  # what one group cannot do is refused
        return self._scheduler(kind, self.groups, batches)

    def _scheduler(self, kind: type[Scheduler], groups: int, batches: int) -> Scheduler:
        tokens = self.max_batched_tokens
        return make_scheduler(
            memory=self.make_memory(groups),
            policy=self.policy,
            preemption=self._preemption(),
            batching=self.batching,
            max_seqs=self.max_seqs * groups,
            max_batched_tokens=None if tokens is None else tokens * batches,
            max_model_len=self.max_model_len,
            async_scheduling=self.async_scheduling,
            connector=self.offloading.connector(self.block_size, groups),
            kind=kind,
        )

    def _preemption(self) -> Preemption:
        if not isinstance(self.preemption, (str, Preemption)):
            raise ConfigError("preemption: needs its prices first")
        return make_preemption(self.preemption)

    # -- what a run tells of it --------------------------------------------------------------------

    def sizes(self) -> dict[str, Any]:
        """Its limits and its memory in plain values, for a file; nothing that is None."""
        sizes = {name: getattr(self, name) for name in _SIZES}
        return {name: size for name, size in sizes.items() if size is not None}

    def of_sizes(self, sizes: Mapping[str, Any]) -> ServerSpec:
        """The same server with what such a file says; what else stands there is left alone."""
        return replace(self, **{name: sizes[name] for name in _SIZES if name in sizes})


def _copied(memory: Memory, sizes: Mapping[str, Any]) -> Memory:
    """A copy of an empty memory; ConfigError if its sizes are not those of the server."""
    own = {
        "block_size": memory.block_size,
        "blocks": memory.total,
        "cpu_blocks": memory.cpu_total,
    }
    for name, size in own.items():
        if (wanted := sizes.get(name, 0)) != size:
            raise ConfigError(
                f"{name}={wanted}: must be {size}, as the object of {class_of(memory).__name__} "
                "has; its class takes other sizes"
            )
    return make_memory(deepcopy(memory))
