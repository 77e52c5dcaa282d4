"""Settings that make sense in another unit alone, or change nothing: a note on each, since none of
them is an error.

All ranges are wide: what any GPU, server or trace has lies far inside them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any, NamedTuple

from pagedsim.core import ConfigError
from pagedsim.core.errors import is_number
from pagedsim.metrics.catalogue import metric_of
from pagedsim.run.job import Arm, Job
from pagedsim.spec.objects import flat
from pagedsim.spec.run import POOL_CONFIG, RunSpec
from pagedsim.spec.words import key_of
from pagedsim.workload import Workload


class Usual(NamedTuple):
    """The values that a setting may sensibly have."""

    unit: str
    low: float
    high: float
    others: Mapping[str, float]
    """Units that are mistaken for it, and how many of it each is."""


def _seconds(high: float) -> Usual:
    return Usual("seconds", 0, high, {"ms": 1e-3})


_GIB = {"MiB": 2.0**-10, "bytes": 2.0**-30}
_RATE = {"TB/s": 1e3, "MB/s": 1e-3, "bytes/s": 1e-9}
_MICROSECONDS = Usual("µs", 0.05, 5000, {"seconds": 1e6, "ns": 1e-3})
_OPERATIONS = Usual("Tera-operations/s", 0.02, 20_000, {"GFLOP/s": 1e-3, "FLOP/s": 1e-12})
_REQUESTS = Usual("requests/s", 0.002, 1e5, {"requests a minute": 1 / 60})
_LINK = Usual("GB/s", 0.05, 5000, {"TB/s": 1e3, "bytes/s": 1e-9})
_GPU = {
    "memory_gib": Usual("GiB", 1, 2000, _GIB),
    "bandwidth_gb_s": Usual("GB/s", 5, 30_000, _RATE),
    **dict.fromkeys(("fp16_tflops", "fp8_tflops", "int8_tops"), _OPERATIONS),
    **dict.fromkeys(("pcie_gb_s", "interconnect_gb_s"), _LINK),
    "network_gb_s": Usual("GB/s for each GPU", 0.05, 100, {"Gbit/s": 1 / 8, "bytes/s": 1e-9}),
    **dict.fromkeys(("pcie_copy_us", "interconnect_us", "network_us"), _MICROSECONDS),
    "tdp_w": Usual("W", 5, 5000, {"kW": 1e3, "mW": 1e-3}),
    "price_per_hour": Usual("euros an hour", 0.01, 100, {"cents": 0.01}),
}
_USUAL = {
    **{f"hardware.{key}": usual for key, usual in _GPU.items()},
    **{f"memory.{key}": Usual("GiB", 0, 4096, _GIB) for key in ("reserved_gib", "swap_space_gib")},
    **{f"link.{key}": _LINK for key in ("bandwidth_gb_s", "node_gb_s")},
    "link.latency_us": Usual("µs", 0, 1e6, {"ns": 1e-3}),
    "link.timeout_s": _seconds(1000),
    "fleet.staleness": _seconds(60),
    **{f"autoscale.{key}": _seconds(3600) for key in ("interval_s", "startup_s")},
    "policy.quantum": _seconds(10),
    "router.ttft": _seconds(100),
    "router.tbt": _seconds(5),
    "qoe.ttft": _seconds(100),
    "qoe.tokens_per_s": Usual("tokens/s", 0.1, 1000, {"tokens a minute": 1 / 60}),
    "workload.rate": _REQUESTS,
    "workload.think_time": _seconds(3600),
}
"""By the last two parts of a key."""
_BOUNDS = re.compile(r"(slo|study\.bounds|study\.objectives|policy\.targets)\.")
"""Where keys are latencies, or levels of priority, and values their bounds."""
_LONGEST = {"ttft": 100.0, "tpot": 5.0, "itl": 5.0, "normalized_latency": 5.0}
_E2E = 10_000.0
"""The longest bounds in seconds, of others than those above the last."""


def doubtful(settings: Mapping[str, Any]) -> Iterator[str]:
    """The settings of a configuration whose unit may be another, a line each."""
    for key, value in flat(settings).items():
        setting = key.replace(f".{POOL_CONFIG}.", ".")
        if not (is_number(value) and value and isfinite(value) and (usual := _usual(setting))):
            continue
        if not usual.low <= value <= usual.high:
            yield f"{setting}={value:.12g} is {value:.12g} {usual.unit}, {_instead(value, usual)}"


def _usual(key: str) -> Usual | None:
    if match := _BOUNDS.match(key):
        name = key.rpartition(".")[2]
        if match[1] == "policy.targets":
            return _seconds(_LONGEST["ttft"])
        with suppress(ConfigError):  # no metric
            metric = metric_of(name)
            return _seconds(_LONGEST.get(metric.name, _E2E)) if metric.unit == "s" else None
    return _USUAL.get(".".join(key.split(".")[-2:]))


def _instead(value: float, usual: Usual) -> str:
    """What is usual, and in which unit the value would be."""
    span = f"{usual.low:g} to {usual.high:,.12g}" if usual.low else f"up to {usual.high:,.12g}"
    for unit, factor in usual.others.items():
        if usual.low <= value * factor <= usual.high:
            return f"where {span} is usual; {value:.12g} {unit} are {value * factor:.6g}"
    return f"where {span} is usual"


# -- swaps that cannot be --------------------------------------------------------------------------

_SWAPPED = ("memory.swap_space_gib", "memory.cpu_blocks")
"""Settings of what is swapped out."""
RECOMPUTING = ("vllm-0.12", "vllm-0.33", "sglang-0.5", "trtllm-1")
"""Options of `server` that preempt by recompute alone."""


def idle_swaps(words: Sequence[str], arms: Sequence[Arm], jobs: Sequence[Job]) -> Iterator[str]:
    """What was typed for swaps where nothing is swapped out, and swaps that a server does not
    have, a line each."""
    idle = [word for word in words if key_of(word) in _SWAPPED]
    if idle and jobs and not any(_may_swap(RunSpec(job.config)) for job in jobs):
        why = "no preemption of this study swaps anything out"
        yield from (f"{word} changes nothing: {why}" for word in idle)
    for arm in arms:
        chosen = dict(word.split("=", 1) for word in (*words, *arm.overrides) if "=" in word)
        server, preemption = chosen.get("server"), chosen.get("preemption", "recompute")
        if server in RECOMPUTING and preemption != "recompute":
            yield (
                f"preemption={preemption}: server={server} preempts by recompute alone, so that "
                "this is no such server"
            )


def _may_swap(config: RunSpec) -> bool:
    """Whether any server of a run may swap."""
    servers = [config.pool(name).server for name in config.fleet.kinds]
    return any(server.weighs_prices or server.may_swap for server in servers)


# -- what is copied and fetched nowhere ------------------------------------------------------------


def idle_offload(words: Sequence[str], arms: Sequence[Arm], jobs: Sequence[Job]) -> Iterator[str]:
    """What was typed of a host tier, of what is below it, and of fetches, and changes nothing, a
    line each."""
    idle = {job.arm: dict(_idle(job.config)) for job in jobs}
    of_arms = [(word, [arm.name]) for arm in arms for word in map(str, arm.overrides)]
    for word, names in [*((word, [*idle]) for word in words), *of_arms]:
        reasons = [idle.get(name, {}).get(key_of(word), "") for name in names]
        if all(reasons):
            yield from (f"{word} changes nothing: {why}" for why in reasons[:1])


def _idle(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The keys that change nothing in a run, each with the reason."""
    if "replicas" in (config["fleet"] or {}) and RunSpec(config).fleet.alone:
        yield "fleet.fetch", "fleet.replicas=1 has no other to fetch from"
    if not isinstance(offload := config["offload"], Mapping):
        return
    for key, others in {"chunks": ("gib",), "blocks": ("gib", "ratio"), "gib": ("ratio",)}.items():
        if offload.get(key) is not None:
            yield from ((f"offload.{other}", f"offload.{key} has the size") for other in others)
    stores = {f"tiers.{name}": tier for name, tier in (offload.get("tiers") or {}).items()}
    stores |= {name: offload[name] for name in ("storage",) if name in offload}
    empty = {name: _is_none(store) for name, store in stores.items()}
    for name, store in stores.items():
        if empty[name] and isinstance(store, Mapping):
            why = f"offload.{name}.gib={store.get('gib')}: there is none"
            yield from ((f"offload.{name}.{key}", why) for key in store if key != "gib")
        elif not RunSpec(config).backend.alone:
            yield f"offload.{name}.folder", "the simulator has no files"
    if all(empty.values()):
        for key in (
            "protect_promoted",
            *(f"prefetch.{key}" for key in offload.get("prefetch", ())),
        ):
            yield f"offload.{key}", "there is nothing below host memory"


def _is_none(store: Any) -> bool:
    """Whether settings of a store below host memory say that there is none."""
    return store is None or (
        isinstance(store, Mapping) and store.get("gib") == 0 and not store.get("folder")
    )


def unshared(settings: Mapping[str, Any], workload: Workload) -> Iterator[str]:
    """Recorded sessions of which no memory finds again what their prompts share."""
    memory, offload = (settings.get(group) or {} for group in ("memory", "offload"))
    targets = memory.get("_target_"), offload.get("_target_")
    if workload.whole and targets == ("pagedsim.core.PagedMemory", "pagedsim.core.offload.Offload"):
        yield "memory=paged finds nothing of what the sessions' prompts share; memory=prefix does"


# -- a trace's times -------------------------------------------------------------------------------

_FEW = 20
"""Of fewer requests nothing is said."""
_SLOWEST, _FASTEST = 0.01, 1000.0
"""Requests/s beyond which a trace's times are more likely in another unit."""


def doubtful_times(settings: Mapping[str, Any], workload: Workload) -> Iterator[str]:
    """Arrivals of a trace whose unit may be another."""
    recorded = settings.get("arrivals", "trace") == "trace" and settings.get("rate") is None
    if not settings.get("path") or not recorded or len(workload) < _FEW:
        return
    rate = workload.rate
    text = f"workload.path={settings['path']}: {len(workload):,} requests come at {rate:.2g}/s"
    scale = float(settings.get("rate_scale", 1))
    if rate < _SLOWEST:
        yield (
            f"{text}, one in {1 / rate:,.0f} s; if its times are a thousand times as many as they "
            f"are taken for, such as milliseconds, workload.rate_scale={1000 * scale:g} mends it"
        )
    elif _FASTEST < rate < float("inf"):
        yield (
            f"{text}; if its times are seconds where the format has milliseconds, "
            f"workload.rate_scale={scale / 1000:g} mends it"
        )
