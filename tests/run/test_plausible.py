"""Notes on settings that make sense in another unit alone, and on swaps that cannot be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedsim.run.job import Arm, Job
from pagedsim.run.plausible import (
    RECOMPUTING,
    doubtful,
    doubtful_times,
    idle_offload,
    idle_swaps,
    unshared,
)
from pagedsim.spec.conf import Conf, offered
from pagedsim.spec.run import RunSpec
from pagedsim.spec.words import parse
from pagedsim.workload import Workload
from tests.run.studies import EXPERIMENTS, settings_of

_NUMBER = re.compile(r"([a-z_]+(?:\.\w+)+)=(-?[0-9.e+-]+)")


def nested(key: str, value: object) -> dict[str, Any]:
    """Settings in which a dotted key has a value."""
    for part in reversed(key.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("hardware.bandwidth_gb_s=3.35", "3.35 TB/s are 3350"),
        ("hardware.memory_gib=80000", "80000 MiB are 78.125"),
        ("hardware.fp16_tflops=989e12", "FLOP/s are 989"),
        ("hardware.network_gb_s=400", "400 Gbit/s are 50"),
        ("hardware.interconnect_us=18e-6", "1.8e-05 seconds are 18"),
        ("hardware.tdp_w=0.7", "0.7 kW are 700"),
        ("fleet.pools.fast.config.hardware.bandwidth_gb_s=8", None),
        ("fleet.pools.fast.config.hardware.bandwidth_gb_s=3.35", "3.35 TB/s are 3350"),
        ("fleet.link.bandwidth_gb_s=50e9", "50000000000 bytes/s are 50"),
        ("fleet.staleness=200", "200 ms are 0.2"),
        ("memory.swap_space_gib=65536", "65536 MiB are 64"),
        ("slo.tpot=50", "50 ms are 0.05"),
        ("slo.clients.chat.e2e=30000", "30000 ms are 30"),
        ("study.bounds.ttft_p99=500", "500 ms are 0.5"),
        ("study.bounds.interactive.itl_p99=60", "60 ms are 0.06"),
        ("study.bounds.output_tokens_per_s=5000", None),
        ("policy.targets.0=500", "500 ms are 0.5"),
        ("qoe.ttft=1300", "1300 ms are 1.3"),
        ("router.tbt=50", "50 ms are 0.05"),
        ("workload.rate=0.0005", "where 0.002 to 100,000 is usual"),
        ("slo.ttft=30", None),
    ],
)
def test_a_value_of_another_unit_is_noted(word: str, meant: str | None) -> None:
    key, _, value = word.partition("=")
    lines = list(doubtful(nested(key, float(value))))
    if meant is None:
        assert not lines
        return
    (line,) = lines
    assert line.startswith(key.replace(".config", "")) and meant in line


def test_no_option_is_noted() -> None:
    for group, options in offered().items():
        for name, own in options.items():
            assert not list(doubtful({group: own})), f"{group}={name}"


@pytest.mark.parametrize("name", [one.name for one in EXPERIMENTS])
def test_no_experiment_is_noted(name: str) -> None:
    """Neither by what it sets, nor by what its arms set."""
    whole = settings_of(f"experiment={name}")
    assert not list(doubtful(whole))
    for key, value in _NUMBER.findall(str(whole["study"])):
        assert not list(doubtful(nested(key, parse(f"{key}={value}").value))), (key, value)


def requests(every: float) -> Workload:
    return Workload.of(np.arange(40) * every, [10] * 40, [5] * 40)


def test_times_of_a_trace_in_another_unit_are_noted() -> None:
    trace: dict[str, Any] = {"path": "a.csv", "arrivals": "trace", "rate": None, "rate_scale": 1.0}
    (slow,) = doubtful_times(trace, requests(every=500.0))
    assert slow.startswith("workload.path=a.csv: 40 requests come at 0.002/s")
    assert "workload.rate_scale=1000 mends it" in slow
    (fast,) = doubtful_times(trace, requests(every=0.0005))
    assert "workload.rate_scale=0.001 mends it" in fast
    for own in ({"rate": 2.0}, {"arrivals": "poisson"}, {"path": None}):
        assert not list(doubtful_times({**trace, **own}, requests(every=500.0)))
    for every in (20.0, 1.0, 0.01, 0.0):
        assert not list(doubtful_times(trace, requests(every)))


def test_each_server_has_swaps_or_is_known_not_to() -> None:
    assert {"vllm-0.6", *RECOMPUTING} == set(Conf().options_of("server"))


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["server=vllm-0.33", "preemption=swap"], 1),
        (["preemption=cheapest", "server=sglang-0.5"], 1),
        (["server=vllm-0.6", "preemption=swap", "memory.swap_space_gib=9"], 0),
        (["server=vllm-0.33"], 0),
        (["memory.swap_space_gib=9"], 1),
        (["memory.cpu_blocks=9", "preemption=cheapest"], 0),
    ],
)
def test_swaps_that_cannot_be_are_noted(words: list[str], lines: int) -> None:
    job = Job("run", 0, settings_of(*words), Path())
    assert len(list(idle_swaps(words, [Arm("run")], [job]))) == lines


VLLM = ("offload=vllm", "batching=unified", "memory=prefix")
HICACHE = ("offload=hicache", "server=sglang-0.5")


@pytest.mark.parametrize(
    ("chosen", "typed"),
    [
        (("memory=prefix",), ["fleet.fetch=sooner"]),
        (VLLM, ["offload.protect_promoted=true", "offload.tiers.remote.shared=true"]),
        ((*VLLM, "offload.chunks=40"), ["offload.gib=3"]),
        (HICACHE, ["offload.storage.shared=true", "offload.prefetch.policy=best_effort"]),
        ((*HICACHE, "offload.gib=40"), ["offload.ratio=3"]),
        ((*HICACHE, "offload.storage.gib=9"), ["+offload.storage.folder=/x"]),
    ],
)
def test_settings_of_what_is_not_there_are_noted(chosen: Sequence[str], typed: list[str]) -> None:
    job = Job("run", 0, settings_of("experiment=single", *chosen, *typed), Path())
    lines = [*idle_offload([*chosen, *typed], [Arm("run")], [job])]
    assert [line.partition(" changes nothing: ")[0] for line in lines] == typed
    arm = Arm("run", typed)
    assert [*idle_offload(chosen, [arm], [job])] == lines


def test_settings_of_what_is_there_are_not_noted() -> None:
    disk = ("offload.tiers.disk.gib=9", "offload.tiers.disk.latency_us=1", "offload.gib=3")
    storage = ("offload.storage.gib=null", "offload.storage.shared=true", "offload.ratio=3")
    for chosen in (
        (*VLLM, *disk, "offload.protect_promoted=true"),
        (*HICACHE, *storage, "offload.prefetch.threshold=9"),
        ("fleet.replicas=2", "fleet.fetch=sooner", "memory=prefix"),
    ):
        job = Job("run", 0, settings_of("experiment=single", *chosen), Path())
        assert not [*idle_offload(chosen, [Arm("run")], [job])], chosen


def test_sessions_without_a_prefix_cache_are_noted() -> None:
    session = Path(__file__).parents[1] / "mistakes/files/agents/session.json"
    for memory, notes in (("paged", 1), ("prefix", 0)):
        settings = settings_of(
            "experiment=single", "workload=trace", f"workload.path={session}", f"memory={memory}"
        )
        assert len([*unshared(settings, RunSpec(settings).workload())]) == notes
