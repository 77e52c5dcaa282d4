"""Names become objects: the one place where the core and the policies meet.

A configuration file, the engine's arguments and a test all say `policy="priority"`; here is what
that means, and what there is to choose from. A policy of your own goes by its path
(`"my.module.MyPolicy"`) or as an object.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from importlib.resources import files
from inspect import isabstract, signature
from typing import Any, TypeVar, cast

from pagedsim.core import (
    Batching,
    ConfigError,
    EvictionPolicy,
    Memory,
    OneByOne,
    PagedMemory,
    Policy,
    Preemption,
    PrefillFirst,
    PrefixMemory,
    ReservedMax,
    ReservedOracle,
    ReservedPow2,
    Scheduler,
    Static,
    Unified,
)
from pagedsim.core.contracts import BATCHING, EVICTION, MEMORY, vet
from pagedsim.core.errors import refuse_settings, unknown
from pagedsim.core.offload import OffloadConnector
from pagedsim.core.policy_validation import refuse_signatures
from pagedsim.policies.admission import Cap, Reserve
from pagedsim.policies.aging import Aging
from pagedsim.policies.autoscaling import Autoscaler, Freeness, KVUse, Queue
from pagedsim.policies.continuum import Continuum
from pagedsim.policies.eviction import (
    ARC,
    FIFO,
    FILO,
    LFU,
    LRU,
    MRU,
    SLRU,
    TLRU,
    KVFlow,
    PriorityLRU,
)
from pagedsim.policies.fairness import DRR, VTC
from pagedsim.policies.ltr import LTR
from pagedsim.policies.mlfq import MLFQ, PLAS, SkipJoin
from pagedsim.policies.ordering import EDF, FCFS, HRRN, LOF, SJF, SRPT, Priority
from pagedsim.policies.past_future import PastFuture
from pagedsim.policies.preemption import Cheapest, Recompute, Swap
from pagedsim.policies.prefix_order import DFSWeight, LongestPrefix, TokenHRRN
from pagedsim.policies.program_aware import ProgramAware
from pagedsim.policies.routing.conductor import Conductor
from pagedsim.policies.routing.dynamo import Dynamo, LMetric
from pagedsim.policies.routing.llm_d import LlmD
from pagedsim.policies.routing.llumnix import Llumnix
from pagedsim.policies.routing.preble import Preble
from pagedsim.policies.routing.prefix_aware import PrefixAware
from pagedsim.policies.routing.router import Router
from pagedsim.policies.routing.simple import (
    Central,
    LeastRequests,
    LeastTokens,
    LeastWork,
    PowerOfTwo,
    RoundRobin,
    Uniform,
)
from pagedsim.policies.routing.splitwise import Splitwise
from pagedsim.policies.routing.sticky import Sticky
from pagedsim.policies.routing.vllm_dp import VllmDP
from pagedsim.policies.session_affinity import SessionAffinity
from pagedsim.policies.slo import SLO
from pagedsim.policies.victims import VictimRule
from pagedsim.sglang import RadixMemory, SGLang
from pagedsim.trtllm import TensorRTLLM

T = TypeVar("T")

PLUGIN_GROUPS = {
    "policy": "pagedsim.policies",
    "batching": "pagedsim.batchings",
    "memory": "pagedsim.memories",
    "router": "pagedsim.routers",
    "cost": "pagedsim.costs",
    "autoscaler": "pagedsim.autoscalers",
}
"""The groups of entry points in which packages offer components of each kind."""

OF_MEMORY = (
    *("block_size", "blocks", "cpu_blocks", "swap_space_gib"),
    *("gpu_memory_utilization", "kv_layout"),
)
"""Settings of the group `memory` that are the server's; the others are its class's own."""
BESIDE: Mapping[str, tuple[str, ...]] = {
    "policy": ("victim",),
    "memory": (*OF_MEMORY, "reserved_gib", "pool"),
    "router": ("backends",),
    "fleet.autoscale": ("min_replicas", "interval_s", "startup_s"),
}
"""Settings of groups that are not those of the class that a group names."""
POLICIES: Mapping[str, type[Policy]] = {
    "fcfs": FCFS,
    "priority": Priority,
    "sjf": SJF,
    "srpt": SRPT,
    "hrrn": HRRN,
    "ltr": LTR,
    "mlfq": MLFQ,
    "skip_join": SkipJoin,
    "plas": PLAS,
    "continuum": Continuum,
    "session_affinity": SessionAffinity,
    "program_aware": ProgramAware,
    "edf": EDF,
    "slo": SLO,
    "lpm": LongestPrefix,
    "dfs_weight": DFSWeight,
    "lof": LOF,
    "hrrn_tokens": TokenHRRN,
    "aging": Aging,
    "vtc": VTC,
    "drr": DRR,
    "past_future": PastFuture,
    "reserve": Reserve,
    "cap": Cap,
}
PREEMPTIONS: Mapping[str, type[Preemption]] = {
    "recompute": Recompute,
    "swap": Swap,
    "cheapest": Cheapest,
}
BATCHINGS: Mapping[str, type[Batching]] = {
    "prefill_first": PrefillFirst,
    "unified": Unified,
    "static": Static,
    "one_by_one": OneByOne,
    "sglang": SGLang,
    "trtllm": TensorRTLLM,
}
MEMORIES: Mapping[str, type[Memory]] = {
    "paged": PagedMemory,
    "prefix": PrefixMemory,
    "radix": RadixMemory,
    "reserved_max": ReservedMax,
    "reserved_pow2": ReservedPow2,
    "reserved_oracle": ReservedOracle,
}
EVICTIONS: Mapping[str, type[EvictionPolicy]] = {
    "lru": LRU,
    "lfu": LFU,
    "fifo": FIFO,
    "mru": MRU,
    "filo": FILO,
    "priority": PriorityLRU,
    "slru": SLRU,
    "tlru": TLRU,
    "arc": ARC,
    "kvflow": KVFlow,
}
ROUTERS: Mapping[str, type[Router]] = {
    "round_robin": RoundRobin,
    "random": Uniform,
    "power_of_two": PowerOfTwo,
    "least_requests": LeastRequests,
    "least_tokens": LeastTokens,
    "least_work": LeastWork,
    "central": Central,
    "sticky": Sticky,
    "prefix_aware": PrefixAware,
    "vllm_dp": VllmDP,
    "llm_d": LlmD,
    "dynamo": Dynamo,
    "lmetric": LMetric,
    "preble": Preble,
    "llumnix": Llumnix,
    "splitwise": Splitwise,
    "conductor": Conductor,
}
AUTOSCALERS: Mapping[str, type[Autoscaler]] = {
    "queue": Queue,
    "kv": KVUse,
    "freeness": Freeness,
}
_NAMED: Mapping[str, Mapping[str, type[Any]]] = {
    "policy": POLICIES,
    "preemption": PREEMPTIONS,
    "batching": BATCHINGS,
    "memory": MEMORIES,
    "eviction": EVICTIONS,
    "router": ROUTERS,
    "autoscaler": AUTOSCALERS,
}


@cache
def _installed() -> EntryPoints:
    """The entry points of all packages, which are read once: it takes some milliseconds."""
    return cast(EntryPoints, entry_points())


@cache
def plugins(kind: str) -> Mapping[str, str]:
    """The components of a kind that installed packages offer: names, and paths of their classes.

    They are entry points of `PLUGIN_GROUPS[kind]`; a name that is taken is passed over.
    """
    return {
        point.name: point.value.replace(":", ".")
        for point in _installed().select(group=PLUGIN_GROUPS[kind])
        if not _is_taken(kind, point.name)
    }


def _is_taken(kind: str, name: str) -> bool:
    """Whether a component of pagedsim, or an option of conf/, has the name."""
    if kind in _NAMED:
        return name in _NAMED[kind]
    return files("pagedsim.conf").joinpath(kind, f"{name}.yaml").is_file()


def policies() -> Mapping[str, type[Policy]]:
    """All that have a name."""
    return {**POLICIES, **{name: plugin_policy(name) for name in plugins("policy")}}


def plugin_policy(name: str) -> type[Policy]:
    """The class of one that a package offers; ConfigError says which, where it cannot be had."""
    try:
        return cast("type[Policy]", _by_path("policy", plugins("policy")[name], Policy))
    except ConfigError as error:
        raise ConfigError(f"{'; '.join(plugin_sources(name))}: {error}") from error


def plugin_sources(name: str) -> list[str]:
    """The entry points that offer a policy of that name, each with its package."""
    points = _installed().select(group=PLUGIN_GROUPS["policy"], name=name)
    packages = [f" of {point.dist.name}" if point.dist else "" for point in points]
    return [f"entry point {name} = {p.value}{of}" for p, of in zip(points, packages, strict=True)]


def make_policy(
    name: str | Policy = "fcfs", *, victim: str | None = None, **settings: Any
) -> Policy:
    """A policy by name or by the path of its class; an object is passed through.

    With a `victim` (`pagedsim.policies.victims.VICTIMS`), victims are chosen by that rule. A policy
    around another takes that one's name, path or object as `of`.
    """
    if isinstance(settings.get("of"), str):
        settings["of"] = inner_policy(settings["of"])
    policy = _make("policy", name, Policy, settings)
    return policy if victim is None else VictimRule(policy, victim)


def inner_policy(name: str) -> Policy:
    """What a policy stands around, by name or path, with the class's own settings."""
    path = plugins("policy").get(name, name)
    make: type[Policy] = _class("policy", name, Policy, "of")
    for parameter in signature(make).parameters.values():
        collects = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not collects:
            raise ConfigError(
                f"of={name}: needs settings: {{_target_: {path}, {parameter.name}: ...}}"
            )
    return make()


def make_preemption(name: str | Preemption = "recompute", **settings: Any) -> Preemption:
    """A preemption by name or path; `cheapest` needs `prices=`, a cost model's estimates."""
    return _make("preemption", name, Preemption, settings)


def make_batching(name: str | Batching = "prefill_first", **settings: Any) -> Batching:
    """A batching by name or path."""
    return vet(_make("batching", name, Batching, settings), BATCHING)


def make_memory(name: str | Memory = "paged", **settings: Any) -> Memory:
    """A memory by name or path; its `eviction` may be a name or path, too."""
    if settings.get("eviction") is not None:
        settings["eviction"] = make_eviction(settings["eviction"])
    return vet(_make("memory", name, Memory, settings), MEMORY)


def make_eviction(name: str | EvictionPolicy = "lru", **settings: Any) -> EvictionPolicy:
    """An order of eviction by name or path."""
    return vet(_make("eviction", name, EvictionPolicy, settings), EVICTION)


def make_router(name: str | Router = "round_robin", **settings: Any) -> Router:
    """A router by name or path."""
    return _make("router", name, Router, settings)


def make_autoscaler(name: str | Autoscaler, **settings: Any) -> Autoscaler:
    """An autoscaler by name or path."""
    return _make("autoscaler", name, Autoscaler, settings)


def memory_class(name: str) -> type[Memory]:
    """The class that a memory's name or path stands for."""
    return _class("memory", name, Memory)


def preemption_class(name: str) -> type[Preemption]:
    """The class that a preemption's name or path stands for."""
    return _class("preemption", name, Preemption)


def accepts(make: Callable[..., Any], setting: str) -> bool:
    """Whether a class has a setting of that name."""
    return setting in signature(make).parameters


def make_scheduler(
    *,
    memory: Memory,
    policy: str | Policy = "fcfs",
    preemption: str | Preemption = "recompute",
    batching: str | Batching = "prefill_first",
    max_seqs: int = 256,
    max_batched_tokens: int | None = None,
    max_model_len: int | None = None,
    async_scheduling: bool = False,
    connector: OffloadConnector | None = None,
    kind: type[Scheduler] = Scheduler,
) -> Scheduler:
    """A scheduler from names; `kind` may be a class that does more.

    >>> make_scheduler(memory=make_memory(blocks=64), policy="prioritty")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    pagedsim.core.errors.ConfigError: unknown policy 'prioritty': did you mean 'priority'? ...
    """
    return kind(
        memory=memory,
        policy=make_policy(policy),
        preemption=make_preemption(preemption),
        batching=make_batching(batching),
        max_seqs=max_seqs,
        max_batched_tokens=max_batched_tokens,
        max_model_len=max_model_len,
        async_scheduling=async_scheduling,
        connector=connector,
    )


def _make(kind: str, name: str | T, base: type[Any], settings: Mapping[str, Any]) -> T:
    if isinstance(name, base):
        if settings:
            given = ", ".join(settings)
            raise ConfigError(f"{kind}={type(name).__name__}(): an object takes no {given}")
        return cast(T, name)
    make: type[T] = _class(kind, name, base)
    refuse_settings(f"{kind}={name}", settings, make, beside=BESIDE.get(kind, ()))
    part = make(**settings)
    refuse_signatures(part, base)
    return part


def _class(kind: str, name: object, base: type[Any], key: str = "") -> type[Any]:
    """The class of a kind's name or path; errors name the setting `key`, or else the kind."""
    key = key or kind
    if not isinstance(name, str):
        raise ConfigError(f"{key}={name!r}: must be a name or a {base.__name__}")
    named, offered = _NAMED[kind], plugins(kind) if kind in PLUGIN_GROUPS else {}
    if name in named:
        return named[name]
    if "." not in name and name not in offered:
        raise unknown(key, name, (*named, *offered))
    return cast("type[Any]", _by_path(key, offered.get(name, name), base))


def settings_of(path: str) -> Collection[str] | None:
    """The settings of a user's class at a path.

    None if there is no such class, if it is one of pagedsim, or if it takes any setting.
    """
    module, _, name = path.rpartition(".")
    if module.partition(".")[0] == "pagedsim":
        return None
    try:
        takes = signature(getattr(import_module(module), name)).parameters.values()
    except Exception:  # who makes it says what is wrong with it
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes):
        return None
    return {parameter.name for parameter in takes}


def _by_path(kind: str, path: str, base: type[Any]) -> Any:
    module, _, attribute = path.rpartition(".")
    try:
        component = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(f"{kind}={path}: cannot be imported: {error}") from error
    if not (isinstance(component, type) and issubclass(component, base)) or isabstract(component):
        raise ConfigError(f"{kind}={path}: must be a subclass of {base.__name__}")
    return component
