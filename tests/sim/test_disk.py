"""Tiers below the host tier in simulated time: stores, servers that wake for them, and fleets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from pagedsim.backends.base import StoppableRecorder
from pagedsim.core import (
    ConfigError,
    PagedsimError,
    PrefixMemory,
    Request,
    Scheduler,
    Unified,
)
from pagedsim.core.offload import OffloadConnector, VLLMOffload
from pagedsim.core.offload.eviction import HostChunk
from pagedsim.core.offload.prices import HOST, worth_loading
from pagedsim.metrics.arms import Run
from pagedsim.metrics.recorder import Recorder
from pagedsim.run.job import Job, run_job
from pagedsim.sim.disk import Disk
from pagedsim.sim.simulate import simulate
from pagedsim.sim.store import Link, Store, Way
from pagedsim.sim.transfers import Transfers
from tests.run.studies import compose
from tests.sim.harness import Constant
from tests.sim.test_transfers import Even, Texts


def store(capacity: float = inf, read: float = 1.0, write: float = 1.0) -> Store:
    """Items of one byte, of which a second reads or writes so many."""
    return Store(Link(Way(0.0, read), Way(0.0, write)), 1.0, capacity)


def test_a_store_has_what_was_written_until_it_was_not_used_for_longest() -> None:
    small = store(3, read=10.0)
    assert small.write("ab", 0.0) == 2.0
    assert [small.has("a", at) for at in (1.9, 2.0)] == [False, True]
    assert small.write("abc", 1.0) == 3.0  # the others are on their way
    assert small.write("ab", 9.0) == 9.0
    assert small.read("c", 9.0) == 9.1
    small.write("de", 9.0)
    assert [key for key in "abcde" if small.has(key, 99.0)] == ["c", "d", "e"]
    small.write("fg", 10.0)  # of what came at once the end goes first
    assert [key for key in "cdefg" if small.has(key, 99.0)] == ["d", "f", "g"]


def chunks(keys: str) -> Sequence[HostChunk]:
    return [HostChunk(key, place) for place, key in enumerate(keys)]


def test_a_crash_loses_jobs_and_what_they_were_writing() -> None:
    content = store(write=2.0)
    one, other = Disk(content), Disk(content)
    one.store(0, chunks("ab"), 0.0)
    assert (one.collect(0.9), one.next_end, one.collect(1.0)) == ([], 1.0, [0])
    one.store(1, chunks("cd"), 1.0)
    one.load(2, chunks("a"), 1.0)
    other.store(0, chunks("e"), 1.0)
    one.store(3, chunks("bef"), 1.0)  # two of which are written already, or being written
    one.clear()
    assert (one.next_end, one.collect(99.0), other.next_end) == (inf, [], 2.5)
    assert [key for key in "abcdef" if other.find(key, 0, 99.0)] == ["a", "b", "e"]


def test_a_crash_does_not_lose_what_was_written_before_though_no_step_has_seen_its_end() -> None:
    disk = Disk(store())
    scheduler = Scheduler(
        memory=PrefixMemory(12, 4),
        batching=Unified(),
        connector=OffloadConnector(10, tiers=[disk]),
    )
    disk.store(0, chunks("a"), 0.0)
    disk.store(1, chunks("b"), 0.0)
    scheduler.crash(1.5)
    assert [key for key in "ab" if disk.find(key, 0, 99.0)] == ["a"]


@pytest.mark.parametrize(("ahead", "lost"), [(False, 2), (True, 3)])
def test_an_idle_server_wakes_when_a_chunk_has_come_up(ahead: bool, lost: int) -> None:
    """The end of text 1 is lost by the GPU and by host memory; then it comes from the disk."""
    disk = Disk(store(read=2.0, write=1.0))
    scheduler = Scheduler(
        memory=PrefixMemory(12, 4),
        batching=Unified(),
        async_scheduling=ahead,
        connector=OffloadConnector(10, tiers=[disk]),
    )
    jobs = Texts([(0.0, 1, 17), (20.0, 2, 40), (50.0, 1, 17), (70.0, 3, 9)])
    recorder = Recorder()
    transfers = Transfers(Even(0.25), below=[disk])
    simulate(scheduler, jobs, Constant(), recorder, transfers=transfers)
    requests = recorder.requests_table()
    assert requests["cached_tokens"].to_pylist() == [0, 0, 16, 0]
    # Chunks come up in 0.5 s each, are loaded in 0.25 s, and the step takes another.
    waits = np.subtract(requests["first_token"], requests["arrival"])
    assert waits.tolist() == [1.0, 1.0, 1.0 + 0.75 * lost, 1.0]
    scheduler.check()
    scheduler.crash(99.0)
    assert not scheduler.host_tokens(Request("again", [1000 + n for n in range(17)]), 0)
    key = next(iter(disk.content._written))
    assert disk.find(key, "again", 99.0)  # its content is still there


@pytest.mark.parametrize("protect", [False, True])
def test_a_prompt_that_would_come_up_for_ever_ends_the_run_unless_it_is_protected(
    protect: bool,
) -> None:
    disk = Disk(store())
    connector = OffloadConnector(1, tiers=[disk], protect_promoted=protect)
    memory = PrefixMemory(3, 4)
    scheduler = Scheduler(
        memory=memory, batching=Unified(), max_batched_tokens=4, connector=connector
    )
    jobs = Texts([(0.0, 1, 9), (20.0, 2, 9), (40.0, 1, 9)])  # two chunks each, and a tier of one
    transfers = Transfers(Even(0.25), below=[disk])
    recorder = Recorder()
    with (
        nullcontext()
        if protect
        else pytest.raises(PagedsimError, match=r"1 requests wait.* offload.protect_promoted=true")
    ):
        simulate(scheduler, jobs, Constant(), recorder, transfers=transfers)
    assert scheduler.unfinished == 1 - protect


# -- from the configuration ------------------------------------------------------------------------

CHATS = (
    *("experiment=single", "workload=chat_sessions", "workload.sessions=10", "workload.rate=2"),
    *("offload=vllm", "batching=unified", "memory=prefix", "memory.blocks=260", "offload.gib=0.3"),
    *("model=llama-3.1-8b", "hardware=h100", "workload.prefixes=null"),
)
READ = "offload.tiers.disk.read_gb_s"
DISK = "offload.tiers.disk.gib=64"


def made(folder: Path, *words: str) -> Any:
    config: Any = OmegaConf.to_container(
        compose("config", overrides=[*CHATS, *words]), resolve=True
    )
    return run_job(Job("arm", 0, config, folder), StoppableRecorder())


def summary_of(folder: Path, *words: str) -> dict[str, Any]:
    run = made(folder, *words)
    assert isinstance(run, Run), run
    return dict(run.summary)


@pytest.mark.usefixtures("hydra")
def test_replicas_of_a_fleet_may_share_a_disk(tmp_path: Path) -> None:
    """Sent round robin, a turn finds what its session left only where all replicas look."""
    words = ["fleet=alike", "fleet.replicas=3", "router=round_robin", DISK]
    alone = summary_of(tmp_path, *words)
    shared = summary_of(tmp_path, *words, "offload.tiers.disk.shared=true")
    assert shared["storage_hit_tokens"] > 3 * alone["storage_hit_tokens"]


@pytest.mark.usefixtures("hydra")
def test_nothing_is_loaded_that_is_cheaper_to_compute(tmp_path: Path) -> None:
    """What a slow disk has and host memory does not is computed, and so is what waits for it."""
    always = summary_of(tmp_path, DISK, f"{READ}=0.1")
    cheaper = summary_of(tmp_path, DISK, f"{READ}=0.1", "offload.load=cheaper")
    loaded = [run["host_hit_tokens"] + run["storage_hit_tokens"] for run in (always, cheaper)]
    assert loaded[0] > 1.5 * loaded[1] > 0
    assert always["ttft_mean"] > 2 * cheaper["ttft_mean"]


class Dear(dict[int, float]):
    """Seconds to load a chunk of each tier, where a token is computed in one."""

    def recompute_seconds(self, tokens: int) -> float:
        return tokens

    def load_seconds(self, chunks: Mapping[int, int]) -> float:
        return sum(self[tier] * count for tier, count in chunks.items())


@pytest.mark.parametrize(
    ("host", "disk", "worth"), [(1, 2, 5), (1, 9, 2), (9, 9, 0), (5, 1, 5), (5, 3.5, 0)]
)
def test_a_load_ends_where_more_of_it_costs_more(host: int, disk: int, worth: int) -> None:
    """Two chunks of four tokens in host memory, of which the GPU has one token; three on a disk."""
    assert worth_loading(Dear({HOST: host, 0: disk}), [HOST, HOST, 0, 0, 0], 4, 1) == worth


@pytest.mark.usefixtures("hydra")
@pytest.mark.parametrize(
    ("word", "said"),
    [
        (f"{DISK} offload.tiers.disk=null", ""),
        ("offload.tiers.disk.gib=null", ""),
        ("offload.tiers.disk.gib=-1", "offload.tiers.disk.gib=-1: must be a number of at least 0"),
        ("offload.tiers.disk.gib=1e-6", "offload.tiers.disk.gib=1e-06: must hold a chunk, which"),
        (f"{DISK} {READ}=0", f"{READ}=0: must be a number above 0"),
        (f"{DISK} +offload.tiers.disk.gb=1", "offload.tiers.disk.gb: no such setting of a store"),
        ("+offload.tiers.nvme={gib: 1}", "offload.tiers.nvme.read_gb_s: must be given"),
        ("offload.tiers.disk=4", "offload.tiers.disk=4: must be a mapping of settings, or null"),
        ("offload.tiers=4", "offload.tiers=4: must be a mapping of names to settings"),
        (
            "offload.tiers.disk.folder=/x",
            "offload.tiers.disk.folder=/x: is the engine's; set gib here",
        ),
        (f"{DISK} offload.tiers.disk.folder=/x", ""),
        ("offload.load=cheap", "offload.load=cheap: unknown; did you mean 'cheaper'?"),
        (f"{DISK} offload.gib=0", "offload.gib=0: must hold a chunk"),
        (f"{DISK} offload.store_threshold=2", "offload.store_threshold=2: must be 0 or 1 with"),
    ],
)
def test_settings_of_tiers(word: str, said: str, tmp_path: Path) -> None:
    words = [word] if "{" in word else word.split()
    run = made(tmp_path, "workload.sessions=2", *words)
    assert isinstance(run, Run) if not said else said in str(run) and "\n" not in str(run)


def test_an_engine_has_none() -> None:
    with pytest.raises(ConfigError, match=r"offload\.load=cheaper: must be always, or in the sim"):
        VLLMOffload(chunks=4, load="cheaper").connector(16)
    settings = {"disk": {"gib": 1, "read_gb_s": 1, "write_gb_s": 1}}
    with pytest.raises(
        ConfigError, match=r"offload\.tiers\.disk: must be null, or in the simulator"
    ):
        VLLMOffload(chunks=4, tiers=settings).connector(16)
